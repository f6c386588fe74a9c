"""Keys and values of one layer in a pool of physical blocks.

The layout is ``[kv heads, slots, head dim]``: per head, a run of blocks is a dense matrix, which MLX's products take as
a view on every device. With slots first, its CPU device would copy the whole run in every step.

MLX arrays are values: an update makes a new array, which reuses the old array's memory if it has no other reference
(measured: 0.02 ms to write into 50 MB). So the pool holds the only references, one update writes all rows of a step
before any view is taken, and views live no longer than their step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np

from edgepipe.backend.step_layout import RowLayout
from edgepipe.backend.types import BlockCopy


class RestArrays(NamedTuple):
    """The tokens [K] of a step whose lower bits later steps may read, and the slots [K] of these, uint32."""

    tokens: mx.array
    slots: mx.array


class NewestPart(NamedTuple):
    """The newest tokens of a row, from the position ``begin`` on."""

    begin: int  # counts from the sequence's first token
    rests: Sequence[mx.array]  # lower bits [heads, length - begin, D / 2] of keys and, where they are apart, of values
    twice: bool  # some of the row's tokens see them with 4 bits


class Paged(NamedTuple):
    """A layer's pool [kv heads, slots, n], as values or codes."""

    keys: mx.array
    values: mx.array  # the keys themselves, if values are a part of them
    scales: tuple[mx.array, mx.array] | None = None  # scales of the codes: those of keys, those of values


