"""A step's host arrays: slots of its tokens, and the slots that they attend to. T packed tokens, B rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import BlockRun, Step, StepRow, TierMove
from edgepipe.errors import StepFailed
from edgepipe.spec.kv_forms import rest_tokens, span_tokens
from edgepipe_emulated.arithmetic import Words
from edgepipe_emulated.kv import KVStorage, Layers, Slots, past_slots, slot_at, table_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """A slice's layers of one memory class that see the same window."""

    pool: int  # number of the class
    window: int | None  # tokens that a token sees, including itself; None: all
    layers: tuple[int, ...]  # layers of the slice, counted from 0
    stored: Layers  # the same layers in the class's pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What the rows of a step see of earlier steps, in one group of layers."""

    starts: tuple[int, ...]  # [B] first position
    # [B] table, and the positions in it from the first one to the row's first; their slots are found while the device
    # computes: no device's host does that.
    seen: tuple[tuple[Sequence[BlockRun], int, int], ...]
    weights: tuple[Words, ...]  # [B] of the same positions

    def slots(self, block_size: int) -> list[Slots]:
        """Return the slots ``[B]`` of the positions."""
        return [past_slots(runs, start, stop, block_size) for runs, start, stop in self.seen]


class BegunSpan(NamedTuple):
    """Earlier tokens of the span that a row goes on with, in one memory class."""

    slots: npt.NDArray[np.int64]  # [n] of their KV
    rests: npt.NDArray[np.int64]  # [n] of their lower bits
    seen_by: slice  # packed tokens of the row in the same span


class Rests(NamedTuple):
    """Lower bits of KV, in one memory class."""

    begun: Sequence[BegunSpan]  # one for each row that goes on with a span
    kept: npt.NDArray[np.int64]  # [K] packed tokens whose lower bits are stored
    slots: npt.NDArray[np.int64]  # [K] their slots


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """Input of ``submit`` besides tokens or activations."""

    step: Step
    weights: Words  # [T] weight of each token's position
    slots: tuple[npt.NDArray[np.int64], ...]  # [T] slot of each token's KV, for each class
    past: tuple[Past, ...]  # earlier tokens that each group reads
    row_of: npt.NDArray[np.int64]  # [T] row of each token
    row_start: npt.NDArray[np.int64]  # [B] packed index of each row's first token
    rests: tuple[Rests, ...] = ()  # one for each class; empty: the form of KV has no spans
    device_s: float = 0.0  # its time on the device, without jitter and moves

    @property
    def num_tokens(self) -> int:
        """T"""
        return len(self.weights)


def prepare_step(
    step: Step, *, pools: Sequence[KVStorage], weights: Words, groups: Sequence[LayerGroup], kv: str = ""
) -> PreparedStep:
    """Build the arrays. ``weights``: for every position of the context. ``groups``: of the slice. ``kv``: its form.

    Raises StepFailed for a short block table, an unknown block, a position beyond the context, an invalid logit row,
    and two tokens in the same slot.
    """
    if not step.rows:
        raise StepFailed("a step has no rows")
    for row in step.rows:
        _check(row, pools, len(weights), rest_tokens(kv))
    lengths = np.array([row.num_tokens for row in step.rows], dtype=np.int64)
    slots = tuple(_own_slots(step, number, pool) for number, pool in enumerate(pools))
    num_tokens = int(lengths.sum())
    if len(step.logit_rows) and not 0 <= step.logit_rows.min() <= step.logit_rows.max() < num_tokens:
        raise StepFailed("a step asks for logits of a token outside the step", fact=f"it has {num_tokens} tokens")
    row_of, row_start = np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths
    # Each row's first position, minus the packed index of its first token.
    positions = np.array([row.position for row in step.rows]) - row_start
    return PreparedStep(
        step=step,
        weights=weights[positions[row_of] + np.arange(num_tokens)],
        slots=slots,
        past=tuple(_past(step, group, pools[group.pool], weights) for group in groups),
        row_of=row_of,
        row_start=row_start,
        rests=tuple(_rests(step, number, pool, kv) for number, pool in enumerate(pools)) if rest_tokens(kv) else (),
    )


def num_awaited(step: Step) -> int:
    """Count a step's moves up to the last one of a block or slot that its copies or rows use."""
    return next((count for count in range(len(step.moves), 0, -1) if _uses(step, step.moves[count - 1])), 0)


