"""The Control stream to one stage: plans out, reports back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio

from edgepipe.engine.held_reports import HeldReport
from edgepipe.engine.sites import StageSite
from edgepipe.errors import ConnectTimeout, EdgepipeError, LinkError, RemoteProtocolError, StageLost, StepFailed
from edgepipe.ids import Epoch, StepId
from edgepipe.link.channels import from_rpc_error, is_refused, make_channel
from edgepipe.link.shaped import Network, ShapedLine
from edgepipe.scheduler import DiskWork, GivenBack, PlaceKey, ScheduledStep
from edgepipe.security.mutual_tls import Security
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, epoch_from_wire, epoch_to_wire
from edgepipe.wire.errors import error_from_wire
from edgepipe.wire.pipelines import PipelineSpec, spec_to_wire
from edgepipe.wire.registrations import Registration, registrations_to_wire
from edgepipe.wire.reports import Drafted, HomeOpened, StageTimings, StepDone, done_from_wire
from edgepipe.wire.sizes import MAX_PLANS
from edgepipe.wire.steps import step_to_wire
from edgepipe.wire.tiers import DiskCopied, DiskCopies, HeldPlaces, HostRoom, NewKeys, PlacesBack
from edgepipe.wire.v1 import stage_pb2, stage_pb2_grpc

Report = StepDone | StageTimings | HomeOpened | DiskCopied | HostRoom | Drafted


class StageControl:
    """Sends plans in order and forwards reports during one epoch."""

    def __init__(
        self,
        site: StageSite,
        *,
        on_report: Callable[[StageSite, Report], None],
        max_queued: int,
        security: Security,
        network: Network | None = None,
    ) -> None:
        """``network``: emulated network between engine and stage; None: send directly."""
        self.site = site
        self._network = network
        self._on_report = on_report
        self._channel = make_channel(site.address, security.to_process(site.certificate))
        self.crashed_step: StepId | None = None  # failed step that a fault report named
        self.raised: EdgepipeError | None = None  # the error with which this stage ended the epoch
        self.device_failed = False  # a fault report said that the device failed a test step, too
        self.met = False  # a connection was established once
        self.swallowed = False  # no answer to connection attempts: a firewall, not a dead process
        self.next_unreached = False  # a fault report said that the link to the next stage failed
        self.kv_since: Epoch | None = None  # epoch since which the stage holds all KV, as its opening said
        self.held: HeldReport | None = None  # what the stage holds, once it is open
        self._call: Any = None
        self._reports: Any = None  # the call's reports, in order
        self._first: asyncio.Future[stage_pb2.StageReport | None] | None = None  # first report after opening
        self._plans: asyncio.Queue[Sequence[stage_pb2.ControlMessage]] = asyncio.Queue(max_queued)

    @property
    def reached(self) -> bool:
        """Whether the connection is established."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def connect(self, *, timeout_s: float) -> None:
        """Connect. A failure is reported by ``open``."""
        ends = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (state := self._channel.get_state(try_to_connect=True)) not in ends:
                    await self._channel.wait_for_state_change(state)
        self.met = self.reached

    async def open(self, spec: PipelineSpec, hello: Hello, *, timeout_s: float) -> None:
        """Send the pipeline's constants and wait until the stage is ready. Raises the stage's error, or StageLost."""
        self._call = stage_pb2_grpc.StageStub(self._channel).Control()
        self._reports = aiter(self._call)
        self.held = held = HeldReport(spec)
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.write(stage_pb2.ControlMessage(open=spec_to_wire(spec, hello)))
                report = await anext(self._reports, None)
                while report is not None and report.WhichOneof("message") == "held":
                    held.note(from_wire(report.held, HeldPlaces))
                    report = await anext(self._reports, None)
        except TimeoutError as exc:
            fact = f"not ready within {timeout_s:.0f} s at {self.site.address}"
            raise self._named(ConnectTimeout(f"{self.site.label} did not open", fact=fact)) from exc
        except grpc.aio.AioRpcError as exc:
            raise self._lost(exc) from exc
        self.met = True
        if report is None:
            raise self._lost(None)
        if report.WhichOneof("message") == "fault":
            raise self._fault(report)
        if report.WhichOneof("message") != "opened":
            raise self._named(RemoteProtocolError(f"{self.site.label} reported before it was open"))
        if report.opened.HasField("kv_since"):
            self.kv_since = epoch_from_wire(report.opened.kv_since)
        self._first = asyncio.ensure_future(anext(self._reports, None))

    async def wait_until_all_open(self, all_open: Coroutine[Any, Any, Any]) -> None:
        """Wait until all stages are open. Raises the stage's error, or StageLost.

        Without this, the previous stage would try to reach a failed stage until the opening deadline.
        """
        assert self._first is not None, "it is open"
        waiting = asyncio.ensure_future(all_open)
        try:
            await asyncio.wait((waiting, self._first), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and (report := self._first_report(self._first)).WhichOneof("message") == "fault":
                self._take(report)
            await waiting
        finally:
            waiting.cancel()

    def send(self, plans: Sequence[stage_pb2.ControlMessage]) -> None:
        """Queue messages of plans. Raises StepFailed if the stage has stopped reading plans."""
        try:
            self._plans.put_nowait(plans)
        except asyncio.QueueFull:
            fact = f"{self._plans.qsize()} plans wait for it"
            raise self._named(StepFailed(f"{self.site.label} takes no more plans", fact=fact)) from None

    async def run(self) -> None:
        """Transfer plans and reports until cancelled. Raises the stage's fault, or StageLost if the stream breaks."""
        line = self._network.line(self._call.write) if self._network is not None else None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(line), name=f"plans:{self.site.index}")
            if line is not None:
                tasks.create_task(line.run(), name=f"plans-line:{self.site.index}")
            await self._read()

    async def close(self) -> None:
        """End the stream; the stage then ends the epoch."""
        if self._first is not None and not self._first.cancel() and not self._first.cancelled():
            self._first.exception()  # mark it retrieved: another task has reported the reason
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    async def _write(self, line: ShapedLine | None) -> None:
        write = self._call.write if line is None else line.write
        try:
            while True:
                for message in await self._plans.get():
                    await write(message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return  # the reader reports the reason

    async def _read(self) -> None:
        assert self._first is not None, "it is open"
        await asyncio.wait((self._first,))
        self._take(self._first_report(self._first))
        try:
            async for report in self._reports:
                self._take(report)
        except grpc.aio.AioRpcError as exc:
            raise self._lost(exc) from exc
        raise self._lost(None)

    def _first_report(self, first: asyncio.Future[stage_pb2.StageReport | None]) -> stage_pb2.StageReport:
        try:
            report = first.result()
        except grpc.aio.AioRpcError as exc:
            raise self._lost(exc) from exc
        if report is None:
            raise self._lost(None)
        return report

    def _take(self, report: stage_pb2.StageReport) -> None:
        kind = report.WhichOneof("message")
        if kind == "step_done":
            self._on_report(self.site, done_from_wire(report.step_done))
        elif kind == "drafted":
            self._on_report(self.site, from_wire(report.drafted, Drafted))
        elif kind == "timings":
            self._on_report(self.site, from_wire(report.timings, StageTimings))
        elif kind == "home_opened":
            self._on_report(self.site, from_wire(report.home_opened, HomeOpened))
        elif kind == "disk":
            self._on_report(self.site, from_wire(report.disk, DiskCopied))
        elif kind == "host_room":
            self._on_report(self.site, from_wire(report.host_room, HostRoom))
        elif kind == "fault":
            raise self._fault(report)

    def _fault(self, report: stage_pb2.StageReport) -> EdgepipeError:
        self.crashed_step = StepId(report.crashed_step) if report.crashed_step else None
        self.device_failed = report.device_failed
        self.next_unreached = report.next_unreached
        return self._named(error_from_wire(report.fault))

    def _lost(self, exc: grpc.aio.AioRpcError | None) -> EdgepipeError:
        cause = from_rpc_error(exc, peer=self.site.label) if exc else None
        if cause is not None and not isinstance(cause, LinkError):
            return self._named(cause)
        self.swallowed = isinstance(cause, ConnectTimeout) and not is_refused(exc)
        fact = f"its connection broke ({(cause.fact or str(cause)) if cause else 'it closed the stream'})"
        next_step = "serve the model again; 'edgepipe logs' on that node says more"
        return self._named(
            StageLost(f"{self.site.label} on {self.site.node_name} was lost", fact=fact, next_step=next_step)
        )

    def _named(self, error: EdgepipeError) -> EdgepipeError:
        self.raised = error.on_node(self.site.node_name, stage=self.site.label)
        return self.raised


class PlannedStep(NamedTuple):
    """A step for the stages."""

    step: ScheduledStep
    registrations: Sequence[Registration]  # sequences that begin in this step
    last_slice: int  # the slice at which the step ends


class StepWriter:
    """Sends an epoch's steps to its stages. Stages that need the same form of a step share its messages."""

    def __init__(self, stages: Sequence[StageControl], epoch: Epoch) -> None:
        self._of = epoch
        self._epoch = epoch_to_wire(epoch)
        self._stages = [
            (
                stage,
                any(part.embedding for part in stage.site.slices),
                any(part.head for part in stage.site.slices),
            )
            for stage in stages
        ]

    def send(self, steps: Sequence[PlannedStep]) -> None:
        """Queue steps, and the sequences that begin in them, for every stage. Raises StepFailed."""
        forms: dict[tuple[bool, bool], list[stage_pb2.ControlMessage]] = {}
        begins = any(step.registrations for step in steps)
        known = any(planned.step.after is None for planned in steps)  # stages get tokens of such steps only
        for stage, embeds, samples in self._stages:
            form = (embeds and known, samples and (begins or known))
            messages = forms.get(form)
            if messages is None:
                messages = forms[form] = self._messages(steps, embeds=embeds, samples=samples)
            stage.send(messages)

    def copy(self, work: DiskWork) -> None:
        """Queue copies between host memory and disk for every stage. Raises StepFailed."""
        copies = DiskCopies(
            epoch=self._of,
            number=work.number,
            memory_class=work.moves[0].number,
            out=work.moves[0].out,
            host_places=tuple(move.place for move in work.moves),
            disk_places=tuple(move.kept for move in work.moves),
            afresh=work.afresh,
        )
        self._tell_all([stage_pb2.ControlMessage(disk=to_wire(copies, stage_pb2.DiskCopies))])

    def give_back(self, given: Sequence[GivenBack]) -> None:
        """Let every stage give the memory of places in host memory back to the system. Raises StepFailed."""
        places = [PlacesBack(epoch=self._of, memory_class=each.number, places=each.places) for each in given]
        self._tell_all([stage_pb2.ControlMessage(back=to_wire(each, stage_pb2.PlacesBack)) for each in places])

    def name(self, keys: Sequence[PlaceKey]) -> None:
        """Let every stage know what steps that retired have left on the device. Raises StepFailed."""
        new = NewKeys(
            epoch=self._of,
            key_class=tuple(key.number for key in keys),
            key_place=tuple(key.place for key in keys),
            keys=b"".join([key.key for key in keys]),
        )
        self._tell_all([stage_pb2.ControlMessage(keys=to_wire(new, stage_pb2.NewKeys))])

    def _tell_all(self, messages: Sequence[stage_pb2.ControlMessage]) -> None:
        for stage, _, _ in self._stages:
            stage.send(messages)

    def _messages(self, steps: Sequence[PlannedStep], *, embeds: bool, samples: bool) -> list[stage_pb2.ControlMessage]:
        """Convert steps for a stage. Those planned ahead go into the message of the step before them."""
        messages: list[stage_pb2.ControlMessage] = []
        for step, registrations, last_slice in steps:
            with_ids = embeds or (samples and step.has_windows)
            plan = step_to_wire(step, epoch=self._epoch, last_slice=last_slice, with_token_ids=with_ids)
            if step.after is not None and messages and len(messages[-1].next_plans) < MAX_PLANS - 1:
                messages[-1].next_plans.append(plan)
                continue
            messages += registrations_to_wire(registrations, epoch=self._epoch, with_sampling=samples)
            messages.append(stage_pb2.ControlMessage(plan=plan))
        return messages
