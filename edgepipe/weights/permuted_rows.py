"""Rows of q and k as llama.cpp's converter writes them, and parts of them in Hugging Face's order.

Within a head of 2 P rows, P rotary pairs, the file has both halves of a pair side by side::

    file          p0 lower, p0 upper, p1 lower, p1 upper, ...
    Hugging Face  p0 lower, p1 lower, ..., p0 upper, p1 upper, ...

A row's blocks stay together, so quantised rows move as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgepipe.spec.tensors import TensorInfo

Bytes = npt.NDArray[np.uint8]
ReadBytes = Callable[[int, int], Bytes]
"""Reads a number of the tensor's bytes from an offset, as they are in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutedRows:
    """Sizes of a permuted tensor."""

    row_bytes: int
    pairs: int  # rotary pairs of a head

    @classmethod
    def of(cls, info: TensorInfo, num_heads: int) -> PermutedRows:
        """Return the sizes of a tensor whose rows are a multiple of two for each head."""
        num_rows = info.shape[0]
        return cls(row_bytes=info.num_bytes // num_rows, pairs=num_rows // num_heads // 2)

    def read(self, offset: int, num_bytes: int, read_bytes: ReadBytes) -> Bytes:
        """Read a range of the tensor in Hugging Face's order: whole heads at once, of others the pairs with its rows.

        So a range that starts or ends within a head reads at most twice the rows of that part.
        """
        first, end = offset // self.row_bytes, -(-(offset + num_bytes) // self.row_bytes)
        parts = [self._read_rows(start, stop, read_bytes) for start, stop in self._runs(first, end)]
        joined = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])
        skipped = offset - first * self.row_bytes
        return joined[skipped : skipped + num_bytes]

    def _runs(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Split logical rows into runs of whole heads, and runs within one half of a head."""
        head = 2 * self.pairs
        while first < end:
            whole = 0 if first % head else (end - first) // head * head
            stop = first + whole if whole else min(end, (first // self.pairs + 1) * self.pairs)
            yield first, stop
            first = stop

    def _read_rows(self, first: int, end: int, read_bytes: ReadBytes) -> Bytes:
        """Read one of the runs."""
        head = 2 * self.pairs
        if first % head == 0 and (end - first) % head == 0:
            data = read_bytes(first * self.row_bytes, (end - first) * self.row_bytes)
            return unpermute_rows(data, end - first, (end - first) // head)
        start = first // head * head  # first row of the head
        upper, pair = divmod(first - start, self.pairs)
        count = 2 * (end - first) - 1  # rows from the first pair's row to the last pair's
        data = read_bytes((start + 2 * pair + upper) * self.row_bytes, count * self.row_bytes)
        return data.reshape(count, self.row_bytes)[::2].reshape(-1)


def unpermute_rows(data: Bytes, num_rows: int, num_heads: int) -> Bytes:
    """Reorder rows of whole heads from the file's order to Hugging Face's: (head, pair, half) to (head, half, pair)."""
    rows = data.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
