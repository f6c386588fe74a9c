"""Who has which KV block. One numbering for all stages; consecutive ids matter: CPUs and MLX attend over runs as views.

A sequence's table grows at its end. So each sequence has a *claim* on the free blocks right behind its last one: others
are placed beyond the claims as long as there is room, and split what is left fairly where there is not::

    |AAAA|-- A's claim --|BB|-- B's claim --|          free          |
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from edgepipe.backend.types import BlockRun
from edgepipe.errors import KVCacheFull


class BlockAllocator:
    """Hands out runs of blocks, counts references, takes back what nobody refers to."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool has at least one block")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._starts = [0]  # of the free extents: maximal, ascending
        self._lengths = {0: num_blocks}  # of the free extents, by start
        self._claims: dict[int, int] = {}  # block behind a table's end -> blocks that the table may still need
        self._free_blocks = num_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody refers to."""
        return self._free_blocks

    @property
    def longest_run(self) -> int:
        """The most blocks that one run could have."""
        return max(self._lengths.values(), default=0)

    def references(self, block: int) -> int:
        """How many refer to the block."""
        return self._references[block]

    def allocate(self, count: int, *, room: int) -> tuple[BlockRun, ...]:
        """``count`` blocks for a new table, in one run where a free extent is long enough.

        ``room`` is how long the table may become; the blocks behind it are kept clear as far as possible.
        Raises KVCacheFull, before anything is taken, if fewer than ``count`` blocks are free.
        """
        self._check(count)
        runs = self._gather(count, max(room, count))
        self._claim(runs[-1], max(room - count, 0))
        return runs

    def extend(self, table: Sequence[BlockRun], count: int, *, room: int) -> tuple[BlockRun, ...]:
        """``count`` more blocks for a table, right behind its last where those are free. Raises KVCacheFull.

        ``room`` is how many more the table may need, these included.
        """
        self._check(count)
        end = table[-1].start + table[-1].count
        self._claims.pop(end, None)
        adjoining = min(self._lengths.get(end, 0), count)
        runs: list[BlockRun] = []
        if adjoining:
            self._take(end, adjoining)
            runs.append(BlockRun(end, adjoining))
        if adjoining < count:
            runs += self._gather(count - adjoining, max(room, count) - adjoining)
        self._claim(runs[-1], max(room - count, 0))
        return tuple(runs)

    def take(self, run: BlockRun) -> None:
        """Refer to blocks that are free now."""
        self._take(run.start, run.count)

    def free_behind(self, block: int) -> int:
        """How many free blocks come right behind this one."""
        return self._lengths.get(block + 1, 0)

    def retain(self, runs: Sequence[BlockRun]) -> None:
        """One more reference to blocks that somebody holds already."""
        for run in runs:
            end = run.start + run.count
            references = self._references[run.start : end]
            if 0 in references:
                raise RuntimeError(f"a free block cannot be shared: {run}")
            self._references[run.start : end] = [count + 1 for count in references]

    def release(self, table: Sequence[BlockRun]) -> None:
        """One reference less to each block of a table, and the end of the table's claim."""
        if table:
            self._claims.pop(table[-1].start + table[-1].count, None)
        self.drop(table)

    def drop(self, runs: Sequence[BlockRun]) -> None:
        """One reference less to each block; no table ends with them."""
        for run in runs:
            end = run.start + run.count
            references = self._references[run.start : end]
            if 0 in references:
                raise RuntimeError(f"a block was given back twice: {run}")
            self._references[run.start : end] = left = [count - 1 for count in references]
            if not any(left):
                self._give(run.start, run.count)
            else:
                for offset, count in enumerate(left):
                    if not count:
                        self._give(run.start + offset, 1)

    def _check(self, count: int) -> None:
        if count < 1:
            raise ValueError("at least one block")
        if count > self._free_blocks:
            raise KVCacheFull(fact=f"{count} blocks are needed, {self._free_blocks} of {self.num_blocks} are free")

    def _claim(self, last: BlockRun, count: int) -> None:
        if count:
            self._claims[last.start + last.count] = count

    def _gather(self, count: int, room: int) -> tuple[BlockRun, ...]:
        """Take one run, or the longest free extents until there are enough blocks."""
        start = self._place(count, room)
        if start is not None:
            self._take(start, count)
            return (BlockRun(start, count),)
        runs: list[BlockRun] = []
        for extent in sorted(self._starts, key=lambda start: (-self._lengths[start], start)):
            length = min(self._lengths[extent], count)
            runs.append(BlockRun(extent, length))
            count -= length
            if not count:
                break
        for run in runs:
            self._take(run.start, run.count)
        return tuple(runs)

    def _place(self, count: int, room: int) -> int | None:
        """Where a run of ``count`` blocks that may become ``room`` long begins; None if no free extent holds it."""
        best: tuple[int, int, int] | None = None
        for start in self._starts:
            length = self._lengths[start]
            if length >= count:
                shortage = max(0, self._claims.get(start, 0) + room - length)
                best = min(best, (shortage, length, start)) if best else (shortage, length, start)
        if best is None:
            return None
        _, length, start = best
        claim, growth, slack = self._claims.get(start, 0), room - count, length - count
        if claim + growth > slack:
            claim = slack * claim // (claim + growth)
        return start + claim

    def _take(self, start: int, count: int) -> None:
        """Cut ``count`` blocks out of the free extent that holds ``start``."""
        index = bisect_left(self._starts, start + 1) - 1
        extent = self._starts[index]
        length = self._lengths.pop(extent)
        pieces = [(extent, start - extent), (start + count, extent + length - start - count)]
        kept = [(piece, size) for piece, size in pieces if size]
        self._starts[index : index + 1] = [piece for piece, _ in kept]
        self._lengths.update(kept)
        self._references[start : start + count] = [1] * count
        self._free_blocks -= count

    def _give(self, start: int, count: int) -> None:
        """Put blocks back, joined with the free extents on both sides."""
        self._free_blocks += count
        index = bisect_left(self._starts, start)
        end = start + count
        if index < len(self._starts) and self._starts[index] == end:
            count += self._lengths.pop(end)
            del self._starts[index]
        if index and self._starts[index - 1] + self._lengths[self._starts[index - 1]] == start:
            self._lengths[self._starts[index - 1]] += count
        else:
            self._starts.insert(index, start)
            self._lengths[start] = count
