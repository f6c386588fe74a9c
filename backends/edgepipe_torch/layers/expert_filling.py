"""Fill the products of experts from weights that hold all experts' rows in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgepipe.model.packed import Packed
from edgepipe_torch.cpu.packed import PackedCpuLinear
from edgepipe_torch.cpu.repack import StoredBlocks
from edgepipe_torch.layers.host_weights import HostWeight, Sink, StoredWeight, floats_of, shape_of
from edgepipe_torch.layers.linear import Linear, PackedLinear

if TYPE_CHECKING:
    from edgepipe_torch.cuda.experts import ExpertMatrix


@dataclass(frozen=True, slots=True)
class Taken:
    """Some experts of a weight that holds all experts' rows in turn."""

    numbers: Sequence[int]  # of these experts, ascending
    rows: int  # of each expert
    count: int  # of all experts

    @property
    def all_rows(self) -> int:
        """Rows of all experts in the weight."""
        return self.count * self.rows

    def each(self) -> Iterator[tuple[int, int]]:
        """Yield each expert's first row and the one behind its last."""
        return ((number * self.rows, (number + 1) * self.rows) for number in self.numbers)

    def of_packed(self, weight: Packed) -> Packed:
        """Return the rows of these experts, of a packed weight [count * rows, in]."""
        return weight if len(self.numbers) == self.count else weight.rows(self._order().numpy())

    def of_floats(self, weight: Tensor) -> Tensor:
        """Return the rows of these experts, of floats [count * rows, ...]."""
        return weight if len(self.numbers) == self.count else weight[self._order()]

    def _order(self) -> Tensor:
        return torch.cat([torch.arange(first, end) for first, end in self.each()])


def each_expert(linears: Sequence[Linear], part: int, taken: Taken, in_features: int) -> Sink:
    """Return a sink that gives each expert taken its rows of a weight [experts * rows, in]."""

    def sink(weight: HostWeight) -> None:
        if shape_of(weight) != (taken.all_rows, in_features):
            raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
        weight = weight.load() if isinstance(weight, StoredWeight) else weight
        for linear, (first, end) in zip(linears, taken.each(), strict=True):
            if isinstance(weight, StoredBlocks):
                assert isinstance(linear, PackedCpuLinear)
                linear.fill_blocks(part, weight.rows(first, end))
            elif isinstance(weight, Packed):
                assert isinstance(linear, PackedLinear)
                linear.fill_packed(part, weight.rows(slice(first, end)))
            else:
                linear.fill(part, weight[first:end])

    return sink


def each_bias(linears: Sequence[Linear], part: int, taken: Taken) -> Sink:
    """Return a sink that gives each expert taken its part of a bias [experts * rows]."""

    def sink(bias: HostWeight) -> None:
        if shape_of(bias) != (taken.all_rows,):
            raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
        for linear, (first, end) in zip(linears, taken.each(), strict=True):
            linear.fill_bias(part, floats_of(bias)[first:end])

    return sink


def matrix_sink(matrix: ExpertMatrix, part: int, taken: Taken, in_features: int) -> Sink:
    """Return a sink that gives a matrix of experts the rows of those taken, of a weight [experts * rows, in]."""

    def sink(weight: HostWeight) -> None:
        if shape_of(weight) != (taken.all_rows, in_features):
            raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
        assert isinstance(weight, Tensor | Packed)  # a device reads no stored blocks
        matrix.fill(part, taken.of_packed(weight) if isinstance(weight, Packed) else taken.of_floats(weight))

    return sink


def matrix_bias_sink(matrix: ExpertMatrix, part: int, taken: Taken) -> Sink:
    """Return a sink that gives a matrix of experts the biases of those taken, of a bias [experts * rows]."""

    def sink(bias: HostWeight) -> None:
        if shape_of(bias) != (taken.all_rows,):
            raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
        matrix.fill_bias(part, taken.of_floats(floats_of(bias)))

    return sink
