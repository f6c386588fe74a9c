"""Feed-forward parts of a layer, and gated products.

T rows, H hidden, I inner features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.spec.layer_spec import Activation
from edgepipe_torch.layers.linear import GatedProduct, HeldWeight, Linear

CLAMP, SHARPNESS = 7.0, 1.702  # constants of gpt-oss's gate


class FeedForward(Protocol):
    """What follows attention in a layer."""

    @property
    def num_bytes(self) -> int:
        """Memory of all weights."""
        ...

    @property
    def products(self) -> Sequence[Linear]:
        """The products that every row passes, where no others are needed; empty: rows differ."""
        ...

    @property
    def linears(self) -> Sequence[HeldWeight]:
        """The weights of all products."""
        ...

    @property
    def waits(self) -> bool:
        """Whether computing waits for the device, which no graph can."""
        ...

    def rows(self, x: Tensor) -> Tensor:
        """Compute x [T, H]; the result [T, H] is valid until the next call."""
        ...

    def add_to(self, x: Tensor, total: Tensor) -> None:
        """Add the result for x [T, H] to total [T, H]."""
        ...


class Gated:
    """``down(activation(gate(x), up(x)))``; of "relu2" ``down(relu(up(x)) ** 2)``, without a gate."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self.gate_up = gate_up
        self.down = down
        self._activation: Activation = activation
        self._activating = gate_up if isinstance(gate_up, GatedProduct) else None

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes

    @property
    def products(self) -> Sequence[Linear]:
        return self.linears if self._activation == "silu" else ()

    @property
    def linears(self) -> Sequence[Linear]:
        return self.gate_up, self.down

    @property
    def waits(self) -> bool:
        return False

    def rows(self, x: Tensor) -> Tensor:
        return self.down.rows(self._inner(x))

    def add_to(self, x: Tensor, total: Tensor) -> None:
        self.down.add_to(self._inner(x), total)

    def _inner(self, x: Tensor) -> Tensor:
        if self._activation == "relu2":
            return self.gate_up.rows(x).relu().square_()
        if self._activating is not None:
            return self._activating.activated(x, self._activation)
        if self._activation == "silu":
            return self.gate_up.swiglu(x)
        gate, up = self.gate_up.rows(x).chunk(2, dim=-1)
        return ACTIVATIONS[self._activation](gate, up)


def _gelu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(SHARPNESS * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"gelu_tanh": _gelu, "clamped_swiglu": _clamped}
