"""One token stream on its way: the scheduler's own record of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from edgepipe.backend.types import BlockCopy, BlockRun
from edgepipe.ids import SequenceId
from edgepipe.scheduler.kv import Key, next_key
from edgepipe.scheduler.types import EndReason, Priority

NEVER = 1 << 60
"""More tokens than there will be."""

MAX_OVERTAKEN = 8
"""Interactive sequences that may pass a batch sequence, waiting or admitted. Then it counts as interactive."""


class Phase(Enum):
    """Where a sequence stands."""

    WAITING = auto()  # for admission, at first or after preemption
    PREFILL = auto()  # admitted, some known tokens not scheduled
    DECODE = auto()  # all known tokens scheduled; ready when no sampling step is in flight
    ENDED = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Tokens, how far they are computed, and the blocks they hold."""

    sequence: SequenceId
    arrival: int  # order of submission: admission goes by it, preemption against it
    tokens: list[int]  # prompt and output
    prompt_tokens: int
    stop_ids: frozenset[int]
    limit: int  # tokens, prompt and output, at which it ends
    priority: Priority  # changes with age
    alone: bool = False  # suspected: shares no step until a token was sampled in a step of its own
    overtaken: int = 0  # interactive sequences that passed it, while it was of the batch
    told_bytes: int = 0  # see SequenceSpec
    told_token_bytes: int = 0
    reuse_prefix: bool = True
    limit_reason: EndReason = EndReason.LENGTH
    phase: Phase = Phase.WAITING
    scheduled: int = 0  # tokens [0, scheduled) are computed or in flight; a sampling row in flight: all known ones
    replay_end: int = 0  # tokens [scheduled, replay_end): later slices have them, the first ones have lost them
    carried: bool = False  # from an epoch before, and not admitted in this one yet
    in_flight: int = 0  # steps that touch its blocks
    preemptions: int = 0
    cached_prompt_tokens: int = 0  # found computed when it was first admitted
    draining: bool = False  # left, but steps in flight still touch its blocks
    table: list[BlockRun] = field(default_factory=list[BlockRun])
    blocks: list[int] = field(default_factory=list[int])  # of the table, one by one
    room: int = 0  # tokens that the blocks hold
    known_blocks: int = 0  # of them: full, computed and told to the cache
    next_full: int = NEVER  # computed tokens at which one more block can be told to the cache
    keys: list[Key] = field(default_factory=list[Key])  # of full blocks, as far as they were asked for
    new_runs: tuple[BlockRun, ...] = ()  # of the table, not yet told
    new_copies: tuple[BlockCopy, ...] = ()  # into its blocks, not yet told
    registered: bool = False  # told since its table was last empty

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def registration_bytes(self) -> int:
        """What stages are told of it when it begins now, at most."""
        return self.told_bytes + self.told_token_bytes * self.num_output

    @property
    def num_blocks(self) -> int:
        """Blocks in the table."""
        return len(self.blocks)

    @property
    def unscheduled(self) -> int:
        """Known tokens that no step holds yet."""
        return len(self.tokens) - self.scheduled

    @property
    def replays(self) -> bool:
        """Whether its next tokens are computed by the first slices only."""
        return self.scheduled < self.replay_end

    @property
    def next_tokens(self) -> int:
        """Tokens that can go into one step."""
        return (self.replay_end if self.replays else len(self.tokens)) - self.scheduled

    def note_overtaken(self) -> None:
        """An interactive sequence passes this batch sequence: after so many it counts as interactive."""
        self.overtaken += 1
        if self.overtaken >= MAX_OVERTAKEN:
            self.priority = Priority.INTERACTIVE

    def grow(self, runs: tuple[BlockRun, ...], *, block_size: int) -> None:
        """Append blocks to the table; adjoining runs become one."""
        self.new_runs += runs
        self.room += block_size * sum([run.count for run in runs])
        for run in runs:
            self.blocks.extend(range(run.start, run.start + run.count))
            last = self.table[-1] if self.table else None
            if last is not None and last.start + last.count == run.start:
                self.table[-1] = BlockRun(last.start, last.count + run.count)
            else:
                self.table.append(run)

    def keys_of(self, num_blocks: int, *, block_size: int) -> list[Key]:
        """The keys of the first ``num_blocks`` blocks, all of whose tokens are known."""
        for index in range(len(self.keys), num_blocks):
            before = self.keys[-1] if self.keys else b""
            self.keys.append(next_key(before, self.tokens[index * block_size : (index + 1) * block_size]))
        return self.keys if len(self.keys) == num_blocks else self.keys[:num_blocks]

    def forget_blocks(self) -> list[BlockRun]:
        """Empty the table and return what it held."""
        table, self.table = self.table, []
        self.blocks, self.known_blocks, self.new_runs, self.registered = [], 0, (), False
        self.room, self.next_full = 0, NEVER
        return table
