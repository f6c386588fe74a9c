"""Inputs and outputs of the scheduler."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from edgepipe.backend.types import BlockCopy, RowState, TierMove
from edgepipe.errors import RequestInvalid
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler.place_keys import PlaceKey


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
    may_fly: bool = False  # its windows of drafts may follow one another in flight
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


def singles(samples: Collection[int], *, num_tokens: int) -> int:
    """Return the tokens of a step's rows that cost a device as much as a decode each.

    They are the tokens that rows sample after, and one of each other row. Only prompts have more tokens.
    """
    return num_tokens if num_tokens == len(samples) else sum([samples or 1 for samples in samples])


class ScheduledStep(NamedTuple):
    """One micro-batch in columns: the same index in the first four columns is one row. It holds changes only.

    A stage applies ``frees``, ``registers``, new blocks, ``moves`` and ``copies`` one after another, then the rows.
    """

    step: StepId  # counts from 1
    sequences: tuple[SequenceId, ...]
    positions: tuple[int, ...]  # absolute, of the row's first token
    num_tokens: tuple[int, ...]
    samples: tuple[int, ...]  # number of the row's last tokens that a token is sampled after
    token_ids: tuple[int, ...]  # [T] of all rows, packed
    block_rows: tuple[int, ...]  # three columns: row, first block and number of blocks appended to that row's table
    block_starts: tuple[int, ...]
    block_counts: tuple[int, ...]
    registers: tuple[SequenceId, ...]  # sequences that begin (again) with an empty block table
    frees: tuple[SequenceId, ...]  # sequences that stages forget
    copies: tuple[BlockCopy, ...] = ()  # blocks of one sequence, copied into the table of another
    moves: tuple[TierMove, ...] = ()  # between the device and host memory; on all stages, also behind ``last_slice``
    # New blocks of each windowed class; empty if no row has new blocks of a window.
    windows: tuple[WindowBlocks, ...] = ()
    states: tuple[RowState, ...] = ()  # state of each row; empty if no layer is recurrent
    drafts: tuple[int, ...] = ()  # most drafts that each row's sequence can use next; empty: none
    last_slice: int | None = None  # the step ends after this slice; None: after the pipeline's last
    # The step in flight whose sampled tokens the rows begin with, so that ``token_ids`` means nothing.
    after: StepId | None = None
    home: bool = False  # the sampled tokens also go to the stage that embeds, so that a step may follow this one
    # Above 0: drafts are not awaited. They come in lots of this size, behind all drafts that have come before.
    lot: int = 0
    # The rows' first tokens are drafts, too: a row samples nothing if its sequence went another way.
    assumed: bool = False
    # What steps that retired before have left on the device; it counts before anything else of this step.
    keys: tuple[PlaceKey, ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of sequences in the step."""
        return len(self.sequences)

    @property
    def num_samples(self) -> int:
        """Number of tokens that get logits, and most ids that ``retire`` takes for this step."""
        return sum(self.samples)

    @property
    def has_windows(self) -> bool:
        """Whether a row holds drafts: the sampler then needs the step's tokens."""
        return self.assumed or (len(self.token_ids) > len(self.sequences) and max(self.samples) > 1)

    @property
    def num_singles(self) -> int:
        """Number of tokens without those that only prompts have: see ``singles``."""
        return singles(self.samples, num_tokens=len(self.token_ids))

    @property
    def is_bulk(self) -> bool:
        """Whether the step has prompt tokens: see ``StepPlan.is_bulk``."""
        return len(self.token_ids) > self.num_singles

    def may_retire_before(self, older: ScheduledStep) -> bool:
        """Return whether this step's answer may come before that of an older step in flight.

        On links and stages, steps without prompt tokens pass steps with prompt tokens of other sequences. These pass
        steps that were planned ahead.
        """
        passes = older.is_bulk if not self.is_bulk else not older.is_bulk and older.after is not None
        return passes and set(self.sequences).isdisjoint(older.sequences)
