"""An imagined draft model in a simulation: which drafts are right, and what they take. PURE, seeded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgepipe.backend.cost import StepWork
from edgepipe.backend.drafting import MOST_DRAFTS, Drafts, DraftSource, ImaginedDrafts
from edgepipe.scheduler import ScheduledStep
from edgepipe.scheduler.drafting import Drafting
from edgepipe.scheduler.pacing import RingTimes

_CONTEXT = 1024  # tokens of the sequences whose steps are timed
_TOKEN = 0  # id of every token and draft; results do not depend on it


class SimulatedDrafts:
    """Draws which drafts are right, and knows the times of windows as an engine measures them."""

    def __init__(self, drafts: ImaginedDrafts, times: RingTimes, *, in_flight: Callable[[], int], seed: int) -> None:
        """``in_flight``: micro-batches that hold sequences now."""
        self._drafts = drafts
        self._times = times
        self._in_flight = in_flight
        self._random = np.random.default_rng((seed, 1 << 21))
        self._known: dict[int, tuple[float, float]] = {}  # times of the turn and of the slowest server, by rows

    def drafting(self) -> Drafting:
        """Return what chooses windows in this simulation."""
        return Drafting(self._period_s, lambda: self._drafts.token_s)

    def sampled(self, step: ScheduledStep) -> list[tuple[int, ...]]:
        """Return the tokens of each sampling row: one, and one for each leading draft that is right."""
        rows = zip(step.positions, step.num_tokens, step.samples, strict=True)
        return [self._window(position + count - samples, samples) for position, count, samples in rows if samples]

    def next_drafts(self, step: ScheduledStep) -> list[Drafts]:
        """Return as many drafts as the step wants, for each sampling row."""
        if not step.drafts:
            return []
        wanted = [count for count, samples in zip(step.drafts, step.samples, strict=True) if samples]
        return [Drafts((_TOKEN,) * count, (DraftSource.MODEL,) * count) for count in wanted]

    def seconds(self, step: ScheduledStep) -> float:
        """Return the time that drafting adds to the step's turn."""
        return sum(step.drafts) * self._drafts.token_s

    def _window(self, position: int, samples: int) -> tuple[int, ...]:
        """``position``: of the first token that the row samples after."""
        draws = self._random.random(MOST_DRAFTS)
        right = 0
        while right < samples - 1 and draws[right] < self._drafts.right(position + 1 + right, right):
            right += 1
        return (_TOKEN,) * (1 + right)

    def _period_s(self, rows: int) -> float:
        known = self._known.get(rows)
        if known is None:
            work = StepWork.of_rows((_CONTEXT,) * rows, (1,) * rows, logit_rows=rows)
            stages = [sum(step_s(work) for step_s in slices) for slices in self._times.stages]
            servers = [*stages, *[upload_s(rows) for upload_s in self._times.uploads]]
            known = self._known[rows] = (sum(servers) + self._times.latency_s(), max(servers))
        turn_s, server_s = known
        return max(turn_s, max(1, self._in_flight()) * server_s)
