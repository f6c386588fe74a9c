"""Windows of drafts in flight: the next window begins before the tokens of the last one are known. PURE.

A window that follows another one in flight assumes that all of its drafts, and a guess of the token behind them, are
right. So a sequence's windows cut one chain of drafts into lots of w tokens, and a run of right drafts leaves the last
stage as fast as the slowest stage, link or the drafter lets them through. With T(w) the turn of w rows, t(w) the time
of w rows on the slowest of all stages and links, d the time of a draft, and a the probability that a draft is right::

    gap   = max(t(w), w * d, T(w) / windows in flight)
    first = max(t(1), w * d)          a run begins with its known token alone, then comes the first lot
    run   = gap / 2 + (1 - a) * T(1) + a * (first + T(w) + a^w / (1 - a^w) * gap)
    tokens per second = (1 / (1 - a)) / run

The first half gap is the time that a run waits at the first stage for a window that has become void. Places of a chain
have probabilities of their own below, so sums stand for the powers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from math import ceil
from operator import eq, itemgetter, mul
from typing import NamedTuple

from edgepipe.backend.drafting import NO_DRAFTS, Drafts
from edgepipe.ids import StepId

_MOST_LOT = 4  # drafts: larger windows cost experts as much as they bring
_MOST_WINDOWS = 8  # windows in flight: as many as a long ring has stages and links
_LEAST_GAP_S = 0.001  # between two windows: a stage's host takes as long for each step, however fast its device is
_ENOUGH = 0.95  # this part of the most tokens per second suffices
_MOST_TOKENS = 64  # tokens of a run that the formula counts
MOST_CHAIN = 48  # drafts behind a sequence's known tokens


_NONE = StepId(0)


class Flight(NamedTuple):
    """How the windows of a sequence follow one another."""

    lot: int  # w: tokens of a window behind the first
    windows: int  # most in flight
    rate: float  # tokens per second, as predicted

    @property
    def drafts(self) -> int:
        """Most drafts that all windows in flight hold, and one window to come."""
        return min(MOST_CHAIN, self.lot * (self.windows + 1))


def windows_may_fly(*, recurrent: bool, rest_tokens: int) -> bool:
    """Return whether a model's windows may follow one another in flight.

    Recurrent layers would need slots for each window, and KV in 4 bits rounds tokens that a void window would have to
    bring back. ``rest_tokens``: see ``kv_forms.rest_tokens``.
    """
    return not recurrent and not rest_tokens


def best_flight(
    chances: Sequence[float],
    *,
    period_s: Callable[[int], float],
    slowest_s: Callable[[int], float],
    draft_s: float,
) -> Flight | None:
    """Return a flight with about the most tokens per second; None if no two windows fit into a turn.

    Of those that are nearly as fast, it is the one with the fewest windows per second: each costs the hosts a step.

    chances    by place in a chain, the probability that a draft is right if those before it are; the last one repeats
    period_s   seconds of a turn with so many rows
    slowest_s  seconds of so many rows on the slowest stage or link
    """
    flights: list[tuple[float, Flight]] = []  # each with its gap
    every = [*chances, *[chances[-1]] * (_MOST_TOKENS - len(chances))]
    reached = [*accumulate(every, mul, initial=1.0)]  # probability that the first n drafts are right
    for lot in range(1, _MOST_LOT + 1):
        turn_s, lot_s = period_s(lot), lot * draft_s
        least_gap_s = max(slowest_s(lot), lot_s, _LEAST_GAP_S)
        first_s = max(slowest_s(1), lot_s)
        for windows in range(2, min(_MOST_WINDOWS, ceil(turn_s / least_gap_s)) + 1):
            gap_s = max(least_gap_s, turn_s / windows)
            run_s = gap_s / 2 + (1 - reached[1]) * period_s(1) + reached[1] * (first_s + turn_s)
            run_s += gap_s * sum(reached[1 + lot :: lot])
            flights.append((gap_s, Flight(lot, windows, sum(reached) / run_s)))
    most = max([flight.rate for _, flight in flights], default=0.0)
    good = [each for each in flights if each[1].rate >= _ENOUGH * most]
    return max(good, key=itemgetter(0))[1] if good else None


class Judged(NamedTuple):
    """Drafts of a chain whose tokens have become known."""

    sources: tuple[int, ...]
    place: int  # distance of the first one from the newest wrong draft before it
    wrong: bool  # whether the last one is wrong


@dataclass(slots=True)
class DraftChain:
    """The drafts behind a sequence's known tokens, each of which assumes all before it; windows in flight hold some."""

    ids: list[int] = field(default_factory=list[int])
    sources: list[int] = field(default_factory=list[int])
    sent: int = 0  # the first ones, which windows in flight hold
    depth: int = 0  # drafts that were right since the last wrong one
    newest: StepId = _NONE  # last step that gave tokens
    broken: StepId = _NONE  # last step known whose tokens the chain did not have: drafts from before it are void

    def begin(self, drafts: Drafts) -> None:
        """Begin anew with ``drafts``."""
        self.ids, self.sources, self.sent, self.depth = [*drafts.ids], [*drafts.sources], 0, 0

    def take_rest(self) -> Drafts:
        """Remove and return the drafts. No window holds one."""
        drafts = Drafts(tuple(self.ids), tuple(self.sources))
        self.begin(NO_DRAFTS)
        return drafts

    def unsent(self, most: int) -> Drafts:
        """Return the drafts of the next window, at most ``most``."""
        end = self.sent + max(0, most)
        return Drafts(tuple(self.ids[self.sent : end]), tuple(self.sources[self.sent : end]))

    def took(self, step: StepId, tokens: Sequence[int]) -> Judged:
        """Let a step's tokens become known. The chain begins anew behind a wrong draft, and behind its end."""
        self.newest = step
        right = sum(1 for _ in takewhile(bool, map(eq, self.ids, tokens)))
        sources = tuple(self.sources[:right])
        wrong = right < min(len(self.ids), len(tokens))
        if wrong:
            sources += (self.sources[right],)
            self.broken = step
        judged = Judged(sources, self.depth, wrong)
        depth = 0 if wrong else self.depth + right
        if right < len(tokens):
            self.begin(NO_DRAFTS)
        else:
            del self.ids[:right], self.sources[:right]
            self.sent = max(0, self.sent - right)
        self.depth = depth
        return judged

    def add(self, drafts: Drafts, *, position: int, step: StepId, known: Sequence[int]) -> None:
        """Append drafts of the tokens from ``position`` on, made when the tokens of ``step`` were the newest.

        ``known``: the sequence's tokens. Drafts that were made for another way than it went are dropped.
        """
        late = len(known) - position  # drafts whose tokens have become known meanwhile
        if step < self.broken or (late <= 0 and -late != len(self.ids)) or (late > 0 and self.ids):
            return
        late = max(0, late)
        if any(map(int.__ne__, drafts.ids[:late], known[position:])):
            self.broken = self.newest
            return
        room = MOST_CHAIN - len(self.ids)
        self.ids += drafts.ids[late : late + room]
        self.sources += drafts.sources[late : late + room]
