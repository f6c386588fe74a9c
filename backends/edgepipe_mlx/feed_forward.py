"""Gated feed-forward parts. T rows, H hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from edgepipe_mlx.joined import JoinedLinear
from edgepipe_mlx.matrices import Linear

Product = Callable[[mx.array, mx.array], mx.array]

_CLAMP, _SHARPNESS = 7.0, 1.702  # constants of gpt-oss's gate


class FeedForward(Protocol):
    """What follows attention in a layer."""

    def rows(self, x: mx.array) -> mx.array:
        """Compute x [T, H]; returns [T, H]. A row's result does not depend on other rows' values."""
        ...


class Gated:
    """``down(activation(gate(x), up(x)))``; without a gate, the up product stands for it."""

    def __init__(self, gate_up: JoinedLinear, down: Linear, activation: Product) -> None:
        """``gate_up``: gates and ups, or ups alone."""
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def rows(self, x: mx.array) -> mx.array:
        """See ``FeedForward``."""
        entering = self._gate_up.multiply(x)
        return self._down.multiply(self._activation(entering[0], entering[-1]))


class Sum:
    """Parts whose results are added."""

    def __init__(self, parts: Sequence[FeedForward]) -> None:
        self._parts = parts

    def rows(self, x: mx.array) -> mx.array:
        """See ``FeedForward``."""
        return reduce(mx.add, [part.rows(x) for part in self._parts])


@partial(mx.compile, shapeless=True)  # one kernel on Metal
def _silu(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up


@partial(mx.compile, shapeless=True)
def _gelu_tanh(gate: mx.array, up: mx.array) -> mx.array:
    return nn.gelu_approx(gate) * up


@partial(mx.compile, shapeless=True)
def _clamped_swiglu(gate: mx.array, up: mx.array) -> mx.array:
    gate, up = mx.minimum(gate, _CLAMP), mx.clip(up, -_CLAMP, _CLAMP)
    return gate * mx.sigmoid(_SHARPNESS * gate) * (up + 1)


@partial(mx.compile, shapeless=True)
def _relu2(_gate: mx.array, up: mx.array) -> mx.array:
    return mx.square(mx.maximum(up, 0))


ACTIVATIONS: Mapping[str, Product] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "clamped_swiglu": _clamped_swiglu,
    "relu2": _relu2,
}
"""Keys are ``layer_spec.Activation``; each function takes a gate and an up product."""
