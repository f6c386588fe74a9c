"""The KV pool: gives blocks to tables, and caches unused full blocks for prompts with the same beginning.

A full block whose step has retired is cached under the *key* of all tokens up to its end. The cache holds a reference
like a table does. A block with only the cache's reference is idle: the pool may evict it.

The cache outlives an epoch (``carry_over``), so running sequences find their computed blocks again. If a stage lost its
memory, its part of every block is missing, while later stages still hold theirs (``lose``). Such a block is *stale*:
a sequence that needs it recomputes its tokens, up to the last slice that lacks them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice

import numpy as np

from edgepipe.backend.types import BlockRun, TierMove
from edgepipe.errors import KVCacheFull
from edgepipe.ids import SequenceId
from edgepipe.scheduler.blocks import BlockAllocator, Ids, blocks_of, ids_of
from edgepipe.scheduler.host_tier import HostTier, Tier
from edgepipe.scheduler.place_keys import NewKeys

Key = bytes
"""Hash of all tokens from a sequence's first to a block's last. It is collision-resistant: with a collision, a user
could read another user's prompt."""


def next_key(before: Key, token_ids: Sequence[int]) -> Key:
    """Return the key of a full block with these tokens after the block with key ``before`` (empty for the first)."""
    return blake2b(before + array("I", token_ids).tobytes(), digest_size=16).digest()


class KeyWatch:
    """Notes changes of the cached blocks or snapshots with the keys of one prompt."""

    def __init__(self) -> None:
        self._keys: frozenset[Key] = frozenset()
        self.changed = False  # a key changed since ``begin``: a prompt with these keys may need less room than before

    def begin(self, keys: frozenset[Key]) -> None:
        """Watch these keys instead of those before."""
        self._keys, self.changed = keys, False

    def note(self, key: Key) -> None:
        """Note that the block or snapshot with this key changed."""
        if key in self._keys:
            self.changed = True


NOT_CACHED = -1
"""Value in ``_idle_since`` for a block outside the cache."""

QUEUED_BLOCKS = 512
"""Number of longest-idle blocks that one sort queues for later evictions: more than most tables need."""


def as_runs(blocks: Iterable[int]) -> tuple[BlockRun, ...]:
    """Join consecutive block ids into runs, in the given order."""
    runs: list[BlockRun] = []
    start = end = 0
    for block in blocks:
        if block != end or end == start:
            if end > start:
                runs.append(BlockRun(start, end - start))
            start = block
        end = block + 1
    if end > start:
        runs.append(BlockRun(start, end - start))
    return tuple(runs)


