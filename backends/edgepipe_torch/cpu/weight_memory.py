"""Memory of weights in pages of 2 MB, where the system has such pages (Linux).

A product reads every weight once. With pages of 4 KB, a core translates an address for each 64 lines of a cache, and
what it fetches ahead by itself ends with each page.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 64 << 20  # a chunk of addresses; memory is used by page, when it is first written
_LINE_BYTES = 64  # a line of the cache


class WeightMemory:
    """Cuts arrays from large runs of memory, one after the other. A run is freed with the last of its arrays.

    The arrays of one model lie together, so small weights share pages. At most one page of a run is partly used.
    """

    def __init__(self) -> None:
        self._free: npt.NDArray[np.uint8] = np.empty(0, np.uint8)  # rest of the newest run

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an array without values, which begins with a cache line."""
        size = prod(shape) * dtype.itemsize
        if not size or not _has_large_pages():
            return torch.empty(*shape, dtype=dtype)
        whole = -(-size // _LINE_BYTES) * _LINE_BYTES
        if whole > len(self._free):
            self._free = _run(max(whole, _CHUNK_BYTES))
        found, self._free = self._free[:size], self._free[whole:]
        return torch.from_numpy(found).view(dtype).view(*shape)


def _has_large_pages() -> bool:
    return sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE")


def _run(size: int) -> npt.NDArray[np.uint8]:
    """Return memory that begins with a page. The system is asked for large pages, but may have none left."""
    memory = mmap.mmap(-1, size + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = np.frombuffer(memory, np.uint8)
    start = -found.ctypes.data % _PAGE_BYTES
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return found[start : start + size]
