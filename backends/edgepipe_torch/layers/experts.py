"""Experts of a mixture in one place, and how their products are filled.

T rows, H hidden, K experts used by each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from edgepipe.spec.layer_spec import Experts
from edgepipe.weights.stored_weight import Rows
from edgepipe_torch.layers.feed_forward import Gated
from edgepipe_torch.layers.linear import HeldWeight, Linear, PartForms, ReadWeight

EXPERTS = "experts"  # role of their products


@dataclass(frozen=True, slots=True)
class Taken:
    """Some experts of a weight that holds all experts' rows in turn."""

    numbers: Sequence[int]  # numbers of these experts, ascending
    rows: int  # rows of each expert
    count: int  # number of all experts in the weight

    @property
    def all_rows(self) -> int:
        """Rows of all experts in the weight."""
        return self.count * self.rows

    def each(self) -> Iterator[slice]:
        """Yield each expert's rows."""
        return (slice(number * self.rows, (number + 1) * self.rows) for number in self.numbers)

    @property
    def order(self) -> npt.NDArray[np.int64] | None:
        """The numbers of these experts' rows; None: of all experts."""
        if len(self.numbers) == self.count:
            return None
        return np.concatenate([np.arange(own.start, own.stop) for own in self.each()])


class CountsExperts(Protocol):
    """Counts the experts that steps read."""

    @property
    def distinct(self) -> int | Tensor:
        """The experts that the last step read, or on a device [1] int32 that later work overwrites."""
        ...


ReadRows = Callable[[Rows | None], ReadWeight]
"""Reads rows of a weight, or all; see ``Device.read``."""


class ExpertMatrix(HeldWeight, Protocol):
    """A matrix of some experts, with parts (gate and up) of equal size."""

    def fill_taken(self, part: int, read: ReadRows, taken: Taken) -> None:
        """Take the rows of the experts taken, of a part [count * rows, in]. Raises RuntimeError for another kind."""
        ...

    def fill_taken_bias(self, part: int, bias: Tensor, taken: Taken) -> None:
        """Copy what belongs to the experts taken, of a part's bias [count * rows]."""
        ...

    def finish(self) -> None:
        """Convert to the computing form after all parts are filled."""
        ...


class ExpertProducts(CountsExperts, Protocol):
    """The experts of a mixture in one place."""

    @property
    def matrices(self) -> tuple[ExpertMatrix, ExpertMatrix]:
        """Gates and ups, or ups alone; downs."""
        ...

    @property
    def linears(self) -> Sequence[HeldWeight]:
        """The weights of all products."""
        ...

    @property
    def waits(self) -> bool:
        """Whether ``add`` waits for the device, to learn which experts were chosen. Known after loading."""
        ...

    def add(self, x: Tensor, chosen: Tensor, weights: Tensor, total: Tensor) -> None:
        """Add to total [T, H] what each row's experts, chosen [T, K] int64, give for x [T, H], times weights [T, K].

        An expert that is in another place has the number -1 and the weight 0.
        """
        ...


class EachExpert:
    """Experts one after the other, each with its rows; on any device."""

    def __init__(self, experts: Sequence[Gated]) -> None:
        self._experts = experts
        self.distinct = 0  # see ``ExpertProducts``

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return len(self._experts)

    @property
    def linears(self) -> Sequence[Linear]:
        return [linear for expert in self._experts for linear in expert.linears]

    @property
    def waits(self) -> bool:
        return True

    @property
    def matrices(self) -> tuple[ExpertLinears, ExpertLinears]:
        gate_up, down = self.by_role
        return ExpertLinears(gate_up), ExpertLinears(down)

    @property
    def by_role(self) -> tuple[Sequence[Linear], Sequence[Linear]]:
        """Products of each expert: gate and up, down."""
        return [expert.gate_up for expert in self._experts], [expert.down for expert in self._experts]

    def add(self, x: Tensor, chosen: Tensor, weights: Tensor, total: Tensor) -> None:
        """See ``ExpertProducts``. Each row's experts are added in the order of their numbers."""
        order = chosen.reshape(-1).argsort(stable=True)
        used, counts = chosen.reshape(-1)[order].unique_consecutive(return_counts=True)
        self.distinct = 0
        rows, factors = order // chosen.shape[1], weights.reshape(-1)[order].unsqueeze(1).to(x.dtype)
        start = 0
        for expert, count in zip(used.tolist(), counts.tolist(), strict=True):
            if expert >= 0:
                own = rows[start : start + count]
                total.index_add_(0, own, self._experts[expert].rows(x[own]) * factors[start : start + count])
                self.distinct += 1
            start += count


class ExpertLinears:
    """An ``ExpertMatrix`` of one product for each expert."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = linears

    @property
    def num_bytes(self) -> int:
        return sum(linear.num_bytes for linear in self._linears)

    def fill_taken(self, part: int, read: ReadRows, taken: Taken) -> None:
        for linear, own in zip(self._linears, taken.each(), strict=True):
            linear.fill(part, read(own))

    def fill_taken_bias(self, part: int, bias: Tensor, taken: Taken) -> None:
        for linear, own in zip(self._linears, taken.each(), strict=True):
            linear.fill_bias(part, bias[own])

    def finish(self) -> None:
        for linear in self._linears:
            linear.finish()


def each_expert(
    product: Callable[[str, int, Sequence[int], PartForms], Linear],
    spec: Experts,
    in_features: int,
    count: int,
    gate_up: PartForms,
    down: PartForms,
) -> EachExpert:
    """Make ``count`` experts of products that a device makes; see ``Device.experts``."""
    inner = [spec.inner] * len(gate_up.forms)
    return EachExpert(
        [
            Gated(
                product(EXPERTS, in_features, inner, gate_up),
                product(EXPERTS, spec.inner, [in_features], down),
                spec.activation,
            )
            for _ in range(count)
        ]
    )
