"""States of recurrent layers: their slots, and where the rows of a step read and write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from edgepipe.backend.step_layout import StepLayout
from edgepipe.backend.types import BlockCopy, RowState
from edgepipe.model.layer_spec import Recurrent

State = tuple[mx.array, ...]


class LayerStates:
    """The slots of one layer. The slot behind the last one holds zeros: a sequence begins with it."""

    def __init__(self, spec: Recurrent, num_slots: int) -> None:
        self._arrays = [mx.zeros((num_slots + 1, *shape), mx.float32) for shape in spec.state_shapes]
        mx.eval(self._arrays)

    @property
    def arrays(self) -> list[mx.array]:
        """All states [slots + 1, ...] float32."""
        return self._arrays

    def read(self, slots: mx.array) -> State:
        """Return the states [N, ...] of slots [N]."""
        return tuple(each[slots] for each in self._arrays)

    def write(self, slots: mx.array, states: State) -> None:
        """Keep states [N, ...] in slots [N]."""
        for each, new in zip(self._arrays, states, strict=True):
            each[slots] = new

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Do nothing: a state is in no block."""


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
        self.num_single = len(single)
        self.rows = mx.array([first for first, _ in single]) if self.long and single else None
        self.read = mx.array([zeros if state.read is None else state.read for _, state in single])
        self.write = mx.array([state.writes[0].slot for _, state in single])


@dataclass(frozen=True, slots=True)
class StateStep:
    """One recurrent layer's part of a step."""

    step: StepStates
    pool: LayerStates
