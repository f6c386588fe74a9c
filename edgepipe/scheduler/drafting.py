"""Decide how many drafts of each sequence a step verifies. PURE.

A window of a known token and j drafts gives ``1 + p1 + p1 * p2 + ...`` tokens, where p is the probability that a draft
is right if those before it are. It takes the time of a turn with j rows more, and the time of drafting::

    tokens per second (j) = (1 + sum of the products up to j) / (period(rows + j) + j * draft_s)

The best j counts, and 0 is among them. The period comes from the measured times of stages and links. Where they are the
bound, not the turn, rows cost all sequences, and so does drafting: a step's tokens wait for all of its drafts. So all
windows and drafts of a step together may lengthen a token of the others by 3 % at most.

Probabilities are counted for each source of drafts, by the draft's place in its window, and for each sequence. A window
that is not worth it gives no counts, so after some turns a short one is tried all the same; then after twice as many.

Windows of a lone sequence may follow one another in flight (``flights.py``), where that promises a tenth more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from operator import mul
from typing import NamedTuple

from edgepipe.backend.drafting import MOST_DRAFTS, NO_DRAFTS, Drafts, DraftSource
from edgepipe.scheduler.flights import DraftChain, Flight, Judged, best_flight

_PRIOR = {
    DraftSource.GRAMMAR: 0.95,
    DraftSource.LOOKUP_LONG: 0.8,
    DraftSource.LOOKUP: 0.5,
    DraftSource.LOOKUP_SHORT: 0.25,
    DraftSource.MODEL: 0.6,
}
"""Probabilities before the first count."""

_OTHER_PRIOR = 0.3
_PRIOR_COUNT, _SHARED_COUNT = 8.0, 8.0  # weight of the prior in the counts of all sequences, and of those in one's own
_SHARED_KEPT, _OWN_KEPT = 0.995, 0.95  # part of the counts that remains with each new one: memory of 200 and of 7
_DEEPEST = 3  # places from the third on share their counts
_WAITING_KEPT = 0.97  # part of a sequence's own counts that remains after a turn without a window
_MOST_LONGER = 0.03  # share by which a window may lengthen the others' tokens
_GAIN = 0.02  # predicted gain below which a window is not worth it
_LEAST_PAUSE, _MOST_PAUSE = 16, 128  # turns without a window until a short one is tried
_TRIED = 1  # drafts of a window on trial
_FREE = 0.002  # share of a period that all drafts of a window may take to count as free
_ALL_RIGHT = (1.0,) * MOST_DRAFTS
_FACTOR_KEPT = 0.99  # part of the times that remains with each window: the factor of the last hundred
_LEAST_FLIGHT, _KEPT_FLIGHT = 1.1, 1.02  # rate over that of single windows at which windows in flight begin, and go on
_KEPT_RATE = 0.95  # part of measured rates that remains with each turn and run: those of the last twenty
_EARLY_RUNS, _JUDGED_RUNS = 10, 16  # after so many runs in flight, a rate far below that of single windows counts; any
_LONG_RUN = 16  # tokens of a run after which it counts, though no draft is wrong
_FAR = 0.8  # such a rate, as a share of that of single windows
_LEAST_GROUNDED, _MOST_GROUNDED = 256, 4096  # windows one at a time after those in flight were measured to be slower
_REFRESHED_RUNS, _REFRESH = 200, 8  # after so many runs in flight, so many windows one at a time measure these anew


@dataclass(slots=True)
class SequenceDrafts:
    """What is known of one sequence's drafts."""

    next: Drafts = NO_DRAFTS  # what may follow its known tokens
    found: bool = (
        False  # drafts came with its newest token, and were not refused yet: none of its steps is planned ahead
    )
    without: int = 0  # turns since drafts came with its token
    counts: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])  # right, all
    pause: int = _LEAST_PAUSE
    waited: int = 0  # turns since the last window or trial
    last_source: int = DraftSource.UNKNOWN
    chain: DraftChain = field(default_factory=DraftChain)  # drafts of windows in flight
    flight: Flight | None = None  # how its windows follow one another; None: one at a time
    run_since_s: float | None = None  # when its newest run of right drafts in flight began; None: not in flight
    run_tokens: int = 0  # tokens since then
    # The newest step that held it alone, with no window in flight, and when that retired.
    newest_turn: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStats:
    """Counts since the epoch began."""

    windows: int = 0
    drafted: int = 0  # drafts that were verified
    accepted: int = 0
    factor: float = 0.0  # tokens per second over those without drafts, of the last windows, as predicted; 0: no window
    ahead: int = 0  # windows that began before the tokens of the one before them were known


