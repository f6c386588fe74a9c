"""Keeps M steps in flight: sends the scheduler's steps to the stages and their answers back to the scheduler.

The pump has no timers except the step watch. A StepDone retires its step and sends the next one first. Steps retire in
the order of sending, except decodes that passed a prompt's chunk on their way. Requests from gateways wake ``run``
once, however many arrive at the same moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import gt, itemgetter

from edgepipe.backend.drafting import MOST_DRAFTS, Drafts
from edgepipe.clock import Clock
from edgepipe.engine.control import PlannedStep, Report, StageControl, StepWriter
from edgepipe.engine.disk_answers import DiskAnswers
from edgepipe.engine.host_rooms import HostRooms
from edgepipe.engine.meter import StageMeter, WindowSum
from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.engine.recorder import StepRecorder
from edgepipe.engine.settings import EngineTimeouts
from edgepipe.engine.sites import StageSite
from edgepipe.engine.watch import StepWatch
from edgepipe.errors import EdgepipeError, RemoteProtocolError, StepFailed
from edgepipe.ids import Epoch, SequenceId, StepId
from edgepipe.sampling import PromptLogprobs, TokenLogprobs
from edgepipe.scheduler import (
    Event,
    GivenBack,
    KeptPools,
    ScheduledStep,
    Scheduler,
    SchedulerStats,
    SequenceEnded,
    SequenceSpec,
    Takeover,
    TokenSampled,
)
from edgepipe.scheduler.drafting import DraftStats
from edgepipe.scheduler.pacing import Chunk
from edgepipe.wire.engines import EngineTrace
from edgepipe.wire.registrations import Registration
from edgepipe.wire.reports import Drafted, HomeOpened, StageTimings, StepDone
from edgepipe.wire.tiers import DiskCopied, HostRoom

logger = logging.getLogger(__name__)

_PLAUSIBLE_S = 60.0  # time of a step that a stage may report at any time
_CLOCK_RATE = 1.1  # fastest clock of a stage, as a multiple of the engine's

_MAX_HOMES = 1024  # steps: the stage that embeds reports every 100 ms

Registrar = Callable[[SequenceId, Sequence[int]], Registration]
"""Maps a sequence and its tokens so far to its registration for the stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNews:
    """Results of a retired step."""

    events: list[Event]
    # Log-probabilities of each sequence's sampled tokens, in their order, where requested.
    logprobs: Mapping[SequenceId, Sequence[TokenLogprobs]]
    prompts: Sequence[tuple[SequenceId, PromptLogprobs]]
    failures: Mapping[SequenceId, EdgepipeError]  # sequences for which sampling failed, behind the tokens in ``events``
    reads: Sequence[tuple[SequenceId, int]] = ()  # tokens computed so far, of prompts that continue in another step
    # Prompt tokens that failed sequences had found in the prefix cache.
    cached: Mapping[SequenceId, int] = field(default_factory=dict[SequenceId, int])


