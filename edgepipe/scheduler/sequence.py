"""The scheduler's record of one token stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from edgepipe.backend.types import BlockCopy, BlockRun
from edgepipe.ids import SequenceId
from edgepipe.scheduler.drafting import SequenceDrafts
from edgepipe.scheduler.kv import Key, next_key
from edgepipe.scheduler.states import StateTable
from edgepipe.scheduler.types import EndReason, Priority
from edgepipe.scheduler.windows import WindowTable

NEVER = 1 << 60
"""More tokens than any sequence has."""

MAX_OVERTAKEN = 8
"""After so many interactive sequences passed it, waiting or admitted, a batch sequence counts as interactive."""


class Phase(Enum):
    """State of a sequence."""

    WAITING = auto()  # waits for admission, first or after preemption
    PREFILL = auto()  # admitted, some known tokens not scheduled
    DECODE = auto()  # all known tokens scheduled; ready while no sampling step is in flight
    ENDED = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Tokens of a sequence, how many of them are computed, and the blocks that hold them."""

    sequence: SequenceId
    arrival: int  # order of submission: the oldest is admitted first, the youngest preempted first
    tokens: list[int]  # prompt and output
    prompt_tokens: int
    stop_ids: frozenset[int]
    limit: int  # tokens, prompt and output, at which the sequence ends
    priority: Priority  # may rise from batch to interactive
    is_batch: bool = False  # it was submitted with batch priority, whatever its priority now
    alone: bool = False  # suspected: shares no step until an isolated step has sampled a token
    may_fly: bool = False  # see SequenceSpec
    overtaken: int = 0  # interactive sequences that passed it while it had batch priority
    registration_base_bytes: int = 0  # see SequenceSpec
    registration_token_bytes: int = 0
    reuse_prefix: bool = True
    limit_reason: EndReason = EndReason.LENGTH
    phase: Phase = Phase.WAITING
    scheduled: int = 0  # tokens [0, scheduled) are computed or in flight; a sampling row in flight: all known ones
    replay_end: int = 0  # tokens [scheduled, replay_end): the first slices lost their KV, later slices still hold it
    carried: bool = False  # it came from the previous epoch, and is not yet admitted in this one
    in_flight: int = 0  # number of steps that use its blocks
    preemptions: int = 0
    cached_prompt_tokens: int = 0  # prompt tokens found in the cache at its first admission
    draining: bool = False  # it left, but steps in flight still use its blocks
    fetched: bool = False  # the disk was asked for its blocks since it was last admitted
    table: list[BlockRun] = field(default_factory=list[BlockRun])
    blocks: list[int] = field(default_factory=list[int])  # block ids of the table, in order
    windows: list[WindowTable] = field(default_factory=list[WindowTable])  # its blocks of each windowed class
    state: StateTable | None = None  # its slots, if the model has recurrent layers
    decoded_s: float = 0.0  # when its newest decode retired; 0: not known
    drafts: SequenceDrafts = field(default_factory=SequenceDrafts)
    room: int = 0  # tokens that its blocks of every class reach to
    rest_tokens: int = 0  # slots that it needs behind its last token's
    known_blocks: int = 0  # its first blocks that are full, computed and entered in the cache
    next_full: int = NEVER  # computed tokens at which the next block can enter the cache
    keys: list[Key] = field(default_factory=list[Key])  # keys of its first full blocks, computed on demand
    new_runs: tuple[BlockRun, ...] = ()  # runs of its table that are not yet sent to the stages
    new_copies: tuple[BlockCopy, ...] = ()  # copies into its blocks that are not yet sent to the stages
    registered: bool = False  # the stages know it since its table was last empty

    @property
    def num_output(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def registration_bytes(self) -> int:
        """Upper bound of its registration message now, in bytes."""
        return self.registration_base_bytes + self.registration_token_bytes * self.num_output

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the table."""
        return len(self.blocks)

    @property
    def unscheduled(self) -> int:
        """Number of known tokens that no step holds yet."""
        return len(self.tokens) - self.scheduled

    @property
    def replays(self) -> bool:
        """Whether only the first slices compute its next tokens."""
        return self.scheduled < self.replay_end

    @property
    def next_tokens(self) -> int:
        """Number of tokens that can go into one step."""
        return min(self.replay_end if self.replays else len(self.tokens), self.room) - self.scheduled

    def note_overtaken(self) -> None:
        """Count an interactive sequence that passes this batch sequence. Raise the priority at ``MAX_OVERTAKEN``."""
        self.overtaken += 1
        if self.overtaken >= MAX_OVERTAKEN:
            self.priority = Priority.INTERACTIVE

    def grow(self, runs: tuple[BlockRun, ...], *, block_size: int) -> None:
        """Append blocks to the table and join adjoining runs."""
        self.new_runs += runs
        for run in runs:
            self.blocks.extend(range(run.start, run.start + run.count))
            last = self.table[-1] if self.table else None
            if last is not None and last.start + last.count == run.start:
                self.table[-1] = BlockRun(last.start, last.count + run.count)
            else:
                self.table.append(run)
        self.note_room(block_size)

    def note_room(self, block_size: int) -> None:
        """Update ``room`` after a table changed."""
        blocks = len(self.blocks)
        reached = block_size * (min([blocks, *[each.end for each in self.windows]]) if self.windows else blocks)
        self.room = max(0, reached - self.rest_tokens)

    def keys_of(self, num_blocks: int, *, block_size: int) -> list[Key]:
        """Return the keys of the first ``num_blocks`` blocks. All their tokens must be known."""
        for index in range(len(self.keys), num_blocks):
            before = self.keys[-1] if self.keys else b""
            self.keys.append(next_key(before, self.tokens[index * block_size : (index + 1) * block_size]))
        return self.keys if len(self.keys) == num_blocks else self.keys[:num_blocks]

    def forget_blocks(self) -> list[BlockRun]:
        """Empty the table and return its former runs."""
        table, self.table = self.table, []
        self.blocks, self.known_blocks, self.new_runs, self.registered = [], 0, (), False
        self.windows = []
        self.room, self.next_full = 0, NEVER
        return table