class Outlook(NamedTuple):
    """What drafts promise to a lone sequence."""

    drafts: int  # number in a window; where windows follow one another in flight, it has no other tokens
    in_flight: int  # windows
    factor: float  # see ``DraftStats``


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsBeside:
    """Rows of a step beside a window."""

    rows: int  # rows of the step with one token each
    alone: bool  # no other sequence decodes
    more: int = 0  # drafts that windows of the step verify so far
    drafts: int = 0  # drafts that are made behind the step so far, for the next windows

    def with_window(self, count: int, *, wanted: int) -> RowsBeside:
        """Return the rows beside the next window, behind a row with ``count`` drafts that wants ``wanted`` more."""
        if not count and not wanted:
            return self
        return replace(self, more=self.more + count, drafts=self.drafts + wanted)


class Drafting:
    """Chooses windows, and counts how they end."""

    def __init__(
        self,
        period_s: Callable[[int], float],
        draft_s: Callable[[], float],
        slowest_s: Callable[[int], float] | None = None,
    ) -> None:
        """
        period_s   seconds between two tokens of a sequence if its step has so many rows; 0 while not known
        draft_s    seconds that one draft takes
        slowest_s  seconds of a step with so many rows on the slowest stage or link; None: no windows in flight
        """
        self._period_s = period_s
        self._draft_s = draft_s
        self._slowest_s = slowest_s
        self._single = self._flown = (0.0, 0.0)  # tokens and seconds of single windows, and of runs in flight
        self._runs = 0  # runs in flight since the last single window
        self._grounded, self._pause = 0, _LEAST_GROUNDED  # windows until some are in flight again; the next such time
        self._counts: dict[tuple[int, int], tuple[float, float]] = {}
        self._windows = self._drafted = self._accepted = self._ahead = 0
        self._plain_s = self._spent_s = 0.0
        self._newest_case: tuple[RowsBeside, float, float] | None = None  # arguments of the newest ``_best_case``
        self._newest_best = 0

    def may_pay(self, beside: RowsBeside) -> bool:
        """Return whether a window of the step, or a draft behind it, may pay. In a filled ring none does."""
        return beside.alone or not self._period_s(beside.rows) or self._best_case(beside) > 0

    def wanted(self, own: SequenceDrafts, beside: RowsBeside) -> int:
        """Return how many drafts the sequence's next turn can use, at most.

        Before the times are known, drafts of several sequences would only delay their tokens: one measures as much.
        """
        period_s = self._period_s(beside.rows)
        if not period_s:
            return MOST_DRAFTS if beside.alone else 0 if beside.drafts else _TRIED
        best_case = self._best_case(beside)
        if not best_case:  # a draft now and then measures anew what drafts take, on devices that may be less busy
            return _TRIED if beside.alone and self._draft_s() > period_s / 2 and self._tries(own) else 0
        if MOST_DRAFTS * self._draft_s() <= _FREE * period_s:
            return MOST_DRAFTS
        source = own.last_source or DraftSource.MODEL
        chances = [self._chance(own, source, place) for place in range(MOST_DRAFTS)]
        return self._best(beside, chances) or (min(best_case, _TRIED) if self._tries(own) else 0)

    def window(self, own: SequenceDrafts, beside: RowsBeside, *, most: int) -> Drafts:
        """Return the drafts that the sequence's next row verifies, at most ``most``, and take them."""
        drafts, own.next = own.next, NO_DRAFTS
        count = min(most, len(drafts.ids))
        if count < 1:
            return NO_DRAFTS
        own.last_source = drafts.sources[0]
        chances = [self._chance(own, source, place) for place, source in enumerate(drafts.sources[:count])]
        best = self._best(beside, chances)
        if best:
            own.pause, own.waited = _LEAST_PAUSE, 0
        elif self._best(beside, [1.0] * count) and self._tries(own):
            best = min(count, _TRIED)
        return Drafts(drafts.ids[:best], drafts.sources[:best])

    def note(self, own: SequenceDrafts, sources: Sequence[int], *, accepted: int, beside: RowsBeside) -> None:
        """Count a window whose first ``accepted`` drafts were right."""
        for place, source in enumerate(sources[: accepted + 1]):
            self._note_draft(own, source, place, right=place < accepted)
        self._windows += 1
        self._drafted += len(sources)
        self._accepted += accepted
        plain_s = self._period_s(beside.rows)
        spent_s = self._period_s(beside.rows + len(sources)) + len(sources) * self._draft_s()
        self._plain_s = _FACTOR_KEPT * self._plain_s + (1 + accepted) * plain_s
        self._spent_s = _FACTOR_KEPT * self._spent_s + spent_s

    def flight(self, own: SequenceDrafts, beside: RowsBeside) -> Flight | None:
        """Return how the sequence's windows follow one another in flight; None: one at a time is as good."""
        if self._slowest_s is None or not beside.alone or own.last_source != DraftSource.MODEL:
            return None
        if not self._period_s(1) or not self._slowest_s(1):
            return None
        if self._grounded:
            self._grounded -= 1
            return None
        chances = [self._chance(own, DraftSource.MODEL, place) for place in range(_DEEPEST)]
        found = self._faster_flight(beside, chances, least=_LEAST_FLIGHT if own.flight is None else _KEPT_FLIGHT)
        if found is None:
            return None
        if self._slower():
            self._grounded, self._pause = self._pause, min(2 * self._pause, _MOST_GROUNDED)
        elif self._runs >= _REFRESHED_RUNS:
            self._grounded, self._pause = _REFRESH, _LEAST_GROUNDED
        if self._grounded:
            self._runs, self._flown = 0, (0.0, 0.0)
            return None
        return found

    def _faster_flight(self, beside: RowsBeside, chances: Sequence[float], *, least: float) -> Flight | None:
        """Return the best flight; None if it gives less than ``least`` times the tokens of single windows."""
        if self._slowest_s is None:
            return None
        found = best_flight(chances, period_s=self._period_s, slowest_s=self._slowest_s, draft_s=self._draft_s())
        single = self._single_rate(beside, [*chances, *[chances[-1]] * (MOST_DRAFTS - len(chances))])
        return None if found is None or found.rate < single * least else found

    def _slower(self) -> bool:
        """Return whether windows in flight were measured to give fewer tokens per second than single ones.

        They take more work of the hosts, which the formula does not know.
        """
        (tokens, seconds), (flown, flown_s) = self._single, self._flown
        ratio = flown * seconds / (flown_s * tokens) if flown_s and tokens else 1.0
        return (self._runs >= _EARLY_RUNS and ratio < _FAR) or (self._runs >= _JUDGED_RUNS and ratio < 1.0)

    def note_single(self, tokens: int, seconds: float) -> None:
        """Record the tokens of a turn of a lone sequence, which has no windows in flight, and its time."""
        self._single = _KEPT_RATE * self._single[0] + tokens, _KEPT_RATE * self._single[1] + seconds

    def _single_rate(self, beside: RowsBeside, chances: Sequence[float]) -> float:
        """Return the tokens per second of single windows, or without any if that is faster."""
        count = self._best(beside, chances)
        tokens = sum(accumulate(chances[:count], mul, initial=1.0))
        return tokens / (self._period_s(1 + count) + count * self._draft_s())

    def note_flight(
        self, own: SequenceDrafts, judged: Judged, *, tokens: int, ahead: bool = True, now_s: float | None
    ) -> None:
        """Count a window in flight that gave so many tokens.

        ahead  whether it began before the tokens of the one before it were known
        now_s  the present time; None: not measured
        """
        self._ahead += ahead
        right = len(judged.sources) - judged.wrong
        for at, source in enumerate(judged.sources):
            self._note_draft(own, source, judged.place + at, right=at < right)
        self._windows += 1
        self._drafted += len(judged.sources)
        self._accepted += right
        own.run_tokens += tokens
        if not judged.wrong and own.run_tokens < _LONG_RUN and own.run_since_s is not None:
            return
        if own.run_since_s is not None and now_s is not None:
            seconds = now_s - own.run_since_s
            self._runs += 1
            self._flown = _KEPT_RATE * self._flown[0] + own.run_tokens, _KEPT_RATE * self._flown[1] + seconds
            self._plain_s = _FACTOR_KEPT * self._plain_s + own.run_tokens * self._period_s(1)
            self._spent_s = _FACTOR_KEPT * self._spent_s + seconds
        own.run_since_s, own.run_tokens = now_s, 0

    def forecast(self, chances: Sequence[float]) -> Outlook:
        """Return the windows that a lone sequence would have.

        ``chances``: for each place in the window, the probability that a draft is right if those before it are.
        """
        lone = RowsBeside(rows=1, alone=True)
        flight = self._faster_flight(lone, chances, least=_LEAST_FLIGHT)
        rate = self._single_rate(lone, chances) if flight is None else flight.rate
        return Outlook(
            drafts=self._best(lone, chances) if flight is None else flight.lot,
            in_flight=1 if flight is None else flight.windows,
            factor=rate * self._period_s(1),
        )

    def stats(self) -> DraftStats:
        """Return the counts."""
        return DraftStats(
            windows=self._windows,
            drafted=self._drafted,
            accepted=self._accepted,
            factor=self._plain_s / self._spent_s if self._spent_s else 0.0,
            ahead=self._ahead,
        )

    def _note_draft(self, own: SequenceDrafts, source: int, place: int, *, right: bool) -> None:
        key = (source, min(place, _DEEPEST - 1))
        self._counts[key] = _counted(self._counts.get(key, (0.0, 0.0)), float(right), kept=_SHARED_KEPT)
        own.counts[source] = _counted(own.counts.get(source, (0.0, 0.0)), float(right), kept=_OWN_KEPT)

    def _chance(self, own: SequenceDrafts, source: int, place: int) -> float:
        prior = _PRIOR.get(DraftSource(source), _OTHER_PRIOR) if source in _SOURCES else _OTHER_PRIOR
        right, count = self._counts.get((source, min(place, _DEEPEST - 1)), (0.0, 0.0))
        shared = (right + _PRIOR_COUNT * prior) / (count + _PRIOR_COUNT)
        right, count = own.counts.get(source, (0.0, 0.0))
        return (right + _SHARED_COUNT * shared) / (count + _SHARED_COUNT)

    def _best(self, beside: RowsBeside, chances: Sequence[float]) -> int:
        """Return the number of drafts with the most tokens per second."""
        draft_s, rows = self._draft_s(), beside.rows + beside.more
        plain_s = self._period_s(rows) + beside.drafts * draft_s
        longest_s = inf if beside.alone else self._period_s(beside.rows) * (1 + _MOST_LONGER)
        best, most = 0, 1.0 + _GAIN
        for count, tokens in enumerate(accumulate(accumulate(chances, mul), initial=1.0)):
            window_s = self._period_s(rows + count) + (beside.drafts + count) * draft_s
            if window_s > longest_s:
                break
            if count and plain_s * tokens > most * window_s:
                best, most = count, plain_s * tokens / window_s
        return best

    def _best_case(self, beside: RowsBeside) -> int:
        """Return the best number of drafts if all of them were right. Rows of one step mostly ask with equal ones."""
        case = (beside, self._period_s(beside.rows), self._draft_s())
        if case != self._newest_case:
            self._newest_case, self._newest_best = case, self._best(beside, _ALL_RIGHT)
        return self._newest_best

    @staticmethod
    def _tries(own: SequenceDrafts) -> bool:
        """Count a turn without a window, and forget some of the counts. Return whether a short window is due."""
        own.waited += 1
        own.counts = {source: (_WAITING_KEPT * a, _WAITING_KEPT * b) for source, (a, b) in own.counts.items()}
        if own.waited < own.pause:
            return False
        own.waited, own.pause = 0, min(2 * own.pause, _MOST_PAUSE)
        return True


_SOURCES = frozenset(map(int, DraftSource))


def _counted(before: tuple[float, float], right: float, *, kept: float) -> tuple[float, float]:
    return kept * before[0] + right, kept * before[1] + 1.0
