"""The KV pool: tables get blocks from it, and what nobody needs any more is kept for prompts that begin alike.

A block that is full, and whose step has retired, is known by the *key* of all tokens up to its end. The cache refers
to it like a table does; while nobody else does, it is idle, and the one that has been idle longest makes room first.

The cache outlives an epoch (``carry_over``): what running sequences had computed is found by their tokens again. Where
a stage has lost its memory its part of every block is missing, while later stages still have theirs (``lose``). Such a
block is *stale*: whoever wants it computes its tokens again, though only up to the last slice that lacks them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from edgepipe.backend.types import BlockRun
from edgepipe.errors import KVCacheFull
from edgepipe.ids import SequenceId
from edgepipe.scheduler.blocks import BlockAllocator

Key = bytes
"""Stands for all tokens from a sequence's first to a block's last. Two texts never share one: it is a hash that nobody
can make collide, since whoever could would read other people's prompts."""


def next_key(before: Key, token_ids: Sequence[int]) -> Key:
    """The key of a full block with these tokens after the block with key ``before`` (empty at the first)."""
    return blake2b(before + array("I", token_ids).tobytes(), digest_size=16).digest()


def as_runs(blocks: Iterable[int]) -> tuple[BlockRun, ...]:
    """Blocks in their order, neighbours joined."""
    runs: list[BlockRun] = []
    for block in blocks:
        if runs and runs[-1].start + runs[-1].count == block:
            runs[-1] = BlockRun(runs[-1].start, runs[-1].count + 1)
        else:
            runs.append(BlockRun(block, 1))
    return tuple(runs)


