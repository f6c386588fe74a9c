"""The blocks of a windowed class: a sequence holds those of its last tokens, whatever its length.

A sequence gets blocks for the window and the slack when it is admitted. Each retired step gives back the blocks behind
the window, and the same number is allocated at the end while the prompt lasts::

    |  given back  |<- window ->|<- slack: steps in flight and to come ->|    allocated later    |
                                ^ computed                               ^ end of the table

Blocks of prefixes are shared, never copied. Blocks that were given back stay in the cache until the pool evicts them.

If stages lost their KV, a sequence that begins behind stale blocks replays its tokens through the first slices. It
holds the stale blocks of the window before its beginning, and computes them again in place. For earlier tokens it takes
idle stale blocks that are cached, else free ones. Free ones do not enter the cache: slices behind lack their KV.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

from edgepipe.backend.types import BlockRun
from edgepipe.scheduler.host_tier import HostTier, Tier
from edgepipe.scheduler.kv import Key, KVPool, as_runs
from edgepipe.spec.memory_classes import WindowPool


@dataclass(slots=True)
class WindowTable:
    """A sequence's blocks of one windowed class."""

    first: int  # place in the sequence of the first block
    blocks: list[int] = field(default_factory=list[int])
    new_runs: tuple[BlockRun, ...] = ()  # runs at the table's end that are not yet sent to the stages
    kept_from: int = 0  # place of the first of the kept blocks
    kept: list[int] = field(default_factory=list[int])  # stale blocks that it holds for places behind its end

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

    def __init__(self, limits: WindowPool, kv: KVPool) -> None:
        self.kv = kv
        self.draining_blocks = 0  # blocks of sequences that left, while steps in flight use them
        self._limits = limits

    def supported(self, keys: Seq[Key], hits: int, *, current: bool, down_to: Tier = Tier.DEVICE) -> int:
        """Return the most leading blocks, at most ``hits``, behind which the cache still has the window.

        ``current``: without stale blocks. ``down_to``: tiers below the device down to this may have a part of it.
        """
        known = partial(self.kv.is_known, down_to=down_to) if down_to else partial(self._is_found, current=current)
        while hits:
            places = range(hits - 1, self._first(hits) - 1, -1)
            missing = next((place for place in places if not known(keys[place])), None)
            if missing is None:
                break
            hits = missing
        return hits

    def needed(self, keys: Seq[Key], hits: int) -> tuple[HostTier, list[Key]] | None:
        """Return the keys of the window behind ``hits`` blocks that are not on the device; None without tiers."""
        if self.kv.host is None:
            return None
        return self.kv.host, [key for key in keys[self._first(hits) : hits] if self.kv.block_of(key) is None]

    def restore(self, keys: Seq[Key], hits: int) -> bool:
        """Bring the window behind ``hits`` blocks back from host memory. Return whether the cache has it then."""
        needed = keys[self._first(hits) : hits]
        here = [block for key in needed if (block := self.kv.block_of(key)) is not None]
        missing = [key for key in needed if self.kv.block_of(key) is None]
        self.kv.hold(here)
        found = not missing or self.kv.restore(missing, count=0, room=0)
        self.kv.release_references(here)
        return found

    def may_replay(self, keys: Seq[Key], begin: int, hits: int) -> bool:
        """Return whether a sequence may compute the window before ``hits`` blocks again if it begins at ``begin``."""
        if begin == hits:
            return True
        kept = self._found(keys, self._kept_from(begin, hits), hits)
        return not self.kv.held(kept) and self._limits.most_blocks + len(kept) <= self.kv.num_blocks

    def has_room(self, keys: Seq[Key], begin: int, hits: int, *, needs: int, kept_blocks: int, share: int) -> bool:
        """Return whether a sequence of ``needs`` blocks leaves ``kept_blocks`` free.

        begin, hits  cached blocks that it need not replay, and all of them
        share        if above 0, as many more must remain as it takes, up to this part of the pool
        """
        first, kept_from = self._first(begin), self._kept_from(begin, hits)
        end = first + min(needs - first, self._limits.most_blocks)
        found = [*self._found(keys, first, begin), *self._found(keys, kept_from, hits)]
        wanted = end - begin - max(0, min(end, hits) - kept_from)
        kept = kept_blocks + (min(wanted, self.kv.num_blocks // share) if share else 0)
        return self.kv.free_blocks - self.kv.num_idle(found) - wanted >= kept

    def admit(self, keys: Seq[Key], begin: int, hits: int, *, needs: int) -> WindowTable:
        """Return the table of a sequence for which ``has_room`` and ``may_replay`` are true."""
        table = WindowTable(self._first(begin), kept_from=self._kept_from(begin, hits))
        found = self._found(keys, table.first, begin)
        table.kept = self._found(keys, table.kept_from, hits)
        self.kv.hold([*found, *table.kept])
        self.kv.spoil(table.kept)
        table.grow(as_runs(found))
        self.fill(table, keys, needs=needs)
        return table

    def fill(self, table: WindowTable, keys: Seq[Key], *, needs: int) -> None:
        """Allocate up to the window and the slack, at most the sequence's ``needs``; fewer if the pool is short.

        A replay takes the kept blocks at their places, and before them idle stale ones that are cached. Others get
        more blocks than the slack while half of the pool is free.
        """
        room = self._room(table)
        while (most := min(needs - table.end, room - len(table.blocks))) > 0:
            if table.end < table.kept_from:
                if not self._fill_replayed(table, keys, most):
                    break
            elif table.kept:
                table.grow(as_runs(table.kept[:most]))
                table.kept, table.kept_from = table.kept[most:], table.end
            elif free := min(most, self.kv.free_blocks):
                self.grow(table, free)
            else:
                break

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
        self.kv.release_references(table.kept)
        table.kept = []
        self.kv.release(as_runs(table.blocks))

    def _room(self, table: WindowTable) -> int:
        """Return the most blocks that the table may have now."""
        limits = self._limits
        if not limits.more or table.kept:
            return limits.most_blocks
        spare = self.kv.free_blocks + len(table.blocks) - self.kv.num_blocks // 2
        return max(limits.most_blocks, min(limits.most_blocks + limits.more // limits.block_size, spare))

    def _fill_replayed(self, table: WindowTable, keys: Seq[Key], most: int) -> bool:
        """Append some blocks, at most ``most``, before the kept ones. Return whether there was one."""
        places = range(table.end, min(table.kept_from, table.end + most))
        stale = next((place for place in places if self._is_idle_stale(keys[place])), places.stop)
        if stale == table.end:
            block = self.kv.block_of(keys[stale])
            assert block is not None
            self.kv.hold([block])
            table.grow((BlockRun(block, 1),))
            return True
        free = min(stale - table.end, self.kv.free_blocks)
        if free:
            self.grow(table, free)
        return bool(free)

    def _is_idle_stale(self, key: Key) -> bool:
        block = self.kv.block_of(key)
        return block is not None and self.kv.is_stale(block) and not self.kv.held((block,))

    def _first(self, hits: int) -> int:
        """Return the place of the first block that a token behind ``hits`` blocks sees."""
        return self._limits.first_block(hits * self._limits.block_size)

    def _kept_from(self, begin: int, hits: int) -> int:
        """Return the place of the first cached block that a replay of the blocks ``[begin, hits)`` computes again."""
        return max(begin, self._first(hits))

    def _is_found(self, key: Key, *, current: bool) -> bool:
        block = self.kv.block_of(key)
        return block is not None and not (current and self.kv.is_stale(block))

    def _found(self, keys: Seq[Key], first: int, hits: int) -> list[int]:
        blocks = [self.kv.block_of(key) for key in keys[first:hits]]
        return [block for block in blocks if block is not None]