def _uses(step: Step, move: TierMove) -> bool:
    if not move.number and any(move.place in (copy.source, copy.target) for copy in step.copies):
        return True
    for row in step.rows:
        tables = row.runs, *[window.runs for window in row.windows]
        if move.number < len(tables):
            if any(run.start <= move.place < run.start + run.count for run in tables[move.number]):
                return True
        elif row.state is not None:
            if move.place == row.state.read or any(move.place == write.slot for write in row.state.writes):
                return True
    return False


def _rests(step: Step, number: int, pool: KVStorage, kv: str) -> Rests:
    """Lay out the lower bits in one class. Tables begin with a span."""
    span, more, packed = span_tokens(kv, pool.block_size), rest_tokens(kv), 0
    begun: list[BegunSpan] = []
    kept: list[npt.NDArray[np.int64]] = []
    slots: list[npt.NDArray[np.int64]] = []
    for row in step.rows:
        first, runs = _table(row, number)
        start = row.position - first * pool.block_size
        end, span_start = start + row.num_tokens, start // span * span
        if span_start < start:
            own = table_slots(runs, span_start, start, pool.block_size)
            rests = table_slots(runs, span_start + more, start + more, pool.block_size)
            begun.append(BegunSpan(own, rests, slice(packed, packed + min(row.num_tokens, span_start + span - start))))
        count = min(row.num_tokens, more)
        packed += row.num_tokens
        kept.append(np.arange(packed - count, packed))
        slots.append(table_slots(runs, end - count + more, end + more, pool.block_size))
    return Rests(begun, np.concatenate(kept), np.concatenate(slots))


def _table(row: StepRow, number: int) -> tuple[int, Sequence[BlockRun]]:
    """Return a row's table of one class: the place of its first block, and its runs."""
    if number == 0:
        return 0, row.runs
    if number > len(row.windows):
        raise StepFailed("a row lacks a block table", fact=f"it has {len(row.windows)} of windows")
    return row.windows[number - 1].first, row.windows[number - 1].runs


def _own_slots(step: Step, number: int, pool: KVStorage) -> npt.NDArray[np.int64]:
    """Return the slots ``[T]`` of the step's tokens in one class; a decode's slot needs no arrays."""
    found: list[int] = []
    for row in step.rows:
        first, runs = _table(row, number)
        position = row.position - first * pool.block_size
        if row.num_tokens == 1:
            found.append(slot_at(runs, position, pool.block_size))
        else:
            found += table_slots(runs, position, position + row.num_tokens, pool.block_size).tolist()
    slots = np.array(found, dtype=np.int64)
    if len(set(found)) != len(found):
        raise StepFailed("two tokens of a step would be written to one KV slot", fact=_shared_slot(slots, pool))
    return slots


def _past(step: Step, group: LayerGroup, pool: KVStorage, weights: Words) -> Past:
    starts: list[int] = []
    tables: list[tuple[Sequence[BlockRun], int, int]] = []
    for row in step.rows:
        first, runs = _table(row, group.pool)
        begin = first * pool.block_size
        start = 0 if group.window is None else max(0, row.position - group.window + 1)
        if start < begin:
            raise StepFailed(
                f"a table of a window of {group.window} tokens begins at token {begin}",
                fact=f"token {row.position} sees the tokens from {start} on",
            )
        starts.append(start)
        tables.append((runs, start - begin, row.position - begin))
    rows = zip(starts, step.rows, strict=True)
    return Past(
        starts=tuple(starts),
        seen=tuple(tables),
        weights=tuple([weights[start : row.position] for start, row in rows]),
    )


def _check(row: StepRow, pools: Sequence[KVStorage], context_length: int, more: int) -> None:
    """``more``: slots that a row needs behind its last token's."""
    end = row.position + row.num_tokens
    if row.num_tokens < 1 or row.position < 0 or end > context_length:
        raise StepFailed(f"tokens {row.position}-{end - 1} are outside the context", fact=f"it has {context_length}")
    for number, pool in enumerate(pools):
        first, runs = _table(row, number)
        room = (first + sum(run.count for run in runs)) * pool.block_size
        if room < end + more:
            raise StepFailed(f"a block table ends before its tokens do: {room} slots for {end + more} tokens")
        if any(run.start < 0 or run.count < 1 or run.start + run.count > pool.num_blocks for run in runs):
            raise StepFailed(
                "a block table names blocks that are not in the pool", fact=f"the pool has {pool.num_blocks}"
            )


def _shared_slot(slots: npt.NDArray[np.int64], pool: KVStorage) -> str:
    values, counts = np.unique(slots, return_counts=True)
    block, slot = divmod(int(values[counts > 1][0]), pool.block_size)
    return f"block {block}, slot {slot}"
