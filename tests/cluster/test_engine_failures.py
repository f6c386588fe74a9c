"""Stages that fail, nodes that refuse, engines that are stopped: everybody hears why, and memory goes back."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import pytest
from edgepipe_emulated import EmulatedBackend

from edgepipe.backend.types import BackendOptions
from edgepipe.engine import EngineLimits, EngineTimeouts
from edgepipe.engine.requests import GatewayStream
from edgepipe.errors import (
    ClusterError,
    ConnectTimeout,
    DeviceOutOfMemory,
    NodeUnreachable,
    NoFeasiblePlacement,
    PeerClosed,
    PipelineBroken,
    StageError,
    StageLost,
    StagesMove,
    StaleEpoch,
    StepFailed,
)
from edgepipe.ids import NodeId
from edgepipe.link.channels import make_channel, translated
from edgepipe.security.mutual_tls import Credentials
from edgepipe.stage.retirement import Retirement
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.reports import StepDone
from edgepipe.wire.v1 import engine_pb2, engine_pb2_grpc
from tests.support.engine.lab import QUICK, EngineLab, engine_lab, oracle_tokens, submission

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SLOW: dict[str, Any] = {"device": "m4", "time_factor": "20"}


class BreaksAt(EmulatedBackend):
    """Fails or hangs at a given step."""

    def __init__(self, step: int, *, hang: Any = None) -> None:
        super().__init__(BackendOptions(device="rtx4090", settings={"time_factor": "0"}))
        self._step, self._hang = step, hang

    def submit(self, prepared: Any, inputs: Any, edits: Any = None) -> Any:
        if prepared.step.step == self._step:
            if self._hang is None:
                raise RuntimeError("the device fell off the bus")
            self._hang.wait(20)
        return super().submit(prepared, inputs, edits)


class Relay:
    """A TCP relay that can be cut."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []
        self._target = ("", 0)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        await self._server.wait_closed()

    async def to(self, address: str) -> str:
        """Where to connect instead of ``address``."""
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Break every connection and take no more."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, far_writer]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._copy(reader, far_writer))
            tasks.create_task(self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()


class ShortOfMemory(EmulatedBackend):
    """Once, at a given step, the device has no memory left."""

    def __init__(self, step: int) -> None:
        super().__init__(BackendOptions(device="rtx4090", settings={"time_factor": "0"}))
        self._at: int | None = step

    def submit(self, prepared: Any, inputs: Any, edits: Any = None) -> Any:
        if prepared.step.step == self._at:
            self._at = None
            raise DeviceOutOfMemory("the device is out of memory", fact="12 MB were asked for")
        return super().submit(prepared, inputs, edits)


def healthy(_: int) -> EmulatedBackend:
    return EmulatedBackend(BackendOptions(device="rtx4090", settings={"time_factor": "0"}))


async def failed(lab: EngineLab) -> None:
    async with asyncio.timeout(20):
        await lab.over.wait()
    assert lab.engine.state().state == "failed"
    assert lab.engine.state().error is lab.failure
    assert [len(node.released) for node in lab.nodes] == [1] * len(lab.nodes)


class BreaksOn(EmulatedBackend):
    """Fails in whatever step computes one position of any sequence."""

    def __init__(self, position: int) -> None:
        super().__init__(BackendOptions(device="rtx4090", settings={"time_factor": "0"}))
        self._position = position

    def submit(self, prepared: Any, inputs: Any, edits: Any = None) -> Any:
        for row in prepared.step.rows:
            if row.position <= self._position < row.position + row.num_tokens:
                raise RuntimeError("the device fell off the bus")
        return super().submit(prepared, inputs, edits)


async def test_a_request_whose_steps_fail_also_alone_is_refused_with_the_stage_named() -> None:
    async with engine_lab(make_backend=lambda index: BreaksOn(15) if index == 1 else healthy(index)) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("guilty", PROMPT, 50), submission("short", PROMPT[:3], 12))
        guilty = await gateway.ended("guilty")
        assert isinstance(guilty.error, StepFailed)
        assert guilty.error.stage == "stage 1"
        assert "edgepipe logs" in guilty.error.fact
        assert guilty.ids == oracle_tokens(PROMPT, len(guilty.ids))
        assert (await gateway.ended("short")).ids == oracle_tokens(PROMPT[:3], 12)
        gateway.send(submission("c", PROMPT, 3))
        assert (await gateway.ended("c")).ids == oracle_tokens(PROMPT, 3)
        assert lab.nodes[1].prepared[2].fresh, "after the second failure the stage gets a new process"


