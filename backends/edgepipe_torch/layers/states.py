"""States of recurrent layers: their slots, and where the rows of a step read and write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edgepipe.backend.step_layout import RowLayout, StepLayout
from edgepipe.backend.types import RowState
from edgepipe.spec.layer_spec import Recurrent
from edgepipe_torch.layers.host_copies import Stored
from edgepipe_torch.layers.transfer import Transfer


class StatePool:
    """The slots of a slice's recurrent layers. Behind the last one is a slot of zeros, with which a sequence begins.

    With ``spare``, another slot follows: surplus rows of graphs write to it, and no row reads it.
    """

    def __init__(
        self, mixers: Sequence[Recurrent], num_slots: int, device: torch.device, *, spare: bool = False
    ) -> None:
        """``mixers``: of the slice's recurrent layers, in order. Raises RuntimeError or MemoryError."""
        self.zeros = num_slots
        self.spare = num_slots + 1
        count = added_slots(spare=spare) + num_slots
        self._layers = [
            tuple(torch.zeros(count, *shape, device=device) for shape in mixer.state_shapes) for mixer in mixers
        ]

    def stored(self, number: int) -> list[Stored]:
        """Return what moves to host memory, as the memory class ``number``."""
        return [Stored(number, tensor, 0, 1) for tensors in self._layers for tensor in tensors]

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Return the tensors [slots, ...] float32 of a recurrent layer; ``index`` counts these."""
        return self._layers[index]


def added_slots(*, spare: bool) -> int:
    """Return how many slots a pool has besides those of sequences and snapshots."""
    return 2 if spare else 1


@dataclass(frozen=True, slots=True)
class LongRow:
    """A row of several tokens: packed rows ``[first, first + count)``."""

    first: int
    count: int
    state: RowState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStates:
    """Where the rows of a step read and write states. N rows have one token."""

    rows: Tensor | None  # [N] int64 packed rows of those; None: they are the step's rows, in order
    read: Tensor  # [N] int64 slots
    write: Tensor  # [N] int64 slots; surplus rows of a graph write the same
    only: int | None  # the slot, if N is 1 and the row reads and writes the same
    long: tuple[LongRow, ...]
    zeros: int  # slot of zeros

    @classmethod
    def of(cls, layout: StepLayout, zeros: int, transfer: Transfer) -> StepStates:
        """Look up the slots of a step's rows."""
        rows: list[int] = []
        read: list[int] = []
        write: list[int] = []
        long: list[LongRow] = []
        for row in layout.rows:
            assert row.state is not None
            if row.num_tokens > 1:
                long.append(LongRow(row.first_row, row.num_tokens, row.state))
                continue
            rows.append(row.first_row)
            slots = single_slots(row.state, zeros)
            read.append(slots[0])
            write.append(slots[1])
        return cls(
            rows=_sent(rows, transfer) if long else None,
            read=_sent(read, transfer),
            write=_sent(write, transfer),
            only=read[0] if len(read) == 1 and read == write else None,
            long=tuple(long),
            zeros=zeros,
        )

    @classmethod
    def singles(cls, num_rows: int, zeros: int) -> StepStates:
        """Return those of so many rows with one token, on a CPU. ``fill`` sets their slots."""
        read, write = (torch.full((num_rows,), zeros) for _ in range(2))
        return cls(rows=None, read=read, write=write, only=None, long=(), zeros=zeros)

    def fill(self, rows: Sequence[RowLayout]) -> None:
        """Set the slots of rows with one token; as many rows as at the start."""
        slots = [single_slots(row.state, self.zeros) for row in rows if row.state is not None]
        for index, (read, write) in enumerate(slots):
            self.read[index], self.write[index] = read, write

    @property
    def num_single(self) -> int:
        """N"""
        return self.read.shape[0]


def single_slots(state: RowState, zeros: int) -> tuple[int, int]:
    """Return the slots that a row with one token reads and writes."""
    return zeros if state.read is None else state.read, state.writes[0].slot


def _sent(numbers: list[int], transfer: Transfer) -> Tensor:
    return transfer.upload(np.array(numbers, np.int64))
