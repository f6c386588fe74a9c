"""Several stages in this process, linked over gRPC on 127.0.0.1 or in memory, driven by hand-made plans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import ActivationType, StageSettings
from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError, PeerClosed
from edgepipe.ids import EngineId, Epoch, PipelineId
from edgepipe.link.channels import bind, make_channel, make_server, translated
from edgepipe.link.protocol import OnSample, Outgoing, RingTarget
from edgepipe.link.shaped import Network
from edgepipe.sampling import sample
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.security.mutual_tls import Credentials, Plaintext
from edgepipe.spec.facts import Slice
from edgepipe.spec.tensors import WeightSource
from edgepipe.stage.draft_child import DraftLaunch
from edgepipe.stage.grammar_builds import Trial
from edgepipe.stage.grammars import OpenTokenizer
from edgepipe.stage.sampler import Sampler
from edgepipe.stage.service import serve_control
from edgepipe.stage.stage import Stage
from edgepipe.stage.tools import MakeLink
from edgepipe.wire.codec import from_wire
from edgepipe.wire.common import Hello, epoch_to_wire
from edgepipe.wire.errors import error_from_wire
from edgepipe.wire.pipelines import PipelineSpec, spec_to_wire
from edgepipe.wire.plans import StepPlan
from edgepipe.wire.registrations import Registration, registrations_to_wire
from edgepipe.wire.reports import HomeTokens, LinkSample, StageTimings, StepDone, StepTiming, done_from_wire
from edgepipe.wire.tiers import HeldPlaces
from edgepipe.wire.v1 import stage_pb2
from edgepipe.wire.v1.stage_pb2_grpc import StageStub
from tests.support.engine.wire_plans import plan_to_wire
from tests.support.network.memory_link import MemorySender

BLOCK_SIZE = 16


def epoch(counter: int, engine_id: str = "engine") -> Epoch:
    """A short way to write an epoch."""
    return Epoch(counter, EngineId(engine_id))


class StageReports:
    """What one stage has told the engine so far."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.home_opened = asyncio.Event()
        self.ended = asyncio.Event()
        self.has_timings = asyncio.Event()
        self.done: asyncio.Queue[StepDone] = asyncio.Queue()  # tests take one per step in flight
        self.timings: list[StepTiming] = []
        self.links: list[LinkSample] = []
        self.home: list[HomeTokens] = []
        self.held: list[HeldPlaces] = []
        self.fault: EdgepipeError | None = None

    def take(self, report: stage_pb2.StageReport) -> None:
        """Sort one report."""
        if report.HasField("opened"):
            self.opened.set()
        elif report.HasField("held"):
            self.held.append(from_wire(report.held, HeldPlaces))
        elif report.HasField("home_opened"):
            self.home_opened.set()
        elif report.HasField("step_done"):
            self.done.put_nowait(done_from_wire(report.step_done))
        elif report.HasField("timings"):
            timings = from_wire(report.timings, StageTimings)
            self.timings.extend(timings.timings)
            self.links.extend(timings.links)
            self.home.extend(timings.home)
            self.has_timings.set()
        else:
            self.fail(error_from_wire(report.fault))

    def fail(self, error: EdgepipeError) -> None:
        """The stream is over, with an error."""
        self.fault = self.fault or error
        self.ended.set()


