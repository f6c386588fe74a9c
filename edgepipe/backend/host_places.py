"""Host memory below a device: places of blocks and states, whose memory the system gets back one by one."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

logger = logging.getLogger(__name__)

# macOS keeps pages after MADV_DONTNEED; Linux frees them at once.
_GIVE_BACK = getattr(mmap, "MADV_FREE_REUSABLE", None) or getattr(mmap, "MADV_DONTNEED", None)
_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)  # a huge page is freed only as a whole


class PinningFailed(Exception):
    """The system pins no more memory. The text says why, for people."""


class Pins(Protocol):
    """Pins memory, so that a device copies it at full speed and beside computing."""

    def pin(self, memory: memoryview) -> None:
        """Pin whole pages. Raises PinningFailed."""
        ...

    def unpin(self, memory: memoryview) -> None:
        """Release what ``pin`` pinned."""
        ...


class HostPlaces:
    """The places of every memory class, each on pages of its own. The system allocates pages when they are written.

    A thread of its own frees memory: unpinning and freeing a gigabyte takes a good part of a second.
    """

    def __init__(self, place_bytes: Sequence[int], num_places: Sequence[int], pins: Pins | None = None) -> None:
        """Both by memory class, see ``TierMove.number``. ``pins``: None: memory is not pinned. Raises MemoryError."""
        self._place_bytes = tuple(place_bytes)
        self.strides = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in place_bytes]
        self._maps = [_mapped(size * count) for size, count in zip(self.strides, num_places, strict=True)]
        self._pins = pins
        self._pins_more = pins is not None  # becomes False when pinning fails
        self._lock = threading.Lock()  # guards all fields below
        self._pinned: set[tuple[int, int]] = set()  # class and place
        self._leaving: set[tuple[int, int]] = set()  # given back, and not yet free
        self._jobs: SimpleQueue[tuple[int, Sequence[int]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None  # started by the first ``give_back``

    def memory(self, number: int) -> memoryview:
        """Return all places of a class, ``strides[number]`` bytes each."""
        return memoryview(self._maps[number])

    def place(self, number: int, place: int) -> memoryview:
        """Return a place's bytes, for use from now on. May be called on any thread."""
        with self._lock:
            self._leaving.discard((number, place))
        begin = place * self.strides[number]
        return self.memory(number)[begin : begin + self._place_bytes[number]]

    def prepare(self, number: int, place: int) -> bool:
        """Prepare a place for copies by the device, from now on. Return whether its memory is pinned."""
        with self._lock:
            self._leaving.discard((number, place))
            if (number, place) in self._pinned:
                return True
            if self._pins is None or not self._pins_more:
                return False
            try:
                self._pins.pin(self._pages(number, place))
            except PinningFailed as exc:
                self._pins_more = False
                logger.warning("idle conversations are copied to and from host memory more slowly: %s", exc)
                return False
            self._pinned.add((number, place))
            return True

    def give_back(self, number: int, places: Sequence[int]) -> None:
        """Free the memory of places soon, unless they are used before; what they hold is lost."""
        with self._lock:
            self._leaving.update((number, place) for place in places)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="host-places", daemon=True)
            self._thread.start()
        self._jobs.put((number, places))

    def close(self) -> None:
        """Free what was given back, and unpin all. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()
        with self._lock:
            for number, place in sorted(self._pinned):
                self._unpin(number, place)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            number, places = job
            for place in places:
                with self._lock:
                    if (number, place) in self._leaving:
                        self._leaving.discard((number, place))
                        self._free(number, place)

    def _free(self, number: int, place: int) -> None:
        self._unpin(number, place)
        if _GIVE_BACK is not None and (size := self.strides[number]):
            self._maps[number].madvise(_GIVE_BACK, place * size, size)

    def _unpin(self, number: int, place: int) -> None:
        if self._pins is not None and (number, place) in self._pinned:
            self._pinned.discard((number, place))
            self._pins.unpin(self._pages(number, place))

    def _pages(self, number: int, place: int) -> memoryview:
        size = self.strides[number]
        return self.memory(number)[place * size : (place + 1) * size]


def _mapped(num_bytes: int) -> mmap.mmap:
    """Reserve addresses. Raises MemoryError."""
    try:
        found = mmap.mmap(-1, max(mmap.PAGESIZE, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise MemoryError from exc
    if _NO_HUGE_PAGES is not None:
        try:
            found.madvise(_NO_HUGE_PAGES)
        except OSError:
            pass  # a kernel without huge pages
    return found
