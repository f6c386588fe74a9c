"""The blocks of a windowed class: a sequence holds those of its last tokens, whatever its length.

A sequence gets blocks for the window and the slack when it is admitted. Each retired step gives back the blocks behind
the window, and the same number is allocated at the end while the prompt lasts::

    |  given back  |<- window ->|<- slack: steps in flight and to come ->|    allocated later    |
                                ^ computed                               ^ end of the table

Blocks of prefixes are shared, never copied. Blocks that were given back stay in the cache until the pool evicts them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from edgepipe.backend.types import BlockRun
from edgepipe.model.memory_classes import WindowPool
from edgepipe.scheduler.kv import Key, KVPool, as_runs


@dataclass(slots=True)
class WindowTable:
    """A sequence's blocks of one windowed class."""

    first: int  # place in the sequence of the first block
    blocks: list[int] = field(default_factory=list[int])
    new_runs: tuple[BlockRun, ...] = ()  # at the table's end, not yet sent to the stages

    @property
    def end(self) -> int:
        """Place behind the last block."""
        return self.first + len(self.blocks)

    def grow(self, runs: tuple[BlockRun, ...]) -> None:
        """Append blocks."""
        self.new_runs += runs
        for run in runs:
            self.blocks.extend(range(run.start, run.start + run.count))

    def take_new(self) -> tuple[int, tuple[BlockRun, ...]]:
        """Return the place of the first block that stages do not know, and those blocks. Stages know them from now."""
        runs, self.new_runs = self.new_runs, ()
        return self.end - sum([run.count for run in runs]), runs


class WindowClass:
    """One windowed class: its pool, and the rules for a sequence's table."""

    def __init__(self, limits: WindowPool, kv: KVPool | None = None) -> None:
        self.kv = kv or KVPool(limits.num_blocks, contiguous=False)
        self.draining_blocks = 0  # of sequences that left, while steps in flight use them
        self._limits = limits

    def supported(self, keys: Seq[Key], hits: int) -> int:
        """Return the most leading blocks, at most ``hits``, behind which the cache still has the window."""
        while hits:
            first = self._limits.first_block(hits * self._limits.block_size)
            places = range(hits - 1, first - 1, -1)
            missing = next((place for place in places if self.kv.block_of(keys[place]) is None), None)
            if missing is None:
                break
            hits = missing
        return hits

    def has_room(self, keys: Seq[Key], hits: int, *, needs: int, kept_blocks: int, share: int) -> bool:
        """Whether a sequence of ``needs`` blocks, the first ``hits`` of them cached, leaves ``kept_blocks`` free.

        ``share``: if above 0, as many more must remain as it takes, up to this part of the pool.
        """
        first = self._limits.first_block(hits * self._limits.block_size)
        found = self._found(keys, first, hits)
        wanted = min(needs - first, self._limits.most_blocks) - len(found)
        kept = kept_blocks + (min(wanted, self.kv.num_blocks // share) if share else 0)
        return self.kv.free_blocks - self.kv.num_idle(found) - wanted >= kept

    def admit(self, keys: Seq[Key], hits: int, *, needs: int) -> WindowTable:
        """Return the table of a sequence for which ``has_room`` is true."""
        table = WindowTable(self._limits.first_block(hits * self._limits.block_size))
        found = self._found(keys, table.first, hits)
        if found:
            self.kv.hold(found)
            table.grow(as_runs(found))
        self.fill(table, needs=needs)
        return table

    def fill(self, table: WindowTable, *, needs: int) -> None:
        """Allocate up to the window and the slack, at most the sequence's ``needs``; fewer if the pool is short."""
        most = min(needs - table.end, self._limits.most_blocks - len(table.blocks), self.kv.free_blocks)
        if most > 0:
            self.grow(table, most)

    def grow(self, table: WindowTable, count: int = 1) -> None:
        """Append ``count`` blocks. Raises KVCacheFull."""
        room = self._limits.most_blocks
        if table.blocks:
            table.grow(self.kv.extend([BlockRun(table.blocks[-1], 1)], count, room=room))
        else:
            table.grow(self.kv.allocate(count, room=room))

    def give_back(self, table: WindowTable, computed: int) -> None:
        """Give back the blocks that no token behind the first ``computed`` ones sees."""
        behind = self._limits.first_block(computed) - table.first
        if behind > 0:
            blocks = table.blocks[:behind]
            del table.blocks[:behind]
            table.first += len(blocks)
            self.kv.release_references(blocks)

    def release(self, table: WindowTable) -> None:
        """Drop the table."""
        self.kv.release(as_runs(table.blocks))

    def _found(self, keys: Seq[Key], first: int, hits: int) -> list[int]:
        blocks = [self.kv.block_of(key) for key in keys[first:hits]]
        return [block for block in blocks if block is not None]