class Control:
    """An engine's Control stream to one stage: over gRPC to an address, or in memory to the object."""

    def __init__(self, stage: Stage | str, opening: stage_pb2.OpenPipeline) -> None:
        self.reports = StageReports()
        self._stage = stage
        self._messages: asyncio.Queue[stage_pb2.ControlMessage | None] = asyncio.Queue()
        self._messages.put_nowait(stage_pb2.ControlMessage(open=opening))

    def send(self, *plans: StepPlan, with_token_ids: bool) -> None:
        """Tell the stage plans, all in one message."""
        first, *others = [plan_to_wire(plan, with_token_ids=with_token_ids) for plan in plans]
        self._messages.put_nowait(stage_pb2.ControlMessage(plan=first, next_plans=others))

    def register(self, registrations: Iterable[Registration], epoch: Epoch) -> None:
        """Tell the stage of sequences that later plans begin."""
        for message in registrations_to_wire(registrations, epoch=epoch_to_wire(epoch), with_sampling=True):
            self._messages.put_nowait(message)

    def send_raw(self, plan: stage_pb2.Plan) -> None:
        """Tell the stage something that may be wrong."""
        self._messages.put_nowait(stage_pb2.ControlMessage(plan=plan))

    def hang_up(self) -> None:
        """End the stream, as an engine does that is done."""
        self._messages.put_nowait(None)

    async def run(self) -> None:
        """Keep the stream until one side ends it; errors end up in ``reports.fault``."""
        try:
            if isinstance(self._stage, str):
                await self._over_grpc(self._stage)
            else:
                await serve_control(self._stage, self._outgoing(), self)
        except EdgepipeError as exc:
            self.reports.fail(exc)
        self.reports.ended.set()

    async def write(self, message: stage_pb2.StageReport, /) -> None:
        """See ``Replies.write``: in memory."""
        self.reports.take(message)

    async def _over_grpc(self, address: str) -> None:
        async with make_channel(address, Credentials()) as channel:
            call: Any = StageStub(channel).Control(self._outgoing(), wait_for_ready=True)
            with translated(f"the stage at {address}"):
                async for report in call:
                    self.reports.take(report)

    async def _outgoing(self) -> AsyncIterator[stage_pb2.ControlMessage]:
        while (message := await self._messages.get()) is not None:
            yield message