class Broken(EmulatedBackend):
    """Its device fails every step, and test steps too, until it is mended."""

    def __init__(self) -> None:
        super().__init__(BackendOptions(device="rtx4090", settings={"time_factor": "0"}))
        self.mended = False

    def check(self) -> None:
        if not self.mended:
            raise StageError("the device does not compute")

    def submit(self, prepared: Any, inputs: Any, edits: Any = None) -> Any:
        self.check()
        return super().submit(prepared, inputs, edits)


async def test_with_a_broken_device_users_are_told_soon_and_served_again_once_it_is_mended() -> None:
    backend = Broken()
    timeouts = EngineTimeouts(barren_min_s=0.05, barren_max_s=0.1)
    async with engine_lab(
        make_backend=lambda index: backend if index == 1 else healthy(index), timeouts=timeouts
    ) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 20), submission("b", PROMPT[:3], 20))
        for name in "ab":
            error = (await gateway.ended(name)).error
            assert isinstance(error, PipelineBroken)
            assert "3 attempts in a row ended without a token" in error.fact
            assert "a new stage process on node1, a placement without node1" in error.fact
            assert error.node == "node1"
        assert [request.fresh for request in lab.nodes[1].prepared][:3] == [False, True, True]
        assert len(lab.nodes[1].prepared) <= 5, "it is not tried more often than makes sense"
        waiting = next(state for state in lab.states if state.state == "waiting")
        assert [(excluded.node_id, excluded.other_id) for excluded in waiting.left_out] == [("node1", None)]
        assert "does not compute" in waiting.left_out[0].reason
        backend.mended = True
        await lab.until(lambda: lab.engine.state().state == "ready")
        gateway.send(submission("c", PROMPT, 20))
        assert (await gateway.ended("c")).ids == oracle_tokens(PROMPT, 20)


class DiesOn(EmulatedBackend):
    """Ends its process, as it were, whenever it computes a given sequence far enough."""

    def __init__(self, sequence: int, position: int) -> None:
        super().__init__(BackendOptions(device="rtx4090", settings={"time_factor": "0"}))
        self._sequence, self._position = sequence, position
        self.die: Callable[[int], None] = lambda _step: None
        self.dead = threading.Event()

    def submit(self, prepared: Any, inputs: Any, edits: Any = None) -> Any:
        rows = prepared.step.rows
        if any(row.sequence == self._sequence and row.position + row.num_tokens > self._position for row in rows):
            self.die(prepared.step.step)
            self.dead.wait(20)
            self.dead.clear()
        return super().submit(prepared, inputs, edits)


async def test_a_process_that_dies_in_a_step_counts_against_whoever_was_in_it_and_nobody_else() -> None:
    backend = DiesOn(1, 12)
    loop = asyncio.get_running_loop()
    async with engine_lab(make_backend=lambda index: backend if index == 1 else healthy(index)) as lab:

        def end_process(step: int) -> None:
            run, session = lab.engine._run, lab.stages.stages[1]._current
            assert run is not None
            assert session is not None
            lab.nodes[1].crashed_in = (run.epoch.counter, step)
            session.fault(PeerClosed("its process is gone"))
            backend.dead.set()

        backend.die = lambda step: loop.call_soon_threadsafe(end_process, step)  # type: ignore[assignment]
        gateway = await lab.gateway()
        gateway.send(submission("guilty", PROMPT, 50), submission("other", PROMPT[:3], 50))
        guilty = await gateway.ended("guilty")
        assert isinstance(guilty.error, StepFailed)
        assert (guilty.error.stage, guilty.error.node) == ("stage 1", "node1")
        assert guilty.ids == oracle_tokens(PROMPT, len(guilty.ids))
        assert (await gateway.ended("other")).ids == oracle_tokens(PROMPT[:3], 50)
        assert lab.engine.state().recoveries == 3


async def test_r1_a_device_that_runs_out_of_memory_once_costs_no_token() -> None:
    async with engine_lab(make_backend=lambda index: ShortOfMemory(6) if index == 1 else healthy(index)) as lab:
        gateway = await lab.gateway()
        prompts = {"a": PROMPT, "b": PROMPT[:3], "c": [*PROMPT, 7]}
        gateway.send(*(submission(name, prompt, 30) for name, prompt in prompts.items()))
        for name, prompt in prompts.items():
            assert (await gateway.ended(name)).ids == oracle_tokens(prompt, 30)
        recovering = next(state for state in lab.states if state.state == "recovering")
        assert isinstance(recovering.error, DeviceOutOfMemory)
        assert recovering.error.node == "node1"
        assert lab.engine.state().state == "ready"


