"""What goes into the scheduler and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from edgepipe.backend.types import BlockCopy
from edgepipe.errors import RequestInvalid
from edgepipe.ids import SequenceId, StepId


class EndReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an EOS or stop id was sampled; it is the last token
    LENGTH = "length"  # max_tokens or the context is used up
    CANCELLED = "cancelled"


class Priority(IntEnum):
    """Who goes first when not all can. Batch sequences get older while others pass, so that they go some time."""

    INTERACTIVE = 0  # somebody waits for every token
    BATCH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One token stream that is wanted. Raises RequestInvalid for an empty prompt, no output, an unknown priority."""

    sequence: SequenceId  # never used before
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()  # output known from before: computed again, never sampled again
    max_tokens: int | None = None  # output tokens, those in ``generated`` included; None: what the context takes
    stop_ids: frozenset[int] = frozenset()  # EOS ids among them, unless they are to be ignored
    priority: int = Priority.INTERACTIVE
    reuse_prefix: bool = True  # False: every prompt token is computed, because something is wanted of each
    alone: bool = False  # suspected of breaking steps: has steps of its own until one of them sampled a token
    told_bytes: int = 0  # what stages are told of it when it begins, at most, but for its output
    told_token_bytes: int = 0  # and of each output token known by then

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestInvalid("the prompt is empty", next_step="give at least one token")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestInvalid("no output is wanted", fact="max_tokens is 0", next_step="ask for at least one token")
        if self.priority not in tuple(Priority):
            raise RequestInvalid(f"there is no priority {self.priority}", fact="0 is interactive, 1 is batch")


class TokenSampled(NamedTuple):
    """A token became known. A tuple, since one is made for every token."""

    sequence: SequenceId
    position: int  # output position
    token_id: int


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The one ending of a sequence; nothing follows."""

    sequence: SequenceId
    reason: EndReason
    num_tokens: int  # output tokens
    cached_prompt_tokens: int = 0  # of the prompt, found computed already


Event = TokenSampled | SequenceEnded


class ScheduledStep(NamedTuple):
    """One micro-batch, as columns: the same index in the first four is one row. Holds only what changed.

    Order of meaning: ``frees``, ``registers``, new blocks, ``copies`` one after another, then the rows.
    """

    step: StepId  # counts from 1
    sequences: tuple[SequenceId, ...]
    positions: tuple[int, ...]  # absolute, of the row's first token
    num_tokens: tuple[int, ...]
    samples: tuple[bool, ...]  # whether a token is sampled after the row's last
    token_ids: tuple[int, ...]  # [T] of all rows, packed
    block_rows: tuple[int, ...]  # three columns: row, first block and number of blocks appended to that row's table
    block_starts: tuple[int, ...]
    block_counts: tuple[int, ...]
    registers: tuple[SequenceId, ...]  # sequences that begin (again) with an empty block table
    frees: tuple[SequenceId, ...]  # sequences that are forgotten
    copies: tuple[BlockCopy, ...] = ()  # blocks computed for one sequence, into the table of another
    last_slice: int | None = None  # with which it ends; None: with the pipeline's last

    @property
    def num_rows(self) -> int:
        """Sequences in the step."""
        return len(self.sequences)

    @property
    def num_samples(self) -> int:
        """Tokens that its ``retire`` takes."""
        return sum(self.samples)