class Pump:
    """One epoch's scheduler and its stages."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        micro_batches: MicroBatches,
        epoch: Epoch,
        num_slices: int,
        vocab_size: int,
        clock: Clock,
        timeouts: EngineTimeouts,
    ) -> None:
        self._scheduler = scheduler
        self.micro_batches = micro_batches
        self._epoch = epoch
        self._num_slices = num_slices
        self._vocab_size = vocab_size
        self._clock = clock
        self._in_flight: deque[ScheduledStep] = deque()
        # Answers that came before that of an older step, which they may not pass.
        self._ahead: dict[StepId, tuple[StageSite, StepDone]] = {}
        self._watch = StepWatch(timeouts=timeouts, turn_s=self._turn_s, on_late=self._on_late)
        scheduler.set_pacer(micro_batches.pacer)
        self._wake = asyncio.Event()
        self._error: EdgepipeError | None = None
        self._on_over: Callable[[], None] = _nobody
        self.num_retired = 0  # steps
        self._stages: Sequence[StageControl] = ()
        self._writer = StepWriter((), epoch)
        self._disk = DiskAnswers(0)
        self._host_rooms = HostRooms(0)
        self.host_problem = ""  # why less host memory is used than there is; empty: nothing else needs it
        self._disk_again: tuple[float, int] | None = None  # see ``disk_again_unix_s``
        self._disk_timer: asyncio.TimerHandle | None = None
        self._ends_at: Mapping[int, int] = {}  # stage index by slice
        self._registration: Registrar = _unknown
        self._on_news: Callable[[StepNews], None] = _ignored
        self._recorder = StepRecorder(clock)
        self.meters: list[StageMeter] = []
        self._homes: dict[StepId, list[int]] = {}  # tokens of steps that one of two stages has told
        self._newest = StepId(0)  # the step that was sent last
        self._began_s = 0.0  # clock's time when the first step was sent
        self._idle = True  # no step is in flight
        self._working_since_s = 0.0  # clock's time when the ring last became busy
        self.tokens = WindowSum(clock)

    def connect(
        self,
        stages: Sequence[StageControl],
        *,
        registration: Registrar,
        on_news: Callable[[StepNews], None],
        on_over: Callable[[], None],
    ) -> None:
        """Connect the pump to opened stages.

        stages        in the order that a token passes them
        registration  returns a sequence's registration for the stages
        on_news       receives each retired step's results
        on_over       called at once when the epoch accepts no more sequences
        """
        self._on_over = on_over
        self._stages = stages
        self._writer = StepWriter(stages, self._epoch)
        self._disk, self._host_rooms = DiskAnswers(len(stages)), HostRooms(len(stages))
        self._registration = registration
        self._on_news = on_news
        self._ends_at = {part.index: stage.site.index for stage in stages for part in stage.site.slices}
        self.meters = [StageMeter(self._clock) for _ in stages]

    async def run(self) -> None:
        """Send steps as they become ready, until cancelled. Raises the error that ends the epoch."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._error is not None:
                    raise self._error
                self._fill()
        finally:
            self._watch.close()
            if self._disk_timer is not None:
                self._disk_timer.cancel()

    def submit(self, specs: Sequence[SequenceSpec], *, accepted: bool = False) -> list[Event]:
        """Queue sequences. Raises PromptTooLong, and QueueFull unless a previous epoch ``accepted`` them."""
        events = self._scheduler.submit(specs, accepted=accepted)
        self._wake.set()
        return events

    def cancel(self, sequence: SequenceId, *, at_position: int) -> list[Event]:
        """End a sequence at output position ``at_position``, at once if it is reached."""
        events = self._scheduler.cancel(sequence, at_position=at_position)
        self._wake.set()
        return events

    def fail(self, error: EdgepipeError) -> None:
        """End the epoch: send no more steps. Sequences continue in the next epoch."""
        self._error = self._error or error
        self._on_over()
        self._wake.set()

    def on_report(self, site: StageSite, report: Report) -> None:
        """Handle a stage's report. Raises RemoteProtocolError if it does not match the steps that were sent."""
        if isinstance(report, StageTimings):
            self._check_timings(site, report)
            self._measure(site, report)
            for tokens in report.home:
                if self._ends_at.get(0) != site.index or not 1 <= tokens.step <= self._newest:
                    raise _unexpected(site, f"tokens of step {tokens.step} came to it, it says")
                self._compare(tokens.step, list(tokens.ids))
        elif isinstance(report, HomeOpened):
            if report.epoch == self._epoch and self._ends_at.get(self._num_slices - 1) == site.index:
                self.plan_ahead()
        elif report.epoch != self._epoch:
            logger.debug("dropped a report: stage=%s epoch=%s", site.index, report.epoch)
        elif isinstance(report, DiskCopied):
            self._copied(site, report)
        elif isinstance(report, HostRoom):
            self._bound_host(site, report)
        elif isinstance(report, Drafted):
            self._drafted(site, report)
        elif self._error is None:
            self._check_timings(site, report)
            now_s = self._clock.monotonic_s()
            self._came_back(site, report, now_s)
            asyncio.get_running_loop().call_soon(self._look_back, site, report, now_s)  # plans are written first

    def _copied(self, site: StageSite, report: DiskCopied) -> None:
        """Note what became of copies between host memory and disk. Raises RemoteProtocolError."""
        try:
            answer = self._disk.note(site.index, site.node_name, report)
        except ValueError as exc:
            raise _unexpected(site, str(exc)) from exc
        if answer is None:
            return
        before, now_s = self._scheduler.stats(), self._clock.monotonic_s()
        self._scheduler.disk_done(
            report.number, failed=answer.failed, seconds=answer.seconds, problem=answer.problem, now_s=now_s
        )
        after = self._scheduler.stats()
        if after.disk_problem and not before.disk_problem:
            logger.warning("idle conversations do not go to disk for now: %s", after.disk_problem)
        elif before.disk_problem and not after.disk_problem:
            logger.info("idle conversations go to disk again")
        self._wake.set()

    def _drafted(self, site: StageSite, report: Drafted) -> None:
        """Plan windows in flight with drafts. Raises RemoteProtocolError."""
        count, highest = len(report.ids), max(report.ids, default=0)
        fact = ""
        if self._ends_at.get(self._num_slices - 1) != site.index:
            fact = "it drafts, and another stage samples"
        elif not 1 <= count <= MOST_DRAFTS or len(report.sources) != count:
            fact = f"it drafts {count} tokens with {len(report.sources)} sources, at most {MOST_DRAFTS} come at once"
        elif highest >= self._vocab_size:
            fact = f"it drafts token {highest}, the vocabulary ends at {self._vocab_size - 1}"
        elif not 1 <= report.step <= self._newest:
            fact = f"it drafts behind step {report.step}, step {self._newest} is the newest"
        if fact:
            raise _unexpected(site, fact)
        self.micro_batches.note_drafts(report.took_us * 1e-6 / count)
        drafts = Drafts(report.ids, report.sources)
        self._scheduler.add_drafts(report.sequence, drafts, position=report.position, step=report.step)
        self._fill()

    def _bound_host(self, site: StageSite, room: HostRoom) -> None:
        """Use as much host memory as the stages have now."""
        permille = self._host_rooms.note(site.index, site.node_name, room)
        if permille is None:
            return
        self._scheduler.bound_host(permille)
        before, self.host_problem = self.host_problem, self._host_rooms.problem
        if self.host_problem and not before:
            logger.warning("idle conversations keep less RAM for now: %s", self.host_problem)
        elif before and not self.host_problem:
            logger.info("idle conversations keep all their RAM again")
        self._wake.set()

    def disk_again_unix_s(self, again_s: float | None) -> int:
        """Convert the time when a disk is tried again to the wall clock's; 0: none rests."""
        if again_s is None:
            return 0
        if self._disk_again is None or self._disk_again[0] != again_s:  # one answer, although clocks drift
            wall_s = self._clock.wall_s() + again_s - self._clock.monotonic_s()
            self._disk_again = again_s, max(1, round(wall_s))
        return self._disk_again[1]

    def in_flight(self) -> dict[StepId, tuple[SequenceId, ...]]:
        """Return the sequences of each step in flight."""
        return {step.step: step.sequences for step in self._in_flight}

    def sequences_of(self, step: StepId) -> tuple[SequenceId, ...]:
        """Return the sequences of a step in flight; empty if it is not in flight."""
        return next((sent.sequences for sent in self._in_flight if sent.step == step), ())

    def take_over(self, pools: KeptPools) -> None:
        """See ``Scheduler.take_over``."""
        self._scheduler.take_over(pools)

    def adopt(self, found: Takeover) -> None:
        """See ``Scheduler.adopt``."""
        self._scheduler.adopt(found)

    def plan_ahead(self) -> None:
        """See ``Scheduler.plan_ahead``."""
        self._scheduler.plan_ahead()

    def hand_over(self) -> KeptPools:
        """See ``Scheduler.hand_over``."""
        return self._scheduler.hand_over()

    def stats(self) -> SchedulerStats:
        """Return the scheduler's current counts."""
        return self._scheduler.stats()

    def draft_stats(self) -> DraftStats:
        """Return the current counts of drafts."""
        return self._scheduler.draft_stats()

    @property
    def chunk(self) -> Chunk | None:
        """See ``Scheduler.chunk``."""
        return self._scheduler.chunk

    def trace(self, *, after_step: int) -> EngineTrace:
        """Return a trace of the recent steps after ``after_step``."""
        return EngineTrace(
            steps=tuple(self._recorder.steps(after=after_step)),
            now_us=self._recorder.now_us(),
            preemptions=self._scheduler.stats().preemptions,
        )

    def _came_back(self, site: StageSite, done: StepDone, now_s: float) -> None:
        """Retire a step, or keep its answer until the older steps that it may not pass have come back.

        Replay steps end on an earlier stage, so their answers may come early. Raises RemoteProtocolError if a stage has
        not answered an older step first.
        """
        step = self._answered(site, done)
        if older := self._owed_before(step):
            if any(self._ends_at.get(self._last_slice(each)) == site.index for each in older):
                raise _unexpected(site, f"it finished step {done.step}, step {older[0].step} is next")
            self._ahead[done.step] = (site, done)
            return
        self._retire(site, step, done, now_s)
        while (ready := self._next_ahead()) is not None:
            ahead_site, ahead_done = self._ahead.pop(ready.step)
            self._retire(ahead_site, ready, ahead_done, now_s)

    def _owed_before(self, step: ScheduledStep) -> list[ScheduledStep]:
        """Return the older steps in flight without an answer that this step may not pass."""
        older = takewhile(lambda each: each.step != step.step, self._in_flight)
        return [each for each in older if each.step not in self._ahead and not step.may_retire_before(each)]

    def _next_ahead(self) -> ScheduledStep | None:
        """Return the oldest answered step that retires now."""
        if not self._ahead:
            return None
        oldest = next(each for each in self._in_flight if each.step in self._ahead)
        return oldest if not self._owed_before(oldest) else None

    def _last_slice(self, step: ScheduledStep) -> int:
        return self._num_slices - 1 if step.last_slice is None else step.last_slice

    def _retire(self, site: StageSite, step: ScheduledStep, done: StepDone, now_s: float) -> None:
        self._check(site, step, done)
        if step is self._in_flight[0]:
            self._watch.retired()
        self._in_flight.remove(step)
        self.num_retired += 1
        sampled: Sequence[SequenceId] = ()
        if done.failures or done.logprobs:
            sampled = [each for each, samples in zip(step.sequences, step.samples, strict=True) if samples]
        failed = {sampled[row]: error for row, error in done.failures}
        if step.home and len(self._stages) > 1:
            self._compare(step.step, [ids[-1] if ids else 0 for ids in done.ids])
        events = self._scheduler.retire(done.step, done.ids, done.drafts, now_s=now_s)
        left = [end for each in failed for end in self._scheduler.cancel(each, at_position=0)]
        self._fill()  # send the next step to the stages before sending tokens to the gateways
        self._idle = not self._in_flight
        news = StepNews(
            events=events,
            logprobs=_logprobs(sampled, done) if done.logprobs else {},
            prompts=done.prompt_logprobs,
            failures=failed,
            reads=_reads(step),
            cached={end.sequence: end.cached_prompt_tokens for end in left if isinstance(end, SequenceEnded)},
        )
        self._on_news(news)
        self.tokens.add(sum([isinstance(event, TokenSampled) for event in events]))

    def _compare(self, step: StepId, ids: list[int]) -> None:
        """Compare a step's tokens from the two stages that tell them: that which sampled them, and that which embeds.

        Raises RemoteProtocolError, which names the first of the two, if it told them different tokens.
        """
        others = self._homes.pop(step, None)
        if others is None:
            self._homes[step] = ids
            if len(self._homes) > _MAX_HOMES:
                del self._homes[next(iter(self._homes))]
        elif others != ids:
            sender = next(each.site for each in self._stages if each.site.index == self._ends_at[self._num_slices - 1])
            raise _unexpected(sender, f"it sent the first stage other tokens of step {step} than the engine")

    def _look_back(self, site: StageSite, done: StepDone, now_s: float) -> None:
        """Update the measurements with a step that retired at ``now_s``, and the limits that follow from them."""
        self._measure(site, done)
        self.micro_batches.retired(done.step, now_s, sequences=self._scheduler.num_running)

    def _measure(self, site: StageSite, report: StepDone | StageTimings) -> None:
        meter = self.meters[site.index]
        working_s = self._clock.monotonic_s() - self._working_since_s
        for timing in report.timings:
            meter.note_timing(timing, working_s=working_s)
            self._recorder.timed(site.index, timing)
            self.micro_batches.note_timing(site.index, timing)
        if isinstance(report, StageTimings):
            for sample in report.links:
                one_way_s = self.micro_batches.note_link(site.index, sample)
                meter.note_hop(num_bytes=sample.num_bytes, one_way_s=one_way_s)

    def _answered(self, site: StageSite, done: StepDone) -> ScheduledStep:
        """Return the step in flight that a stage reports. Raises RemoteProtocolError if it owes no such answer."""
        step = next((each for each in self._in_flight if each.step == done.step), None)
        if step is None or step.step in self._ahead:
            raise _unexpected(site, f"it finished step {done.step}, which is not in flight")
        if self._ends_at.get(self._last_slice(step)) != site.index:
            raise _unexpected(site, f"it finished step {done.step}, which ends on another stage")
        return step

    def _check(self, site: StageSite, step: ScheduledStep, done: StepDone) -> None:
        fact, most = "", step.samples if all(step.samples) else [samples for samples in step.samples if samples]
        counts = [*map(len, done.ids)]
        highest = max([max(row) for row in done.ids if row], default=0)
        failed = {row for row, _ in done.failures}
        if len(counts) != len(most) or any(map(gt, counts, most)):
            fact = f"step {done.step} samples {[*most]} tokens, {counts} came"
        elif highest >= self._vocab_size:
            fact = f"step {done.step} gave token {highest}, the vocabulary ends at {self._vocab_size - 1}"
        elif any(index >= sum(counts) for index, _ in done.logprobs) or any(row >= len(counts) for row in failed):
            fact = f"step {done.step} reports more tokens than it samples"
        elif not (all(counts) or step.assumed) and {row for row, count in enumerate(counts) if not count} - failed:
            fact = f"step {done.step} gave a sequence neither a token nor a reason why not"
        elif done.drafts:
            fact = self._fault_of_drafts(step, done)
        if fact:
            raise _unexpected(site, fact)

    def _fault_of_drafts(self, step: ScheduledStep, done: StepDone) -> str:
        most = [count for count, samples in zip(step.drafts, step.samples, strict=bool(step.drafts)) if samples]
        counts = [len(row.ids) for row in done.drafts]
        highest = max([max(row.ids) for row in done.drafts if row.ids], default=0)
        if len(counts) != len(most) or any(map(gt, counts, most)):
            return f"step {done.step} asks for {most} drafts, {counts} came"
        if highest >= self._vocab_size:
            return f"step {done.step} drafts token {highest}, the vocabulary ends at {self._vocab_size - 1}"
        return ""

    def _check_timings(self, site: StageSite, report: StepDone | StageTimings) -> None:
        """Check that a stage times its own slices, steps that were sent, and no longer than since the first step.

        The prediction of a step's turn, and so the deadline of a late step, follows these times.
        """
        slices = {part.index for part in site.slices}
        age_s = self._clock.monotonic_s() - self._began_s
        longest_us = 1e6 * max(_PLAUSIBLE_S, _CLOCK_RATE * age_s)
        for timing in report.timings:
            fact = ""
            if timing.slice_index not in slices:
                fact = f"it timed slice {timing.slice_index}, which another stage has"
            elif not 1 <= timing.step <= self._newest:
                fact = f"it timed step {timing.step}, step {self._newest} is the newest"
            elif max(timing.compute_us, timing.upload_us) > longest_us:
                took_s = max(timing.compute_us, timing.upload_us) * 1e-6
                fact = f"step {timing.step} took {took_s:.0f} s, and the first step began {age_s:.0f} s ago"
            if fact:
                raise _unexpected(site, fact)

    def _fill(self) -> None:
        self._scheduler.set_micro_batches(self.micro_batches.sizing.micro_batches)
        self._scheduler.set_turns_ahead(self.micro_batches.turns_ahead)
        steps: list[PlannedStep] = []
        while self._error is None and (step := self._scheduler.next_step()) is not None:
            if self._idle:
                self._idle, self._working_since_s = False, self._clock.monotonic_s()
            if not self._newest:
                self._began_s = self._clock.monotonic_s()
            steps.append(self._planned(step))
            self._newest = step.step
            scheduler = self._scheduler
            self._recorder.planned(step, micro_batches=scheduler.micro_batches, used_blocks=scheduler.used_blocks)
            self._in_flight.append(step)
            self.micro_batches.sent(step, self._clock.monotonic_s())
        if steps:
            self._writer.send(steps)
        elif self._error is None and (keys := self._scheduler.take_keys()):
            self._writer.name(keys)
        given: list[GivenBack] = []
        while self._error is None and (back := self._scheduler.next_given_back()) is not None:
            given.append(back)
        if given:
            self._writer.give_back(given)
        self._use_disk()
        if self._in_flight:
            oldest = self._in_flight[0]
            self._watch.oldest_is(oldest.step, len(oldest.token_ids))

    def _use_disk(self) -> None:
        """Send the next works for the disks, and wake when a disk that rests is tried again."""
        now_s = self._clock.monotonic_s()
        while self._error is None and (work := self._scheduler.next_disk_work(now_s=now_s)) is not None:
            self._disk.sent(work)
            self._writer.copy(work)
        again_s = self._scheduler.disk_again_s
        if again_s is not None and again_s > now_s and self._disk_timer is None and self._error is None:
            self._disk_timer = asyncio.get_running_loop().call_later(again_s - now_s, self._try_disk)

    def _try_disk(self) -> None:
        self._disk_timer = None
        self._wake.set()

    def _planned(self, step: ScheduledStep) -> PlannedStep:
        registrations = [self._registration(each, self._scheduler.tokens(each)) for each in step.registers]
        return PlannedStep(step, registrations, self._last_slice(step))

    def _turn_s(self) -> float:
        """Return an upper bound on the oldest step's turn, from measurements."""
        return self.micro_batches.turn_s([step.step for step in self._in_flight])

    def _on_late(self, step: StepId, waited_s: float) -> None:
        """Fail the epoch and blame the first stage that has not reported the step."""
        bulk = any(each.is_bulk for each in self._in_flight if each.step == step)
        meters = zip(self._stages, self.meters, strict=True)
        silent = [stage for stage, meter in meters if meter.newest_step(bulk=bulk) < step]
        site = (silent[0] if silent else self._stages[-1]).site
        error = StepFailed(
            f"step {step} did not come back from {site.label} on {site.node_name}",
            fact=f"waited {waited_s:.1f} s",
            next_step="see 'edgepipe status' and 'edgepipe logs' there",
            node=site.node_name,
            stage=site.label,
        )
        self.fail(error)


