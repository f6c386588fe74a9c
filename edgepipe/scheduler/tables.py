"""Block tables of all sequences: allocate, share, copy and free blocks."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from edgepipe.backend.types import BlockCopy
from edgepipe.ids import SequenceId
from edgepipe.scheduler.kv import Key, KVPool, as_runs
from edgepipe.scheduler.limits import SchedulerLimits
from edgepipe.scheduler.sequence import Sequence


class BlockTables:
    """Keeps each block while a running sequence, a step in flight or the prefix cache may use it."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._kv = KVPool(limits.num_blocks, contiguous=limits.contiguous_kv)
        self._frees: list[SequenceId] = []
        self.draining_blocks = 0  # blocks that steps in flight use: of sequences that left, or sources of copies
        self.admitted_tokens = 0  # known tokens of sequences when they were admitted, since the start
        self.cached_tokens = 0  # admitted tokens found in the prefix cache
        self.kept_tokens = 0  # of sequences from the previous epoch: found still computed
        self.replayed_tokens = 0  # of the same sequences: recomputed up to the last slice that lost them

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self._kv.num_blocks

    @property
    def free_blocks(self) -> int:
        """Number of blocks that no sequence holds."""
        return self._kv.free_blocks

    @property
    def cached_blocks(self) -> int:
        """Number of blocks in the prefix cache."""
        return self._kv.cached_blocks

    @property
    def stale_to(self) -> int | None:
        """Last slice that must recompute stale blocks; None if nothing was lost."""
        return self._kv.stale_to

    def carry_over(self) -> KVPool:
        """Return a pool with the same prefix cache for the next epoch."""
        return self._kv.carry_over()

    def take_over(self, pool: KVPool) -> None:
        """Start with the previous epoch's pool. Raises ValueError if its number of blocks differs."""
        if pool.num_blocks != self._kv.num_blocks:
            raise ValueError(f"a pool of {pool.num_blocks} blocks cannot be one of {self._kv.num_blocks}")
        self._kv = pool

    def awaited(self, sequence: Sequence) -> Key | None:
        """Return the key of the last of the prompt's next blocks that other sequences are computing; None if none.

        Waiting for that block is quicker than computing it twice.
        """
        keys = self._reusable_keys(sequence)
        end = begin = self._kv.num_current(self._kv.find(keys))
        while end < len(keys) and self._kv.coming_from(keys[end]) is not None:
            end += 1
        return keys[end - 1] if end > begin else None

    def coming_from(self, key: Key) -> SequenceId | None:
        """Return the sequence that is computing the block with this key, or None."""
        return self._kv.coming_from(key)

    def admit(self, sequence: Sequence, *, kept_blocks: int) -> bool:
        """Build a table for all known tokens: share or copy computed blocks, allocate the rest.

        Returns False and takes nothing if fewer than ``kept_blocks`` would remain free, or while another sequence holds
        stale blocks of the prompt.
        """
        count = self.needs(sequence)
        left = self._kv.free_blocks - kept_blocks
        known = self._known_prefix(sequence) if left > 0 else None
        if known is None:
            return False
        copied = False
        if self._limits.contiguous_kv and known and not self._kv.can_adopt(known, more=count - len(known)):
            known = self._affordable(known[: self._kv.num_current(known)], max(left - count, 0))
            copied = bool(known)
        else:
            left += len(known) - self._kv.num_idle(known)
        if count > left:
            return False
        self._take(sequence, known, count, copied=copied)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Add one block if one is free. Return whether it was."""
        if not self._kv.free_blocks:
            return False
        runs = self._kv.extend(sequence.table, room=self._room(sequence) - sequence.num_blocks)
        sequence.grow(runs, block_size=self._limits.block_size)
        return True

    def turns_with_blocks(self, sequences: Iterable[Sequence], most: int) -> int:
        """Lower bound on the tokens per sequence that still fit in free blocks, at most ``most``."""
        size = self._limits.block_size
        rooms = [sequence.room - len(sequence.tokens) for sequence in sequences]
        turns = min(most, self._kv.free_blocks * size)
        while turns > 0 and sum([-(-(turns - room) // size) for room in rooms if room < turns]) > self._kv.free_blocks:
            turns //= 2
        return turns

    def note_computed(self, sequence: Sequence, end: int) -> None:
        """Enter the full blocks of the computed tokens ``[0, end)`` in the prefix cache."""
        if end < sequence.next_full:
            return
        full = end // self._limits.block_size
        keys = sequence.keys_of(full, block_size=self._limits.block_size)
        for index in range(sequence.known_blocks, full):
            self._kv.enter(keys[index], sequence.blocks[index])
        sequence.known_blocks = full
        sequence.next_full = (full + 1) * self._limits.block_size

    def note_sent(self, copies: Seq[BlockCopy]) -> None:
        """Count the sources of copies in a step that is now in flight."""
        self.draining_blocks += len(copies)

    def note_copied(self, copies: Seq[BlockCopy]) -> None:
        """Release the sources of copies in a step that retired."""
        self.draining_blocks -= len(copies)
        self._kv.release_references([copy.source for copy in copies])

    def leave(self, sequence: Sequence) -> None:
        """Cancel the computations and copies that a sequence still owed, because it stopped running."""
        self._kv.expect_no_more(sequence.keys[sequence.known_blocks :], sequence.sequence)
        self._kv.release_references([copy.source for copy in sequence.new_copies])
        sequence.new_copies = ()

    def release(self, sequence: Sequence) -> None:
        """Free the blocks. While steps in flight use them, only count them; call again when none does."""
        if sequence.in_flight:
            self.draining_blocks += 0 if sequence.draining else sequence.num_blocks
            sequence.draining = True
            return
        self.draining_blocks -= sequence.num_blocks if sequence.draining else 0
        sequence.draining = False
        if sequence.registered:
            self._frees.append(sequence.sequence)
        self._kv.release(sequence.forget_blocks())

    @property
    def has_frees(self) -> bool:
        """Whether the next step must list sequences to forget."""
        return bool(self._frees)

    def pop_frees(self) -> list[SequenceId]:
        """Remove and return the sequences that stages may forget, for the next step."""
        frees, self._frees = self._frees, []
        return frees

    def needs(self, sequence: Sequence) -> int:
        """Number of blocks for all known tokens."""
        return -(-len(sequence.tokens) // self._limits.block_size)

    def _room(self, sequence: Sequence) -> int:
        """Number of blocks for the sequence at its limit."""
        return -(-sequence.limit // self._limits.block_size)

    def _reusable_keys(self, sequence: Sequence) -> list[Key]:
        """Return the keys of blocks that the cache may provide: all full ones except the last token's (its logits are
        needed)."""
        if not self._limits.prefix_cache or not sequence.reuse_prefix:
            return []
        size = self._limits.block_size
        return sequence.keys_of((len(sequence.tokens) - 1) // size, block_size=size)

    def _known_prefix(self, sequence: Sequence) -> list[int] | None:
        """Return the cached blocks of its first tokens; None while other sequences rewrite stale ones among them."""
        known = self._kv.find(self._reusable_keys(sequence))
        stale = known[self._kv.num_current(known) :]
        return known if self._kv.num_idle(stale) == len(stale) else None

    def _affordable(self, known: list[int], spare_blocks: int) -> list[int]:
        """Return the leading blocks that the pool can keep while they are copied."""
        while (excess := self._kv.num_idle(known) - spare_blocks) > 0:
            known = known[:-excess]
        return known

    def _take(self, sequence: Sequence, known: list[int], count: int, *, copied: bool) -> None:
        size, room = self._limits.block_size, self._room(sequence)
        current = self._kv.num_current(known)
        self._kv.hold(known)
        if copied:
            sequence.grow(self._kv.allocate(count, room=room), block_size=size)
            sequence.new_copies = tuple(map(BlockCopy, known, sequence.blocks))
        else:
            sequence.grow(as_runs(known), block_size=size)
            self._take_more(sequence, count - len(known), room=room - len(known))
        sequence.scheduled = current * size
        sequence.replay_end = len(known) * size
        sequence.known_blocks = current
        if not sequence.preemptions and not sequence.carried:
            sequence.cached_prompt_tokens = min(sequence.scheduled, sequence.prompt_tokens)
        if self._limits.prefix_cache:
            sequence.next_full = (current + 1) * size
            keys = sequence.keys_of(len(sequence.tokens) // size, block_size=size)
            self._kv.expect(keys[current:], sequence.sequence)
        self._count(sequence)

    def _take_more(self, sequence: Sequence, count: int, *, room: int) -> None:
        """Allocate blocks behind the known ones; adjoining them if the pool is contiguous."""
        if self._limits.contiguous_kv and sequence.table and count:
            sequence.grow(self._kv.extend(sequence.table, count, room=room), block_size=self._limits.block_size)
        elif count:
            sequence.grow(self._kv.allocate(count, room=room), block_size=self._limits.block_size)

    def _count(self, sequence: Sequence) -> None:
        self.admitted_tokens += len(sequence.tokens)
        self.cached_tokens += sequence.scheduled
        if sequence.carried:
            sequence.carried = False
            self.kept_tokens += sequence.scheduled
            self.replayed_tokens += max(0, sequence.replay_end - sequence.scheduled)
