"""A step's host side: where each packed row is, and where its keys and values go. numpy only, no tensor.

Shape letters: T packed tokens, R rows that are sampled from, S rows that are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import BlockCopy, BlockRun, RowState, ScoreRows, Step, StepRow, TierMove
from edgepipe.errors import StepFailed
from edgepipe.spec.kv_forms import REST_TOKENS

Indices = npt.NDArray[Any]  # int32 or int64, as the backend's kernels take them


class RestSlots(NamedTuple):
    """Where the lower bits of a row's newest tokens are, from the span of its first token on; see ``kv_forms``."""

    span: int  # tokens
    first: int  # position of the first of these tokens: a multiple of the span
    slots: Indices  # [length - first]
    blocks: Indices  # the block table, as long as these slots need

    def start(self, position: int) -> int:
        """Return the first position of a position's span."""
        return position // self.span * self.span

    def of(self, start: int, end: int) -> Indices:
        """Return the slots of the positions ``[start, end)``."""
        return self.slots[start - self.first : end - self.first]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """One sequence's packed rows ``[first_row, first_row + num_tokens)``."""

    first_row: int
    num_tokens: int
    length: int  # tokens of the sequence, this step's included
    blocks: Indices  # the block table, as long as ``length`` needs
    start_slot: int  # slot of token 0
    contiguous: bool  # the blocks follow one another: token n is in slot ``start_slot + n``
    state: RowState | None = None  # slots of its state; None: no layer is recurrent
    rests: RestSlots | None = None  # None: the form of KV has no spans

    @property
    def position(self) -> int:
        """Position of its first token in this step."""
        return self.length - self.num_tokens

    @property
    def end_row(self) -> int:
        """The packed row behind its last one."""
        return self.first_row + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """What a backend's ``submit`` needs of a step."""

    slice_index: int
    positions: Indices  # [T] absolute, of each packed token
    slots: Indices  # [T] where each token's keys and values go
    rows: tuple[RowLayout, ...]
    logit_rows: Indices  # [R + S] packed tokens: sampled from, then scored
    num_sampled: int  # R
    scores: ScoreRows | None
    copies: tuple[BlockCopy, ...]
    moves: tuple[TierMove, ...]
    next_ids: Indices | None  # see ``Step``
    # The same step in each windowed memory class: ``slots`` and ``rows`` are those of the class, and the rows' lengths
    # count from the first token that the class's table names.
    windows: tuple[StepLayout, ...] = ()

    @property
    def num_tokens(self) -> int:
        """T"""
        return len(self.slots)


def lay_out_step(
    step: Step,
    *,
    block_size: int,
    num_blocks: int,
    window_blocks: Sequence[int] = (),
    state_slots: int = 0,
    span: int = 0,
    dtype: type[np.int32] | type[np.int64],
) -> StepLayout:
    """Lay out a step of blocks with ``block_size`` tokens, from a pool of ``num_blocks`` and the windows' pools.

    span  see ``kv_forms.span_tokens``

    Raises StepFailed if a block table is short, or if it names a block or slot that the pools lack: kernels check
    nothing.
    """
    check_states(step.rows, state_slots)
    positions = [np.arange(row.position, row.position + row.num_tokens, dtype=dtype) for row in step.rows]
    lay_out_rows = partial(_lay_out_rows, block_size=block_size, span=span, dtype=dtype)
    slots, rows = lay_out_rows(step.rows, num_blocks=num_blocks)
    for copy in step.copies:
        _check_run(BlockRun(copy.source, 1), num_blocks)
        _check_run(BlockRun(copy.target, 1), num_blocks)
    layout = StepLayout(
        slice_index=step.slice_index,
        positions=_joined(positions, dtype),
        slots=slots,
        rows=rows,
        logit_rows=_logit_rows(step, len(slots), dtype),
        num_sampled=len(step.logit_rows),
        scores=step.scores,
        copies=step.copies,
        moves=step.moves,
        next_ids=_next_ids(step, len(slots), dtype),
    )
    if not window_blocks:
        return layout
    windows: list[StepLayout] = []
    for number, count in enumerate(window_blocks):
        held = [_within(row, number, block_size) for row in step.rows]
        slots, rows = lay_out_rows(held, num_blocks=count)
        windows.append(replace(layout, slots=slots, rows=rows))
    return replace(layout, windows=tuple(windows))


def _lay_out_rows(
    held: Sequence[StepRow], *, block_size: int, num_blocks: int, span: int, dtype: type[np.int32] | type[np.int64]
) -> tuple[Indices, tuple[RowLayout, ...]]:
    """Return the slots ``[T]`` of the rows' tokens in one memory class, and the rows' layouts."""
    slots: list[Indices] = []
    rows: list[RowLayout] = []
    first_row = 0
    for row in held:
        layout = _row_layout(row, first_row, block_size=block_size, num_blocks=num_blocks, span=span, dtype=dtype)
        own = np.arange(row.position, row.position + row.num_tokens, dtype=dtype)
        slots.append(_slots_at(layout, own, block_size))
        rows.append(layout)
        first_row += row.num_tokens
    return _joined(slots, dtype), tuple(rows)


