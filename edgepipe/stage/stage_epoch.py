"""One epoch of a pipeline on one stage: plans in, steps through the slices, reports out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from edgepipe.backend.cost import work_of
from edgepipe.backend.types import Step, StepOutput
from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError, LinkError, RemoteProtocolError, Retry, StageLost, StaleEpoch, StepFailed
from edgepipe.ids import Epoch, StepId
from edgepipe.link.channels import ATTEMPT_S
from edgepipe.link.protocol import OnSample, Outgoing, RingTarget, StepBytes
from edgepipe.link.receiver import RingReceiver
from edgepipe.link.serving import Replies
from edgepipe.plain_words import plain
from edgepipe.sampling import SequenceSampler
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.spec.facts import Slice
from edgepipe.spec.memory_classes import WindowPool
from edgepipe.stage.compute import ComputeThread
from edgepipe.stage.grammar_builds import GrammarBuilds, PendingGrammar
from edgepipe.stage.lane import Lane
from edgepipe.stage.reports import Reports
from edgepipe.stage.retirement import Retirement
from edgepipe.stage.sampler import SamplerPool, StepResult
from edgepipe.stage.sequences import PlannedRows, SequenceTable, packed_indices
from edgepipe.stage.service import Commands
from edgepipe.stage.step_order import StepUses
from edgepipe.stage.step_work import StageStep
from edgepipe.stage.trace import Trace, TraceEntry
from edgepipe.wire.plans import OpenRing, PipelineSpec, Registration, Registrations, StepPlan

logger = logging.getLogger(__name__)

_REACH_S = 2 * ATTEMPT_S + 1.0  # stages listen before they learn of each other; a block fails both attempts
_LEAST_WINDOW = 8  # steps
_CHECK_S = 5.0  # time of a test step after the submitted ones; the daemon ends a device that hangs


class MakeLink(Protocol):
    """Creates the sending end of a link; called on the loop."""

    def __call__(self, target: RingTarget, *, on_sample: OnSample) -> Outgoing:
        """Return a sender that does not run yet."""
        ...


@dataclass(slots=True)
class Counters:
    """Counts over all epochs of a stage; written on the loop only."""

    received: int = 0  # plans accepted
    sent: int = 0  # steps passed to the next stage or reported as done
    repeats: int = 0  # repeated plans, dropped
    strays: int = 0  # plans and frames of other epochs, dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Parts of a stage that outlive an epoch."""

    compute: ComputeThread
    samplers: SamplerPool
    grammars: GrammarBuilds
    clock: Clock
    trace: Trace
    counters: Counters
    dial: MakeLink
    connect_s: float  # time for the next stage to open its end of the link
    node: str  # name for errors
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crash:
    """A step that the backend failed to compute."""

    step: StepId
    error: EdgepipeError


class _Over(Exception):
    """The epoch has ended on this stage. Only ends the task group."""


