"""Blocks and snapshots of one memory class in host memory, below the device.

A cached block that the device's pool evicts moves to a place in the host memory of every stage. All stages number these
places alike. ``restore`` copies the block back for a prompt that needs it. The place keeps its copy after that, so a
second eviction of the block costs no copy. The longest unused places go first.

A step carries its moves in order (``ScheduledStep.moves``), and stages perform them one after another before its rows.

Below host memory may be a file on every stage (``disk_places.py``). All but a quarter of host memory has copies there,
and those places go first, so a block that leaves host memory is still known. ``fetch`` brings it back to a place in
host memory. No step carries these copies, since disks are slow: see ``disk_works.py``.

Other programs may need the machine's memory. Then ``set_bound`` leaves fewer places in use, and ``give_back`` returns
those whose memory the stages give back to the system. Without anything in flight, a place is in use, free or given
back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from edgepipe.backend.types import TierMove
from edgepipe.scheduler.disk_places import DiskPlaces

if TYPE_CHECKING:
    from edgepipe.scheduler.kv import Key


_UNWRITTEN_SHARE = 4  # a quarter of the places may hold what the disk does not have: the newest, which may come back


class Tier(IntEnum):
    """Where a block or a snapshot may be: the lower, the slower."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class GivenBack(NamedTuple):
    """Places of one memory class in host memory whose memory stages give back to the system."""

    number: int  # the memory class
    places: tuple[int, ...]


