"""The keys of the blocks and snapshots that a stage's places below the device hold.

The engine's tables say what is where, and end with the engine's process. A stage that lives on knows it by these keys
and tells the next engine, which takes over what all stages hold alike (``scheduler/held_places.py``).

A place has a key only from the end of a write on, and loses it when another write begins. So a key is never that of
bytes that are half written, whatever broke off. A write that ends late counts only if no other has begun since.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edgepipe.backend.types import TierMove
from edgepipe.ids import Epoch
from edgepipe.wire.plans import HeldPlaces
from edgepipe.wire.sizes import MAX_HELD


class Content:
    """What was written to a place at one time."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key = b""  # empty while it is being written


class _Places:
    """The places of one memory class in one tier. At most one place has each key: the newest."""

    def __init__(self) -> None:
        self._contents: dict[int, Content] = {}
        self.keys: OrderedDict[bytes, int] = OrderedDict()  # longest unused first

    def begin(self, place: int) -> Content:
        self.forget(place)
        content = self._contents[place] = Content()
        return content

    def end(self, place: int, content: Content, key: bytes) -> None:
        if not key or self._contents.get(place) is not content:
            return
        if (other := self.keys.get(key)) is not None:
            self.forget(other)
        content.key = key
        self.keys[key] = place

    def at(self, place: int) -> Content | None:
        content = self._contents.get(place)
        return content if content is not None and content.key else None

    def touch(self, place: int) -> None:
        if (content := self.at(place)) is not None:
            self.keys.move_to_end(content.key)

    def forget(self, place: int) -> None:
        content = self._contents.pop(place, None)
        if content is not None and content.key:
            del self.keys[content.key]


class BegunMove(NamedTuple):
    """A planned move between the device and host memory."""

    move: TierMove
    content: Content | None  # None: back to the device


class HeldKeys:
    """The keys of one stage's places in host memory and on disk. May be called on any thread."""

    def __init__(self, num_classes: int) -> None:
        """``num_classes``: memory classes, see ``TierMove.number``."""
        self._lock = threading.Lock()
        self._num_classes = num_classes
        self._host, self._disk = self._nothing(), self._nothing()

    def forget_all(self) -> None:
        """Forget all keys."""
        with self._lock:
            self._host, self._disk = self._nothing(), self._nothing()

    # Moves of steps

    def begin(self, moves: Iterable[TierMove]) -> tuple[BegunMove, ...]:
        """Note that a step will perform moves. The places that they write have no keys until ``end``."""
        with self._lock:
            return tuple(
                [BegunMove(move, self._host[move.number].begin(move.kept) if move.out else None) for move in moves]
            )

    def end(self, begun: Iterable[BegunMove]) -> None:
        """Note that a step has performed moves."""
        with self._lock:
            for move, content in begun:
                places = self._host[move.number]
                if content is None:
                    places.touch(move.kept)
                else:
                    places.end(move.kept, content, move.key)

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
            found = [
                (number, on_disk, list(places.keys.items()))
                for on_disk, tier in ((False, self._host), (True, self._disk))
                for number, places in enumerate(tier)
            ]
        return [
            HeldPlaces(
                epoch=epoch,
                memory_class=number,
                on_disk=on_disk,
                places=tuple([place for _, place in page]),
                keys=b"".join([key for key, _ in page]),
            )
            for number, on_disk, held in found
            for page in [held[begin : begin + MAX_HELD] for begin in range(0, len(held), MAX_HELD)]
        ]

    def _nothing(self) -> list[_Places]:
        return [_Places() for _ in range(self._num_classes)]
