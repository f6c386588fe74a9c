"""States of recurrent layers: their slots, and where the rows of a step read and write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from edgepipe.backend.step_layout import StepLayout
from edgepipe.backend.types import RowState
from edgepipe.spec.layer_spec import Recurrent

State = tuple[mx.array, ...]


@dataclass(frozen=True, slots=True)
class _Batch:
    """States that a step computed side by side. All slots that it names hold it."""

    arrays: State  # [N, ...]
    slots: tuple[int, ...]  # [N]

    def row(self, slot: int) -> State:
        """Return the state [1, ...] of a slot."""
        at = self.slots.index(slot)
        return tuple(each[at : at + 1] for each in self.arrays)


class LayerStates:
    """The slots of one layer. The slot behind the last one holds zeros: a sequence begins with it.

    A slot holds the arrays that a step computed, and nothing writes to them. One array for all slots would be copied
    whole by every write: MLX updates an array in place only while nothing else holds it, and a step's kernels hold what
    they read until they have run (docs/experiments.md). Rows that stay together from step to step share a batch, so
    their states are never copied. Once one leaves, the others get arrays of their own, so that no slot keeps the states
    of others alive.
    """

    def __init__(self, spec: Recurrent, num_slots: int) -> None:
        # The batch of each slot.
        self._batches = [
            _Batch(tuple(mx.zeros((1, *shape), mx.float32) for shape in spec.state_shapes), (slot,))
            for slot in range(num_slots + 1)
        ]
        mx.eval([batch.arrays for batch in self._batches])

    def read(self, slots: Sequence[int]) -> State:
        """Return the states [N, ...] of slots [N]."""
        together = self._batches[slots[0]]
        if together.slots == tuple(slots):
            return together.arrays
        rows = [self._batches[slot].row(slot) for slot in slots]
        return rows[0] if len(rows) == 1 else tuple(mx.concatenate(list(each)) for each in zip(*rows, strict=True))

    def write(self, slots: Sequence[int], states: State, *, own: bool = False) -> list[mx.array]:
        """Keep states [N, ...] in slots [N]. Returns new arrays, which the step must evaluate.

        own  the states are no parts of larger arrays, which they would keep alive; others are copied
        """
        left = {other for slot in slots for other in self._batches[slot].slots} - set(slots)
        apart = ((self._batches[slot].row(slot), (slot,)) for slot in sorted(left))
        new = [
            _Batch(states if own else _copied(states), tuple(slots)),
            *(_Batch(_copied(each), at) for each, at in apart),
        ]
        for batch in new:
            for slot in batch.slots:
                self._batches[slot] = batch
        return [array for batch in new for array in batch.arrays]


def _copied(states: State) -> State:
    """Return arrays that keep no larger ones alive."""
    return tuple(mx.contiguous(each) for each in states)


@dataclass(frozen=True, slots=True)
class LongRow:
    """A row of several tokens: packed rows ``[first, first + count)``."""

    first: int
    count: int
    state: RowState


class StepStates:
    """Where the rows of a step read and write states. N rows have one token."""

    def __init__(self, plan: StepLayout, zeros: int) -> None:
        """``zeros``: the slot of zeros."""
        rows = [(row, row.state) for row in plan.rows if row.state is not None]
        single = [(row.first_row, state) for row, state in rows if row.num_tokens == 1]
        self.zeros = zeros
        self.long = [LongRow(row.first_row, row.num_tokens, state) for row, state in rows if row.num_tokens > 1]
        self.rows = mx.array([first for first, _ in single]) if self.long and single else None
        self.read = [zeros if state.read is None else state.read for _, state in single]
        self.write = [state.writes[0].slot for _, state in single]
        self.written: list[mx.array] = []  # the new states of all layers, which the step must evaluate


@dataclass(frozen=True, slots=True)
class StateStep:
    """One recurrent layer's part of a step."""

    step: StepStates
    pool: LayerStates

    def keep(self, slots: Sequence[int], states: State, *, own: bool = False) -> None:
        """Keep states [N, ...] in slots [N]; see ``LayerStates.write``."""
        self.step.written += self.pool.write(slots, states, own=own)
