"""Number of micro-batches in flight: builds curves from the reports of stages and links, and M from the curves."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median_low

import numpy as np

from edgepipe.backend.cost import SliceCost, StepWork
from edgepipe.backend.expert_reads import ExpertMeter
from edgepipe.engine.turns import TurnLedger
from edgepipe.ids import StepId
from edgepipe.scheduler import ScheduledStep
from edgepipe.scheduler.pacing import Pacer, RingTimes, most_prompt_steps
from edgepipe.scheduler.sizing import (
    Floats,
    LinkCurve,
    RingMeasurements,
    Sizer,
    Sizing,
    StageCurve,
    most_micro_batches,
)
from edgepipe.scheduler.step_time import SliceTimes
from edgepipe.wire.reports import LinkSample, StepTiming

_MAX_STEPS = 1024  # steps whose sizes are kept until all stages have reported
_MORE_ROWS = 32  # rows of windows in a step, beyond one for each sequence, whose times are predicted
_CONTEXT = 1024  # tokens of the sequences in these predictions: windows read the KV once
_DRAFT_TIMES = 9  # newest times of a draft whose median counts: the first one may wait for kernels to compile
_AHEAD_S, _MOST_AHEAD = 0.06, 8  # time of the steps planned ahead, and their number: a new chat waits for them
_ASSUMED_BYTES_PER_S = 10e6  # assumed rate of a link that has carried nothing yet


class MicroBatches:
    """Measures the ring, chooses M and predicts turns. Driven by steps and reports, without a timer."""

    def __init__(
        self,
        *,
        slices: Sequence[Sequence[int]],
        row_bytes: int,
        fixed: int,
        costs: Mapping[int, SliceCost] | None = None,
        most_prefill_tokens: int = 2048,
        itl_goal_s: float | None = None,
        slack_tokens: int | None = None,
    ) -> None:
        """
        slices               indices of each stage's slices; stages in the order that a token passes them
        row_bytes            bytes of one token's activations on a link
        fixed                M if the user fixed it, else 0
        costs                by slice index: step cost by the device's data sheet, where known
        most_prefill_tokens  prompt tokens of a step
        itl_goal_s           seconds that prompts may add to a decode's turn; None: no bound
        slack_tokens         tokens of one prompt in all steps in flight; None: no bound
        """
        self._num_stages = len(slices)
        self._fixed = fixed
        self._row_bytes = row_bytes
        self._curves = [{index: StageCurve() for index in of_stage} for of_stage in slices]
        known = costs or {}
        self._times = {index: SliceTimes(known.get(index)) for of_stage in slices for index in of_stage}
        self._interleaved = any(len(of_stage) > 1 for of_stage in slices)
        holders = [stage for _, stage in sorted((index, stage) for stage, held in enumerate(slices) for index in held)]
        # Stages whose outgoing links a step uses.
        self._hops = [stage for stage, following in pairwise(holders) if stage != following]
        self._works: dict[StepId, StepWork] = {}  # newest steps, in the order of sending
        self._links = [LinkCurve() for _ in slices]  # outgoing; the last stage's gets no reports
        self._turns = TurnLedger(num_slices=sum(map(len, slices)), upload_s=self._uploads_s)
        self._sizer = Sizer(num_stages=self._num_stages, fixed=fixed)
        self.experts = ExpertMeter()  # share of the experts that steps read, over all stages
        self._known_uploads_s: dict[tuple[int, int], float] = {}  # keys: stage and bytes; cleared by each decision on M
        self._periods_s: list[float] = []  # see ``period_s``, by rows
        self._slowest_s: list[float] = []  # see ``slowest_s``, by rows
        self._sheets: dict[int, tuple[tuple[float, ...], Floats]] = {}  # a slice's shares of experts, seconds by rows
        self._predicts_windows = False  # a step has asked for drafts
        self._drafts_asked: dict[StepId, int] = {}  # how many each of the newest steps asks for
        self._drafts_s: deque[float] = deque(maxlen=_DRAFT_TIMES)
        self.pacer = Pacer(
            RingTimes(
                stages=[[self._times[index].expected_s for index in of_stage] for of_stage in slices],
                uploads=[partial(self._expected_upload_s, hop) for hop in self._hops],
                latency_s=lambda: self.latency_s,
            ),
            most_tokens=most_prefill_tokens,
            goal_s=itl_goal_s,
            most_in_flight_tokens=slack_tokens,
        )

    @property
    def sizing(self) -> Sizing:
        """The M in use and its reason."""
        return self._sizer.sizing

    @property
    def most(self) -> int:
        """Upper bound of the steps in flight: M with decodes, and P with prompt tokens; without those planned ahead."""
        return (self._fixed or most_micro_batches(self._num_stages)) + most_prompt_steps(self._num_stages)

    @property
    def latency_s(self) -> float:
        """Latency of the whole ring: one-way delays, sampling, the token's return."""
        return self._turns.latency_s

    @property
    def turns_ahead(self) -> int:
        """Number of steps to plan behind the one that is computed, at most: 1 before any measurement."""
        token_s = self._turns.token_s
        return max(1, min(_MOST_AHEAD, int(_AHEAD_S / token_s))) if token_s else 1

    def turn_s(self, steps: Sequence[StepId]) -> float:
        """Return an upper bound on the turn of the first of the ``steps`` in flight: all devices, links and latency.

        A device with several slices may compute the other steps in between. 0 before any measurement.
        """
        return sum(self._way_s(step) for step in (steps if self._interleaved else steps[:1])) + self.latency_s

    def longest_turn_s(self, *, context_length: int) -> float:
        """Return an upper bound on the devices' time for the last chunk of the longest prompt; 0 if unknown.

        The chunk is as large as the pacer allows.
        """
        tokens = self.pacer.most_tokens(context_length, waiting=context_length)
        work = StepWork.of_rows((context_length,), (tokens,), logit_rows=1)
        return sum(times.bound_s(work) for times in self._times.values())

    def decode_s(self, stage: int, rows: float) -> tuple[float, float]:
        """Return the seconds of a decode step of ``rows`` on a stage, and of its upload; 0 where unknown."""
        if not rows:
            return 0.0, 0.0
        at = np.array([rows])
        curves = self._curves[stage].values()
        step_s = float(sum(curve.at(at)[0] for curve in curves)) if all(curve.known for curve in curves) else 0.0
        return step_s, self._links[stage].seconds(round(rows * self._row_bytes))

    def period_s(self, rows: int) -> float:
        """Return the seconds between two tokens of a sequence if each step has so many rows; 0 while not known."""
        periods = self._periods_s
        if not periods:
            return 0.0
        return periods[rows - 1] if rows <= len(periods) else periods[-1] * rows / len(periods)

    @property
    def draft_s(self) -> float:
        """Seconds that one draft takes, as measured; 0 before."""
        return median_low(self._drafts_s) if self._drafts_s else 0.0

    def slowest_s(self, rows: int) -> float:
        """Return the seconds of a step with so many rows on the slowest stage or link; 0 while not known."""
        return self._slowest_s[min(rows, len(self._slowest_s)) - 1] if self._slowest_s else 0.0

    def note_drafts(self, seconds: float) -> None:
        """Record what each of some drafts took that no step waited for."""
        if seconds > 0:
            self._drafts_s.append(seconds)

    def sent(self, step: ScheduledStep, now_s: float) -> None:
        """Record that a step's plans were sent."""
        if step.drafts:
            self._predicts_windows = True
            self._drafts_asked[step.step] = sum(step.drafts)
            if len(self._drafts_asked) > _MAX_STEPS:
                del self._drafts_asked[next(iter(self._drafts_asked))]
        self._works[step.step] = StepWork.of_rows(step.positions, step.num_tokens, logit_rows=step.num_samples)
        if len(self._works) > _MAX_STEPS:
            del self._works[next(iter(self._works))]
        if step.last_slice is None:
            self._turns.sent(
                step.step, num_rows=step.num_singles, num_tokens=len(step.token_ids), now_s=now_s, after=step.after
            )

    def retired(self, step: StepId, now_s: float, *, sequences: int) -> None:
        """Record that a step retired while ``sequences`` run. Every few turns, decide on M."""
        self._turns.retired(step, now_s)
        if self._sizer.due(sequences=sequences):
            self._known_uploads_s.clear()
            self._follow_experts()
            ring = self._ring()
            self._sizer.decide(ring, sequences=sequences)
            if ring.known and self._predicts_windows:
                self._periods_s = self._periods(ring, sequences=max(1, sequences))

    def note_timing(self, stage: int, timing: StepTiming) -> None:
        """Record that a stage computed a step on one slice."""
        if (work := self._works.get(timing.step)) is not None:
            self._times[timing.slice_index].note(work, timing.compute_us * 1e-6)
        self._curves[stage][timing.slice_index].note(
            num_rows=timing.num_rows, num_tokens=timing.num_tokens, seconds=timing.compute_us * 1e-6
        )
        if timing.expert_share:
            self.experts.note(timing.num_tokens, timing.expert_share)
        if timing.draft_us and (asked := self._drafts_asked.pop(timing.step, 0)):
            self._drafts_s.append(timing.draft_us * 1e-6 / asked)
        stayed_us = timing.queued_us + timing.compute_us + timing.send_queue_us + timing.draft_us
        self._turns.stayed(timing.step, stayed_us * 1e-6)
        if timing.upload_us:
            self._links[stage].note_upload(num_bytes=timing.upload_bytes, seconds=timing.upload_us * 1e-6)

    def note_link(self, stage: int, sample: LinkSample) -> float:
        """Record that a step reached the stage after ``stage``. Return the link's one-way latency in seconds.

        That is half of the round trip without the upload, so no two clocks are compared.
        """
        link = self._links[stage]
        link.note_arrival(
            num_bytes=sample.num_bytes,
            round_trip_s=sample.round_trip_us * 1e-6,
            spread_bytes=sample.spread_bytes,
            spread_s=(sample.last_received_us - sample.first_received_us) * 1e-6,
        )
        return max(0.0, sample.round_trip_us * 1e-6 - self._upload_s(stage, sample.num_bytes)) / 2

    def _follow_experts(self) -> None:
        """Predict step times by the experts that steps read. The curves of M need no correction: they are measured."""
        if shares := self.experts.shares():
            for times in self._times.values():
                times.read_experts(shares)

    def _way_s(self, step: StepId) -> float:
        """Return an upper bound on the step's time on all devices and links."""
        work = self._works.get(step)
        if work is None:
            return 0.0
        num_bytes = work.tokens * self._row_bytes
        links_s = [self._links[hop].seconds(num_bytes) or num_bytes / _ASSUMED_BYTES_PER_S for hop in self._hops]
        return sum(times.bound_s(work) for times in self._times.values()) + sum(links_s)

    def _uploads_s(self, num_tokens: int) -> float:
        return sum(self._upload_s(stage, num_tokens * self._row_bytes) for stage in range(self._num_stages))

    def _expected_upload_s(self, stage: int, num_tokens: int) -> float:
        return self._upload_s(stage, num_tokens * self._row_bytes)

    def _upload_s(self, stage: int, num_bytes: int) -> float:
        key = (stage, num_bytes)
        seconds = self._known_uploads_s.get(key)
        if seconds is None:
            seconds = self._known_uploads_s[key] = self._links[stage].seconds(num_bytes)
        return seconds

    def _periods(self, ring: RingMeasurements, *, sequences: int) -> list[float]:
        """Return the periods of steps with 1 to some more rows than a micro-batch has now."""
        in_flight = min(self.sizing.micro_batches, sequences)
        rows = np.arange(1.0, -(-sequences // in_flight) + _MORE_ROWS + 1)
        servers = [
            sum(curve.with_sheet(rows, self._sheet_s(index, rows)) for index, curve in curves.items())
            for curves in self._curves
        ]
        servers += [link.at(rows * self._row_bytes) for link in self._links]
        every = np.stack(servers)
        self._slowest_s = every.max(axis=0).tolist()
        return np.maximum(every.sum(axis=0) + ring.latency_s, in_flight * every.max(axis=0)).tolist()

    def _sheet_s(self, index: int, rows: Floats) -> Floats:
        """Return the seconds of decodes on a slice by its device's data sheet; zeros if that is not known."""
        shares = tuple([round(each.share, 2) for each in self.experts.shares()])  # they change a little with each step
        known = self._sheets.get(index)
        if known is None or known[0] != shares or len(known[1]) < len(rows):
            works = [StepWork.of_rows((_CONTEXT,) * n, (1,) * n, logit_rows=n) for n in range(1, len(rows) + 1)]
            known = (shares, np.array([self._times[index].expected_s(work) for work in works]))
            self._sheets[index] = known
        return known[1][: len(rows)]

    def _ring(self) -> RingMeasurements:
        return RingMeasurements(
            stages=[list(curves.values()) for curves in self._curves],
            links=self._links,
            row_bytes=self._row_bytes,
            latency_s=self._turns.latency_s,
        )