class KVPool:
    """Blocks of a pipeline. ``contiguous``: tables shall be runs, even if the cache loses a block for it."""

    def __init__(self, num_blocks: int, *, contiguous: bool) -> None:
        self.num_blocks = num_blocks
        self._blocks = BlockAllocator(num_blocks)
        self._contiguous = contiguous
        self._by_key: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # of the blocks in the cache
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the cache only; the longest idle first
        self._coming: dict[Key, SequenceId] = {}  # who is computing what is not known yet, or stale
        self._stale: set[int] = set()  # in the cache, missing on stages up to the one with ``stale_to``
        self.stale_to: int | None = None  # slice; None while nothing has been lost

    @property
    def free_blocks(self) -> int:
        """Blocks that tables can get: free ones and idle ones."""
        return self._blocks.free_blocks + len(self._idle)

    @property
    def cached_blocks(self) -> int:
        """Blocks whose contents are known by key."""
        return len(self._keys)

    def carry_over(self) -> KVPool:
        """The same cache in a pool where nobody holds anything, for the next epoch."""
        pool = KVPool(self.num_blocks, contiguous=self._contiguous)
        held = [block for block in self._keys if block not in self._idle]
        for run in as_runs(sorted(self._keys)):
            pool._blocks.take(run)
        for block in (*self._idle, *reversed(held)):  # of what was held last, a table's end goes first
            pool._idle[block] = None
            pool._keys[block] = self._keys[block]
            pool._by_key[self._keys[block]] = block
        pool._stale, pool.stale_to = set(self._stale), self.stale_to
        return pool

    def lose(self, last_slice: int) -> None:
        """Stages up to the one with this slice have lost what they held of all blocks."""
        before = self.stale_to if self._stale and self.stale_to is not None else last_slice
        self.stale_to = max(before, last_slice)
        self._stale = set(self._keys)

    # Tables

    def allocate(self, count: int, *, room: int) -> tuple[BlockRun, ...]:
        """As ``BlockAllocator.allocate``, idle blocks making room. Raises KVCacheFull."""
        self._make_room(count)
        if self._contiguous:
            self._make_run(count)
        return self._blocks.allocate(count, room=room)

    def extend(self, table: Sequence[BlockRun], count: int = 1, *, room: int) -> tuple[BlockRun, ...]:
        """As ``BlockAllocator.extend``, idle blocks making room. Raises KVCacheFull."""
        behind = table[-1].start + table[-1].count
        if self._contiguous and behind in self._idle:
            self._evict(behind)
        self._make_room(count)
        return self._blocks.extend(table, count, room=room)

    def release(self, table: Sequence[BlockRun]) -> None:
        """One reference less to each block of a table; those in the cache that nobody else holds become idle."""
        self._blocks.release(table)
        self._settle(table)

    # Contents

    def find(self, keys: Iterable[Key]) -> list[int]:
        """The blocks with the first of these keys, up to the first that is not known."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_current(self, blocks: Sequence[int]) -> int:
        """How many of them, from the first on, no stage lacks."""
        if not self._stale:
            return len(blocks)
        return next((place for place, block in enumerate(blocks) if block in self._stale), len(blocks))

    def can_adopt(self, blocks: Sequence[int], *, more: int) -> bool:
        """Whether they can become somebody's own as they are: idle, one run, and room for so many more behind it."""
        return (
            len(as_runs(blocks)) == 1
            and self.num_idle(blocks) == len(blocks)
            and self._blocks.free_behind(blocks[-1]) >= more
        )

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of them would be free if they were not wanted."""
        return sum(1 for block in blocks if block in self._idle)

    def hold(self, blocks: Sequence[int]) -> None:
        """Refer to blocks in the cache, so that they stay."""
        self._blocks.retain(as_runs(blocks))
        for block in blocks:
            self._idle.pop(block, None)

    def let_go(self, blocks: Sequence[int]) -> None:
        """Undo ``hold``."""
        runs = as_runs(blocks)
        self._blocks.drop(runs)
        self._settle(runs)

    def enter(self, key: Key, block: int) -> None:
        """The block, which somebody holds, is full and computed. If the cache has such a block, it keeps that one."""
        self._coming.pop(key, None)
        known = self._by_key.get(key)
        if known == block:
            self._stale.discard(block)
            return
        if known is not None and known in self._stale:
            self._idle.pop(known, None)
            self._forget(known)
            known = None
        if known is None:
            self._by_key[key] = block
            self._keys[block] = key
            self._blocks.retain((BlockRun(block, 1),))

    def expect(self, keys: Iterable[Key], sequence: SequenceId) -> None:
        """The sequence is about to compute these."""
        for key in keys:
            self._coming.setdefault(key, sequence)

    def expect_no_more(self, keys: Iterable[Key], sequence: SequenceId) -> None:
        """The sequence does not go on; those of these that it was to compute are not waited for."""
        for key in keys:
            if self._coming.get(key) == sequence:
                del self._coming[key]

    def coming_from(self, key: Key) -> SequenceId | None:
        """The sequence that is computing the block with this key now, if there is one."""
        return self._coming.get(key)

    def _settle(self, runs: Sequence[BlockRun]) -> None:
        """Blocks that only the cache refers to now are idle, the last of a table the first to go."""
        for run in reversed(runs):
            for block in range(run.start + run.count - 1, run.start - 1, -1):
                if block in self._keys and self._blocks.references(block) == 1:
                    self._idle[block] = None

    def _make_room(self, count: int) -> None:
        if count > self.free_blocks:
            raise KVCacheFull(fact=f"{count} blocks are needed, {self.free_blocks} of {self.num_blocks} are free")
        while self._blocks.free_blocks < count:
            self._evict(next(iter(self._idle)))

    def _make_run(self, count: int) -> None:
        """Give up idle blocks, no more than the table takes, to get it into one piece."""
        for _ in range(min(count, len(self._idle))):
            if self._blocks.longest_run >= count:
                return
            self._evict(next(iter(self._idle)))

    def _evict(self, block: int) -> None:
        del self._idle[block]
        self._forget(block)

    def _forget(self, block: int) -> None:
        self._stale.discard(block)
        del self._by_key[self._keys.pop(block)]
        self._blocks.drop((BlockRun(block, 1),))
