"""Inputs and outputs of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from edgepipe.backend.types import BlockCopy, RowState
from edgepipe.errors import RequestInvalid
from edgepipe.ids import SequenceId, StepId


class EndReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"  # an EOS or stop id was sampled; it is the last token
    LENGTH = "length"  # max_tokens or the context is used up
    CANCELLED = "cancelled"


class Priority(IntEnum):
    """Order of admission. A batch sequence counts how many pass it, so it does not wait for ever."""

    INTERACTIVE = 0  # a person waits for each token
    BATCH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One token stream to generate. Raises RequestInvalid for an empty prompt, no output or an unknown priority."""

    sequence: SequenceId  # never used before
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()  # output of an earlier attempt: computed again, never sampled again
    max_tokens: int | None = None  # output tokens, including ``generated``; None: up to the context length
    stop_ids: frozenset[int] = frozenset()  # includes the EOS ids, unless the request ignores them
    priority: int = Priority.INTERACTIVE
    reuse_prefix: bool = True  # False: compute every prompt token, for example for log-probabilities
    alone: bool = False  # suspected of breaking steps: shares no step until an isolated step has sampled a token
    registration_base_bytes: int = 0  # upper bound of its registration message, without output tokens
    registration_token_bytes: int = 0  # additional registration bytes per known output token

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
    """A sequence ended. This is its last event."""

    sequence: SequenceId
    reason: EndReason
    num_tokens: int  # output tokens
    cached_prompt_tokens: int = 0  # prompt tokens found in the prefix cache


Event = TokenSampled | SequenceEnded


class WindowBlocks(NamedTuple):
    """New blocks of one windowed class, in columns."""

    rows: tuple[int, ...]
    places: tuple[int, ...]  # place in the sequence of the run's first block; a row's first run begins its table
    starts: tuple[int, ...]
    counts: tuple[int, ...]


class ScheduledStep(NamedTuple):
    """One micro-batch in columns: the same index in the first four columns is one row. It holds changes only.

    A stage applies ``frees``, ``registers``, new blocks, ``copies`` one after another, then the rows.
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
    frees: tuple[SequenceId, ...]  # sequences that stages forget
    copies: tuple[BlockCopy, ...] = ()  # blocks of one sequence, copied into the table of another
    # New blocks of each windowed class; empty if no row has new blocks of a window.
    windows: tuple[WindowBlocks, ...] = ()
    states: tuple[RowState, ...] = ()  # state of each row; empty if no layer is recurrent
    last_slice: int | None = None  # the step ends after this slice; None: after the pipeline's last

    @property
    def num_rows(self) -> int:
        """Number of sequences in the step."""
        return len(self.sequences)

    @property
    def num_samples(self) -> int:
        """Number of token ids that ``retire`` takes for this step."""
        return sum(self.samples)

    @property
    def is_bulk(self) -> bool:
        """Whether the step has prompt tokens: see ``StepPlan.is_bulk``."""
        return len(self.token_ids) > len(self.sequences)

    def may_retire_before(self, older: ScheduledStep) -> bool:
        """Return whether this step's answer may come before that of an older step in flight.

        On links and stages, steps without prompt tokens pass steps with prompt tokens of other sequences.
        """
        return not self.is_bulk and older.is_bulk and set(self.sequences).isdisjoint(older.sequences)
