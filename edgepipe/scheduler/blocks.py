"""Allocator of KV blocks, with one numbering for all stages. CPUs and MLX attend over consecutive ids as views.

A sequence's table grows at its end, so each sequence has a *claim* on the free blocks right behind its last block. The
allocator places other tables beyond the claims. Where space is short, both get a proportional share::

    |AAAA|-- A's claim --|BB|-- B's claim --|          free          |

All state is in arrays over all blocks. A call costs a few numpy passes over them, however fragmented the pool is. Calls
for one block access single elements instead, which is cheaper than a pass.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import BlockRun
from edgepipe.errors import KVCacheFull

Ids = npt.NDArray[np.int64]
"""``[n]``: block ids, or numbers of blocks."""

Mask = npt.NDArray[np.bool_]
"""``[num_blocks]``: one flag per block."""

NEAR_BLOCKS = 128
"""Blocks of growth that justify an eviction: 2,048 tokens in blocks of 16, longer than most answers."""


class Extents(NamedTuple):
    """Maximal stretches of consecutive blocks."""

    starts: Ids
    lengths: Ids

    def pick(self, indices: Ids | Mask) -> Extents:
        """Return the extents at these indices, in that order."""
        return Extents(self.starts[indices], self.lengths[indices])


def extents_of(mask: Mask) -> Extents:
    """Find the stretches of set flags, ascending."""
    padded = np.zeros(len(mask) + 2, np.bool_)
    padded[1:-1] = mask
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    return Extents(edges[::2], edges[1::2] - edges[::2])


def ids_of(starts: Ids, lengths: Ids) -> Ids:
    """List the blocks of several runs, one run after the other."""
    befores: Ids = np.cumsum(lengths) - lengths
    ids: Ids = np.repeat(starts - befores, lengths)
    return ids + np.arange(len(ids))


def blocks_of(table: Sequence[BlockRun]) -> Ids:
    """List the blocks of a table in its order."""
    if len(table) == 1:
        return np.arange(table[0].start, table[0].start + table[0].count)
    starts = np.fromiter([run.start for run in table], np.int64, len(table))
    return ids_of(starts, np.fromiter([run.count for run in table], np.int64, len(table)))


def _runs_of(extents: Extents) -> tuple[BlockRun, ...]:
    """Convert extents to runs. Setting the slots without ``__init__`` halves the time for 8,192 runs."""
    runs = tuple(map(object.__new__, repeat(BlockRun, len(extents.starts))))
    for slot, values in (("start", extents.starts), ("count", extents.lengths)):
        fill: Callable[[BlockRun, int], None] = BlockRun.__dict__[slot].__set__
        deque(map(fill, runs, values.tolist()), maxlen=0)
    return runs


def _split_longest(extents: Extents, count: int, losses: Ids | None = None) -> tuple[Extents, Extents, int]:
    """Split extents into the longest ones, which a table of ``count`` blocks takes whole, and the others.

    Returns both, and how many blocks are still needed: one of the others has that many. ``losses`` ``[extents]``
    decides between extents of equal length. Requires that no extent has ``count`` blocks, but all together have.
    """
    sizes = np.bincount(extents.lengths)
    totals = np.cumsum((sizes * np.arange(len(sizes)))[::-1])[::-1]  # blocks in extents of this length or longer
    shortest = int(np.flatnonzero(totals >= count)[-1])
    whole = extents.lengths > shortest
    count -= int(extents.lengths[whole].sum())
    num_alike = (count - 1) // shortest
    alike = np.flatnonzero(extents.lengths == shortest)
    if losses is not None and num_alike:
        alike = alike[np.argpartition(losses[alike], num_alike - 1)]
    whole[alike[:num_alike]] = True
    return extents.pick(whole), extents.pick(~whole), count - num_alike * shortest


def _kept_clear(claims: Ids, growth: int, slack: Ids) -> Ids:
    """Divide ``slack`` blocks between the claim in front of a new run and the run's own growth.

    Returns how many blocks stay clear for the claim: the whole claim where both fit, else its share.
    """
    wanted = np.maximum(claims + growth, 1)
    return np.where(wanted > slack, slack * claims // wanted, claims)


class BlockAllocator:
    """Allocates runs of blocks and counts references. A block without references is free."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool has at least one block")
        self.num_blocks = num_blocks
        self._references = array("q", bytes(8 * num_blocks))
        # Blocks that tables may still need; the index is the block behind the table's end.
        self._claims = array("q", bytes(8 * (num_blocks + 1)))
        self._free = bytearray(b"\1" * num_blocks)  # 1 where the block has no reference
        self._all_references = np.frombuffer(self._references, np.int64)  # the same memory, for many blocks at once
        self._all_claims = np.frombuffer(self._claims, np.int64)
        self._all_free = np.frombuffer(self._free, np.bool_)
        self._free_blocks = num_blocks

    @property
    def free_blocks(self) -> int:
        """Number of blocks without references."""
        return self._free_blocks

    def is_free(self, block: int) -> bool:
        """Return whether the block has no reference."""
        return self._free[block] == 1

    def free_behind(self, block: int) -> int:
        """Count the consecutive free blocks right behind this block."""
        return self._num_free(block + 1, most=self.num_blocks)

    def allocate(self, count: int, *, room: int) -> tuple[BlockRun, ...]:
        """Allocate ``count`` blocks for a new table, in one run where a free extent is long enough.

        ``room``: blocks that the table may grow to. The allocator keeps blocks behind the table clear where possible.
        Raises KVCacheFull, before it takes any block, if fewer than ``count`` blocks are free.
        """
        self._check(count)
        runs = self._gather(count, max(room, count))
        self._claim(runs[-1], max(room - count, 0))
        return runs

    def extend(self, table: Sequence[BlockRun], count: int, *, room: int) -> tuple[BlockRun, ...]:
        """Allocate ``count`` more blocks for a table, right behind its last where those are free. Raises KVCacheFull.

        ``room``: additional blocks that the table may need, including ``count``.
        """
        self._check(count)
        end = self.end_claim(table)
        adjoining = self._num_free(end, most=count)
        runs = tuple[BlockRun, ...]()
        if adjoining:
            self._take_run(end, adjoining)
            runs = (BlockRun(end, adjoining),)
        if adjoining < count:
            runs += self._gather(count - adjoining, max(room, count) - adjoining)
        self._claim(runs[-1], max(room - count, 0))
        return runs

    def take(self, blocks: Ids) -> None:
        """Add the first reference to free blocks."""
        self._all_references[blocks] = 1
        self._all_free[blocks] = False
        self._free_blocks -= len(blocks)

    def retain(self, blocks: Ids) -> None:
        """Add a reference to blocks in use. Raises RuntimeError if a block is free."""
        if self._all_free[blocks].any():
            raise RuntimeError(f"a free block cannot be shared: {blocks}")
        self._all_references[blocks] += 1

    def retain_one(self, block: int) -> None:
        """Add a reference to one block in use. Raises RuntimeError if the block is free."""
        if self._free[block]:
            raise RuntimeError(f"a free block cannot be shared: {block}")
        self._references[block] += 1

    def release(self, table: Sequence[BlockRun]) -> tuple[Ids, Ids]:
        """Remove a reference from each block of a table, and the table's claim.

        Returns the blocks and the remaining references of each.
        """
        if table:
            self.end_claim(table)
        blocks = blocks_of(table)
        return blocks, self.drop(blocks)

    def drop(self, blocks: Ids, times: Ids | int = 1) -> Ids:
        """Remove ``times`` references from each block and return the remaining ones; claims do not change.

        Raises RuntimeError, before it drops any reference, if a block has fewer.
        """
        left = self._all_references[blocks] - times
        freed = left <= 0
        num_freed = int(np.count_nonzero(freed))
        if num_freed + np.count_nonzero(left) > len(blocks):  # some are below 0
            raise RuntimeError(f"a block was given back twice: {blocks}")
        self._all_references[blocks] = left
        self._all_free[blocks] = freed
        self._free_blocks += num_freed
        return left

    def drop_one(self, block: int) -> None:
        """Remove one reference from one block. Raises RuntimeError if the block is free."""
        if self._free[block]:
            raise RuntimeError(f"a block was given back twice: {block}")
        self._references[block] -= 1
        if not self._references[block]:
            self._free[block] = 1
            self._free_blocks += 1

    def end_claim(self, table: Sequence[BlockRun]) -> int:
        """Remove a table's claim and return the block behind the table."""
        end = table[-1].start + table[-1].count
        self._claims[end] = 0
        return end

    def has_roomy_run(self, count: int, *, room: int) -> bool:
        """Return whether ``allocate`` finds one run with up to ``NEAR_BLOCKS`` free blocks for the growth of the new
        table and of the table in front of it."""
        extents = extents_of(self._all_free)
        if extents.lengths.max(initial=0) < count:
            return False
        start = self._place(extents, count, room)
        extent = self._free.rfind(0, 0, start) + 1
        behind = min(room - count, NEAR_BLOCKS)
        kept = min(self._claims[extent], NEAR_BLOCKS)
        return start - extent >= kept and self._num_free(start + count, most=behind) == behind

    def choose_available(self, values: Ids, count: int, *, room: int) -> Extents:
        """Choose free and idle blocks for a new table: one run if an extent has ``count`` blocks, else the longest.

        ``values`` ``[num_blocks]``: loss of evicting an idle block, above 0; 0 for every other block. Among the runs
        with room to grow, the lowest loss wins.
        """
        extents = extents_of(self._all_free | (values > 0))
        lost = np.zeros(self.num_blocks + 1, np.int64)  # loss of all blocks before each
        np.cumsum(values, out=lost[1:])
        whole = Extents(extents.starts[:0], extents.lengths[:0])
        growth = room - count
        if extents.lengths.max(initial=0) < count:
            losses = lost[extents.starts + extents.lengths] - lost[extents.starts]
            whole, extents, count = _split_longest(extents, count, losses)
        start = self._cheapest_window(extents, lost[count:] - lost[:-count], count, growth)
        return Extents(np.append(whole.starts, start), np.append(whole.lengths, count))

    def take_extents(self, extents: Extents, *, growth: int) -> tuple[BlockRun, ...]:
        """Take free blocks for a new table and claim ``growth`` more behind the last of them."""
        self.take(ids_of(*extents))
        runs = _runs_of(extents)
        self._claim(runs[-1], growth)
        return runs

    def _cheapest_window(self, extents: Extents, losses: Ids, count: int, growth: int) -> int:
        """Return the start of the ``count`` blocks with the lowest loss. At least one extent is long enough.

        ``losses``: loss of the ``count`` blocks from each block on. Claims and ``growth`` count up to ``NEAR_BLOCKS``.
        Growth is halved until an extent has room for it.
        """
        growth = min(growth, NEAR_BLOCKS)
        extents = extents.pick(extents.lengths >= count)
        claims = np.minimum(self._all_claims[extents.starts], NEAR_BLOCKS)
        clear = _kept_clear(claims, growth, extents.lengths - count)
        starts, lengths = extents.starts + clear, extents.lengths - clear
        while growth > lengths.max() - count:
            growth //= 2
        fits = lengths >= count + growth
        windows = ids_of(starts[fits], lengths[fits] - (count + growth - 1))
        return int(windows[losses[windows].argmin()])

    def _check(self, count: int) -> None:
        if count < 1:
            raise ValueError("at least one block")
        if count > self._free_blocks:
            raise KVCacheFull(fact=f"{count} blocks are needed, {self._free_blocks} of {self.num_blocks} are free")

    def _num_free(self, start: int, *, most: int) -> int:
        """Count the consecutive free blocks from ``start`` on, at most ``most``."""
        end = self._free.find(0, start, start + most)
        return (min(start + most, self.num_blocks) if end < 0 else end) - start

    def _claim(self, last: BlockRun, count: int) -> None:
        self._claims[last.start + last.count] = count

    def _gather(self, count: int, room: int) -> tuple[BlockRun, ...]:
        """Take one run, or the longest free extents until there are enough blocks."""
        if count == self._free_blocks == 1:  # no choice: the usual case in a full pool
            start = self._free.find(1)
            self._take_run(start, 1)
            return (BlockRun(start, 1),)
        extents, runs = extents_of(self._all_free), tuple[BlockRun, ...]()
        if extents.lengths.max() < count:
            whole, extents, rest = _split_longest(extents, count)
            self.take(ids_of(*whole))
            runs, room, count = _runs_of(whole), room - count + rest, rest
        start = self._place(extents, count, room)
        self._take_run(start, count)
        return (*runs, BlockRun(start, count))

    def _place(self, extents: Extents, count: int, room: int) -> int:
        """Return the start for a run of ``count`` blocks that may grow to ``room``. One extent must be long enough."""
        extents = extents.pick(extents.lengths >= count)
        claims = self._all_claims[extents.starts]
        shortages = np.maximum(claims + room - extents.lengths, 0)
        least = np.flatnonzero(shortages == shortages.min())
        best = least[extents.lengths[least].argmin()]
        clear = _kept_clear(claims[best], room - count, extents.lengths[best] - count)
        return int(extents.starts[best] + clear)

    def _take_run(self, start: int, count: int) -> None:
        """Take ``count`` free blocks from ``start`` on."""
        if count == 1:
            self._references[start], self._free[start] = 1, 0
        else:
            self._all_references[start : start + count] = 1
            self._all_free[start : start + count] = False
        self._free_blocks -= count