def _within(row: StepRow, number: int, block_size: int) -> StepRow:
    """Return the row as a windowed class holds it: its positions count from the table's first block."""
    if number >= len(row.windows):
        raise StepFailed(
            f"sequence {row.sequence} lacks the blocks of a window", fact=f"it has those of {len(row.windows)}"
        )
    table = row.windows[number]
    return replace(row, position=row.position - table.first * block_size, runs=table.runs)


def all_slots(row: RowLayout, block_size: int) -> Indices:
    """``[length]``: the slot of each token of the row's sequence."""
    within = np.arange(block_size, dtype=row.blocks.dtype)
    return (row.blocks[:, None] * block_size + within).reshape(-1)[: row.length]


def _row_layout(
    row: StepRow,
    first_row: int,
    *,
    block_size: int,
    num_blocks: int,
    span: int,
    dtype: type[np.int32] | type[np.int64],
) -> RowLayout:
    length, more = row.position + row.num_tokens, REST_TOKENS if span else 0
    covered = sum(run.count for run in row.runs) * block_size
    if row.num_tokens < 1 or row.position < 0 or covered < length + more:
        raise StepFailed(
            f"the blocks of sequence {row.sequence} do not cover its tokens",
            fact=f"{covered} slots for tokens {row.position}-{length - 1}{f' and {more} more' if more else ''}",
        )
    for run in row.runs:
        _check_run(run, num_blocks)
    parts = [np.arange(run.start, run.start + run.count, dtype=dtype) for run in row.runs]
    table = parts[0] if len(parts) == 1 else np.concatenate(parts)
    blocks = table[: -(-length // block_size)]
    rests = None
    if span:
        first = row.position // span * span
        places = np.arange(first + REST_TOKENS, length + REST_TOKENS, dtype=dtype)
        slots = table[places // block_size] * block_size + places % block_size
        rests = RestSlots(span, first, slots, table[: -(-(length + more) // block_size)])
    return RowLayout(
        first_row=first_row,
        num_tokens=row.num_tokens,
        length=length,
        blocks=blocks,
        start_slot=int(blocks[0]) * block_size,
        contiguous=len(parts) == 1 or not bool((np.diff(blocks) != 1).any()),
        state=row.state,
        rests=rests,
    )


def check_states(rows: Sequence[StepRow], state_slots: int) -> None:
    """Check the slots that rows name, of a pool of so many slots (0: no layer is recurrent). Raises StepFailed."""
    if not state_slots:
        return
    written: set[int] = set()
    for row in rows:
        state = row.state
        if state is None or not state.writes or (state.read is None) != (row.position == 0):
            raise StepFailed(
                f"sequence {row.sequence} lacks the slots of its state", fact=f"it is at token {row.position}"
            )
        ends = [0, *[write.after for write in state.writes]]
        if ends[-1] != row.num_tokens or any(after <= before for before, after in pairwise(ends)):
            raise StepFailed(
                f"the states of sequence {row.sequence} are not those of its tokens",
                fact=f"they are behind {ends[1:]} of {row.num_tokens} tokens",
            )
        slots = [write.slot for write in state.writes]
        for slot in (*slots, *(() if state.read is None else (state.read,))):
            if not 0 <= slot < state_slots:
                raise StepFailed(f"there is no slot {slot} for a state", fact=f"the pool has {state_slots}")
        if len({*slots}) < len(slots) or not written.isdisjoint(slots):
            raise StepFailed("two states would go to one slot", fact=f"sequence {row.sequence} writes {slots}")
        written.update(slots)
    if any(
        row.state is not None
        and row.state.read in written
        and row.state.read not in [write.slot for write in row.state.writes]
        for row in rows
    ):
        raise StepFailed("a row would write to a state that another row reads")


def _slots_at(layout: RowLayout, positions: Indices, block_size: int) -> Indices:
    if layout.contiguous:
        return positions + layout.start_slot
    return layout.blocks[positions // block_size] * block_size + positions % block_size


def _check_run(run: BlockRun, num_blocks: int) -> None:
    if run.start < 0 or run.start + run.count > num_blocks:
        raise StepFailed(
            f"KV blocks {run.start}-{run.start + run.count - 1} do not exist", fact=f"the pool has {num_blocks}"
        )


def _logit_rows(step: Step, num_tokens: int, dtype: type[np.int32] | type[np.int64]) -> Indices:
    scored = () if step.scores is None else step.scores.rows
    rows = np.array([*step.logit_rows, *scored], dtype)
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < num_tokens:
        raise StepFailed("logits of a row outside the step are wanted", fact=f"the step has {num_tokens} rows")
    return rows


def _next_ids(step: Step, num_tokens: int, dtype: type[np.int32] | type[np.int64]) -> Indices | None:
    if step.next_ids is None:
        return None
    if step.next_ids.shape != (num_tokens,):
        raise StepFailed("a step's next tokens do not match its rows", fact=f"{step.next_ids.shape} of {num_tokens}")
    return step.next_ids.astype(dtype)


def _joined(parts: list[Indices], dtype: type[np.int32] | type[np.int64]) -> Indices:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
