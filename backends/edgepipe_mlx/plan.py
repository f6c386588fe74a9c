"""A step's host arrays: positions and KV slots of its packed rows. Uses numpy only, no MLX objects."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import BlockCopy, BlockRun, ScoreRows, Step, StepRow
from edgepipe.errors import StepFailed

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """One sequence's packed rows ``[first_row, first_row + num_tokens)``."""

    first_row: int
    num_tokens: int
    length: int  # tokens of the sequence, including this step's
    start_slot: int  # slot of token 0; valid only without ``blocks``
    blocks: Int32s | None  # the block table if the sequence lies in several runs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Layout of a step for ``submit``."""

    slice_index: int
    positions: Int32s  # [T] absolute, one per packed row
    slots: Int32s  # [T] slot of each row's keys and values
    rows: tuple[RowLayout, ...]
    logit_rows: Int32s  # [R]
    scores: ScoreRows | None
    copies: tuple[BlockCopy, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


def lay_out_step(step: Step, *, block_size: int, num_blocks: int) -> StepLayout:
    """Lay out a step. Raises StepFailed for a short block table or a block outside the pool."""
    positions: list[Int32s] = []
    slots: list[Int32s] = []
    rows: list[RowLayout] = []
    first_row = 0
    for row in step.rows:
        runs = join_runs(row.runs)
        _check(row, runs, block_size=block_size, num_blocks=num_blocks)
        own = np.arange(row.position, row.position + row.num_tokens, dtype=np.int32)
        plan = _lay_out_row(row, runs, first_row, block_size)
        positions.append(own)
        slots.append(_slots(plan, own, block_size))
        rows.append(plan)
        first_row += row.num_tokens
    return StepLayout(
        slice_index=step.slice_index,
        positions=_join(positions),
        slots=_join(slots),
        rows=tuple(rows),
        logit_rows=np.asarray(step.logit_rows, np.int32),
        scores=step.scores,
        copies=step.copies,
    )


def tile_rows(rows: tuple[RowLayout, ...], max_scores: int) -> tuple[RowLayout, ...]:
    """Split long chunks so that queries times keys of a part (of one head) are at most ``max_scores``.

    A part sees only keys up to its own end, so the split changes no result and saves masked work.
    """
    tiles: list[RowLayout] = []
    for row in rows:
        size = max(1, max_scores // row.length)
        start = row.length - row.num_tokens
        for at in range(0, row.num_tokens, size):
            count = min(size, row.num_tokens - at)
            tiles.append(replace(row, first_row=row.first_row + at, num_tokens=count, length=start + at + count))
    return tuple(tiles)


def join_runs(runs: tuple[BlockRun, ...]) -> list[BlockRun]:
    """Join the blocks into as few runs as possible."""
    joined: list[BlockRun] = []
    for run in runs:
        if joined and joined[-1].start + joined[-1].count == run.start:
            joined[-1] = BlockRun(joined[-1].start, joined[-1].count + run.count)
        else:
            joined.append(run)
    return joined


def _lay_out_row(row: StepRow, runs: list[BlockRun], first_row: int, block_size: int) -> RowLayout:
    length = row.position + row.num_tokens
    in_one_run = runs[0].count * block_size >= length
    return RowLayout(
        first_row=first_row,
        num_tokens=row.num_tokens,
        length=length,
        start_slot=runs[0].start * block_size,
        blocks=None if in_one_run else _table(runs, -(-length // block_size)),
    )


def _table(runs: list[BlockRun], num_blocks: int) -> Int32s:
    """Return the first ``num_blocks`` block ids of the runs."""
    return np.concatenate([np.arange(run.start, run.start + run.count, dtype=np.int32) for run in runs])[:num_blocks]


def _slots(plan: RowLayout, positions: Int32s, block_size: int) -> Int32s:
    if plan.blocks is None:
        return positions + np.int32(plan.start_slot)
    return plan.blocks[positions // block_size] * np.int32(block_size) + positions % np.int32(block_size)


def _join(parts: list[Int32s]) -> Int32s:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _check(row: StepRow, runs: list[BlockRun], *, block_size: int, num_blocks: int) -> None:
    """Check a row's blocks, because MLX silently reads and writes beyond the end of an array."""
    covered = sum(run.count for run in runs) * block_size
    if row.num_tokens < 1 or covered < row.position + row.num_tokens:
        raise StepFailed(
            f"the blocks of sequence {row.sequence} do not cover its tokens",
            fact=f"{covered} slots for {row.position + row.num_tokens} tokens",
        )
    for run in runs:
        if run.start < 0 or run.start + run.count > num_blocks:
            raise StepFailed(
                f"sequence {row.sequence} uses a KV block that does not exist",
                fact=f"blocks {run.start}-{run.start + run.count - 1} of a pool of {num_blocks}",
            )
