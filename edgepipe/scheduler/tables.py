"""The block tables of all sequences: what they take, share, copy and give back."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from edgepipe.backend.types import BlockCopy
from edgepipe.ids import SequenceId
from edgepipe.scheduler.kv import Key, KVPool, as_runs
from edgepipe.scheduler.limits import SchedulerLimits
from edgepipe.scheduler.sequence import Sequence


class BlockTables:
    """Keeps a block with whoever may still use it: running sequences, steps in flight, the prefix cache."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._kv = KVPool(limits.num_blocks, contiguous=limits.contiguous_kv)
        self._frees: list[SequenceId] = []
        self.draining_blocks = 0  # that steps in flight use, of sequences that left or as sources of their copies
        self.admitted_tokens = 0  # known tokens of sequences when they were admitted, since the start
        self.cached_tokens = 0  # of those, found in the prefix cache
        self.kept_tokens = 0  # of sequences of an epoch before: computed then, and still there
        self.replayed_tokens = 0  # of the same: computed again, up to the last slice that had lost them

    @property
    def num_blocks(self) -> int:
        """In the pool."""
        return self._kv.num_blocks

    @property
    def free_blocks(self) -> int:
        """That no sequence holds."""
        return self._kv.free_blocks

    @property
    def cached_blocks(self) -> int:
        """Whose contents are known by key."""
        return self._kv.cached_blocks

    @property
    def stale_to(self) -> int | None:
        """The slice up to which some of what is known must be computed again; None if nothing has been lost."""
        return self._kv.stale_to

    def carry_over(self) -> KVPool:
        """What is known by key, for the tables of the next epoch."""
        return self._kv.carry_over()

    def take_over(self, pool: KVPool) -> None:
        """Begin with what an epoch before has left. Raises ValueError if that was another kind of pool."""
        if pool.num_blocks != self._kv.num_blocks:
            raise ValueError(f"a pool of {pool.num_blocks} blocks cannot be one of {self._kv.num_blocks}")
        self._kv = pool

    def awaited(self, sequence: Sequence) -> Key | None:
        """The last of the next blocks of its prompt that other sequences are computing now; None if they compute none.

        Waiting for it is quicker than computing it twice.
        """
        keys = self._reusable_keys(sequence)
        end = begin = self._kv.num_current(self._kv.find(keys))
        while end < len(keys) and self._kv.coming_from(keys[end]) is not None:
            end += 1
        return keys[end - 1] if end > begin else None

    def coming_from(self, key: Key) -> SequenceId | None:
        """The sequence that is computing the block with this key now, if there is one."""
        return self._kv.coming_from(key)

    def admit(self, sequence: Sequence, *, kept_blocks: int) -> bool:
        """A table for all known tokens, what is computed already shared or copied, the rest new.

        False, and nothing is taken, if fewer than ``kept_blocks`` would be left to others, or while another sequence
        holds blocks of the prompt that are to be written again.
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
        """One more block, if one is free now."""
        if not self._kv.free_blocks:
            return False
        runs = self._kv.extend(sequence.table, room=self._room(sequence) - sequence.num_blocks)
        sequence.grow(runs, block_size=self._limits.block_size)
        return True

    def turns_with_blocks(self, sequences: Iterable[Sequence], most: int) -> int:
        """For how many more tokens of each of these there are blocks for sure, at most ``most``."""
        size = self._limits.block_size
        rooms = [sequence.room - len(sequence.tokens) for sequence in sequences]
        turns = min(most, self._kv.free_blocks * size)
        while turns > 0 and sum([-(-(turns - room) // size) for room in rooms if room < turns]) > self._kv.free_blocks:
            turns //= 2
        return turns

    def note_computed(self, sequence: Sequence, end: int) -> None:
        """Tokens ``[0, end)`` of its table are computed: blocks that are full now may serve others."""
        if end < sequence.next_full:
            return
        full = end // self._limits.block_size
        keys = sequence.keys_of(full, block_size=self._limits.block_size)
        for index in range(sequence.known_blocks, full):
            self._kv.enter(keys[index], sequence.blocks[index])
        sequence.known_blocks = full
        sequence.next_full = (full + 1) * self._limits.block_size

    def note_sent(self, copies: Seq[BlockCopy]) -> None:
        """A step with these copies is in flight."""
        self.draining_blocks += len(copies)

    def note_copied(self, copies: Seq[BlockCopy]) -> None:
        """The step with these copies has retired."""
        self.draining_blocks -= len(copies)
        self._kv.release_references([copy.source for copy in copies])

    def leave(self, sequence: Sequence) -> None:
        """The sequence does not run any more: nothing waits for what it was to compute or to copy."""
        self._kv.expect_no_more(sequence.keys[sequence.known_blocks :], sequence.sequence)
        self._kv.release_references([copy.source for copy in sequence.new_copies])
        sequence.new_copies = ()

    def release(self, sequence: Sequence) -> None:
        """Free the blocks; while steps in flight touch them only count them. To be called again when none does."""
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
        """Whether the next step has to tell of tables that can be forgotten."""
        return bool(self._frees)

    def pop_frees(self) -> list[SequenceId]:
        """Sequences whose tables stages may forget, to be told with the next step."""
        frees, self._frees = self._frees, []
        return frees

    def needs(self, sequence: Sequence) -> int:
        """Blocks for all known tokens."""
        return -(-len(sequence.tokens) // self._limits.block_size)

    def _room(self, sequence: Sequence) -> int:
        """Blocks that the sequence takes if it uses up its limit."""
        return -(-sequence.limit // self._limits.block_size)

    def _reusable_keys(self, sequence: Sequence) -> list[Key]:
        """Of the blocks that it may find computed: never the one with the last token, whose logits are wanted."""
        if not self._limits.prefix_cache or not sequence.reuse_prefix:
            return []
        size = self._limits.block_size
        return sequence.keys_of((len(sequence.tokens) - 1) // size, block_size=size)

    def _known_prefix(self, sequence: Sequence) -> list[int] | None:
        """Blocks that hold its first tokens already; None while others are in the middle of writing some again."""
        known = self._kv.find(self._reusable_keys(sequence))
        stale = known[self._kv.num_current(known) :]
        return known if self._kv.num_idle(stale) == len(stale) else None

    def _affordable(self, known: list[int], spare_blocks: int) -> list[int]:
        """As many of them as can stay while they are copied."""
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
        """New blocks behind those that are known, right behind them where it matters."""
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