class KVPool(Protocol):
    """One layer's keys and values, in any form. Belongs to the compute thread."""

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All that the pool holds, for evaluation only; do not keep them."""
        ...

    @property
    def paged(self) -> Paged:
        """All tokens, for kernels that read blocks themselves; do not keep the arrays."""
        ...

    def write(self, slots: mx.array, keys: mx.array, values: mx.array, rests: RestArrays | None) -> None:
        """Write the step's keys and values [T, kv heads, 1, D] to ``slots`` [T] uint32.

        ``rests``: where lower bits go, if the pool has them.
        """
        ...

    def read(self, row: RowLayout, first: int, blocks: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return keys and values [1, kv heads, length - first, D] of a sequence's tokens ``[first, length)``.

        ``blocks`` [n], from the block with ``first`` on, if the sequence does not lie in one run.
        """
        ...

    def turned(self, vectors: mx.array) -> mx.array:
        """Rotate queries [..., D] as the keys are that ``read`` returns, or sums of its values [..., V] back again."""
        ...

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, with the result of copying one after another."""
        ...


@runtime_checkable
class SpanPool(KVPool, Protocol):
    """A pool whose newest tokens have codes of 8 bits, see ``kv_forms``."""

    def rests_at(self, slots: mx.array) -> Sequence[mx.array]:
        """Return the lower bits in ``slots`` [n], as ``NewestPart.rests``."""
        ...

    def rests_of(self, first: int, end: int) -> Sequence[mx.array]:
        """Return the lower bits of the tokens ``[first, end)`` of the last ``write``."""
        ...

    def read_newest(
        self, row: RowLayout, first: int, blocks: mx.array | None, newest: NewestPart
    ) -> tuple[mx.array, mx.array]:
        """Return what ``read`` does, and behind it the newest tokens with 8 bits, once more or only there."""
        ...


class KVStorage:
    """Keys and values in the compute dtype."""

    def __init__(self, *, num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int, dtype: mx.Dtype) -> None:
        self._block_size = block_size
        self._heads = head_rows(num_kv_heads)
        shape = (num_kv_heads, num_blocks * block_size, head_dim)
        self._keys = mx.zeros(shape, dtype)
        self._values = mx.zeros(shape, dtype)
        mx.eval(self._keys, self._values)

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        """Keys and values, for evaluation only; do not keep them."""
        return self._keys, self._values

    @property
    def paged(self) -> Paged:
        """See ``KVPool``."""
        return Paged(self._keys, self._values)

    def write(self, slots: mx.array, keys: mx.array, values: mx.array, rests: RestArrays | None) -> None:
        """Write the step's keys and values [T, kv heads, 1, D] to ``slots`` [T]."""
        self._keys[self._heads, slots] = keys.squeeze(2).swapaxes(0, 1)
        self._values[self._heads, slots] = values.squeeze(2).swapaxes(0, 1)

    def read(self, row: RowLayout, first: int, blocks: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return keys and values [1, kv heads, length - first, D] of a sequence's tokens ``[first, length)``.

        A view if the sequence lies in one run. Otherwise gathers its ``blocks`` [n], from the block with ``first`` on.
        """
        keys, values = (
            read_tokens(pool, row, first, blocks, self._block_size)[None] for pool in (self._keys, self._values)
        )
        return keys, values

    def turned(self, vectors: mx.array) -> mx.array:
        """Return the vectors: keys and values are as they were written."""
        return vectors

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, with the result of copying one after another.

        Reads are evaluated before the update: a pending read would reference the old array, and the update would copy
        the pool. The step evaluates the update: a device that has just told of a read may still hold the array.
        """
        for wave in independent(copies):
            sources, targets = copied_slots(wave, self._block_size)
            keys, values = self._keys[self._heads, sources], self._values[self._heads, sources]
            mx.eval(keys, values)
            self._keys[self._heads, targets] = keys
            self._values[self._heads, targets] = values


def stored_block(pool: KVPool, block: int, block_size: int) -> tuple[mx.array, ...]:
    """Return a block of all arrays of a pool [kv heads, slots, n]. Evaluate it before the pool's next update."""
    slots = mx.arange(block * block_size, (block + 1) * block_size, dtype=mx.uint32)
    return tuple(array[head_rows(array.shape[0]), slots] for array in pool.arrays)


def restore_block(pool: KVPool, block: int, block_size: int, values: Sequence[mx.array]) -> None:
    """Write arrays like those of ``stored_block`` to a block. The step evaluates the update."""
    slots = mx.arange(block * block_size, (block + 1) * block_size, dtype=mx.uint32)
    for array, copied in zip(pool.arrays, values, strict=True):
        array[head_rows(array.shape[0]), slots] = copied


def head_rows(count: int) -> mx.array:
    """Return [heads, 1] uint32, an index of all heads beside one of slots.

    MLX makes such an index by a kernel for every access that leaves it out, and two kernels more if the types differ.
    """
    rows = mx.arange(count, dtype=mx.uint32)[:, None]
    mx.eval(rows)
    return rows


def read_tokens(pool: mx.array, row: RowLayout, first: int, blocks: mx.array | None, block_size: int) -> mx.array:
    """Return a sequence's tokens ``[first, length)`` of a pool [kv heads, slots, D]; as for ``KVPool.read``."""
    if blocks is None:
        return pool[:, row.start_slot + first : row.start_slot + row.length]
    heads, slots, dim = pool.shape
    picked = mx.take(pool.reshape(heads, slots // block_size, block_size * dim), blocks, axis=1)
    skipped = first // block_size * block_size
    return picked.reshape(heads, -1, dim)[:, first - skipped : row.length - skipped]


def copied_slots(copies: Sequence[BlockCopy], block_size: int) -> tuple[mx.array, mx.array]:
    """Return the slots of the source blocks and of the target blocks, in order, uint32."""

    def slots(blocks: list[int]) -> mx.array:
        within = np.arange(block_size, dtype=np.uint32)
        return mx.array((np.array(blocks, np.uint32)[:, None] * block_size + within).reshape(-1))

    return slots([copy.source for copy in copies]), slots([copy.target for copy in copies])


def independent(copies: Sequence[BlockCopy]) -> list[list[BlockCopy]]:
    """Split the copies, in order, into groups whose copies can run at once.

    Within a group, no block is read after a write or written twice.
    """
    groups: list[list[BlockCopy]] = []
    written: set[int] = set()
    for copy in copies:
        if not groups or copy.source in written or copy.target in written:
            groups.append([])
            written = set()
        groups[-1].append(copy)
        written.add(copy.target)
    return groups
