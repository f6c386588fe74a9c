"""An imagined draft model in a simulation: which drafts are right, and what they take. PURE, seeded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from math import inf
from typing import NamedTuple

import numpy as np

from edgepipe.backend.cost import StepWork
from edgepipe.backend.drafting import Drafts, DraftSource, ImaginedDrafts
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler import ScheduledStep
from edgepipe.scheduler.drafting import Drafting
from edgepipe.scheduler.pacing import RingTimes

_CONTEXT = 1024  # tokens of the sequences whose steps are timed
_TOKEN, _WRONG = 0, 1  # id of every token and right draft, and of every wrong draft


class Lot(NamedTuple):
    """Drafts for a window in flight, see ``Scheduler.add_drafts``."""

    sequence: SequenceId
    drafts: Drafts
    position: int
    step: StepId


class _Drafter:
    """Goes on drafting a sequence whose windows are in flight, lot after lot, as ``stage/drafts_ahead.py`` does."""

    def __init__(self, make: Callable[[int, int], Drafts], *, token_s: float) -> None:
        """``make(position, count)``: drafts of the tokens from ``position`` on."""
        self._make = make
        self._token_s = token_s
        self.ready_s = inf  # when the lot that is being made is there
        self._lot: Lot | None = None
        self._chain: list[int] = []  # drafts behind the known tokens
        self._told: list[tuple[ScheduledStep, int, Sequence[int]]] = []  # steps whose tokens it has not seen
        self._newest: tuple[ScheduledStep, int] | None = None  # the last of those that it saw, and its last token

    def took(self, step: ScheduledStep, position: int, tokens: Sequence[int], now_s: float) -> None:
        """Let a step's tokens become known; ``position``: of the first of them."""
        self._told.append((step, position, tokens))
        if self._lot is None:
            self._begin(now_s)

    def rest(self) -> None:
        """Forget the sequence: its windows follow one another one at a time."""
        self._told, self._chain, self._newest, self._lot, self.ready_s = [], [], None, None, inf

    def take(self) -> Lot:
        """Take the lot that is ready, and begin the next one."""
        assert self._lot is not None, "no lot is being made"
        lot, now_s = self._lot, self.ready_s
        self._chain += lot.drafts.ids
        self._begin(now_s)
        return lot

    def _begin(self, now_s: float) -> None:
        for step, position, tokens in self._told:
            self._newest = (step, position + len(tokens) - 1)
            right = self._chain[: len(tokens)] == [*tokens]
            self._chain = self._chain[len(tokens) :] if right else []
        self._told = []
        self._lot, self.ready_s = None, inf
        if self._newest is None:
            return
        step, newest = self._newest
        if len(self._chain) + step.lot <= step.drafts[0]:
            position = newest + 1 + len(self._chain)
            self._lot = Lot(step.sequences[0], self._make(position, step.lot), position, step.step)
            self.ready_s = now_s + step.lot * self._token_s


class SimulatedDrafts:
    """Draws which drafts are right, and knows the times of windows as an engine measures them."""

    def __init__(self, drafts: ImaginedDrafts, times: RingTimes, *, in_flight: Callable[[], int], seed: int) -> None:
        """``in_flight``: micro-batches that hold sequences now."""
        self._drafts = drafts
        self._times = times
        self._in_flight = in_flight
        self._random = np.random.default_rng((seed, 1 << 21))
        self._known: dict[int, tuple[float, float]] = {}  # times of the turn and of the slowest server, by rows
        self._ends: dict[SequenceId, int] = {}  # position of the newest token once all steps planned have retired
        self._drafter = _Drafter(self._made, token_s=drafts.token_s)

    def drafting(self) -> Drafting:
        """Return what chooses windows in this simulation."""
        slowest_s = self._slowest_s if self._drafts.goes_on else None
        return Drafting(self._period_s, lambda: self._drafts.token_s, slowest_s)

    def sampled(self, step: ScheduledStep) -> list[tuple[int, ...]]:
        """Return the tokens of each sampling row: one, and one for each leading draft that is right.

        Call it for each step, in their order. The row of a window in flight has none if its sequence goes another way.
        """
        found: list[tuple[int, ...]] = []
        starts = accumulate(step.num_tokens, initial=0)
        rows = zip(step.sequences, step.positions, step.num_tokens, step.samples, starts, strict=False)
        for sequence, position, count, samples, start in rows:
            if not samples:
                continue
            own = step.token_ids[start + count - samples : start + count]
            end = position + count - samples  # position of the known token
            if step.assumed and (own[0] != _TOKEN or self._ends.get(sequence) != end):
                found.append(())
                continue
            right = sum(1 for _ in takewhile(_TOKEN.__eq__, own[1:]))
            found.append((_TOKEN,) * (1 + right))
            self._ends[sequence] = end + 1 + right
        return found

    def next_drafts(self, step: ScheduledStep) -> list[Drafts]:
        """Return as many drafts as the step wants, for each sampling row. Call it after ``sampled``."""
        if not step.drafts or step.lot:
            return []
        rows = zip(step.sequences, step.drafts, step.samples, strict=True)
        return [self._made(self._ends[sequence] + 1, count) for sequence, count, samples in rows if samples]

    def seconds(self, step: ScheduledStep) -> float:
        """Return the time that drafting adds to the step's turn. Nothing waits for drafts of windows in flight."""
        return 0.0 if step.lot else sum(step.drafts) * self._drafts.token_s

    @property
    def ready_s(self) -> float:
        """When the next lot of drafts for windows in flight is there; infinite without one."""
        return self._drafter.ready_s

    def take(self) -> Lot:
        """Take that lot."""
        return self._drafter.take()

    def retired(self, step: ScheduledStep, ids: Sequence[Sequence[int]], now_s: float) -> None:
        """Let a step's tokens become known to what drafts for windows in flight."""
        if not step.lot:
            self._drafter.rest()
        elif ids[0]:
            self._drafter.took(step, step.positions[0] + step.num_tokens[0] - step.samples[0] + 1, ids[0], now_s)

    def _made(self, position: int, count: int) -> Drafts:
        """Draw drafts of the tokens from ``position`` on. Those behind a wrong one do not matter."""
        draws = self._random.random(count)
        right = [draws[place] < self._drafts.right(position + place, place) for place in range(count)]
        return Drafts(tuple([_TOKEN if each else _WRONG for each in right]), (DraftSource.MODEL,) * count)

    def _period_s(self, rows: int) -> float:
        turn_s, server_s = self._server_times(rows)
        return max(turn_s, max(1, self._in_flight()) * server_s)

    def _slowest_s(self, rows: int) -> float:
        return self._server_times(rows)[1]

    def _server_times(self, rows: int) -> tuple[float, float]:
        known = self._known.get(rows)
        if known is None:
            work = StepWork.of_rows((_CONTEXT,) * rows, (1,) * rows, logit_rows=rows)
            stages = [sum(step_s(work) for step_s in slices) for slices in self._times.stages]
            servers = [*stages, *[upload_s(rows) for upload_s in self._times.uploads]]
            known = self._known[rows] = (sum(servers) + self._times.latency_s(), max(servers))
        return known