class KVPool:
    """Blocks of a pipeline. ``contiguous``: make each table one run where possible, at the cost of cached blocks.

    A contiguous pool evicts by window: a new table gets the run of free and idle blocks with the lowest loss. An idle
    block's value is its rank in the order of idleness (1: longest idle), and a run's loss is the sum of the values.
    So old chats go before new ones, and among chats of one age the run with fewer idle blocks wins. The number of idle
    blocks is not the first criterion: every chat ends with a free block, so the count would favour short chats over
    old ones. Free blocks that stay free save the next eviction.

    Any other pool evicts the longest-idle blocks, wherever they are.
    """

    def __init__(
        self, num_blocks: int, *, contiguous: bool, host: HostTier | None = None, new_keys: NewKeys | None = None
    ) -> None:
        """
        host      takes current blocks that are evicted
        new_keys  takes the keys of blocks that tables have computed
        """
        self.num_blocks = num_blocks
        self.host = host
        self._new_keys = new_keys
        self._blocks = BlockAllocator(num_blocks)
        self._contiguous = contiguous
        self._by_key: dict[Key, int] = {}  # block of each key in the order of ``enter``, evicted blocks included
        self._keys = [b""] * num_blocks  # last key of each block; an evicted block keeps it until the next ``enter``
        # Value of ``_now`` when each block became idle; 0: in the cache and held.
        self._idle_since = array("q", [NOT_CACHED]) * num_blocks
        self._all_idle_since = np.frombuffer(self._idle_since, np.int64)  # the same memory
        self._now = 0  # blocks that became idle so far: the clock of ``_idle_since``
        self._num_idle = self._num_cached = 0
        # Longest-idle blocks, each with its ``_idle_since`` when queued.
        self._queue: Iterator[tuple[int, int]] = iter(())
        self._coming: dict[Key, SequenceId] = {}  # sequence that computes a block that is missing or stale
        self._awaited: set[Key] = set()  # keys of ``_coming`` that waiting sequences want to hear of
        self._settled: list[Key] = []  # awaited keys that are not coming any more
        self._stale: set[int] = set()  # cached blocks that stages up to slice ``stale_to`` lack
        self.stale_to: int | None = None  # slice; None if nothing was lost
        # Notes blocks that enter the cache or become current, and stale ones that leave it or are held.
        self.watch = KeyWatch()

    @property
    def free_blocks(self) -> int:
        """Number of blocks that tables can get: free and idle ones."""
        return self._blocks.free_blocks + self._num_idle

    @property
    def empty_blocks(self) -> int:
        """Number of blocks that tables can get without evicting others."""
        return self._blocks.free_blocks

    @property
    def cached_blocks(self) -> int:
        """Number of blocks in the cache."""
        return self._num_cached

    def carry_over(
        self, host: HostTier | None = None, unsettled: Sequence[TierMove] = (), new_keys: NewKeys | None = None
    ) -> KVPool:
        """Return a pool for the next epoch with the same cache and without tables.

        unsettled  moves that not all stages have performed for certain: what they brought to the device is forgotten
        """
        pool = KVPool(self.num_blocks, contiguous=self._contiguous, host=host, new_keys=new_keys)
        pool._by_key, pool._keys = dict(self._by_key), list(self._keys)
        pool._all_idle_since[:] = self._all_idle_since
        pool._now, pool._num_idle, pool._num_cached = self._now, self._num_idle, self._num_cached
        entered = np.fromiter(self._by_key.values(), np.int64, len(self._by_key))
        entered = entered[self._all_idle_since[entered] != NOT_CACHED]
        pool._blocks.take(entered)
        pool._make_idle(entered[self._all_idle_since[entered] == 0])
        pool._stale, pool.stale_to = set(self._stale), self.stale_to
        moved = {move.place for move in unsettled if host is not None and move.number == host.number and not move.out}
        for block in moved:
            if pool._idle_since[block] != NOT_CACHED:
                pool._forget(block)
        return pool

    def adopt(self, held: Mapping[Key, int]) -> None:
        """Begin with the blocks of an earlier engine as idle ones: blocks by key, longest unused first."""
        for key, block in held.items():
            self._name(block, key)
        blocks = np.fromiter(held.values(), np.int64, len(held))
        self._blocks.take(blocks)
        self._make_idle(blocks[::-1])
        self._num_cached += len(blocks)

    def lose(self, last_slice: int) -> None:
        """Mark all cached blocks stale: the stages up to this slice lack their KV, earlier losses included."""
        self.stale_to = last_slice
        self._stale = set(np.flatnonzero(self._all_idle_since != NOT_CACHED).tolist())
        if self.host is not None:
            self.host.lose()

    @property
    def any_stale(self) -> bool:
        """Whether the cache or host memory has a stale block."""
        return bool(self._stale) or (self.host is not None and self.host.any_stale)

    def is_stale(self, block: int) -> bool:
        """Return whether this cached block is stale."""
        return block in self._stale

    def refresh(self, key: Key, block: int) -> None:
        """Note that a table has computed a block again, if it is the one that is cached under the key."""
        if self.block_of(key) == block and block in self._stale:
            self._stale.discard(block)
            self.watch.note(key)
            self._tell(key, block)

    def spoil(self, blocks: Sequence[int]) -> None:
        """Mark cached blocks stale that a sequence will compute again up to slice ``stale_to``."""
        self._stale.update(blocks)

    # Tables

    def allocate(self, count: int, *, room: int) -> tuple[BlockRun, ...]:
        """Allocate like ``BlockAllocator.allocate`` and evict idle blocks as needed. Raises KVCacheFull."""
        self._check(count)
        room = max(room, count)
        if not self._contiguous:
            self._make_room(count)
        elif self._num_idle and not self._blocks.has_roomy_run(count, room=room):
            return self._evict_window(count, room=room)
        return self._blocks.allocate(count, room=room)

    def extend(self, table: Sequence[BlockRun], count: int = 1, *, room: int) -> tuple[BlockRun, ...]:
        """Extend like ``BlockAllocator.extend`` and evict idle blocks as needed. Raises KVCacheFull."""
        self._check(count)
        if not self._contiguous:
            self._make_room(count)
            return self._blocks.extend(table, count, room=room)
        adjoining = self._clear_behind(table, count)
        runs = self._blocks.extend(table, adjoining, room=room) if adjoining else ()
        if adjoining < count:
            self._blocks.end_claim(runs or table)
            runs += self.allocate(count - adjoining, room=room - adjoining)
        return runs

    def release(self, table: Sequence[BlockRun]) -> None:
        """Drop a table's references. Cached blocks without another reference become idle."""
        self._settle(*self._blocks.release(table))

    # Contents

    def find(self, keys: Iterable[Key]) -> list[int]:
        """Return the cached blocks of the leading keys, up to the first key that is not cached."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None or self._idle_since[block] == NOT_CACHED:
                break
            found.append(block)
        return found

    def block_of(self, key: Key) -> int | None:
        """Return the cached block with this key, or None."""
        block = self._by_key.get(key)
        return None if block is None or self._idle_since[block] == NOT_CACHED else block

    def is_known(self, key: Key, down_to: Tier) -> bool:
        """Return whether a block with this key is cached on the device, or is below it in a tier ``down_to`` this."""
        return self.block_of(key) is not None or (self.host is not None and self.host.has(key, down_to))

    def restore(self, keys: Sequence[Key], *, count: int, room: int) -> bool:
        """Cache blocks again that host memory keeps, in a table of ``count`` blocks that begins with them.

        The caller holds the other blocks that it needs. ``room``: as for ``allocate``. Return whether all ``keys`` are
        back; the pool may have too few blocks, or lose one of them where host memory is short.
        """
        host = self.host
        if host is None or max(count, len(keys)) > self.free_blocks:
            return False
        with host.pinned(keys):
            table = self.allocate(max(count, len(keys)), room=room)
            for key, block in zip(keys, blocks_of(table)[: len(keys)].tolist(), strict=True):
                self._name(block, key)
                self._idle_since[block] = 0
                self._num_cached += 1
                self._blocks.retain_one(block)
                if host.restore(key, block):
                    self._stale.add(block)
        self.release(table)
        return True

    def gather(self, keys: Sequence[Key]) -> None:
        """Evict the idle blocks with these keys, so that ``restore`` brings all of them back in one run."""
        found = [block for key in keys if (block := self.block_of(key)) is not None]
        if self.host is not None and not self.held(found) and not self._stale.intersection(found):
            with self.host.pinned(keys):
                self._evict(found)

    def next_evicted(self, count: int, *, spared: Sequence[int]) -> list[int]:
        """Return the current blocks that an allocation of ``count`` evicts and host memory has room for but lacks.

        ``spared``: blocks that the table holds by then. For pools that are not contiguous.
        """
        missing = count - self.empty_blocks
        if self.host is None or missing <= 0:
            return []
        order: list[int] = self._idle_in_order()[0].tolist()
        held = set(spared)
        evicted = [block for block in order if block not in held][:missing]
        kept = evicted[-self.host.bound :] if self.host.bound else []  # the later ones push out the earlier ones
        return [block for block in kept if block not in self._stale and not self.host.is_current(self._keys[block])]

    def copy_out(self, blocks: Sequence[int], *, pinned: Sequence[int]) -> bool:
        """Copy idle blocks to host memory ahead of their eviction. Return whether a move does.

        ``pinned``: further blocks whose copies stay there.
        """
        assert self.host is not None
        before = self.host.num_stored
        with self.host.pinned([self._keys[block] for block in (*pinned, *blocks)]):
            for block in blocks:
                self.host.store(self._keys[block], block)
        return self.host.num_stored > before

    def num_current(self, blocks: Sequence[int]) -> int:
        """Count the leading blocks that are not stale."""
        if not self._stale:
            return len(blocks)
        return next((place for place, block in enumerate(blocks) if block in self._stale), len(blocks))

    def held(self, blocks: Iterable[int]) -> list[int]:
        """Return those of these cached blocks that tables hold."""
        return [block for block in blocks if not self._idle_since[block]]

    def can_adopt(self, blocks: Sequence[int], *, more: int) -> bool:
        """Return whether a table can take over the blocks in place: one idle run with ``more`` free blocks behind."""
        return (
            len(as_runs(blocks)) == 1
            and self.num_idle(blocks) == len(blocks)
            and self._blocks.free_behind(blocks[-1]) >= more
        )

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Count the idle blocks among them."""
        return sum(1 for block in blocks if self._idle_since[block] > 0)

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a reference to cached blocks, which protects them from eviction."""
        ids = np.array(blocks, np.int64)
        self._note_stale(blocks)
        self._blocks.retain(ids)
        self._num_idle -= int(np.count_nonzero(self._all_idle_since[ids] > 0))
        self._all_idle_since[ids] = 0

    def release_references(self, blocks: Sequence[int]) -> None:
        """Drop references that ``hold`` added: one for each occurrence of a block."""
        times = Counter(blocks)
        ids = np.array([*times], np.int64)
        self._settle(ids, self._blocks.drop(ids, np.array([*times.values()], np.int64)))

    def enter(self, key: Key, block: int) -> None:
        """Cache a full, computed block that a table holds. A current block already cached under the key stays."""
        self._expect_one_no_more(key)
        known = self.block_of(key)
        if known is not None and known not in self._stale:
            return
        self.watch.note(key)
        self._tell(key, block)
        if known == block:
            self._stale.discard(block)
            return
        if known is not None:
            self._forget(known)
        self._name(block, key)
        self._idle_since[block] = 0
        self._num_cached += 1
        self._blocks.retain_one(block)

    def expect(self, keys: Iterable[Key], sequence: SequenceId) -> None:
        """Record that the sequence will compute the blocks with these keys."""
        for key in keys:
            self._coming.setdefault(key, sequence)

    def expect_no_more(self, keys: Iterable[Key], sequence: SequenceId) -> None:
        """Record that the sequence stopped and will not compute these blocks."""
        for key in keys:
            if self._coming.get(key) == sequence:
                self._expect_one_no_more(key)

    def coming_from(self, key: Key) -> SequenceId | None:
        """Return the sequence that is computing the block with this key, or None."""
        return self._coming.get(key)

    def await_key(self, key: Key) -> None:
        """Let ``take_settled`` return the key once no sequence is computing its block."""
        self._awaited.add(key)
        if key not in self._coming:
            self._expect_one_no_more(key)

    def take_settled(self) -> list[Key]:
        """Remove and return the awaited keys whose blocks are computed or given up."""
        settled, self._settled = self._settled, []
        return settled

    def _expect_one_no_more(self, key: Key) -> None:
        """Record that no sequence is computing the block with this key any more."""
        self._coming.pop(key, None)
        if key in self._awaited:
            self._awaited.discard(key)
            self._settled.append(key)

    def _settle(self, blocks: Ids, references: Ids) -> None:
        """Make blocks idle that only the cache refers to. ``references``: remaining references of each block."""
        self._make_idle(blocks[(references == 1) & (self._all_idle_since[blocks] == 0)])

    def _make_idle(self, blocks: Ids) -> None:
        """Mark blocks idle. The last of them will be evicted first."""
        count = len(blocks)
        self._all_idle_since[blocks] = np.arange(self._now + count, self._now, -1)
        self._now += count
        self._num_idle += count

    def _check(self, count: int) -> None:
        if count > self.free_blocks:
            raise KVCacheFull(fact=f"{count} blocks are needed, {self.free_blocks} of {self.num_blocks} are free")

    def _make_room(self, count: int) -> None:
        """Evict the longest-idle blocks until ``count`` are free."""
        if (missing := count - self._blocks.free_blocks) > QUEUED_BLOCKS:
            self._evict(self._idle_in_order()[0][:missing])
        while (missing := count - self._blocks.free_blocks) > 0:
            queued = list(islice(self._queue, missing))
            if queued:
                self._evict([block for block, since in queued if self._idle_since[block] == since])
            else:
                blocks, since = self._idle_in_order()
                self._queue = zip(blocks[:QUEUED_BLOCKS].tolist(), since[:QUEUED_BLOCKS].tolist(), strict=True)

    def _evict_window(self, count: int, *, room: int) -> tuple[BlockRun, ...]:
        """Take the free and idle blocks with the lowest loss, in one run where possible."""
        extents = self._blocks.choose_available(self._values(), count, room=room)
        blocks = ids_of(*extents)
        self._evict(blocks[self._all_idle_since[blocks] > 0])
        return self._blocks.take_extents(extents, growth=room - count)

    def _clear_behind(self, table: Sequence[BlockRun], count: int) -> int:
        """Evict the idle blocks right behind a table. Return how many are then free there, at most ``count``."""
        end = table[-1].start + table[-1].count
        idle: list[int] = []
        stop = min(end + count, self.num_blocks)
        for block in range(end, stop):
            if self._idle_since[block] > 0:
                idle.append(block)
            elif not self._blocks.is_free(block):
                stop = block
                break
        self._evict(idle)
        return stop - end

    def _idle_in_order(self) -> tuple[Ids, Ids]:
        """Return the idle blocks, longest idle first, and the time since when each is idle."""
        idle = np.flatnonzero(self._all_idle_since > 0)
        bits = self.num_blocks.bit_length()
        order = np.sort(self._all_idle_since[idle] << bits | idle)  # takes half the time of argsort
        return order & ((1 << bits) - 1), order >> bits

    def _values(self) -> Ids:
        """Rank the idle blocks: 1 for the longest idle. Returns ``[num_blocks]``, 0 for blocks that are not idle."""
        blocks, _ = self._idle_in_order()
        values = np.zeros(self.num_blocks, np.int64)
        values[blocks] = np.arange(1, len(blocks) + 1)
        return values

    def _evict(self, blocks: Ids | list[int]) -> None:
        """Remove idle blocks from the cache, which frees them. Current ones move to host memory."""
        if self.host is not None:
            for block in map(int, blocks):
                if block not in self._stale:
                    self.host.store(self._keys[block], block)
        if len(blocks) < 2:  # the usual case in a full pool
            for block in blocks:
                self._forget(int(block))
            return
        ids = np.asarray(blocks, np.int64)
        if self._stale:
            self._note_stale(ids.tolist())
            self._stale.difference_update(ids.tolist())
        self._all_idle_since[ids] = NOT_CACHED
        self._num_idle -= len(ids)
        self._num_cached -= len(ids)
        self._blocks.drop(ids)

    def _forget(self, block: int) -> None:
        """Remove one block, idle or held, from the cache."""
        self._note_stale((block,))
        self._stale.discard(block)
        self._num_idle -= self._idle_since[block] > 0
        self._num_cached -= 1
        self._idle_since[block] = NOT_CACHED
        self._blocks.drop_one(block)

    def _note_stale(self, blocks: Iterable[int]) -> None:
        for block in self._stale.intersection(blocks) if self._stale else ():
            self.watch.note(self._keys[block])

    def _tell(self, key: Key, block: int) -> None:
        if self._new_keys is not None:
            self._new_keys.note(key, block)

    def _name(self, block: int, key: Key) -> None:
        """Replace the block's former key with ``key``."""
        before = self._keys[block]
        if self._by_key.get(before) == block:
            del self._by_key[before]
        self._by_key.pop(key, None)
        self._by_key[key] = block
        self._keys[block] = key
