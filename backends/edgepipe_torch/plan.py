"""A step's host arrays: rotations and KV slots of its packed rows. Uses numpy only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import BlockCopy, BlockRun, ScoreRows, Step, StepRow
from edgepipe.errors import StepFailed
from edgepipe_torch.rope import Rotations

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """One sequence's packed rows ``[first_row, first_row + num_tokens)``."""

    first_row: int
    num_tokens: int
    length: int  # tokens of the sequence, including this step's
    start_slot: int  # slot of token 0; valid only without ``slots``
    slots: Int64s | None  # [length] slot of every token if the sequence lies in several runs
    blocks: Int64s  # the block table, up to ``length``


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Layout of a step for ``submit``."""

    slice_index: int
    slots: Int64s  # [T] slot of each row's keys and values
    rotations: npt.NDArray[np.complex64]  # [T, D / 2]
    rows: tuple[RowLayout, ...]
    logit_rows: Int64s  # [R + S] rows to sample from, then rows to score
    scores: ScoreRows | None
    copies: tuple[BlockCopy, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


def lay_out_step(step: Step, *, rotations: Rotations, block_size: int, num_blocks: int) -> StepLayout:
    """Lay out a step. Raises StepFailed for a short block table or a block outside the pool."""
    positions: list[Int64s] = []
    slots: list[Int64s] = []
    rows: list[RowLayout] = []
    first_row = 0
    for row in step.rows:
        plan = _lay_out_row(row, first_row, block_size=block_size, num_blocks=num_blocks)
        own = np.arange(row.position, row.position + row.num_tokens)
        positions.append(own)
        slots.append(own + plan.start_slot if plan.slots is None else plan.slots[row.position :])
        rows.append(plan)
        first_row += row.num_tokens
    return StepLayout(
        slice_index=step.slice_index,
        slots=_join(slots),
        rotations=rotations.at(_join(positions)),
        rows=tuple(rows),
        logit_rows=_logit_rows(step, first_row),
        scores=step.scores,
        copies=_checked_copies(step.copies, num_blocks),
    )


def _lay_out_row(row: StepRow, first_row: int, *, block_size: int, num_blocks: int) -> RowLayout:
    length = row.position + row.num_tokens
    blocks = _block_table(row, length, block_size=block_size, num_blocks=num_blocks)
    broken = bool((np.diff(blocks) != 1).any())
    return RowLayout(
        first_row=first_row,
        num_tokens=row.num_tokens,
        length=length,
        start_slot=int(blocks[0]) * block_size,
        slots=_slots(blocks, length, block_size) if broken else None,
        blocks=blocks,
    )


def _block_table(row: StepRow, length: int, *, block_size: int, num_blocks: int) -> Int64s:
    covered = sum(run.count for run in row.runs) * block_size
    if row.num_tokens < 1 or row.position < 0 or covered < length:
        raise StepFailed(
            f"the blocks of sequence {row.sequence} do not cover its tokens",
            fact=f"{covered} slots for tokens {row.position}-{length - 1}",
        )
    for run in row.runs:
        _check_run(run, num_blocks)
    table = [np.arange(run.start, run.start + run.count) for run in row.runs]
    return np.concatenate(table)[: -(-length // block_size)]


def _check_run(run: BlockRun, num_blocks: int) -> None:
    if run.start < 0 or run.start + run.count > num_blocks:
        raise StepFailed(
            f"KV blocks {run.start}-{run.start + run.count - 1} do not exist", fact=f"the pool has {num_blocks}"
        )


def _slots(blocks: Int64s, length: int, block_size: int) -> Int64s:
    return (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[:length]


def _logit_rows(step: Step, num_tokens: int) -> Int64s:
    scored = () if step.scores is None else step.scores.rows
    rows = np.array([*step.logit_rows, *scored], np.int64)
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < num_tokens:
        raise StepFailed("the step asks for logits of a row outside the step", fact=f"it has {num_tokens} rows")
    return rows


def _checked_copies(copies: tuple[BlockCopy, ...], num_blocks: int) -> tuple[BlockCopy, ...]:
    for copy in copies:
        _check_run(BlockRun(copy.source, 1), num_blocks)
        _check_run(BlockRun(copy.target, 1), num_blocks)
    return copies


def _join(parts: list[Int64s]) -> Int64s:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
