"""Stages that end epochs between steps: a request that never gets further is refused alone; status shows the pause."""

from __future__ import annotations

from edgepipe.engine import EngineLimits, EngineTimeouts
from edgepipe.errors import PeerClosed, StepFailed
from tests.support.engine.lab import EngineLab, break_stage, engine_lab, lose_kv, oracle_tokens, submission
from tests.support.processes.waiting import until

LONG = [1 + number % 200 for number in range(480)]  # 30 steps
SHORT = [3, 1, 4, 1, 5, 9, 2, 6]
LIMITS = EngineLimits(max_prefill_tokens=16)


async def dies(lab: EngineLab, *, after_steps: int) -> None:
    """The last stage's process dies in the next epoch that serves, after so many steps, and all KV is lost."""
    await until(lambda: lab.engine._run is not None and lab.engine._run.pump.num_retired >= after_steps)
    run = lab.engine._run
    lose_kv(lab, 0, 1)
    break_stage(lab, 1)
    await until(lambda: lab.engine._run is not run)


async def test_a_prompt_that_ends_its_stage_between_steps_each_time_is_refused_and_other_answers_go_on() -> None:
    async with engine_lab(limits=LIMITS, time_factor="1") as lab:
        gateway = await lab.gateway()
        gateway.send(submission("guilty", LONG, 4))
        guilty, killed = gateway.answer("guilty"), 0
        while guilty.ended is None and killed < 40:
            await dies(lab, after_steps=3)
            killed += 1
            if killed == 2:
                gateway.send(submission("other", SHORT, 50))
            await lab.until(lambda: guilty.ended is not None or lab.engine.state().state == "ready")
        assert isinstance(guilty.error, StepFailed)
        assert "4 attempts in a row ended before any more of it was computed" in guilty.error.what
        assert "the attempts ended on node1" in guilty.error.fact
        assert (await gateway.ended("other")).ids == oracle_tokens(SHORT, 50)
        gateway.send(submission("later", LONG, 2))
        assert (await gateway.ended("later")).ids == oracle_tokens(LONG, 2)


async def test_a_stage_that_is_late_again_and_again_is_left_out_though_a_token_comes_each_time() -> None:
    async with engine_lab(time_factor="1") as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", SHORT, 60))
        for count in (1, 2, 3):
            assert not lab.engine.state().left_out
            await until(lambda: lab.engine._run is not None and lab.engine._run.pump.num_retired >= 3)
            run = lab.engine._run
            assert run is not None
            run.pump._on_late(max(run.pump.in_flight()), 5.0)
            await lab.until(lambda count=count: lab.engine.state().recoveries == count)
        [left_out] = lab.engine.state().left_out
        assert left_out.node_id == "node0", "no stage has reported the step"
        assert "did not come back from stage 0" in left_out.reason
        assert (await gateway.ended("a")).ids == oracle_tokens(SHORT, 60)


async def test_a_stage_that_blames_another_machine_each_time_is_left_out_itself() -> None:
    async with engine_lab() as lab:
        for _ in range(3):
            await until(lambda: lab.engine._run is not None)
            run, session = lab.engine._run, lab.stages.stages[1]._current
            assert session is not None
            session.fault(PeerClosed("the other one is at fault", node="node0", stage="stage 0"))
            await until(lambda run=run: lab.engine._run is not run)
        await lab.until(lambda: lab.engine.state().state == "ready")
        assert [entry.node_id for entry in lab.engine.state().left_out] == ["node1"]


async def test_a_stage_that_dies_idle_each_time_is_started_again_after_growing_pauses_that_are_told() -> None:
    timeouts = EngineTimeouts(barren_min_s=0.05)
    async with engine_lab(timeouts=timeouts) as lab:
        for _ in range(4):
            await dies(lab, after_steps=0)
            await lab.until(lambda: lab.engine.state().state == "ready")
        pausing = [state for state in lab.states if "the next attempt is in" in state.message]
        assert {state.state for state in pausing} >= {"recovering", "waiting"}
        assert all("the next attempt is in 1 s" in state.message for state in pausing), [
            state.message for state in pausing
        ]
        assert any("the stage is shutting down" in state.message for state in pausing)
        [left_out] = lab.engine.state().left_out
        assert (left_out.node_id, "keeps ending the pipeline" in left_out.reason) == ("node1", True)
        gateway = await lab.gateway()
        gateway.send(submission("a", SHORT, 20))
        assert (await gateway.ended("a")).ids == oracle_tokens(SHORT, 20)
