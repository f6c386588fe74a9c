"""Places of one memory class in a file on every stage, below host memory. ``HostTier`` decides what goes there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgepipe.scheduler.kv import Key


class DiskPlaces:
    """The places of one memory class on disk. All stages number them alike. The longest unused ones go first."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._places: OrderedDict[Key, int] = OrderedDict()  # longest unused first
        self._free = list(range(num_places - 1, -1, -1))
        self._writing: dict[Key, int] = {}  # places that are being written
        self._reading: set[Key] = set()  # keys that are being read: their places stay
        self._stale: set[Key] = set()  # see ``KVPool.stale_to``

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

    def is_current(self, key: Key) -> bool:
        """Return whether a copy is there that is not stale."""
        return key in self._places and key not in self._stale

    def begin_write(self, key: Key) -> int | None:
        """Return the place for a new copy of a key; None while all places are being read or written."""
        if key in self._places:
            if key in self._reading:
                return None
            self._drop(key)
        if not self._free:
            oldest = next((key for key in self._places if key not in self._reading), None)
            if oldest is None:
                return None
            self._drop(oldest)
        self._writing[key] = self._free.pop()
        return self._writing[key]

    def end_write(self, key: Key, *, done: bool) -> None:
        """Note that a copy was written, or that it was not."""
        place = self._writing.pop(key)
        if done:
            self._places[key] = place
        else:
            self._free.append(place)

    def begin_read(self, key: Key) -> int:
        """Return a key's place, which stays until ``end_read``."""
        self._reading.add(key)
        self._places.move_to_end(key)
        return self._places[key]

    def end_read(self, key: Key, *, done: bool) -> bool:
        """Note that a copy was read, or that it is lost. Return whether it is stale."""
        self._reading.discard(key)
        stale = key in self._stale
        if not done:
            self._drop(key)
        return stale

    def lose(self) -> None:
        """Mark all copies stale."""
        self._stale = set(self._places)

    def adopt(self, held: Mapping[Key, int]) -> None:
        """Begin with the copies of an earlier engine. See ``HostTier.adopt``."""
        self._places = OrderedDict(held)
        taken = set(held.values())
        self._free = [place for place in self._free if place not in taken]

    def carry_over(self) -> DiskPlaces:
        """Return the same copies for the next epoch, without those that are being written."""
        after = DiskPlaces(self.num_places)
        after._places, after._stale = OrderedDict(self._places), set(self._stale)
        taken = set(after._places.values())
        after._free = [place for place in after._free if place not in taken]
        return after

    def clear(self) -> None:
        """Forget all copies but those that are being read."""
        for key in [key for key in self._places if key not in self._reading]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        self._free.append(self._places.pop(key))
        self._stale.discard(key)