async def test_after_a_stages_fault_its_node_is_named_and_the_answer_goes_on() -> None:
    async with engine_lab(**SLOW) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 40))
        await gateway.has("a", 2)
        session = lab.stages.stages[1]._current
        assert session is not None
        session.fault(PeerClosed("the stage is shutting down"))
        answer = await gateway.ended("a")
        assert answer.ids == oracle_tokens(PROMPT, 40)
        recovering = next(state for state in lab.states if state.state == "recovering")
        assert isinstance(recovering.error, PeerClosed)
        assert (recovering.error.stage, recovering.error.node) == ("stage 1", "node1")
        assert (lab.engine.state().state, lab.engine.state().error) == ("ready", None)


async def test_a_stage_that_is_gone_for_long_is_named_and_used_again_once_it_is_back() -> None:
    limits, timeouts = EngineLimits(max_failed_epochs=2), EngineTimeouts(again_max_s=0.2)
    async with engine_lab(ready=False, limits=limits, timeouts=timeouts, **SLOW) as lab, Relay() as relay:
        address = lab.nodes[0].stage_address
        lab.nodes[0].stage_address = await relay.to(address)
        await lab.until(lambda: lab.engine.state().state == "ready")
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 400))
        await gateway.has("a", 2)
        relay.cut()
        answer = await gateway.ended("a")
        assert isinstance(answer.error, StageLost)
        assert (answer.error.stage, answer.error.node) == ("stage 0", "node0")
        await lab.until(lambda: lab.engine.state().state == "waiting")
        lab.nodes[0].stage_address = address
        await lab.until(lambda: lab.engine.state().state == "ready")
        gateway.send(submission("b", PROMPT, 5))
        assert (await gateway.ended("b")).ids == oracle_tokens(PROMPT, 5)


async def test_a_step_that_does_not_come_back_is_noticed_and_named() -> None:
    release = threading.Event()
    timeouts = EngineTimeouts(step_min_s=0.3, step_first_s=0.5)

    def make(index: int) -> EmulatedBackend:
        return BreaksAt(5, hang=release) if index == 1 else healthy(index)

    async with engine_lab(make_backend=make, timeouts=timeouts) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 50))
        await lab.until(lambda: lab.states[-1].state == "recovering")
        error = lab.states[-1].error
        assert isinstance(error, StepFailed)
        assert error.stage == "stage 1"
        assert "step 5" in error.what
        release.set()
        assert (await gateway.ended("a")).ids == oracle_tokens(PROMPT, 50)


async def test_after_a_failure_new_gateways_hear_why() -> None:
    async with engine_lab(**SLOW) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 50))
        await gateway.has("a", 2)
        session = lab.stages.stages[0]._current
        assert session is not None
        session.fault(StaleEpoch("another engine drives the pipeline"))
        await failed(lab)
        assert gateway.answer("a").ended is None, "the engine that took over answers it"
        async with make_channel(lab.address, Credentials()) as channel:
            call = engine_pb2_grpc.EngineStub(channel).Generate(
                iter([engine_pb2.GatewayMessage(hello=hello_to_wire(Hello(role="gateway")))])
            )
            with pytest.raises(StaleEpoch), translated("the engine"):
                await anext(aiter(call))
            state = await engine_pb2_grpc.EngineStub(channel).Describe(engine_pb2.DescribeEngine(), timeout=5)
            assert state.state == "failed"
            assert state.error.code == "stale_epoch"


async def test_stop_tells_gateways_and_gives_memory_back() -> None:
    async with engine_lab(**SLOW) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 400))
        await gateway.has("a", 2)
        await lab.engine.stop()
        answer = await gateway.ended("a")
        assert isinstance(answer.error, ClusterError)
        assert lab.failure is None
        assert lab.engine.state().state == "stopping"
        assert [len(node.released) for node in lab.nodes] == [1, 1]


async def test_a_cancelled_engine_ends_no_request_and_gives_memory_back() -> None:
    async with engine_lab(**SLOW) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 400))
        await gateway.has("a", 2)
        lab.task.cancel()
        await lab.over.wait()
        assert gateway.answer("a").ended is None
        assert [len(node.released) for node in lab.nodes] == [1, 1]


async def test_a_stage_that_is_gone_before_it_opens_is_named() -> None:
    async with engine_lab(ready=False) as lab:
        lab.nodes[1].stage_address = "127.0.0.1:1"
        async with asyncio.timeout(20):
            await lab.over.wait()
        assert isinstance(lab.failure, ConnectTimeout)
        assert (lab.failure.stage, lab.failure.node) == ("stage 1", "node1")
        assert [len(node.released) for node in lab.nodes] == [1, 1]


async def test_a_refusing_node_ends_the_start_and_all_give_back() -> None:
    async with engine_lab(ready=False) as lab:
        lab.nodes[1].refusal = NoFeasiblePlacement("node1 lacks 3 GB", fact="1 GB is free")
        async with asyncio.timeout(10):
            await lab.over.wait()
        assert isinstance(lab.failure, NoFeasiblePlacement)
        assert lab.failure.node == "node1"
        assert lab.engine.state().state == "failed"
        assert [len(node.released) for node in lab.nodes] == [1, 1]


