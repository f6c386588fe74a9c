"""One epoch of a pipeline on one stage: plans in, steps through the slices, reports out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from edgepipe.backend.cost import work_of
from edgepipe.backend.types import Step, StepOutput, TierMove
from edgepipe.errors import EdgepipeError, LinkError, RemoteProtocolError, Retry, StageLost, StaleEpoch, StepFailed
from edgepipe.ids import Epoch, StepId
from edgepipe.link.protocol import Outgoing, StepBytes
from edgepipe.link.receiver import RingReceiver
from edgepipe.link.serving import Replies
from edgepipe.plain_words import plain
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.spec.facts import Slice
from edgepipe.spec.memory_classes import WindowPool
from edgepipe.stage.disk_tier import DiskTier
from edgepipe.stage.draft_process import Guesser
from edgepipe.stage.drafting import DraftWish
from edgepipe.stage.drafts_ahead import DraftsAhead
from edgepipe.stage.epoch_tiers import EpochTiers
from edgepipe.stage.held_keys import BegunMove, HeldKeys
from edgepipe.stage.home import Home, HomeFeed, WayHome
from edgepipe.stage.host_watch import HostWatch
from edgepipe.stage.lane import Lane
from edgepipe.stage.mtp_drafter import share_out
from edgepipe.stage.plan_check import check_plan
from edgepipe.stage.reports import Reports
from edgepipe.stage.retirement import Retirement
from edgepipe.stage.ring_ends import RingEnds
from edgepipe.stage.sampler import StepResult
from edgepipe.stage.sequence_parts import SequenceParts
from edgepipe.stage.sequences import PlannedRows, SequenceTable, packed_indices
from edgepipe.stage.service import Commands
from edgepipe.stage.step_order import StepUses
from edgepipe.stage.step_work import StageStep
from edgepipe.stage.tools import Tools
from edgepipe.stage.trace import TraceEntry
from edgepipe.wire.pipelines import PipelineSpec
from edgepipe.wire.plans import ControlCommand, StepPlan
from edgepipe.wire.registrations import Registrations
from edgepipe.wire.reports import Drafted, HomeTokens, LinkSample, StepDone
from edgepipe.wire.sizes import MAX_PLANS
from edgepipe.wire.tiers import DiskCopies, NewKeys, PlacesBack

logger = logging.getLogger(__name__)

_CHECK_S = 5.0  # time of a test step after the submitted ones; the daemon ends a device that hangs


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
        rest_tokens: int = 0,
        mtp_slice: int | None = None,
        draft_model: Guesser | None = None,
        disk: DiskTier | None = None,
        host: HostWatch | None = None,
        held: HeldKeys | None = None,
    ) -> None:
        """
        kv_since     the epoch since which the KV holds all that this engine's steps wrote
        mtp_slice    slice with a layer that predicts one token more; None: no slice here has one
        draft_model  a second model that drafts; None: without one
        disk         below host memory; None: without one
        host         watches host memory below the device; None: it keeps its size
        held         what this stage keeps; None: no engine asks
        """
        self.spec = spec
        self._model = model
        self._windows = windows
        self._rest_tokens = rest_tokens  # slots that a sequence needs behind its last token's
        self._kv_since = kv_since
        self._draft_model = draft_model
        self.over = False
        self._paused = False
        self._crash: asyncio.Future[_Crash] = asyncio.get_running_loop().create_future()
        self._tools = tools
        self._tasks = asyncio.TaskGroup()  # the tasks that ``run`` starts
        self._loop = asyncio.get_running_loop()
        self._ring = RingEnds(spec, tools.clock, connect_s=tools.connect_s)
        self._parts = SequenceParts(
            tools.compute,
            tools.grammars,
            self._tasks,
            block_size=spec.block_size,
            rest_tokens=rest_tokens,
            mtp_slice=mtp_slice,
            draft_model=draft_model,
        )
        self._table = SequenceTable(
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            windows=windows,
            rest_tokens=rest_tokens,
            state_slots=spec.state_slots,
            host_places=spec.host_places,
            model=model,
            new_sampler=self._parts.new_sampler if any(part.head for part in spec.slices) else None,
            new_drafter=self._parts.new_drafter,
            held=held,
        )
        self._retirement = Retirement(spec.epoch)
        self._reports = Reports()
        self._tiers = EpochTiers(
            spec, self._tasks, self._reports, disk=disk, host=host, held=held, cannot_obey=self._cannot_obey
        )
        self._drafts_ahead = DraftsAhead(spec.epoch, self._drafted)
        self._flying: dict[StepId, tuple[DraftWish | None, ...]] = {}  # wishes of the steps that are not reported yet
        self._last_step = StepId(0)
        self._moves: tuple[TierMove, ...] = ()  # moves of plans that ended before this stage, for its next step
        self._begun: tuple[BegunMove, ...] = ()  # the same moves
        self._in_compute = 0  # steps in the compute thread
        self._max_in_compute = tools.compute.backend.max_submitted + 1  # one more waits in its queue
        self._lanes = {part.index: self._make_lane(part) for part in sorted(spec.slices, key=lambda part: part.index)}
        embeds, samples = 0 in self._lanes, spec.num_slices - 1 in self._lanes
        kept = 4 * spec.max_in_flight + MAX_PLANS  # more than are in flight and planned ahead
        self._home = Home(tools.compute.put, clock=tools.clock, kept=kept) if embeds else None
        self._feed = self._make_feed(self._home) if self._home is not None and not samples else None
        if self._home is not None and samples:
            self._lanes[0].lacks_tokens = self._home.lacks
        self._way_home: WayHome | None = None
        if samples and not embeds and spec.next_address:
            self._way_home = WayHome(tools.dial(self._ring.target(0), on_sample=_not_measured))

    def receiver(self, slice_index: int) -> RingReceiver | None:
        """Return the receiver of a slice's inputs; None if no other stage feeds the slice."""
        if slice_index == 0:
            return self._feed.receiver if self._feed is not None else None
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
                self._tiers.start()
                await commands.feed(self._obey, refuse=self._cannot_obey)
                self._reports.finish()  # the writer then ends the rest: gRPC ends badly if a write is cancelled
        except* _Over:
            logger.debug("epoch %s ended", self.spec.epoch)
        finally:
            self.end()

    def pause(self) -> None:
        """Start no further step until ``resume``. The next epoch starts unpaused."""
        self._paused = True
        if self._home is not None:
            self._home.pause()

    def resume(self) -> None:
        """Start steps again."""
        self._paused = False
        if not self.over:
            if self._home is not None:
                self._home.resume()
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
        self._tiers.close()
        self._table.release_all()
        self.over = True
        self._crash.cancel()
        self._parts.close()
        self._drafts_ahead.close()
        if self._home is not None:
            self._home.close()
        if self._feed is not None:
            self._feed.close()
        for lane in self._lanes.values():
            lane.close()
        self._reports.close()

    def computed(self, work: StageStep, output: StepOutput) -> None:
        """See ``WorkOwner.computed``; runs on the compute thread."""
        assert work.span is not None, "the step was computed"
        span = work.span
        self._tiers.ended(work.moves)
        if work.kept:
            share_out(work.kept, output)
        if work.samples or work.scored:
            self._sample(work, output)
        else:
            self._loop.call_soon_threadsafe(self._after_compute, work, output)
        self._tools.trace.append(TraceEntry(work.step, work.slice_index, span.submitted_s, span.collected_s))

    def _sample(self, work: StageStep, output: StepOutput) -> None:
        compute, samplers = self._tools.compute, self._tools.samplers
        if work.here and (work.flies or not compute.has_waiting):
            try:
                result = samplers.sample_here(output, work.samples, work.wishes, work.scored)
            except Exception as exc:
                self.broken(work, exc)
                return
            self._on_result(work, output, True, result)
            return
        samplers.put(
            output,
            work.samples,
            work.wishes,
            work.scored,
            partial(self._on_result, work, output, False),
            partial(self.broken, work),
        )
        compute.later(lambda: self._loop.call_soon_threadsafe(self._after_compute, work, output))

    def _samples_here(self, rows: PlannedRows, *, flies: bool) -> bool:
        """Return whether the compute thread samples a step itself, if nothing else waits for that thread."""
        # A model takes its time to draft, and a layer of this one needs the compute thread.
        models = (self._tools.compute.backend.draft_model, self._draft_model)
        drafts = any(wish is not None and wish.count for wish in rows.wishes)
        drafting = drafts and (bool(rows.kept) or any(model is not None for model in models))
        return flies or (self._tools.samplers.is_sooner_here(rows.samples) and not rows.scored and not drafting)

    def broken(self, work: StageStep, error: Exception) -> None:
        """See ``WorkOwner.broken``; runs on the compute thread or a sampler thread."""
        fault = _as_fault(error, f"step {work.step} could not be computed")
        self._loop.call_soon_threadsafe(self._crashed, _Crash(step=work.step, error=fault))

    def _crashed(self, crash: _Crash) -> None:
        """Start no further step; ``_tell_crash`` tests the device, then ends the epoch."""
        self.pause()
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
            lane.receiver = self._ring.receiver(partial(self._arrived, lane), on_held=lane.held)
        if part.index + 1 < spec.num_slices and part.index + 1 not in local:
            lane.sender = self._tools.dial(self._ring.target(part.index + 1), on_sample=self._reports.link)
        return lane

    def _make_feed(self, home: Home) -> HomeFeed:
        return HomeFeed(
            home,
            self._lanes[0],
            make_receiver=self._ring.receiver,
            vocab_size=self._model.vocab_size,
            on_tokens=self._tokens_came,
        )

    async def _write(self, replies: Replies) -> None:
        await self._reports.write_to(replies)
        raise _Over

    async def _keep(self, sender: Outgoing | WayHome) -> None:
        try:
            await sender.run()
        except EdgepipeError as exc:
            self.fault(exc, next_unreached=isinstance(exc, LinkError) and exc.retry is Retry.SAFE)

    async def _announce_home(self, way: WayHome) -> None:
        await way.opened()
        self._reports.home_opened(self.spec.epoch)

    async def _announce(self, senders: list[Outgoing]) -> None:
        for sender in senders:
            await sender.connected()
        await self._tiers.report_held()
        self._reports.opened(self.spec.epoch, kv_since=self._kv_since)
        self._tiers.report_host_room()

    def _obey(self, commands: Sequence[ControlCommand]) -> None:
        if self.over:
            return
        try:
            for command in commands:
                if command.epoch != self.spec.epoch:
                    self._tools.counters.strays += 1
                elif isinstance(command, StepPlan):
                    self._plan(command)
                elif isinstance(command, DiskCopies):
                    self._tiers.copy(command)
                elif isinstance(command, PlacesBack):
                    self._tiers.give_back(command)
                elif isinstance(command, NewKeys):
                    self._tiers.name(command)
                else:
                    self._register(command)
            self._pump()
        except Exception as exc:
            self._cannot_obey(exc)

    def _cannot_obey(self, error: Exception) -> None:
        self.fault(_as_fault(error, "a plan could not be prepared"))

    def _register(self, registrations: Registrations) -> None:
        for registration in registrations.sequences:
            self._table.tell(registration)

    def _plan(self, plan: StepPlan) -> None:
        counters = self._tools.counters
        if plan.step <= self._last_step:
            counters.repeats += 1
            return
        if plan.step != self._last_step + 1:
            raise RemoteProtocolError(
                f"the plan of step {self._last_step + 1} is missing", fact=f"step {plan.step} came"
            )
        self._last_step = plan.step
        counters.received += 1
        self._tiers.planned(plan)
        self._begin(plan, self._table.apply(plan))

    def _begin(self, plan: StepPlan, rows: PlannedRows) -> None:
        last = self._lanes.get(plan.last_slice)
        check_plan(plan, rows, self.spec, vocab_size=self._model.vocab_size)
        self._plan_home(plan)
        if last is not None:
            self._retirement.due(plan.step)
        if not plan.rows:
            if last is not None:
                self._retire(plan.step, StepResult())
            return
        lanes = [lane for index, lane in self._lanes.items() if index <= plan.last_slice]
        self._moves += plan.moves
        self._begun += rows.begun
        self._tiers.moved(plan.moves)
        if plan.lot and last is not None:
            self._flying[plan.step] = rows.wishes
        for lane in lanes:
            work = self._prepare(plan, rows, lane, first=lane is lanes[0])
            if lane.part.embedding:
                self._give_tokens(lane, plan)
            lane.plan(work)
        if lanes:
            self._moves, self._begun = (), ()

    def _give_tokens(self, lane: Lane, plan: StepPlan) -> None:
        """Give the slice that embeds its tokens. ``Home`` holds a step for those that this stage samples itself."""
        if plan.is_bulk or self._feed is None:
            lane.arrive(plan.step, np.array(plan.token_ids, np.int32), bulk=plan.is_bulk)
        else:
            self._feed.give(plan)

    def _plan_home(self, plan: StepPlan) -> None:
        """Note where the tokens that a step samples go, besides the engine."""
        if self._home is not None:
            self._home.planned(plan)
        if self._feed is not None:
            self._feed.planned(plan)
        if (way := self._way_home) is not None:
            way.planned(plan)
            if plan.step == 1:  # the engine plans once all stages are open and know the stage before them
                self._tasks.create_task(self._keep(way), name="stage-home")
                self._tasks.create_task(self._announce_home(way), name="stage-home-opened")

    def _tokens_came(self, step: StepId, ids: Sequence[int]) -> None:
        self._pump()
        self._reports.home(HomeTokens(step=step, ids=tuple(ids)))

    def _prepare(self, plan: StepPlan, rows: PlannedRows, lane: Lane, *, first: bool) -> StageStep:
        started_s = self._tools.clock.monotonic_s()
        retires = lane.part.index == plan.last_slice
        step = Step(
            step=plan.step,
            slice_index=lane.part.index,
            rows=rows.rows,
            logit_rows=packed_indices(rows.logit_rows),
            copies=plan.copies if first else (),
            moves=self._moves if first else (),
            scores=rows.score_rows if retires else None,
            next_ids=rows.next_ids if lane.part.head else None,
        )
        flies = retires and any(wish is not None and wish.lot for wish in rows.wishes)
        prepared = self._tools.compute.backend.prepare(step)
        ready_s = self._tools.clock.monotonic_s()
        return StageStep(
            self,
            epoch=plan.epoch.counter,
            step=plan.step,
            slice_index=lane.part.index,
            bulk=plan.is_bulk,
            num_tokens=plan.num_tokens,
            num_rows=plan.num_singles,
            demand=work_of(step),
            prepared=prepared,
            prepare_us=int((ready_s - started_s) * 1e6),
            ready_s=ready_s,
            retires=retires,
            flies=flies,
            here=retires and self._samples_here(rows, flies=flies),
            samples=rows.samples if retires else (),
            wishes=rows.wishes if retires else (),
            kept=rows.kept if retires else (),
            scored=rows.scored if retires else (),
            uses=StepUses(
                rows.rows,
                plan.copies,
                self._moves,
                block_size=self.spec.block_size,
                windows=self._windows,
                rest_tokens=self._rest_tokens,
            ),
            moves=self._begun if first else (),
            sequences=tuple([row.sequence for row in plan.rows]),
            after=plan.after,
        )

    def _arrived(self, lane: Lane, step: StepId, data: StepBytes, bulk: bool) -> None:
        lane.arrive_bytes(step, data, bulk=bulk)
        self._pump()
        lane.watch(bulk=bulk)

    def _pump(self) -> None:
        """Pass ready steps to the compute thread, no more than it can use. All else is done behind that."""
        for lane, work in self._ready():
            self._in_compute += 1
            if work.retires:
                self._retirement.begin(work.step)
            if self._home is not None and self._feed is None and work.after is not None and work.slice_index == 0:
                self._home.hold(work)
            else:
                self._tools.compute.put(work)
            lane.left(work)

    def _pump_later(self) -> None:
        if self.over:
            return
        try:
            self._pump()
        except Exception as exc:
            self.fault(_as_fault(exc, "a step could not be started"))

    def _ready(self) -> Iterator[tuple[Lane, StageStep]]:
        for lane in () if self._paused else self._lanes.values():
            while self._has_room(lane) and (work := lane.next_ready()) is not None:
                yield lane, work

    def _has_room(self, lane: Lane) -> bool:
        """Whether a step of the lane may be passed on. None passes a step that waits for its tokens."""
        if lane.part.embedding and self._home is not None and self._home.holds:
            return False
        return self._in_compute < self._max_in_compute

    def _after_compute(self, work: StageStep, output: StepOutput, result: StepResult | None = None) -> None:
        """Go on after a step. ``result``: its tokens, if the compute thread has sampled them itself."""
        if self.over:
            return
        self._in_compute -= 1
        writes = True  # another stage waits for that, so the next steps are looked for later
        try:
            if result is None:
                writes = self._pass_on(work, output)
            elif self._way_home is not None and not work.flies and self._retirement.is_next(work.step):
                rows = result.sampled
                self._way_home.send(work.step, [row[-1].token if row[-1].error is None else 0 for row in rows])
                self._loop.call_soon(self._sampled, work, result)  # the first stage waits, so its tokens start first
            else:
                self._retire(work.step, result, work)
                writes = False
            if writes:
                self._loop.call_soon(self._pump_later)
            else:
                self._pump()
        except Exception as exc:
            self.fault(_as_fault(exc, f"step {work.step} could not be passed on"))

    def _pass_on(self, work: StageStep, output: StepOutput) -> bool:
        """Pass a step's activations on, if another slice follows. Return whether they go to another stage."""
        if work.retires:
            if not work.samples and not work.scored:
                self._retire(work.step, StepResult(), work)
            return False
        lane = self._lanes[work.slice_index]
        if output.activations is None:
            raise StepFailed(f"slice {work.slice_index} gave no activations for step {work.step}")
        if lane.sender is None:
            self._lanes[work.slice_index + 1].arrive(work.step, output.activations, bulk=work.bulk)
            self._reports.timing(work.timing())
            return False
        lane.sender.send(work.step, output.activations, bulk=work.bulk)
        self._tools.counters.sent += 1
        self._loop.call_soon(self._report_sent, work, lane.sender)  # the next stage waits, so the write starts first
        return True

    def _report_sent(self, work: StageStep, sender: Outgoing) -> None:
        if not self.over:
            self._reports.timing(work.timing(sent=sender.stats))

    def _on_result(self, work: StageStep, output: StepOutput, here: bool, result: StepResult) -> None:
        """Take a step's sampled tokens, on the thread that sampled them. The device's next step comes first.

        ``here``: that is the compute thread. The loop then wakes once for the step and its tokens.
        """
        if self._home is not None:
            self._home.give(work.step, [row[-1].token if row else 0 for row in result.sampled])
        wake = self._loop.call_soon_threadsafe
        if not here:
            wake(self._sampled, work, result)
        elif self._home is not None:  # the next step is there already
            self._tools.compute.later(lambda: wake(self._after_compute, work, output, result))
        else:
            wake(self._after_compute, work, output, result)

    def _sampled(self, work: StageStep, result: StepResult) -> None:
        if self.over:
            return
        try:
            self._retire(work.step, result, work)
        except Exception as exc:
            self.fault(_as_fault(exc, f"step {work.step} could not be retired"))

    def _retire(self, step: StepId, result: StepResult, work: StageStep | None = None) -> None:
        timings = (work.timing(sample_us=result.sample_us, draft_us=result.draft_us),) if work is not None else ()
        for done in self._retirement.settle(step, result, timings):
            self._tools.counters.sent += 1
            if self._way_home is not None:
                self._way_home.send(done.step, [ids[-1] if ids else 0 for ids in done.ids])
                self._loop.call_soon(self._report_done, done)  # the first stage waits, so its tokens start first
            else:
                self._report_done(done)

    def _report_done(self, done: StepDone) -> None:
        if self.over:
            return
        self._reports.done(done)
        for wish, tokens in zip(self._flying.pop(done.step, ()), done.ids, strict=False):
            if wish is not None and tokens:
                self._drafts_ahead.took(wish, done.step, tokens)

    def _drafted(self, drafted: Drafted) -> None:
        """Report drafts for windows in flight; called on the thread that made them."""
        self._loop.call_soon_threadsafe(self._report_drafted, drafted)

    def _report_drafted(self, drafted: Drafted) -> None:
        if not self.over:
            self._reports.drafted(drafted)


def _not_measured(sample: LinkSample) -> None:
    """Ignore the times of tokens on the way home: the engine measures the ring's latency."""


def _as_fault(error: Exception, summary: str) -> EdgepipeError:
    """Return an EdgepipeError as it is; log any other exception and wrap it in StepFailed."""
    if isinstance(error, EdgepipeError):
        return error
    logger.error("%s", summary, exc_info=error)
    return StepFailed(summary, fact=plain(error))
