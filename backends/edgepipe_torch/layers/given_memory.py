"""Host memory in pieces of equal size, each of which can be given back to the system."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import torch

# macOS keeps pages after MADV_DONTNEED; Linux frees them at once.
_GIVE_BACK = getattr(mmap, "MADV_FREE_REUSABLE", None) or getattr(mmap, "MADV_DONTNEED", None)
_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)  # a huge page is freed only as a whole


class GivenMemory:
    """Pieces one behind another. The system allocates their pages when they are written."""

    def __init__(self, num_pieces: int, piece_bytes: int) -> None:
        """Raises MemoryError."""
        self.piece_bytes = piece_bytes
        size = num_pieces * piece_bytes
        try:
            self._map = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as exc:
            raise MemoryError from exc
        if _NO_HUGE_PAGES is not None:
            try:
                self._map.madvise(_NO_HUGE_PAGES)
            except OSError:
                pass  # a kernel without huge pages
        self.tensor = (
            torch.frombuffer(self._map, dtype=torch.uint8, count=size) if size else torch.empty(0, dtype=torch.uint8)
        )

    def give_back(self, places: Sequence[int]) -> None:
        """Free the whole pages of these pieces. What they hold is lost."""
        if _GIVE_BACK is None:
            return
        page = mmap.PAGESIZE
        for first, end in _runs(sorted(places)):
            begin, stop = -(-first * self.piece_bytes // page) * page, end * self.piece_bytes // page * page
            if begin < stop:
                self._map.madvise(_GIVE_BACK, begin, stop - begin)


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs ``[first, end)`` of ascending places."""
    first = end = -1
    for place in places:
        if place != end:
            if first >= 0:
                yield first, end
            first = place
        end = place + 1
    if first >= 0:
        yield first, end
