"""The keys of the blocks and snapshots that a stage's places hold, on the device (``device_keys.py``) and below it.

The engine's tables say what is where, and end with the engine's process. A stage that lives on knows it by these keys
and tells the next engine, which takes over what all stages hold alike (``scheduler/held_places.py``).

A place below the device has a key only from the end of a write on, and loses it when another write begins. So a key is
never that of bytes that are half written, whatever broke off. A write that ends late counts only if no other has begun
since.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edgepipe.backend.types import BlockRun, RowState, TierMove
from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import Epoch
from edgepipe.scheduler import PlaceKey, Tier
from edgepipe.stage.device_keys import DeviceKeys
from edgepipe.wire.sizes import MAX_HELD
from edgepipe.wire.tiers import HeldPlaces


class Content:
    """What was written to a place at one time."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key = b""  # empty while it is being written


class _Places:
    """The places of one memory class in one tier. At most one place has each key: the newest."""

    def __init__(self) -> None:
        self.contents: dict[int, Content] = {}
        self.keys: OrderedDict[bytes, int] = OrderedDict()  # longest unused first

    def begin(self, place: int) -> Content:
        self.forget(place)
        content = self.contents[place] = Content()
        return content

    def end(self, place: int, content: Content, key: bytes) -> None:
        if not key or self.contents.get(place) is not content:
            return
        if (other := self.keys.get(key)) is not None:
            self.forget(other)
        content.key = key
        self.keys[key] = place

    def at(self, place: int) -> Content | None:
        content = self.contents.get(place)
        return content if content is not None and content.key else None

    def touch(self, place: int) -> None:
        if (content := self.at(place)) is not None:
            self.keys.move_to_end(content.key)

    def forget(self, place: int) -> None:
        content = self.contents.pop(place, None)
        if content is not None and content.key:
            del self.keys[content.key]


class BegunMove(NamedTuple):
    """A planned move between the device and host memory."""

    move: TierMove
    content: Content | None  # what host memory gets, or holds if the move goes to the device; None: not known


class HeldKeys:
    """The keys of one stage's places in all tiers. May be called on any thread."""

    def __init__(self, device_places: Sequence[int]) -> None:
        """``device_places``: blocks of each memory class on the device, and slots of states if there are any."""
        self._lock = threading.Lock()
        self._device_places = tuple(device_places)
        self._device = [*map(DeviceKeys, device_places)]
        self._host, self._disk = self._nothing(), self._nothing()

    def forget_all(self) -> None:
        """Forget all keys."""
        with self._lock:
            self._device = [*map(DeviceKeys, self._device_places)]
            self._host, self._disk = self._nothing(), self._nothing()

    # The device

    def name(self, keys: Iterable[PlaceKey]) -> None:
        """Note what steps that retired have left on the device. Raises RemoteProtocolError for a place that is not."""
        with self._lock:
            for number, place, key in keys:
                own = self._device[number] if number < len(self._device) else None
                if own is None or place >= own.num_places:
                    raise RemoteProtocolError(
                        f"the engine names place {place} of memory class {number} on the device",
                        fact=f"the classes have {[*self._device_places]} places",
                    )
                own.name(place, key)

    def append(self, number: int, run: BlockRun, *, shared: int = 0) -> None:
        """Note that steps will write blocks of a sequence's table, except the first ``shared`` ones."""
        if shared == run.count:
            return
        with self._lock:
            own = self._device[number]
            if run.count == 1:  # the usual case of a decode
                own.write(run.start)
            else:
                own.write_run(run.start + shared, run.count - shared)

    def write_states(self, state: RowState) -> None:
        """Note that a row will write states. Its backend checks the slots."""
        with self._lock:
            slots = self._device[-1]
            for write in state.writes:
                if write.slot < slots.num_places:
                    slots.write(write.slot)

    def release(self, tables: Iterable[Sequence[BlockRun]]) -> None:
        """Note that a sequence has left. ``tables``: its blocks, by memory class."""
        with self._lock:
            for own, runs in zip(self._device, tables, strict=False):
                own.release(runs)

    # Moves of steps

    def begin(self, moves: Iterable[TierMove]) -> tuple[BegunMove, ...]:
        """Note that a step will perform moves. The places that they write have no keys until ``end``."""
        with self._lock:
            return tuple([self._begin(move) for move in moves])

    def _begin(self, move: TierMove) -> BegunMove:
        host = self._host[move.number]
        if move.out:
            return BegunMove(move, host.begin(move.kept))
        begun = BegunMove(move, host.contents.get(move.kept))
        self._device[move.number].begin_move(move.place, begun)
        return begun

    def end(self, begun: Iterable[BegunMove]) -> None:
        """Note that a step has performed moves."""
        with self._lock:
            for each in begun:
                move, content = each
                places = self._host[move.number]
                if not move.out:
                    places.touch(move.kept)
                    self._device[move.number].end_move(move.place, each, content.key if content is not None else b"")
                elif content is not None:
                    places.end(move.kept, content, move.key)

    def begin_epoch(self) -> None:
        """Note that moves that have not ended never will."""
        with self._lock:
            for own in self._device:
                own.forget_moves()

    def give_back(self, number: int, places: Iterable[int]) -> None:
        """Note that places of host memory lose what they hold."""
        with self._lock:
            for place in places:
                self._host[number].forget(place)

    # Copies between host memory and the disk

    def begin_write(self, number: int, host: int, disk: int) -> tuple[Content | None, Content]:
        """Note that a copy to disk begins. Return what it copies, None if that is not known, and the copy."""
        with self._lock:
            return self._host[number].at(host), self._disk[number].begin(disk)

    def end_write(self, number: int, host: int, disk: int, copied: tuple[Content | None, Content]) -> None:
        """Note that a copy to disk is there. It counts if its source has not changed meanwhile."""
        with self._lock:
            source, copy = copied
            if source is not None and self._host[number].at(host) is source:
                self._disk[number].end(disk, copy, source.key)

    def copied_back(self, number: int, host: int, disk: int) -> None:
        """Note that a place in host memory has been written with what a place on disk holds."""
        with self._lock:
            source, places = self._disk[number].at(disk), self._host[number]
            places.end(host, places.begin(host), source.key if source is not None else b"")
            self._disk[number].touch(disk)

    def lose(self, number: int, disk: int) -> None:
        """Note that a place on disk cannot be read."""
        with self._lock:
            self._disk[number].forget(disk)

    def lose_disk(self) -> None:
        """Note that nothing on disk can be read any more."""
        with self._lock:
            self._disk = self._nothing()

    def pages(self, epoch: Epoch) -> Sequence[HeldPlaces]:
        """Return what all places hold, in messages for the engine of this epoch."""
        with self._lock:
            found = [(number, Tier.DEVICE, list(own.held().items())) for number, own in enumerate(self._device)] + [
                (number, tier, list(places.keys.items()))
                for tier, classes in ((Tier.HOST, self._host), (Tier.DISK, self._disk))
                for number, places in enumerate(classes)
            ]
        return [
            HeldPlaces(
                epoch=epoch,
                memory_class=number,
                tier=tier,
                places=tuple([place for _, place in page]),
                keys=b"".join([key for key, _ in page]),
            )
            for number, tier, held in found
            for page in [held[begin : begin + MAX_HELD] for begin in range(0, len(held), MAX_HELD)]
        ]

    def _nothing(self) -> list[_Places]:
        return [_Places() for _ in self._device_places]
