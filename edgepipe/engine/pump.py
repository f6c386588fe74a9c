"""Keeps M steps in flight: sends the scheduler's steps to the stages and their answers back to the scheduler.

The pump has no timers except the step watch. A StepDone retires its step and sends the next one first. Requests from
gateways wake ``run`` once, however many arrive at the same moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgepipe.clock import Clock
from edgepipe.engine.control import StageControl, StepWriter
from edgepipe.engine.meter import StageMeter, WindowSum
from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.engine.recorder import StepRecorder
from edgepipe.engine.settings import EngineTimeouts
from edgepipe.engine.sites import StageSite
from edgepipe.engine.watch import StepWatch
from edgepipe.errors import EdgepipeError, RemoteProtocolError, StepFailed
from edgepipe.ids import Epoch, SequenceId, StepId
from edgepipe.sampling import PromptLogprobs, TokenLogprobs
from edgepipe.scheduler import Event, KeptPools, ScheduledStep, Scheduler, SchedulerStats, SequenceSpec, TokenSampled
from edgepipe.scheduler.pacing import Chunk
from edgepipe.wire.engines import EngineTrace
from edgepipe.wire.plans import Registration, StageTimings, StepDone

logger = logging.getLogger(__name__)

_PLAUSIBLE_S = 60.0  # time of a step that a stage may report at any time
_CLOCK_RATE = 1.1  # fastest clock of a stage, as a multiple of the engine's

Registrar = Callable[[SequenceId, Sequence[int]], Registration]
"""Maps a sequence and its tokens so far to its registration for the stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNews:
    """Results of a retired step."""

    events: list[Event]
    logprobs: Mapping[SequenceId, TokenLogprobs]  # logprobs of the sampled tokens, where requested
    prompts: Sequence[tuple[SequenceId, PromptLogprobs]]
    failures: Mapping[SequenceId, EdgepipeError]  # sequences for which sampling failed
    reads: Sequence[tuple[SequenceId, int]] = ()  # tokens computed so far, of prompts that continue in another step


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
        self._ahead: dict[StepId, tuple[StageSite, StepDone]] = {}  # finished before an older step
        self._watch = StepWatch(timeouts=timeouts, turn_s=self._turn_s, on_late=self._on_late)
        scheduler.set_pacer(micro_batches.pacer)
        self._wake = asyncio.Event()
        self._error: EdgepipeError | None = None
        self._on_over: Callable[[], None] = _nobody
        self.num_retired = 0  # steps
        self._stages: Sequence[StageControl] = ()
        self._writer = StepWriter((), epoch)
        self._ends_at: Mapping[int, int] = {}  # stage index by slice
        self._registration: Registrar = _unknown
        self._on_news: Callable[[StepNews], None] = _ignored
        self.stale_reports = 0  # reports of other epochs, dropped
        self._recorder = StepRecorder(clock)
        self.meters: list[StageMeter] = []
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

    def on_report(self, site: StageSite, report: StepDone | StageTimings) -> None:
        """Handle a stage's report. Raises RemoteProtocolError if it does not match the steps that were sent."""
        if isinstance(report, StageTimings):
            self._check_timings(site, report)
            self._measure(site, report)
        elif report.epoch != self._epoch:
            self.stale_reports += 1
            logger.debug("dropped a report: stage=%s epoch=%s", site.index, report.epoch)
        elif self._error is None:
            self._check_timings(site, report)
            self._came_back(site, report)
            now_s = self._clock.monotonic_s()
            asyncio.get_running_loop().call_soon(self._look_back, site, report, now_s)  # plans are written first

    def in_flight(self) -> dict[StepId, tuple[SequenceId, ...]]:
        """Return the sequences of each step in flight."""
        return {step.step: step.sequences for step in self._in_flight}

    def sequences_of(self, step: StepId) -> tuple[SequenceId, ...]:
        """Return the sequences of a step in flight; empty if it is not in flight."""
        return next((sent.sequences for sent in self._in_flight if sent.step == step), ())

    def take_over(self, pools: KeptPools) -> None:
        """See ``Scheduler.take_over``."""
        self._scheduler.take_over(pools)

    def hand_over(self) -> KeptPools:
        """See ``Scheduler.hand_over``."""
        return self._scheduler.hand_over()

    def stats(self) -> SchedulerStats:
        """Return the scheduler's current counts."""
        return self._scheduler.stats()

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

    def _came_back(self, site: StageSite, done: StepDone) -> None:
        """Retire steps in the order of sending. Replay steps end on an earlier stage, so they may finish early."""
        if self._overtakes(site, done):
            self._ahead[done.step] = (site, done)
            return
        self._retire(site, done)
        while self._in_flight and (ahead := self._ahead.pop(self._in_flight[0].step, None)) is not None:
            self._retire(*ahead)

    def _overtakes(self, site: StageSite, done: StepDone) -> bool:
        """Return whether this step in flight ends on ``site`` while the oldest step ends on another stage."""
        if not self._in_flight or self._in_flight[0].step == done.step:
            return False
        ends = {step.step: self._ends_at.get(self._last_slice(step)) for step in self._in_flight}
        return ends.get(done.step) == site.index and next(iter(ends.values())) != site.index

    def _last_slice(self, step: ScheduledStep) -> int:
        return self._num_slices - 1 if step.last_slice is None else step.last_slice

    def _retire(self, site: StageSite, done: StepDone) -> None:
        self._check(site, done)
        step = self._in_flight.popleft()
        self.num_retired += 1
        self._watch.retired()
        sampled = [each for each, samples in zip(step.sequences, step.samples, strict=True) if samples]
        failed = {sampled[index]: error for index, error in done.failures}
        for sequence in failed:
            self._scheduler.cancel(sequence, at_position=0)  # drops the placeholder token
        events = self._scheduler.retire(done.step, done.ids)
        self._fill()  # send the next step to the stages before sending tokens to the gateways
        self._idle = not self._in_flight
        news = StepNews(
            events=events,
            logprobs={sampled[index]: logprobs for index, logprobs in done.logprobs},
            prompts=done.prompt_logprobs,
            failures=failed,
            reads=_reads(step),
        )
        self._on_news(news)
        self.tokens.add(sum(1 for event in events if isinstance(event, TokenSampled)))

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

    def _check(self, site: StageSite, done: StepDone) -> None:
        wanted = self._in_flight[0] if self._in_flight else None
        fact = ""
        if wanted is None or wanted.step != done.step:
            fact = f"it finished step {done.step}, " + (
                f"step {wanted.step} is next" if wanted else "none is in flight"
            )
        elif len(done.ids) != wanted.num_samples:
            fact = f"step {done.step} samples {wanted.num_samples} tokens, {len(done.ids)} came"
        elif max(done.ids, default=0) >= self._vocab_size:
            fact = f"step {done.step} gave token {max(done.ids)}, the vocabulary ends at {self._vocab_size - 1}"
        elif any(index >= len(done.ids) for index, _ in (*done.logprobs, *done.failures)):
            fact = f"step {done.step} reports more tokens than it samples"
        if fact:
            raise _unexpected(site, fact)

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
        while self._error is None and (step := self._scheduler.next_step()) is not None:
            if self._idle:
                self._idle, self._working_since_s = False, self._clock.monotonic_s()
            if not self._newest:
                self._began_s = self._clock.monotonic_s()
            self._send(step)
            self._newest = step.step
            self._recorder.planned(step, self._scheduler.stats())
            self._in_flight.append(step)
            self.micro_batches.sent(step, self._clock.monotonic_s())
        if self._in_flight:
            oldest = self._in_flight[0]
            self._watch.oldest_is(oldest.step, len(oldest.token_ids))

    def _send(self, step: ScheduledStep) -> None:
        registrations = [self._registration(each, self._scheduler.tokens(each)) for each in step.registers]
        self._writer.send(step, registrations, last_slice=self._last_slice(step))

    def _turn_s(self) -> float:
        """Return an upper bound on the oldest step's turn, from measurements."""
        return self.micro_batches.turn_s([step.step for step in self._in_flight])

    def _on_late(self, step: StepId, waited_s: float) -> None:
        """Fail the epoch and blame the first stage that has not reported the step."""
        silent = [stage for stage, meter in zip(self._stages, self.meters, strict=True) if meter.last_step < step]
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