class HostTier:
    """The places of one memory class in host memory."""

    def __init__(self, number: int, num_places: int, moves: list[TierMove], *, disk: DiskPlaces | None = None) -> None:
        """
        number  of the memory class, see ``TierMove``
        moves   takes the moves of the next step, of all classes
        disk    the places below; None: there is no disk
        """
        self.number = number
        self.num_places = num_places
        self.bound = num_places  # places that may be used now
        self._given_back: list[int] = []  # places without memory: those beyond the bound
        self.disk = disk
        self._unwritten: OrderedDict[Key, None] = OrderedDict()  # current keys without a copy on disk, ordered alike
        self._writing: set[Key] = set()  # keys of which a copy is being written: their places stay
        self._reading: dict[Key, int] = {}  # keys that are coming back from disk, and their places
        self._wanted: dict[Key, None] = {}  # keys that come back next, in order
        self._moves = moves
        self._places: OrderedDict[Key, int] = OrderedDict()  # longest unused first
        self._free = list(range(num_places - 1, -1, -1))
        self._pinned: frozenset[Key] = frozenset()
        self._stale: set[Key] = set()  # see ``KVPool.stale_to``
        self.num_stored = 0  # copies to host memory since the start
        self.num_restored = 0  # copies back

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def has(self, key: Key, down_to: Tier) -> bool:
        """Return whether a key is in host memory, or on disk if ``down_to`` says so."""
        return key in self._places or (down_to is Tier.DISK and self.disk is not None and key in self.disk)

    def is_current(self, key: Key) -> bool:
        """Return whether a key's copy is in host memory and not stale."""
        return key in self._places and key not in self._stale

    @property
    def used_places(self) -> int:
        """Places that hold a block or a snapshot."""
        return len(self._places)

    @property
    def any_stale(self) -> bool:
        """Whether a copy is stale, here or on disk."""
        return bool(self._stale) or (self.disk is not None and self.disk.any_stale)

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
            self._touch(key)
            if key not in self._stale:
                return
            self._stale.discard(key)
        elif not self._make_room():
            return
        else:
            self._places[key] = self._free.pop()
        self._note_unwritten(key)
        self.num_stored += 1
        self._moves.append(TierMove(self.number, place, self._places[key], out=True, key=key))

    def restore(self, key: Key, place: int) -> bool:
        """Copy a key's block or snapshot to ``place`` on the device. Return whether it is stale."""
        self._touch(key)
        self.num_restored += 1
        self._moves.append(TierMove(self.number, place, self._places[key], out=False))
        if key not in self._stale:
            return False
        self._drop(key)  # the device will have a better one
        return True

    # The bound

    def set_bound(self, bound: int) -> None:
        """Use so many places from now on."""
        self.bound = max(0, min(bound, self.num_places))
        while self._given_back and self.num_places - len(self._given_back) < self.bound:
            self._free.append(self._given_back.pop())

    @property
    def num_over(self) -> int:
        """Places beyond the bound that still have memory."""
        return self.num_places - len(self._given_back) - self.bound

    def give_back(self, unsettled: Collection[int], *, most: int) -> list[int]:
        """Return the next places beyond the bound that nothing uses. ``set_bound`` may let them be used again.

        Free places go first, then those of the longest unused keys. ``unsettled``: see ``reads``.
        """
        count = min(most, self.num_over)
        if count < 1:
            return []
        taken = list(islice((place for place in self._free if place not in unsettled), count))
        written = (key for key in self._places if self._is_written(key))
        idle = (key for key in chain(written, self._unwritten) if self._places[key] not in unsettled)
        for key in list(islice(idle, count - len(taken))):
            taken.append(self._places[key])
            self._drop(key)
        gone = set(taken)
        self._free = [place for place in self._free if place not in gone]
        self._given_back += taken
        return taken

    def lose(self) -> None:
        """Mark all copies stale."""
        self._stale = set(self._places)
        self._unwritten.clear()
        if self.disk is not None:
            self.disk.lose()

    # Copies between host memory and the disk

    def fetch(self, keys: Sequence[Key]) -> set[Key]:
        """Let ``reads`` bring those of these keys to host memory that only the disk has. Return those that are coming.

        The others of them become the longest to stay.
        """
        coming: set[Key] = set()
        for key in keys:
            if key in self._places:
                self._touch(key)
            elif self.disk is not None and key in self.disk:
                coming.add(key)
                if key not in self._reading:
                    self._wanted[key] = None
        return coming

    @property
    def any_due(self) -> bool:
        """Whether ``reads`` or ``writes`` may have something to copy."""
        if self.disk is None:
            return False
        return bool(self._wanted) or self._excess > 0

    def reads(self, unsettled: Collection[int], *, most: int) -> list[tuple[Key, TierMove]]:
        """Return the next copies from disk.

        unsettled  places in host memory that steps in flight may still use
        """
        moves: list[tuple[Key, TierMove]] = []
        while self._wanted and len(moves) < most and self.disk is not None:
            key = next(iter(self._wanted))
            if key not in self._places and key in self.disk:
                if (place := self._take_settled(unsettled)) is None:
                    break
                self._reading[key] = place
                moves.append((key, TierMove(self.number, place, self.disk.begin_read(key), out=False)))
            del self._wanted[key]
        return moves

    def writes(self, unsettled: Collection[int], *, most: int) -> list[tuple[Key, TierMove]]:
        """Return the next copies to disk, so that most of host memory can be taken at any time. See ``reads``."""
        moves: list[tuple[Key, TierMove]] = []
        for key in list(islice(self._unwritten, max(0, min(most, self._excess)))):
            place = self._places[key]
            if place in unsettled:
                continue
            assert self.disk is not None
            if (kept := self.disk.begin_write(key)) is None:
                break
            del self._unwritten[key]
            self._writing.add(key)
            moves.append((key, TierMove(self.number, place, kept, out=True)))
        return moves

    def is_coming(self, key: Key) -> bool:
        """Return whether ``fetch`` was called for this key and its copy has not arrived."""
        return key in self._reading or key in self._wanted

    def forget_disk(self) -> None:
        """Forget the copies on disk."""
        self.stop_fetching()
        if self.disk is not None:
            self.disk.clear()
            current = (key for key in self._places if key not in self._stale and key not in self._writing)
            self._unwritten = OrderedDict.fromkeys(current)

    def stop_fetching(self) -> None:
        """Bring nothing more from disk but what is coming already."""
        self._wanted.clear()

    def written(self, key: Key, *, done: bool) -> None:
        """Note that a copy to disk has ended. ``done``: all stages have it."""
        assert self.disk is not None
        self._writing.discard(key)
        self.disk.end_write(key, done=done)
        if not done and key in self._places and key not in self._stale:
            self._note_unwritten(key)

    def arrived(self, key: Key, *, done: bool) -> None:
        """Note that a copy from disk has ended. ``done``: all stages have it in host memory; else it is lost."""
        assert self.disk is not None
        place = self._reading.pop(key)
        stale = self.disk.end_read(key, done=done)
        if not done or key in self._places:
            self._free.append(place)
            return
        self._places[key] = place
        if stale:
            self._stale.add(key)

    def _take_settled(self, unsettled: Collection[int]) -> int | None:
        """Take a place that no step in flight uses, a free one or that of the longest unused key that is on disk."""
        place = next((place for place in reversed(self._free) if place not in unsettled), None)
        if place is None:
            written = (key for key, place in self._places.items() if place not in unsettled and self._is_written(key))
            if (key := next(written, None)) is None:
                return None
            place = self._places[key]
            self._drop(key)
        self._free.remove(place)
        return place

    @property
    def most_needed(self) -> int:
        """Places for what one prompt needs from disk or has here: the others may hold what the disk does not have."""
        return self.bound - self.bound // _UNWRITTEN_SHARE

    @property
    def _excess(self) -> int:
        """Number of keys without a copy on disk, beyond those that may stay so."""
        return len(self._unwritten) - self.bound // _UNWRITTEN_SHARE if self.disk is not None else 0

    def _is_written(self, key: Key) -> bool:
        return key not in self._unwritten and key not in self._writing

    def _note_unwritten(self, key: Key) -> None:
        if self.disk is not None and not self.disk.is_current(key):
            self._unwritten[key] = None

    def _touch(self, key: Key) -> None:
        self._places.move_to_end(key)
        if key in self._unwritten:
            self._unwritten.move_to_end(key)

    # From epoch to epoch

    def adopt(self, here: Mapping[Key, int], on_disk: Mapping[Key, int]) -> None:
        """Begin with the copies of an earlier engine: places by key, longest unused first."""
        if self.disk is not None:
            self.disk.adopt(on_disk)
        self._places = OrderedDict(here)
        taken = set(here.values())
        self._free = [place for place in self._free if place not in taken]
        for key in here:
            self._note_unwritten(key)

    def carry_over(self, moves: list[TierMove], unsettled: Sequence[TierMove]) -> HostTier:
        """Return the same places for the next epoch, without copies that not all stages have for certain."""
        disk = self.disk.carry_over() if self.disk is not None else None
        after = HostTier(self.number, self.num_places, moves, disk=disk)
        after.bound = self.bound  # some stages may not have given back all places beyond it: that begins again
        written = {move.kept for move in unsettled if move.out and move.number == self.number}
        kept = {key: place for key, place in self._places.items() if place not in written}
        after._places = OrderedDict(kept)
        taken = set(kept.values())
        after._free = [place for place in after._free if place not in taken]
        after._stale = self._stale & kept.keys()
        after.num_stored, after.num_restored = self.num_stored, self.num_restored
        for key in kept:
            if key not in after._stale:
                after._note_unwritten(key)
        return after

    def _make_room(self) -> bool:
        """Free a place if none is free. Return whether one is."""
        if not self._free:
            unpinned = (key for key in self._places if key not in self._pinned)
            key = next((key for key in unpinned if self._is_written(key)), None)
            if key is None:
                key = next((key for key in self._unwritten if key not in self._pinned), None)
            if key is not None:
                self._drop(key)
        return bool(self._free)

    def _drop(self, key: Key) -> None:
        self._free.append(self._places.pop(key))
        self._stale.discard(key)
        self._unwritten.pop(key, None)
