"""What survives a failure in the stages' KV is not computed twice, and what does not is never taken for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.engine import EngineLimits, EngineTimeouts
from edgepipe.errors import StepFailed
from edgepipe.spec.facts import ModelConfig
from tests.support.engine.lab import CONFIG, EngineLab, break_stage, engine_lab, lose_kv, oracle_tokens, submission

LIMITS = EngineLimits(max_prefill_tokens=64)
SHARED = [7, 3, 9, 1, 4, 4, 8, 2] * 12  # six blocks that all prompts begin with
LAB: dict[str, Any] = {"num_stages": 3, "limits": LIMITS, "link": "1gbit,0.5ms"}
STATES = emulated_model_config(num_layers=6, context_length=512, attention_every=3)  # every third keeps KV
WINDOWS = emulated_model_config(num_layers=6, context_length=512, windows=(16, 24, None))


async def ask_and_break(lab: EngineLab, lost: Collection[int], config: ModelConfig = CONFIG) -> None:
    """Three requests, two of which begin alike; the epoch ends when all are under way."""
    gateway = await lab.gateway()
    prompts = {"a": [*SHARED, 1], "b": [*SHARED, 2, 3], "c": [5, 6, 7] * 9}
    gateway.send(*(submission(name, prompt, 40) for name, prompt in prompts.items()))
    for name in prompts:
        await gateway.has(name, 16)
    lose_kv(lab, *lost)
    break_stage(lab, 1)
    for name, prompt in prompts.items():
        assert (await gateway.ended(name)).ids == oracle_tokens(prompt, 40, config=config), name
    gateway.send(submission("later", [*SHARED, 9], 5))
    later = await gateway.ended("later")
    assert later.ids == oracle_tokens([*SHARED, 9], 5, config=config)
    assert later.ended is not None
    assert later.ended.cached_prompt_tokens == len(SHARED), "a prefix is found after a recovery, too"
    await lab.settle()


@pytest.mark.parametrize("contiguous_kv", [False, True], ids=["shared", "copied"])
async def test_a_stream_that_broke_costs_no_computing(contiguous_kv: bool) -> None:
    async with engine_lab(contiguous_kv=contiguous_kv, **LAB) as lab:
        await ask_and_break(lab, ())
        state = lab.engine.state()
        assert state.kept_tokens >= 160
        assert state.replayed_tokens == 0
        assert state.recoveries == 1


@pytest.mark.parametrize(("lost", "contiguous_kv"), [((0,), False), ((1,), True), ((0, 1), False)], ids=str)
async def test_stages_behind_the_one_that_lost_its_kv_compute_nothing_again(
    lost: tuple[int, ...], contiguous_kv: bool
) -> None:
    async with engine_lab(contiguous_kv=contiguous_kv, **LAB) as lab:
        await ask_and_break(lab, lost)
        assert lab.engine.state().replayed_tokens >= 110
        slices = [{entry.slice_index for entry in stage.trace()} for stage in lab.stages.stages]
        steps = [sum(1 for _ in stage.trace()) for stage in lab.stages.stages]
        assert slices == [{0}, {1}, {2}]
        assert steps[2] < steps[max(lost)], "replays end before the last stage"


@pytest.mark.parametrize(
    ("config", "lost", "contiguous_kv"),
    [
        (STATES, (0,), True),
        (STATES, (1,), False),
        (STATES, (0, 1), True),
        (WINDOWS, (0,), True),
        (WINDOWS, (1,), False),
    ],
    ids=["recurrent, first", "recurrent, middle", "recurrent, both", "windows, first", "windows, middle"],
)
async def test_stages_behind_the_one_that_lost_its_states_or_windows_keep_theirs(
    config: ModelConfig, lost: tuple[int, ...], contiguous_kv: bool
) -> None:
    async with engine_lab(contiguous_kv=contiguous_kv, config=config, **LAB) as lab:
        await ask_and_break(lab, lost, config)
        replayed = lab.engine.state().replayed_tokens
        assert replayed >= 110, "nearly all of what two long prompts share, and of their answers so far"
        last = max(lost)
        await lab.until(lambda: tokens_computed(lab, 0) - tokens_computed(lab, last + 1) == replayed)
        await lab.until(lambda: tokens_computed(lab, 0) == tokens_computed(lab, last))


def tokens_computed(lab: EngineLab, stage: int) -> int:
    """Return the tokens of this epoch's steps that a stage has reported as computed."""
    trace = lab.engine._trace(0)  # pyright: ignore[reportPrivateUsage]
    assert trace is not None
    return sum(step.decode_rows + step.prefill_tokens for step in trace.steps if len(step.spans) > stage)


