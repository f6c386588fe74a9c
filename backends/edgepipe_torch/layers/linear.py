"""Matrix products: what a layer asks of them, their buffers, and the product for any device and dtype.

Each device chooses the layout of a product (``Device.product``): ``cpu.linear``, ``cpu.packed``, ``cuda.packed``.

T rows, I in features, O out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.backend.types import PackedProducts
from edgepipe.spec.layer_spec import Activation
from edgepipe.spec.packed import Packed
from edgepipe.spec.packed_form import PackedForm
from edgepipe.weights.stored_weight import StoredWeight


@dataclass(frozen=True, slots=True)
class PartForms:
    """How the parts of a product are stored."""

    forms: Sequence[PackedForm | None]  # form of each part; None for floats
    fit_16_bits: bool  # 16 bits hold all floats exactly


class HeldWeight(Protocol):
    """A weight in memory."""

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias."""
        ...


@runtime_checkable
class HoldsPacked(HeldWeight, Protocol):
    """A product with packed parts."""

    @property
    def products(self) -> set[PackedProducts]:
        """What multiplies with the packed parts."""
        ...


ReadWeight = Tensor | Packed | HeldWeight
"""A weight [O, I] in host memory as products take it: floats, packed, or tiled for the kernels of a CPU."""


class Linear(HeldWeight, Protocol):
    """A weight with parts (such as q, k and v) merged along the out features."""

    def fill(self, part: int, weight: ReadWeight) -> None:
        """Take one part's weight [O, I], as ``Device.read`` returns it. The caller may then free its own."""
        ...

    def fill_bias(self, part: int, bias: Tensor) -> None:
        """Copy one part's bias [O] from host memory."""
        ...

    def rows(self, x: Tensor) -> Tensor:
        """Multiply x [T, I]; the result [T, O] is valid until the next product of this kind."""
        ...

    def add_to(self, x: Tensor, total: Tensor) -> None:
        """Add the product of x [T, I] to total [T, O]."""
        ...

    def swiglu(self, x: Tensor) -> Tensor:
        """Return silu(first part) * second part [T, O / 2] of x [T, I], valid until the next product of this kind."""
        ...

    def finish(self) -> None:
        """Convert to the computing form after all parts are filled."""
        ...


@runtime_checkable
class GatedProduct(Protocol):
    """A product of two parts, gate and up, that applies their activation itself."""

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """Return the activation [T, O / 2] of both parts' products of x [T, I]; not of "relu2", which has one part."""
        ...


@runtime_checkable
class Table(Protocol):
    """A weight that can return its rows, so that a tied head can embed."""

    def take(self, ids: Tensor) -> Tensor:
        """Return the rows of ids [T] int64 as [T, I]."""
        ...


def floats_of(weight: StoredWeight) -> Tensor:
    """Return a weight's values: bf16 where it holds them, half the bytes, else float32. Raises ModelInvalid."""
    values = weight.floats
    if values.dtype == np.uint16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


class Workspace:
    """Reusable buffers for products' results, by name and shape."""

    _MAX_SHAPES = 64  # prefills have many sizes; drops the oldest shapes

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        """Return a buffer with undefined content."""
        key = (name, shape)
        found = self._buffers.get(key)
        if found is None:
            if len(self._buffers) >= self._MAX_SHAPES:
                del self._buffers[next(iter(self._buffers))]
            found = self._buffers[key] = torch.empty(shape, dtype=self._dtype, device=self._device)
        return found


class PlainLinear:
    """Product for any device and dtype, with weight ``[O, I]``."""

    def __init__(self, in_features: int, parts: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        self._starts = [sum(parts[:index]) for index in range(len(parts))]
        self._weight = torch.empty(sum(parts), in_features, dtype=dtype, device=device)
        self._bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def fill(self, part: int, weight: ReadWeight) -> None:
        assert isinstance(weight, Tensor)
        at = self._starts[part]
        self._weight[at : at + weight.shape[0]].copy_(weight)

    def fill_bias(self, part: int, bias: Tensor) -> None:
        if self._bias is None:
            self._bias = torch.zeros(self._weight.shape[0], dtype=self._weight.dtype, device=self._weight.device)
        at = self._starts[part]
        self._bias[at : at + len(bias)].copy_(bias)

    def rows(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, x: Tensor, total: Tensor) -> None:
        total.addmm_(x, self._weight.t())
        if self._bias is not None:
            total.add_(self._bias)

    def swiglu(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self._weight, self._bias).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def finish(self) -> None:
        """Do nothing; the weight is complete."""

    def take(self, ids: Tensor) -> Tensor:
        return self._weight[ids]
