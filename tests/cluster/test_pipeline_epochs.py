"""One epoch is obeyed, the highest; the rest is dropped and counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import psutil
import pytest
from edgepipe_emulated import oracle

from edgepipe.errors import (
    ConnectTimeout,
    EdgepipeError,
    ShardMismatch,
    StageError,
    StageLost,
    StaleEpoch,
    VersionMismatch,
)
from edgepipe.ids import PipelineId
from edgepipe.link.channels import make_channel, translated
from edgepipe.security.mutual_tls import Credentials
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.wire.common import Hello, epoch_to_wire, hello_to_wire
from edgepipe.wire.pipelines import PipelineSpec, spec_to_wire
from edgepipe.wire.v1 import stage_pb2
from edgepipe.wire.v1.stage_pb2_grpc import StageStub
from tests.support.engine.pipeline import Control, LocalStages, epoch
from tests.support.engine.pipeline_engine import CONFIG, SmallEngine, stages

PROMPT = [1, 2, 3]


async def refusal(local: LocalStages, spec: PipelineSpec) -> EdgepipeError:
    """What the last stage answers to an epoch that it will not open."""
    control = local.control(len(local.stages) - 1, spec)
    await control.run()
    assert not control.reports.opened.is_set()
    assert control.reports.fault is not None
    return control.reports.fault


async def test_an_epoch_that_has_ended_leaves_weights_and_room_for_the_next() -> None:
    async with stages(2) as local:
        for counter in (1, 2, 3):
            async with local.open(epoch(counter)) as driver:
                engine = SmallEngine(driver)
                sequence = engine.new(PROMPT)
                await engine.generate([[sequence]], 6)
                assert sequence.generated == oracle.generate(PROMPT, 6, CONFIG, ignore_eos=True)


async def test_a_stage_that_was_paused_by_sleep_computes_in_the_next_epoch() -> None:
    async with stages(2) as local:
        async with local.open(epoch(1)):
            local.stages[1].pause()
        async with local.open(epoch(2)) as driver:
            engine = SmallEngine(driver)
            sequence = engine.new(PROMPT)
            await engine.generate([[sequence]], 6)
            assert sequence.generated == oracle.generate(PROMPT, 6, CONFIG, ignore_eos=True)


async def test_a_paused_stage_goes_on_only_at_the_epoch_that_its_engine_works_at() -> None:
    async with stages(2) as local, local.open(epoch(3)) as driver:
        engine, stage = SmallEngine(driver), local.stages[1]
        sequence = engine.new(PROMPT)
        await engine.generate([[sequence]], 2)
        stage.pause()
        engine.send(sequence)
        stage.resume(epoch(4))  # the engine has left this stage behind
        assert stage.progress().started == 2
        stage.resume(epoch(3))
        await engine.retire()
        assert sequence.generated == oracle.generate(PROMPT, 3, CONFIG, ignore_eos=True)


async def test_a_higher_epoch_replaces_a_lower_one_which_is_told() -> None:
    async with stages(2) as local, local.open(epoch(1)) as old, local.open(epoch(2)) as new:
        for control in old.controls:
            await control.reports.ended.wait()
            assert isinstance(control.reports.fault, StaleEpoch)
            assert control.reports.fault.node.startswith("node")
        engine = SmallEngine(new)
        sequence = engine.new(PROMPT)
        await engine.generate([[sequence]], 4)
        assert sequence.generated == oracle.generate(PROMPT, 4, CONFIG, ignore_eos=True)


@pytest.mark.parametrize("counter", [1, 2])
async def test_an_epoch_that_is_not_higher_is_refused(counter: int) -> None:
    async with stages(2) as local:
        async with local.open(epoch(2)) as driver:
            assert isinstance(await refusal(local, local.spec(1, epoch(counter))), StaleEpoch)
            engine = SmallEngine(driver)
            await engine.generate([[engine.new(PROMPT)]], 2)
        assert isinstance(await refusal(local, local.spec(1, epoch(counter))), StaleEpoch), "also after it ended"


async def test_a_stage_whose_next_one_was_cut_off_from_the_engine_tells_of_no_other_engine() -> None:
    """An engine that believed in one would leave the pipeline to it."""
    async with stages(2) as local, local.open(epoch(1)) as driver:
        first, last = driver.controls
        last.hang_up()
        await first.reports.ended.wait()
        assert isinstance(first.reports.fault, StageLost)
        assert "has ended" in first.reports.fault.what


async def test_the_engines_name_breaks_ties() -> None:
    async with stages(1) as local, local.open(epoch(1, "a")) as old, local.open(epoch(1, "b")):
        await old.controls[0].reports.ended.wait()
        assert isinstance(old.fault(), StaleEpoch)


async def test_plans_of_other_epochs_and_repeated_plans_are_dropped_and_counted() -> None:
    async with stages(2) as local, local.open(epoch(5)) as driver:
        engine = SmallEngine(driver)
        sequence = engine.new(PROMPT)
        plan = engine.plan(sequence)
        driver.send(replace(plan, epoch=epoch(4)))
        driver.send(replace(plan, epoch=epoch(6)))
        driver.send(plan)
        driver.send(plan)
        await engine.retire()
        await engine.generate([[sequence]], 5)
        assert sequence.generated == oracle.generate(PROMPT, 5, CONFIG, ignore_eos=True)
        assert [(stage.progress().strays, stage.progress().repeats) for stage in local.stages] == [(2, 1)] * 2


async def test_another_pipeline_is_refused_while_one_is_open_and_taken_afterwards() -> None:
    other = PipelineId("other")
    async with stages(1) as local:
        async with local.open(epoch(9)):
            assert isinstance(await refusal(local, local.spec(0, epoch(10), pipeline_id=other)), StageError)
        async with local.open(epoch(1), pipeline_id=other) as driver:
            engine = SmallEngine(driver)
            await engine.generate([[engine.new(PROMPT)]], 2)


async def test_layers_that_are_not_loaded_are_refused() -> None:
    wrong = Slice(index=1, layers=LayerRange(3, 8), embedding=False, head=True)
    async with stages(2) as local:
        error = await refusal(local, local.spec(1, epoch(1), slices=(wrong,)))
        assert isinstance(error, ShardMismatch)
        assert "loaded: 4-7; needed: 3-7" in error.fact


async def test_another_version_is_refused_by_name() -> None:
    async with stages(1) as local:
        hello = Hello(role="engine", node_name="old-box", protocol_version=0)
        control = Control(local.addresses[0], spec_to_wire(local.spec(0, epoch(1)), hello))
        await control.run()
        assert isinstance(control.reports.fault, VersionMismatch)
        assert "old-box" in control.reports.fault.what


def numbers(field: str, value: int) -> dict[str, Any]:
    return {field: value}


@pytest.mark.parametrize("field", ["num_blocks", "block_size", "max_in_flight", "hidden_size", "step_deadline_ms"])
async def test_numbers_that_cannot_be_are_refused(field: str) -> None:
    async with stages(1) as local:
        error = await refusal(local, local.spec(0, epoch(1), **numbers(field, 0)))
        assert field in error.what


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", 2**31), ("max_in_flight", 2**32 - 1), ("num_blocks", 2**32 - 1)]
)
async def test_huge_numbers_cost_nothing_unless_they_can_be(field: str, value: int) -> None:
    """What would not fit is refused; what is only a bound allocates nothing."""
    before = psutil.Process().memory_info().rss
    async with stages(1) as local:
        control = local.control(0, local.spec(0, epoch(1), **numbers(field, value)))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(control.run())
            ended = tasks.create_task(control.reports.ended.wait())
            opened = tasks.create_task(control.reports.opened.wait())
            await asyncio.wait([ended, opened], return_when=asyncio.FIRST_COMPLETED)
            if not control.reports.ended.is_set():
                control.hang_up()
            opened.cancel()
        assert psutil.Process().memory_info().rss - before < 50 << 20
        assert control.reports.fault is None or isinstance(control.reports.fault, EdgepipeError)
        if field == "hidden_size":
            assert isinstance(control.reports.fault, ShardMismatch)


async def ring_answer(local: LocalStages, opening: stage_pb2.OpenRing) -> Any:
    """What the last stage says to a predecessor."""
    async with make_channel(local.addresses[-1], Credentials()) as channel:
        call: Any = StageStub(channel).Ring()
        with translated("the stage"):
            await call.write(stage_pb2.RingMessage(open=opening))
            return await call.read()


def ring_opening(counter: int, **fields: Any) -> stage_pb2.OpenRing:
    values: dict[str, Any] = {
        "hello": hello_to_wire(Hello(role="stage")),
        "pipeline_id": "pipeline",
        "epoch": epoch_to_wire(epoch(counter)),
        "slice": 1,
        "hidden_size": CONFIG.hidden_size,
        "activation_type": 1,
        **fields,
    }
    return stage_pb2.OpenRing(**values)


@pytest.mark.parametrize(
    ("opening", "why"),
    [
        (ring_opening(1), "epoch 1@engine has been replaced"),
        (ring_opening(2, slice=0), "no other stage feeds slice 0"),
        (ring_opening(2, hidden_size=8), "disagree on activations"),
        (ring_opening(2, activation_type=2), "disagree on activations"),
        (ring_opening(2, activation_type=7), "unknown activation type"),
    ],
    ids=["stale", "wrong slice", "hidden size", "type", "unknown type"],
)
async def test_a_predecessor_that_does_not_fit_is_refused_and_the_pipeline_goes_on(
    opening: stage_pb2.OpenRing, why: str
) -> None:
    async with stages(2) as local, local.open(epoch(2)) as driver:
        with pytest.raises(EdgepipeError, match=why):
            await ring_answer(local, opening)
        engine = SmallEngine(driver)
        await engine.generate([[engine.new(PROMPT)]], 3)


async def test_a_stage_alone_does_not_open_before_the_next_one() -> None:
    async with stages(2, open_s=0.2) as local:
        control = local.control(0, local.spec(0, epoch(1)))
        await control.run()
        assert not control.reports.opened.is_set()
        assert isinstance(control.reports.fault, ConnectTimeout)
