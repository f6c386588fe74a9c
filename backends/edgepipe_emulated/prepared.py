"""A step's host arrays: slots of its tokens, and the slots that they attend to. T packed tokens, B rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import Step, StepRow
from edgepipe.errors import StepFailed
from edgepipe_emulated.arithmetic import Words
from edgepipe_emulated.kv import KVStorage, Slots, past_slots, slot_at, table_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """Input of ``submit`` besides tokens or activations."""

    step: Step
    weights: Words  # [T] weight of each token's position
    slots: npt.NDArray[np.int64]  # [T] slot of each token's KV
    past: tuple[Slots, ...]  # [B] slots that each row attends to besides its own tokens
    past_weights: tuple[Words, ...]  # [B] weights of those positions
    row_of: npt.NDArray[np.int64]  # [T] row of each token
    row_start: npt.NDArray[np.int64]  # [B] packed index of each row's first token


def prepare_step(step: Step, *, pool: KVStorage, weights: Words) -> PreparedStep:
    """Build the arrays. ``weights``: for every position of the context.

    Raises StepFailed for a short block table, an unknown block, a position beyond the context, an invalid logit row,
    and two tokens in the same slot.
    """
    if not step.rows:
        raise StepFailed("a step has no rows")
    for row in step.rows:
        _check(row, pool, len(weights))
    lengths = np.array([row.num_tokens for row in step.rows], dtype=np.int64)
    slots = np.array([slot for row in step.rows for slot in _own_slots(row, pool.block_size)], dtype=np.int64)
    if len(set(slots.tolist())) != len(slots):
        raise StepFailed("two tokens of a step would be written to one KV slot", fact=_shared_slot(slots, pool))
    if len(step.logit_rows) and not 0 <= step.logit_rows.min() <= step.logit_rows.max() < len(slots):
        raise StepFailed("a step asks for logits of a token outside the step", fact=f"it has {len(slots)} tokens")
    row_of, row_start = np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths
    # Each row's first position, minus the packed index of its first token.
    positions = np.array([row.position for row in step.rows]) - row_start
    return PreparedStep(
        step=step,
        weights=weights[positions[row_of] + np.arange(len(slots))],
        slots=slots,
        past=tuple(past_slots(row.runs, row.position, pool.block_size) for row in step.rows),
        past_weights=tuple(weights[: row.position] for row in step.rows),
        row_of=row_of,
        row_start=row_start,
    )


def _own_slots(row: StepRow, block_size: int) -> Sequence[int]:
    """Return the slots of the row's tokens; a decode's slot needs no arrays."""
    if row.num_tokens == 1:
        return (slot_at(row.runs, row.position, block_size),)
    return table_slots(row.runs, row.position, row.position + row.num_tokens, block_size).tolist()


def _check(row: StepRow, pool: KVStorage, context_length: int) -> None:
    end = row.position + row.num_tokens
    room = sum(run.count for run in row.runs) * pool.block_size
    if row.num_tokens < 1 or row.position < 0 or end > context_length:
        raise StepFailed(f"tokens {row.position}-{end - 1} are outside the context", fact=f"it has {context_length}")
    if room < end:
        raise StepFailed(f"a block table ends before its tokens do: {room} slots for {end} tokens")
    if any(run.start < 0 or run.count < 1 or run.start + run.count > pool.num_blocks for run in row.runs):
        raise StepFailed("a block table names blocks that are not in the pool", fact=f"the pool has {pool.num_blocks}")


def _shared_slot(slots: npt.NDArray[np.int64], pool: KVStorage) -> str:
    values, counts = np.unique(slots, return_counts=True)
    block, slot = divmod(int(values[counts > 1][0]), pool.block_size)
    return f"block {block}, slot {slot}"