def _unexpected(site: StageSite, fact: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"{site.label} sent an unexpected answer", fact=fact, node=site.node_name, stage=site.label
    )


def _logprobs(sampled: Sequence[SequenceId], done: StepDone) -> dict[SequenceId, list[TokenLogprobs]]:
    """Return the log-probabilities of each sampling row's sequence."""
    owners = [sequence for sequence, ids in zip(sampled, done.ids, strict=True) for _ in ids]
    found: dict[SequenceId, list[TokenLogprobs]] = {}
    for index, logprobs in sorted(done.logprobs, key=itemgetter(0)):
        found.setdefault(owners[index], []).append(logprobs)
    return found


def _reads(step: ScheduledStep) -> list[tuple[SequenceId, int]]:
    """Return the rows that do not sample, with their sequences' computed tokens after the step."""
    if all(step.samples):
        return []
    rows = zip(step.sequences, step.positions, step.num_tokens, step.samples, strict=True)
    return [(sequence, position + count) for sequence, position, count, samples in rows if not samples]


def _unknown(sequence: SequenceId, tokens: Sequence[int]) -> Registration:
    raise RuntimeError(f"sequence {sequence} was scheduled before the pump was connected")


def _nobody() -> None:
    """Default until ``connect``."""


def _ignored(news: StepNews) -> None:
    """Default until ``connect``."""