async def test_a_node_that_is_not_there_is_named() -> None:
    async with engine_lab(ready=False) as lab:
        lab.engine._core.nodes.addresses["node1"] = "127.0.0.1:1"  # type: ignore[index]
        async with asyncio.timeout(20):
            await lab.over.wait()
        assert isinstance(lab.failure, NodeUnreachable)
        assert lab.failure.node == "node1"


async def test_loading_can_be_given_up() -> None:
    async with engine_lab(ready=False) as lab:
        lab.nodes[1].hold = asyncio.Event()
        await lab.until(lambda: any(state.progress >= 0.5 for state in lab.states))
        lab.task.cancel()
        await lab.over.wait()
        assert [len(node.released) for node in lab.nodes] == [1, 1]
        lab.nodes[1].hold.set()


async def test_progress_is_told_while_loading() -> None:
    async with engine_lab(ready=False) as lab:
        for node in lab.nodes:
            node.hold = asyncio.Event()
        await lab.until(lambda: any(state.progress == 0.5 for state in lab.states))
        assert "loading weights on node" in lab.states[-1].message
        for node in lab.nodes:
            node.hold.set()  # type: ignore[union-attr]
        await lab.until(lambda: lab.states[-1].state == "ready")


async def test_an_engine_that_is_not_ready_takes_no_requests() -> None:
    async with engine_lab(ready=False) as lab, make_channel(lab.address, Credentials()) as channel:
        lab.nodes[0].hold = asyncio.Event()
        call = engine_pb2_grpc.EngineStub(channel).Generate(
            iter([engine_pb2.GatewayMessage(hello=hello_to_wire(Hello(role="gateway")))])
        )
        with pytest.raises(PeerClosed, match="takes no requests"), translated("the engine"):
            await anext(aiter(call))
        lab.nodes[0].hold.set()
        await lab.until(lambda: lab.states[-1].state == "ready")


async def test_a_second_failure_while_the_next_epoch_is_prepared_is_survived() -> None:
    async with engine_lab(timeouts=EngineTimeouts(again_min_s=0.01), **SLOW) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 40))
        await gateway.has("a", 2)
        lab.nodes[1].refusal = StepFailed("not now")
        session = lab.stages.stages[0]._current
        assert session is not None
        session.fault(PeerClosed("the stage is shutting down"))
        await lab.until(lambda: len(lab.nodes[1].prepared) >= 3)
        gateway.send(submission("late", PROMPT[:3], 10))
        lab.nodes[1].refusal = None
        assert (await gateway.ended("a")).ids == oracle_tokens(PROMPT, 40)
        assert (await gateway.ended("late")).ids == oracle_tokens(PROMPT[:3], 10)


async def test_a_request_that_arrives_at_the_very_end_of_an_epoch_waits_for_the_next_one() -> None:
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        gateway.send(submission("first", PROMPT, 3))
        await gateway.ended("first")
        run, table = lab.engine._run, lab.engine._table
        assert run is not None
        stream = GatewayStream(NodeId("another"))
        run.pump.fail(StagesMove())
        table.submit(stream, submission("late", PROMPT, 8))  # before anything else can happen
        ids: list[int] = []
        async for news in stream.events():
            ids += [token for tokens in news.message.tokens for token in tokens.ids]
            if news.message.ended:
                assert news.message.ended[0].reason == "length"
                break
        assert ids == oracle_tokens(PROMPT, 8)


async def test_an_engine_that_is_stopped_while_it_starts_does_not_serve() -> None:
    async with engine_lab(ready=False) as lab:
        hold = lab.nodes[1].hold = asyncio.Event()
        await lab.until(lambda: any(state.progress >= 0.5 for state in lab.states))
        await lab.engine.stop()
        await lab.over.wait()
        hold.set()
        assert lab.failure is None
        assert "ready" not in {state.state for state in lab.states}
        assert [len(node.prepared) for node in lab.nodes] == [1, 1]


async def test_a_step_that_cannot_be_retired_holds_up_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    settle, calls = Retirement.settle, itertools.count()

    def fails_once(own: Retirement, *given: Any) -> Iterator[StepDone]:
        if next(calls) == 5:
            raise RuntimeError("no room for the report")
        return settle(own, *given)

    monkeypatch.setattr(Retirement, "settle", fails_once)
    # The stage says so itself: no step is late for a minute.
    async with engine_lab(num_stages=2, timeouts=replace(QUICK, step_min_s=60)) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", PROMPT, 20))
        async with asyncio.timeout(20):
            assert (await gateway.ended("a")).ids == oracle_tokens(PROMPT, 20)