class StageEpoch:
    """One epoch on one stage. Runs on the loop; ``computed`` and ``broken`` are called on the compute thread."""

    def __init__(
        self,
        spec: PipelineSpec,
        tools: Tools,
        *,
        model: ModelBounds,
        kv_since: Epoch,
        windows: Sequence[WindowPool] = (),
    ) -> None:
        """``kv_since``: the epoch since which the KV holds all that this engine's steps wrote."""
        self.spec = spec
        self._model = model
        self._windows = windows
        self._kv_since = kv_since
        self.over = False
        self._paused = False
        self._crash: asyncio.Future[_Crash] = asyncio.get_running_loop().create_future()
        self._tools = tools
        self._tasks = asyncio.TaskGroup()  # the tasks that ``run`` starts
        self._loop = asyncio.get_running_loop()
        self._table = SequenceTable(
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            windows=windows,
            state_slots=spec.state_slots,
            model=model,
            new_sampler=self._new_sampler if any(part.head for part in spec.slices) else None,
        )
        self._retirement = Retirement(spec.epoch)
        self._reports = Reports()
        self._last_step = StepId(0)
        self._in_compute = 0  # steps in the compute thread
        self._max_in_compute = tools.compute.backend.max_submitted + 1  # one more waits in its queue
        self._lanes = {part.index: self._make_lane(part) for part in sorted(spec.slices, key=lambda part: part.index)}

    def receiver(self, slice_index: int) -> RingReceiver | None:
        """Return the receiver of a slice's activations; None if no other stage feeds the slice."""
        lane = self._lanes.get(slice_index)
        return lane.receiver if lane is not None else None

    async def run(self, commands: Commands, replies: Replies) -> None:
        """Execute plans until the engine ends the stream or a fault was reported to it."""
        senders = [lane.sender for lane in self._lanes.values() if lane.sender is not None]
        try:
            async with self._tasks as tasks:
                tasks.create_task(self._write(replies), name="stage-reports")
                for sender in senders:
                    tasks.create_task(self._keep(sender), name="stage-ring")
                tasks.create_task(self._announce(senders), name="stage-opened")
                tasks.create_task(self._tell_crash(), name="stage-crash")
                await commands.feed(self._obey, refuse=self._cannot_obey)
                self._reports.finish()  # the writer then ends the rest: gRPC ends badly if a write is cancelled
        except* _Over:
            logger.debug("epoch %s ended", self.spec.epoch)
        finally:
            self.end()

    def pause(self) -> None:
        """Start no further step until ``resume``. The next epoch starts unpaused."""
        self._paused = True

    def resume(self) -> None:
        """Start steps again."""
        self._paused = False
        if not self.over:
            self._pump()

    def fault(
        self,
        error: EdgepipeError,
        *,
        crashed_step: int = 0,
        device_failed: bool = False,
        next_unreached: bool = False,
        asked: bool = False,
    ) -> None:
        """End the epoch and report the reason to the engine. Only the first call counts.

        crashed_step    the step that failed, if one did
        device_failed   the device failed a test step, too
        next_unreached  the connection to the next stage failed
        asked           not a fault: the stage was asked to end
        """
        if self.over:
            return
        error = error.on_node(self._tools.node, stage=self._tools.stage)
        quiet = asked or isinstance(error, StaleEpoch | StageLost)  # another process ended it: not this stage's fault
        logger.log(
            logging.INFO if quiet else logging.WARNING, "epoch %s ends on this stage: %s", self.spec.epoch, error
        )
        self._reports.fault(
            error, crashed_step=crashed_step, device_failed=device_failed, next_unreached=next_unreached
        )
        self.end()

    def end(self) -> None:
        """Drop all steps that are not computed yet. Another epoch may use the KV after the steps in the thread."""
        self.over = True
        self._crash.cancel()
        for lane in self._lanes.values():
            lane.close()
        self._reports.close()

    def computed(self, work: StageStep, output: StepOutput) -> None:
        """See ``WorkOwner.computed``; runs on the compute thread."""
        assert work.span is not None, "the step was computed"
        span = work.span
        self._tools.trace.append(TraceEntry(work.step, work.slice_index, span.submitted_s, span.collected_s))
        if work.samples or work.scored:
            self._tools.samplers.put(
                output, work.samples, work.scored, partial(self._on_result, work), partial(self.broken, work)
            )
        self._loop.call_soon_threadsafe(self._after_compute, work, output)

    def broken(self, work: StageStep, error: Exception) -> None:
        """See ``WorkOwner.broken``; runs on the compute thread or a sampler thread."""
        fault = _as_fault(error, f"step {work.step} could not be computed")
        self._loop.call_soon_threadsafe(self._crashed, _Crash(step=work.step, error=fault))

    def _crashed(self, crash: _Crash) -> None:
        """Start no further step; ``_tell_crash`` tests the device, then ends the epoch."""
        self._paused = True
        if not self.over and not self._crash.done():
            self._crash.set_result(crash)

    async def _tell_crash(self) -> None:
        crash = await self._crash
        failed = await self._device_fails()
        self.fault(crash.error, crashed_step=crash.step, device_failed=failed)

    async def _device_fails(self) -> bool:
        """Return whether the device fails a small test step, too. Then the step's requests are not at fault."""
        compute = self._tools.compute
        try:
            async with asyncio.timeout(_CHECK_S):
                await compute.call(compute.backend.check)
        except Exception as exc:
            logger.error("the device failed a test step: %s", exc)
            return True
        return False

    def _new_sampler(self, registration: Registration, fault: EdgepipeError | None) -> SequenceSampler:
        grammar = registration.sampling.grammar
        pending = PendingGrammar()
        if grammar is not None and fault is None:
            prepared = self._tools.grammars.prepare(grammar, registration.generated, pending)
            self._tasks.create_task(prepared, name=f"grammar:{registration.sequence}")
        return SequenceSampler(
            registration.sampling,
            choice=registration.choice,
            prompt=registration.seen,
            generated=registration.generated,
            end_ids=registration.end_ids,
            start_grammar=pending.state,
            fault=fault,
        )

    def _make_lane(self, part: Slice) -> Lane:
        spec = self.spec
        lane = Lane(
            part,
            hidden_size=spec.hidden_size,
            activation_type=spec.activation_type,
            deadline_s=spec.step_deadline_ms / 1e3,
            clock=self._tools.clock,
            on_late=self.fault,
        )
        local = {other.index for other in spec.slices}
        if not part.embedding and part.index - 1 not in local:
            lane.receiver = RingReceiver(
                epoch=spec.epoch,
                window=_window(spec),
                clock=self._tools.clock,
                on_step=partial(self._arrived, lane),
                on_held=lane.held,
            )
        if part.index + 1 < spec.num_slices and part.index + 1 not in local:
            lane.sender = self._tools.dial(self._target(part.index + 1), on_sample=self._reports.link)
        return lane

    def _target(self, slice_index: int) -> RingTarget:
        spec = self.spec
        return RingTarget(
            address=spec.next_address,
            opening=OpenRing(
                pipeline_id=spec.pipeline_id,
                epoch=spec.epoch,
                slice=slice_index,
                hidden_size=spec.hidden_size,
                activation_type=spec.activation_type,
            ),
            # A step may retire before its credit returns, so the engine's next step may find it still queued.
            max_queued=2 * _window(spec) + 2,
            reach_s=_REACH_S,
            connect_s=self._tools.connect_s,
            deadline_s=spec.step_deadline_ms / 1e3,
            certificate=spec.next.certificate if spec.next is not None else b"",
        )

    async def _write(self, replies: Replies) -> None:
        await self._reports.write_to(replies)
        raise _Over

    async def _keep(self, sender: Outgoing) -> None:
        try:
            await sender.run()
        except EdgepipeError as exc:
            self.fault(exc, next_unreached=isinstance(exc, LinkError) and exc.retry is Retry.SAFE)

    async def _announce(self, senders: list[Outgoing]) -> None:
        for sender in senders:
            await sender.connected()
        self._reports.opened(self.spec.epoch, kv_since=self._kv_since)

    def _obey(self, command: StepPlan | Registrations) -> None:
        if self.over:
            return
        try:
            if isinstance(command, StepPlan):
                self._plan(command)
                self._pump()
            else:
                self._register(command)
        except Exception as exc:
            self._cannot_obey(exc)

    def _cannot_obey(self, error: Exception) -> None:
        self.fault(_as_fault(error, "a plan could not be prepared"))

    def _register(self, registrations: Registrations) -> None:
        if registrations.epoch != self.spec.epoch:
            self._tools.counters.strays += 1
            return
        for registration in registrations.sequences:
            self._table.tell(registration)

    def _plan(self, plan: StepPlan) -> None:
        counters = self._tools.counters
        if plan.epoch != self.spec.epoch:
            counters.strays += 1
            return
        if plan.step <= self._last_step:
            counters.repeats += 1
            return
        if plan.step != self._last_step + 1:
            raise RemoteProtocolError(
                f"the plan of step {self._last_step + 1} is missing", fact=f"step {plan.step} came"
            )
        self._last_step = plan.step
        counters.received += 1
        self._begin(plan, self._table.apply(plan))

    def _begin(self, plan: StepPlan, rows: PlannedRows) -> None:
        last = self._lanes.get(plan.last_slice)
        self._check(plan, rows, last)
        if last is not None:
            self._retirement.due(plan.step)
        if not plan.rows:
            if last is not None:
                self._retire(plan.step, StepResult())
            return
        lanes = [lane for index, lane in self._lanes.items() if index <= plan.last_slice]
        for lane in lanes:
            work = self._prepare(plan, rows, lane, with_copies=lane is lanes[0])
            if lane.part.embedding:
                lane.arrive(plan.step, np.array(plan.token_ids, np.int32), bulk=work.bulk)
            lane.plan(work)

    def _check(self, plan: StepPlan, rows: PlannedRows, last: Lane | None) -> None:
        problem = ""
        if plan.last_slice >= self.spec.num_slices:
            problem = f"it ends at slice {plan.last_slice} of {self.spec.num_slices}"
        elif last is not None and rows.logit_rows and not last.part.head:
            problem = f"it samples at slice {plan.last_slice}, which has no head"
        elif plan.rows and 0 in self._lanes and len(plan.token_ids) != plan.num_tokens:
            problem = f"it has {len(plan.token_ids)} token ids for {plan.num_tokens} tokens"
        elif (highest := max(plan.token_ids, default=0)) >= self._model.vocab_size:
            problem = f"it has token id {highest}; ids go from 0 to {self._model.vocab_size - 1}"
        elif plan.copies and not plan.rows:
            problem = "it copies blocks and has no rows"
        if problem:
            raise RemoteProtocolError(f"the plan of step {plan.step} is invalid: {problem}")

    def _prepare(self, plan: StepPlan, rows: PlannedRows, lane: Lane, *, with_copies: bool) -> StageStep:
        started_s = self._tools.clock.monotonic_s()
        retires = lane.part.index == plan.last_slice
        step = Step(
            step=plan.step,
            slice_index=lane.part.index,
            rows=rows.rows,
            logit_rows=packed_indices(rows.logit_rows),
            copies=plan.copies if with_copies else (),
            scores=rows.score_rows if retires else None,
        )
        prepared = self._tools.compute.backend.prepare(step)
        ready_s = self._tools.clock.monotonic_s()
        return StageStep(
            self,
            epoch=plan.epoch.counter,
            step=plan.step,
            slice_index=lane.part.index,
            bulk=plan.is_bulk,
            num_tokens=plan.num_tokens,
            num_rows=len(plan.rows),
            demand=work_of(step),
            prepared=prepared,
            prepare_us=int((ready_s - started_s) * 1e6),
            ready_s=ready_s,
            retires=retires,
            samples=rows.samples if retires else (),
            scored=rows.scored if retires else (),
            uses=StepUses(rows.rows, plan.copies, block_size=self.spec.block_size, windows=self._windows),
        )

    def _arrived(self, lane: Lane, step: StepId, data: StepBytes, bulk: bool) -> None:
        lane.arrive_bytes(step, data, bulk=bulk)
        self._pump()

    def _pump(self) -> None:
        """Pass ready steps to the compute thread, no more than it can use."""
        for work in self._ready():
            self._in_compute += 1
            if work.retires:
                self._retirement.begin(work.step)
            self._tools.compute.put(work)

    def _ready(self) -> Iterator[StageStep]:
        for lane in () if self._paused else self._lanes.values():
            while self._in_compute < self._max_in_compute and (work := lane.next_ready()) is not None:
                yield work

    def _after_compute(self, work: StageStep, output: StepOutput) -> None:
        if self.over:
            return
        self._in_compute -= 1
        try:
            self._pass_on(work, output)
            self._pump()
        except Exception as exc:
            self.fault(_as_fault(exc, f"step {work.step} could not be passed on"))

    def _pass_on(self, work: StageStep, output: StepOutput) -> None:
        if work.retires:
            if not work.samples and not work.scored:
                self._retire(work.step, StepResult(), work)
            return
        lane = self._lanes[work.slice_index]
        if output.activations is None:
            raise StepFailed(f"slice {work.slice_index} gave no activations for step {work.step}")
        if lane.sender is None:
            self._lanes[work.slice_index + 1].arrive(work.step, output.activations, bulk=work.bulk)
            self._reports.timing(work.timing())
            return
        lane.sender.send(work.step, output.activations, bulk=work.bulk)
        self._tools.counters.sent += 1
        self._reports.timing(work.timing(sent=lane.sender.stats))

    def _on_result(self, work: StageStep, result: StepResult) -> None:
        """Take a step's sampled tokens; runs on a sampler thread."""
        self._loop.call_soon_threadsafe(self._sampled, work, result)

    def _sampled(self, work: StageStep, result: StepResult) -> None:
        if not self.over:
            self._retire(work.step, result, work)

    def _retire(self, step: StepId, result: StepResult, work: StageStep | None = None) -> None:
        timings = (work.timing(sample_us=result.sample_us),) if work is not None else ()
        for done in self._retirement.settle(step, result, timings):
            self._reports.done(done)
            self._tools.counters.sent += 1


def _window(spec: PipelineSpec) -> int:
    """Return the credit window in steps. Its minimum avoids one credit message per step when few are in flight."""
    return max(spec.max_in_flight, _LEAST_WINDOW)


def _as_fault(error: Exception, summary: str) -> EdgepipeError:
    """Return an EdgepipeError as it is; log any other exception and wrap it in StepFailed."""
    if isinstance(error, EdgepipeError):
        return error
    logger.error("%s", summary, exc_info=error)
    return StepFailed(summary, fact=plain(error))
