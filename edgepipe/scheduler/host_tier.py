"""Blocks and snapshots of one memory class in host memory, below the device.

A cached block that the device's pool evicts moves to a place in the host memory of every stage. All stages number these
places alike. ``restore`` copies the block back for a prompt that needs it. The place keeps its copy after that, so a
second eviction of the block costs no copy. The longest unused places go first.

A step carries its moves in order (``ScheduledStep.moves``), and stages perform them one after another before its rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edgepipe.backend.types import TierMove

if TYPE_CHECKING:
    from edgepipe.scheduler.kv import Key


class HostTier:
    """The places of one memory class in host memory."""

    def __init__(self, number: int, num_places: int, moves: list[TierMove]) -> None:
        """
        number  of the memory class, see ``TierMove``
        moves   takes the moves of the next step, of all classes
        """
        self.number = number
        self.num_places = num_places
        self._moves = moves
        self._places: OrderedDict[Key, int] = OrderedDict()  # longest unused first
        self._free = list(range(num_places - 1, -1, -1))
        self._pinned: frozenset[Key] = frozenset()
        self._stale: set[Key] = set()  # see ``KVPool.stale_to``
        self.num_stored = 0  # copies to host memory since the start
        self.num_restored = 0  # copies back

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    @property
    def used_places(self) -> int:
        """Places that hold a block or a snapshot."""
        return len(self._places)

    @property
    def any_stale(self) -> bool:
        """Whether a copy is stale."""
        return bool(self._stale)

    @contextmanager
    def pinned(self, keys: Iterable[Key]) -> Generator[None]:
        """Let no other block take the places of these keys."""
        self._pinned = frozenset(keys)
        yield
        self._pinned = frozenset()

    def store(self, key: Key, place: int) -> None:
        """Move what the device has at ``place``, which is current and which the device gives up, to host memory.

        Costs nothing if a current copy is there. Drops it if only pinned places are left.
        """
        if key in self._places:
            self._places.move_to_end(key)
            if key not in self._stale:
                return
            self._stale.discard(key)
        elif not self._make_room():
            return
        else:
            self._places[key] = self._free.pop()
        self.num_stored += 1
        self._moves.append(TierMove(self.number, place, self._places[key], out=True))

    def restore(self, key: Key, place: int) -> bool:
        """Copy a key's block or snapshot to ``place`` on the device. Return whether it is stale."""
        self._places.move_to_end(key)
        self.num_restored += 1
        self._moves.append(TierMove(self.number, place, self._places[key], out=False))
        if key not in self._stale:
            return False
        self._drop(key)  # the device will have a better one
        return True

    def lose(self) -> None:
        """Mark all copies stale."""
        self._stale = set(self._places)

    def carry_over(self, moves: list[TierMove], unsettled: Sequence[TierMove]) -> HostTier:
        """Return the same places for the next epoch, without copies that not all stages have for certain."""
        after = HostTier(self.number, self.num_places, moves)
        written = {move.kept for move in unsettled if move.out and move.number == self.number}
        kept = {key: place for key, place in self._places.items() if place not in written}
        after._places = OrderedDict(kept)
        taken = set(kept.values())
        after._free = [place for place in after._free if place not in taken]
        after._stale = self._stale & kept.keys()
        after.num_stored, after.num_restored = self.num_stored, self.num_restored
        return after

    def _make_room(self) -> bool:
        """Free a place if none is free. Return whether one is."""
        if not self._free:
            key = next((key for key in self._places if key not in self._pinned), None)
            if key is not None:
                self._drop(key)
        return bool(self._free)

    def _drop(self, key: Key) -> None:
        self._free.append(self._places.pop(key))
        self._stale.discard(key)
