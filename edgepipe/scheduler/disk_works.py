"""Copies between host memory and the disk, which stages perform beside their steps, in order.

A *work* is a few copies of one memory class in one direction. All stages perform it and answer. Until then nothing else
uses its places. A slow disk delays no step: what host memory gives up before it has a copy on disk is lost. What a
stage cannot read again (it is damaged, or was not written) is lost, too, and computed again.

The disk *rests* if a stage reports a problem, or if copying a block takes longer than computing it: what lies there is
forgotten, and after a pause one work tries it again. The pause doubles from a minute to a quarter of an hour, until the
disk has worked for that long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from edgepipe.backend.types import TierMove

if TYPE_CHECKING:
    from edgepipe.scheduler.host_tier import HostTier
    from edgepipe.scheduler.kv import Key

_MOST_WORKS = 4  # works under way: bounds the queue of a stage
_MOST_MOVES = 32  # moves of one work: 70 MB of a 32B on two stages, a few hundredths of a second
_TRIALS = 8  # works of blocks that are timed before their mean counts against the disk
_NEWEST = 0.2  # weight of the newest work in the mean
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 900.0  # a USB disk is plugged in again in the first; a full one takes a person


class DiskWork(NamedTuple):
    """A few copies between host memory and the disk, all of one memory class and in one direction.

    ``TierMove.place`` is in host memory, ``TierMove.kept`` on disk.
    """

    number: int  # from 1
    moves: tuple[TierMove, ...]
    afresh: bool = False  # the disk rested: stages with a problem open a new file


class DiskWorks:
    """The works of all memory classes, and the prompts that wait for some of them."""

    def __init__(self, tiers: Sequence[HostTier], *, block_s: float | None = None) -> None:
        """
        tiers    of all memory classes, in the order of ``TierMove.number``
        block_s  time of computing a block's tokens; None: not known
        """
        self._tiers = tiers
        self._block_s = block_s
        self._under_way: dict[int, list[tuple[Key, TierMove]]] = {}
        self._last = 0
        self._awaited: dict[Key, list[tuple[HostTier, Key]]] = {}  # what a prompt lacks, by its ticket
        self._num_tickets = 0
        self._settled: list[Key] = []  # tickets
        self._seconds: dict[int, float] = {}  # mean time of one copy in each memory class
        self._num_timed = 0  # works of blocks of the context
        self.problem = ""  # why the disk rests; empty: it is used
        self.again_s: float | None = None  # when it is tried again, on the caller's clock; None: it is used
        self._pause_s = 0.0  # the newest pause; 0: the disk has worked for long
        self._works_since_s = 0.0  # when the last trial went well
        self._trial: int | None = None  # number of the work that tries the disk
        self.num_fetched = 0  # blocks of the context that came back from disk

    def seconds(self, missing: Iterable[tuple[HostTier, Sequence[Key]]]) -> float:
        """Return the predicted time of bringing these keys back from disk."""
        return sum(len(keys) * self._seconds.get(tier.number, 0.0) for tier, keys in missing)

    def fetch(self, needed: Sequence[tuple[HostTier, Sequence[Key]]]) -> Key | None:
        """Bring those of the keys back that only the disk has.

        Return a ticket that ``take_settled`` returns once they came or were lost; None if none comes.
        """
        coming = [(tier, key) for tier, keys in needed for key in tier.fetch(keys)]
        if not coming:
            return None
        self._num_tickets += 1
        ticket = b"disk" + self._num_tickets.to_bytes(8, "big")  # no hash of tokens has this length
        self._awaited[ticket] = coming
        return ticket

    def take_settled(self) -> list[Key]:
        """Remove and return the tickets whose keys came or were lost."""
        settled, self._settled = self._settled, []
        return settled

    def next(self, unsettled: Sequence[TierMove], *, idle: bool, now_s: float = 0.0) -> DiskWork | None:
        """Return the next work for all stages; None without one, or while enough of them are under way.

        unsettled  moves that not all stages have performed for certain
        idle       no step is in flight, so these moves may wait for ever
        now_s      the present time of any monotonic clock, the same for all calls
        """
        if not self.may_begin(now_s):
            return None
        stores, all_moves = list[set[int]](), list[set[int]]()
        for tier in self._tiers:
            own = [move for move in unsettled if move.number == tier.number]
            all_moves.append({move.kept for move in own})
            stores.append({move.kept for move in own if move.out})
        for tier, places in zip(self._tiers, all_moves, strict=True):
            if moves := tier.reads(places, most=_MOST_MOVES):
                return self._begin(moves)
        for tier, places in zip(self._tiers, stores, strict=True):
            if moves := tier.writes(places, most=_MOST_MOVES):
                return self._begin(moves)
        if idle and not self._under_way:
            self._stop_fetching()
        return None

    def done(
        self,
        number: int,
        *,
        failed: Collection[int] = (),
        seconds: float = 0.0,
        problem: str = "",
        now_s: float = 0.0,
    ) -> None:
        """Note that all stages have answered a work.

        failed   moves that a stage could not perform, by their place in ``DiskWork.moves``
        seconds  that it took on the slowest stage; 0: not known
        problem  why a stage cannot use its disk; empty: it can
        now_s    see ``next``

        Raises KeyError for a work that is not under way.
        """
        moves = self._under_way.pop(number)
        tries, self._trial = number == self._trial, None
        counts = tries or not self.problem  # else it was sent before the disk rested
        for place, (key, move) in enumerate(moves):
            tier, done = self._tiers[move.number], place not in failed and counts
            if move.out:
                tier.written(key, done=done)
            else:
                tier.arrived(key, done=done)
                self.num_fetched += done and not move.number
        if problem and counts:
            self.rest(problem, now_s=now_s)
        elif tries:
            self.problem, self.again_s, self._works_since_s = "", None, now_s
        elif seconds and counts:
            self._note_seconds(moves[0][1].number, seconds / len(moves), now_s)
        self._settle()

    def rest(self, problem: str, *, now_s: float) -> None:
        """Use the disk no more for a pause, and forget what lies there."""
        if not self.problem and now_s - self._works_since_s >= LONGEST_PAUSE_S:
            self._pause_s = 0.0
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if self._pause_s else FIRST_PAUSE_S
        self.problem, self.again_s = problem, now_s + self._pause_s
        self._seconds.clear()
        self._num_timed = 0
        for tier in self._tiers:
            tier.forget_disk()

    def carry_over(self, tiers: Sequence[HostTier]) -> DiskWorks:
        """Return the works of the next epoch, with what was learned about the disk."""
        after = DiskWorks(tiers, block_s=self._block_s)
        after._seconds, after._num_timed = dict(self._seconds), self._num_timed
        after.problem, after.again_s = self.problem, self.again_s
        after._pause_s, after._works_since_s = self._pause_s, self._works_since_s
        return after

    def may_begin(self, now_s: float) -> bool:
        """Whether ``next`` may have a work. A disk that rests gets one after its pause, when all others have ended."""
        if self.again_s is not None and (self._under_way or now_s < self.again_s):
            return False
        return len(self._under_way) < _MOST_WORKS and any(tier.any_due for tier in self._tiers)

    def _begin(self, moves: list[tuple[Key, TierMove]]) -> DiskWork:
        self._last += 1
        self._under_way[self._last] = moves
        if self.problem:
            self._trial = self._last
        return DiskWork(self._last, tuple(move for _, move in moves), afresh=bool(self.problem))

    def _note_seconds(self, number: int, place_s: float, now_s: float) -> None:
        before = self._seconds.get(number, place_s)
        self._seconds[number] = mean_s = before + _NEWEST * (place_s - before)
        if number or self._block_s is None:
            return
        self._num_timed += 1
        if self._num_timed >= _TRIALS and mean_s >= self._block_s:
            took, again = f"{1e3 * mean_s:.3g} ms", f"{1e3 * self._block_s:.3g} ms"
            self.rest(f"the disk is slow: it takes {took} for a block, computing one takes {again}", now_s=now_s)

    def _stop_fetching(self) -> None:
        for tier in self._tiers:
            tier.stop_fetching()
        self._settle()

    def _settle(self) -> None:
        for ticket, lacks in list(self._awaited.items()):
            self._awaited[ticket] = still = [(tier, key) for tier, key in lacks if tier.is_coming(key)]
            if not still:
                del self._awaited[ticket]
                self._settled.append(ticket)