@pytest.mark.parametrize("lost", [(0, 2)], ids=str)
@pytest.mark.parametrize("config", [CONFIG, STATES], ids=["attention", "recurrent"])
async def test_what_the_last_stage_lost_is_computed_by_all(lost: tuple[int, ...], config: ModelConfig) -> None:
    async with engine_lab(config=config, **LAB) as lab:
        await ask_and_break(lab, lost, config)
        assert lab.engine.state().replayed_tokens == 0


@pytest.mark.parametrize("config", [CONFIG, STATES, WINDOWS], ids=["attention", "recurrent", "windows"])
async def test_a_second_loss_while_the_first_is_replayed(config: ModelConfig) -> None:
    limits = EngineLimits(max_prefill_tokens=16)
    async with engine_lab(num_stages=3, limits=limits, link="1gbit,5ms", config=config) as lab:
        gateway = await lab.gateway()
        prompt = SHARED * 3
        gateway.send(submission("a", prompt, 30), submission("b", [1, *prompt], 30))
        await gateway.has("a", 4)
        await gateway.has("b", 4)
        lose_kv(lab, 1)
        break_stage(lab, 1)
        await lab.until(lambda: 0 < lab.engine.state().replayed_tokens)
        lose_kv(lab, 0)
        break_stage(lab, 2)
        assert (await gateway.ended("a")).ids == oracle_tokens(prompt, 30, config=config)
        assert (await gateway.ended("b")).ids == oracle_tokens([1, *prompt], 30, config=config)
        assert lab.engine.state().recoveries == 2


async def test_an_epoch_that_failed_to_open_loses_nothing_but_what_is_lost() -> None:
    async with engine_lab(timeouts=EngineTimeouts(again_min_s=0.01), **LAB) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", SHARED, 60))
        await gateway.has("a", 20)
        lab.nodes[2].refusal = StepFailed("not now")
        break_stage(lab, 1)
        await lab.until(lambda: len(lab.nodes[2].prepared) >= 3)
        lose_kv(lab, 0)
        lab.nodes[2].refusal = None
        assert (await gateway.ended("a")).ids == oracle_tokens(SHARED, 60)
        assert lab.engine.state().replayed_tokens >= 96


async def test_room_for_long_prompts_comes_back_after_a_recovery_onto_a_smaller_machine() -> None:
    async with engine_lab(num_stages=3, max_blocks=256) as lab:
        gateway = await lab.gateway()
        for max_blocks in (8, 256):
            gateway.send(submission(f"kept {max_blocks}", SHARED, 5))
            await gateway.ended(f"kept {max_blocks}")
            lab.nodes[0].max_blocks = max_blocks
            before = lab.engine.state().recoveries
            break_stage(lab, 1)
            await lab.until(lambda before=before: lab.engine.state().recoveries > before)
            assert lab.engine.state().num_blocks == max_blocks
        long = [*SHARED, *SHARED, *SHARED, 1]
        gateway.send(submission("long", long, 5))
        assert (await gateway.ended("long")).ids == oracle_tokens(long, 5)
        await lab.settle()


async def test_a_little_more_room_is_not_worth_computing_everything_again() -> None:
    async with engine_lab(max_blocks=200, **LAB) as lab:
        for node in lab.nodes:
            node.max_blocks = 240
        await ask_and_break(lab, ())
        assert lab.engine.state().num_blocks == 200
        assert lab.engine.state().replayed_tokens == 0