class Driver:
    """One open epoch over all stages: what an engine is to them."""

    def __init__(self, controls: Sequence[Control], epoch: Epoch, num_slices: int) -> None:
        self.controls = controls
        self.epoch = epoch
        self.last_slice = num_slices - 1

    @property
    def last(self) -> StageReports:
        """Reports of the stage that retires steps."""
        return self.controls[-1].reports

    def send(self, *plans: StepPlan, to: Sequence[int] | None = None) -> None:
        """Tell plans in one message to all stages, or to those named."""
        for index, control in enumerate(self.controls):
            if to is None or index in to:
                control.send(*plans, with_token_ids=index == 0)

    def register(self, *registrations: Registration) -> None:
        """Tell all stages of sequences that later plans begin."""
        for control in self.controls:
            control.register(registrations, self.epoch)

    async def next_done(self) -> StepDone:
        """The next retired step. Raises the fault of whichever stage ends the epoch first."""
        done = asyncio.ensure_future(self.last.done.get())
        ends = [asyncio.ensure_future(control.reports.ended.wait()) for control in self.controls]
        try:
            await asyncio.wait([done, *ends], return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return done.result()
            raise self.fault() or PeerClosed("a stage ended the epoch")
        finally:
            for future in (done, *ends):
                future.cancel()

    def fault(self) -> EdgepipeError | None:
        """The first stage's fault, if any stage has one."""
        return next((control.reports.fault for control in self.controls if control.reports.fault is not None), None)


class LocalStages:
    """Stages that have loaded one slice each and listen."""

    def __init__(self, stages: Sequence[Stage], addresses: Sequence[str], slices: Sequence[Slice], hidden: int) -> None:
        self.stages = stages
        self.addresses = list(addresses)  # as neighbours are told them; a test may put a proxy's in
        self._listening = list(addresses)
        self.slices = slices
        self._hidden_size = hidden
        self._over_grpc = not addresses[0].startswith("memory:")

    def spec(self, index: int, epoch: Epoch, *, home: bool = False, **changes: Any) -> PipelineSpec:
        """What stage ``index`` is told; ``changes`` replace fields. ``home``: the last stage knows the first one."""
        last = index == len(self.stages) - 1 and not home
        fields: dict[str, Any] = {
            "pipeline_id": PipelineId("pipeline"),
            "epoch": epoch,
            "slices": (self.slices[index],),
            "num_slices": len(self.slices),
            "hidden_size": self._hidden_size,
            "activation_type": ActivationType.BF16,
            "num_blocks": 256,
            "block_size": BLOCK_SIZE,
            "next_address": "" if last else self.addresses[(index + 1) % len(self.stages)],
            "max_in_flight": 4,
            "step_deadline_ms": 20_000,
        }
        return PipelineSpec(**{**fields, **changes})

    def control(self, index: int, spec: PipelineSpec) -> Control:
        """A Control stream that is not running yet."""
        stage = self._listening[index] if self._over_grpc else self.stages[index]
        return Control(stage, spec_to_wire(spec, Hello(role="engine")))

    @asynccontextmanager
    async def open(self, epoch: Epoch, **changes: Any) -> AsyncGenerator[Driver]:
        """Open an epoch on all stages; raises the first fault. Hangs up at the end."""
        controls = [self.control(index, self.spec(index, epoch, **changes)) for index in range(len(self.stages))]
        async with asyncio.TaskGroup() as tasks:
            for index, control in enumerate(controls):
                tasks.create_task(control.run(), name=f"control-{index}")
            driver = Driver(controls, epoch, len(self.slices))
            try:
                await self._wait_until_open(driver)
                yield driver
            finally:
                for control in controls:
                    control.hang_up()

    async def _wait_until_open(self, driver: Driver) -> None:
        for control in driver.controls:
            waits = [asyncio.ensure_future(event.wait()) for event in (control.reports.opened, control.reports.ended)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if not control.reports.opened.is_set():
                raise driver.fault() or PeerClosed("a stage ended before it opened")


@asynccontextmanager
async def local_stages(
    *,
    make_backend: Callable[[int], Backend],
    slices: Sequence[Slice],
    weights: WeightSource,
    clock: Clock,
    over: str = "grpc",
    sampler: Sampler = sample,
    network: Network | None = None,
    open_tokenizer: OpenTokenizer | None = None,
    grammar_trial: Trial | None = None,
    open_s: float = 30.0,
    draft: Callable[[ModelBounds], DraftLaunch] | None = None,
    disk_folder: Path | None = None,
    kv: str = "",
) -> AsyncGenerator[LocalStages]:
    """One stage per slice, loaded and listening; ``over`` is "grpc" or "memory". All is closed at the end.

    ``network`` emulates one between the stages' nodes, over gRPC; ``draft``: see ``Stage.load``.
    ``kv``: form of the KV of these backends.
    """
    async with AsyncExitStack() as stack:
        by_address: dict[str, Stage] = {}
        stages: list[Stage] = []
        for index, part in enumerate(slices):
            stage = Stage(
                backend=make_backend(index),
                clock=clock,
                hello=Hello(role="stage", node_id=f"node{index}", node_name=f"node{index}"),
                security=Plaintext(),
                sampler=sampler,
                dial=_memory_dial(by_address, clock) if over == "memory" else None,
                network=network,
                open_tokenizer=open_tokenizer,
                grammar_trial=grammar_trial,
                open_s=open_s,
                disk_folder=disk_folder,
                name=f"stage {index}",
            )
            stack.push_async_callback(stage.close)
            await stage.load(
                slices=[part],
                open_weights=lambda: weights,
                progress=lambda _: None,
                settings=StageSettings(block_size=BLOCK_SIZE, kv=kv),
                draft=draft,
            )
            by_address[f"memory:{index}"] = stage
            stages.append(stage)
        addresses = list(by_address) if over == "memory" else [await _listen(stage, stack) for stage in stages]
        yield LocalStages(stages, addresses, slices, weights.config.hidden_size)


def _memory_dial(by_address: dict[str, Stage], clock: Clock) -> MakeLink:
    def dial(target: RingTarget, *, on_sample: OnSample) -> Outgoing:
        stage = by_address[target.address]
        return MemorySender(target, find_receiver=stage.find_receiver, clock=clock, on_sample=on_sample)

    return dial


async def _listen(stage: Stage, stack: AsyncExitStack) -> str:
    server: grpc.aio.Server = make_server(Plaintext())
    stage.add_to(server)
    port = bind(server, Plaintext(), host="127.0.0.1", port=0)
    await server.start()
    stack.push_async_callback(server.stop, None)
    return f"127.0.0.1:{port}"
