"""A step that cannot run ends the epoch with a fault that names the stage; the process lives and serves the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import psutil
import pytest

from edgepipe.backend.types import BlockRun
from edgepipe.errors import EdgepipeError, RemoteProtocolError, StepFailed
from edgepipe.ids import StepId
from edgepipe.link.channels import make_channel, translated
from edgepipe.security.mutual_tls import Credentials
from edgepipe.stage import service
from edgepipe.wire.common import Hello, epoch_to_wire, hello_to_wire
from edgepipe.wire.plans import PlanRow, StepPlan
from edgepipe.wire.v1 import common_pb2, stage_pb2
from edgepipe.wire.v1.stage_pb2_grpc import StageStub
from tests.support.engine.pipeline import Driver, LocalStages, epoch
from tests.support.engine.pipeline_engine import CONFIG, HeldBackend, SmallEngine, emulated, stages
from tests.support.engine.wire_plans import plan_to_wire

PROMPT = [1, 2, 3]
UNKNOWN_FIELD = b"\xfa\x3f\x05later"  # number 1023, five bytes
Change = Callable[[StepPlan], StepPlan]


async def fault_of(driver: Driver) -> EdgepipeError:
    """The fault that ends the epoch."""
    with pytest.raises(EdgepipeError) as caught:
        await driver.next_done()
    return caught.value


async def assert_serves(local: LocalStages, counter: int) -> None:
    """The stages open another epoch and compute."""
    async with local.open(epoch(counter)) as driver:
        engine = SmallEngine(driver)
        await engine.generate([[engine.new(PROMPT)]], 3)


def _with_row(**changes: object) -> Change:
    def change(plan: StepPlan) -> StepPlan:
        fields = {
            name: getattr(plan.rows[0], name) for name in ("sequence", "position", "num_tokens", "sample", "new_blocks")
        }
        return replace(plan, rows=(PlanRow(**{**fields, **changes}),))  # pyright: ignore[reportArgumentType]

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_with_row(sequence=99), "not registered"),
        (_with_row(new_blocks=(BlockRun(255, 2),)), "assigns blocks 255-256"),
        (_with_row(new_blocks=()), "its blocks hold 0"),
        (_with_row(num_tokens=4), "3 token ids for 4 tokens"),
        (_with_row(num_tokens=2**32 - 1), "its blocks hold"),
        (_with_row(position=2**32 - 1), "its blocks hold"),
        (lambda plan: replace(plan, step=StepId(2)), "plan of step 1 is missing"),
        (lambda plan: replace(plan, last_slice=2), "ends at slice 2 of 2"),
        (lambda plan: replace(plan, last_slice=0), "has no head"),
    ],
    ids=["sequence", "blocks", "room", "tokens", "huge", "far", "gap", "slice", "head"],
)
async def test_a_bad_plan_is_a_fault_of_the_engine(change: Change, why: str) -> None:
    async with stages(2) as local:
        async with local.open(epoch(1)) as driver:
            engine = SmallEngine(driver)
            driver.send(change(engine.plan(engine.new(PROMPT))))
            error = await fault_of(driver)
            assert isinstance(error, RemoteProtocolError)
            assert why in str(error)
            assert error.stage.startswith("stage ")
            assert error.node.startswith("node")
        await assert_serves(local, 2)


async def test_columns_of_different_lengths_are_a_fault() -> None:
    async with stages(1) as local:
        async with local.open(epoch(1)) as driver:
            engine = SmallEngine(driver)
            message = plan_to_wire(engine.plan(engine.new(PROMPT)), with_token_ids=True)
            message.num_tokens.append(1)
            driver.controls[0].send_raw(message)
            assert isinstance(await fault_of(driver), RemoteProtocolError)
        await assert_serves(local, 2)


async def test_unknown_fields_are_ignored() -> None:
    """A newer minor version may say more."""
    async with stages(1) as local, local.open(epoch(1)) as driver:
        engine = SmallEngine(driver)
        sequence = engine.new(PROMPT)
        message = plan_to_wire(engine.plan(sequence), with_token_ids=True)
        message.MergeFromString(UNKNOWN_FIELD)
        assert UNKNOWN_FIELD in message.SerializeToString()
        driver.controls[0].send_raw(message)
        await engine.retire()
        assert len(sequence.generated) == 1


async def test_a_million_entries_are_refused_and_cost_little_memory() -> None:
    async with stages(1) as local:
        process = psutil.Process()
        async with local.open(epoch(1)) as driver:
            engine = SmallEngine(driver)
            message = plan_to_wire(engine.plan(engine.new(PROMPT)), with_token_ids=True)
            message.num_tokens.extend([1] * 1_000_000)
            before = process.memory_info().rss
            driver.controls[0].send_raw(message)
            assert isinstance(await fault_of(driver), RemoteProtocolError)
            assert process.memory_info().rss - before < 50 << 20
        await assert_serves(local, 2)


@pytest.mark.parametrize(
    "data", [b"\x0b" * 5000, b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f"], ids=["nested", "tags", "lengths"]
)
@pytest.mark.parametrize("method", ["Control", "Ring"])
async def test_bytes_that_are_no_message_end_their_stream_alone(method: str, data: bytes) -> None:
    async with stages(2) as local, local.open(epoch(1)) as driver:
        async with make_channel(local.addresses[1], Credentials()) as channel:
            call: Any = channel.stream_stream(f"/edgepipe.wire.v1.Stage/{method}")(timeout=10)
            await call.write(data)
            assert await call.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN)
        engine = SmallEngine(driver)
        await engine.generate([[engine.new(PROMPT)]], 3)


async def test_a_stream_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FIRST_MESSAGE_S", 0.05)  # the real wait makes a slow test
    async with stages(1) as local, make_channel(local.addresses[0], Credentials()) as channel:
        for open_stream in (StageStub(channel).Control, StageStub(channel).Ring):
            call: Any = open_stream()
            with pytest.raises(RemoteProtocolError, match="sent nothing"), translated("the stage"):
                await call.read()
        await assert_serves(local, 1)


@pytest.mark.parametrize("at", [0, 1])
async def test_a_backend_that_breaks_ends_the_epoch_not_the_process(at: int) -> None:
    backends = [HeldBackend(emulated()), HeldBackend(emulated())]
    async with stages(2, make_backend=backends.__getitem__) as local:
        async with local.open(epoch(1)) as driver:
            engine = SmallEngine(driver)
            backends[at].breaks_at = 2
            sequence = engine.new(PROMPT)
            engine.send(sequence)
            await engine.retire()
            engine.send(sequence)
            error = await fault_of(driver)
            assert isinstance(error, StepFailed)
            assert (error.stage, error.node) == (f"stage {at}", f"node{at}")
            assert "edgepipe logs" in error.fact
        backends[at].breaks_at = None
        await assert_serves(local, 2)


async def test_a_step_whose_activations_do_not_come_names_the_missing_side() -> None:
    async with stages(2) as local, local.open(epoch(1), step_deadline_ms=100) as driver:
        engine = SmallEngine(driver)
        driver.send(engine.plan(engine.new(PROMPT)), to=[1])
        error = await fault_of(driver)
        assert isinstance(error, StepFailed)
        assert "activations of step 1 did not come from the stage before" in error.what
        assert error.stage == "stage 1"


async def test_activations_whose_plan_does_not_come_name_the_missing_side() -> None:
    async with stages(2) as local, local.open(epoch(1), step_deadline_ms=100) as driver:
        engine = SmallEngine(driver)
        driver.send(engine.plan(engine.new(PROMPT)), to=[0])
        await driver.controls[1].reports.ended.wait()
        error = driver.controls[1].reports.fault
        assert isinstance(error, StepFailed)
        assert "plan of step 1 did not come from the engine" in error.what


async def test_waiting_without_work_is_no_fault() -> None:
    async with stages(2) as local, local.open(epoch(1), step_deadline_ms=400) as driver:
        engine = SmallEngine(driver)
        sequence = engine.new(PROMPT)
        await engine.generate([[sequence]], 1)
        await asyncio.sleep(0.9)  # idle for more than two deadlines of a real stage, which are longer than credits wait
        await engine.generate([[sequence]], 2)
        assert driver.fault() is None


async def test_an_engine_that_hangs_up_ends_the_epoch_and_what_was_queued() -> None:
    backends = [HeldBackend(emulated())]
    async with stages(1, make_backend=backends.__getitem__) as local:
        async with local.open(epoch(1)) as driver:
            engine = SmallEngine(driver)
            gate = backends[0].hold(1)
            for _ in range(3):
                engine.send(engine.new(PROMPT))
            assert await asyncio.to_thread(backends[0].submitted[1].wait, 30)
            driver.controls[0].hang_up()
            await driver.controls[0].reports.ended.wait()
        gate.set()
        await assert_serves(local, 2)
        steps = [entry.step for entry in local.stages[0].trace()]
        assert steps == [1, 1, 2, 3], "the first epoch's second and third step were never computed"


async def test_activations_that_do_not_fit_their_plan_are_a_fault_of_the_stage_before() -> None:
    async with stages(2) as local:
        async with local.open(epoch(1), step_deadline_ms=200) as driver:
            engine = SmallEngine(driver)
            plan = engine.plan(engine.new(PROMPT))
            driver.send(plan, to=[0])
            driver.send(_with_row(num_tokens=5)(plan), to=[1])
            await driver.controls[1].reports.ended.wait()
            assert isinstance(driver.controls[1].reports.fault, StepFailed | RemoteProtocolError)
        await assert_serves(local, 2)


async def test_a_ring_stream_that_breaks_the_rules_ends_the_epoch() -> None:
    async with stages(2) as local:
        async with local.open(epoch(1)) as driver, make_channel(local.addresses[1], Credentials()) as channel:
            call: Any = StageStub(channel).Ring()
            opening = stage_pb2.OpenRing(
                hello=hello_to_wire(Hello(role="stage")),
                pipeline_id="pipeline",
                epoch=epoch_to_wire(epoch(1)),
                slice=1,
                hidden_size=CONFIG.hidden_size,
                activation_type=common_pb2.ACTIVATION_TYPE_BF16,
            )
            await call.write(stage_pb2.RingMessage(open=opening))
            frame = stage_pb2.Frame(epoch=epoch_to_wire(epoch(1)), step=1, chunk=3, data=b"late")
            await call.write(stage_pb2.RingMessage(frame=frame))
            error = await fault_of(driver)
            assert isinstance(error, RemoteProtocolError)
            assert "begins with chunk 3" in error.what
        await assert_serves(local, 2)
