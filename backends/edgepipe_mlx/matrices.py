"""Matrices [O, I] that take rows and multiply: as floats, or packed."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from edgepipe_mlx.packing import Planes


class Matrix(Protocol):
    """A weight [O, I] of one compute dtype."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        ...

    def rows(self, indices: mx.array) -> mx.array:
        """Return rows ``indices`` [R] as [R, I] in the compute dtype."""
        ...

    def multiply(self, x: mx.array) -> mx.array:
        """Return ``x @ weight.T``: x [..., I] in the compute dtype, result [..., O] in the same."""
        ...


class WideMatrix:
    """A weight of floats: a matrix, or a vector that neither takes rows nor multiplies."""

    def __init__(self, weight: mx.array) -> None:
        self._weight = weight

    @property
    def array(self) -> mx.array:
        """The values."""
        return self._weight

    @property
    def num_bytes(self) -> int:
        """See ``Matrix``."""
        return self._weight.nbytes

    def rows(self, indices: mx.array) -> mx.array:
        """See ``Matrix``."""
        return self._weight[indices]

    def multiply(self, x: mx.array) -> mx.array:
        """See ``Matrix``."""
        return x @ self._weight.T


class PackedMatrix:
    """A packed matrix, which MLX's kernels unpack as they multiply."""

    def __init__(self, planes: Planes, *, dtype: mx.Dtype, arithmetic: mx.Dtype) -> None:
        """``arithmetic``: type of the kernel's input and sums.

        The CPU device sums in the input's type; in bf16 its error is 20 times as large, and it takes longer.
        """
        self._form = planes.form
        self._dtype = dtype
        self._arithmetic = arithmetic
        self._words = mx.array(planes.words)
        self._scales = mx.array(planes.scales)
        self._biases = None if planes.biases is None else mx.array(planes.biases)
        if planes.scales.dtype == "uint16":
            self._scales = self._scales.view(mx.bfloat16)
            self._biases = None if self._biases is None else self._biases.view(mx.bfloat16)
        self._order = None if planes.order is None else mx.array(planes.order)
        mx.eval(self._arrays())

    @property
    def num_bytes(self) -> int:
        """See ``Matrix``."""
        return sum(array.nbytes for array in self._arrays())

    def rows(self, indices: mx.array) -> mx.array:
        """See ``Matrix``. Only these rows are widened, in float32, and rounded once."""
        affine = self._biases is not None
        values = mx.dequantize(
            self._words[indices],
            self._scales[indices].astype(mx.float32) if affine else self._scales[indices],
            self._biases[indices].astype(mx.float32) if self._biases is not None else None,
            group_size=self._form.group,
            bits=self._form.bits,
            mode=self._form.mode,
            dtype=mx.float32,
        )
        if self._order is not None:
            values = mx.take(values, mx.argsort(self._order), axis=-1)
        return values.astype(self._dtype)

    def multiply(self, x: mx.array) -> mx.array:
        """See ``Matrix``."""
        if self._order is not None:
            x = mx.take(x, self._order, axis=-1)
        product = mx.quantized_matmul(
            x.astype(self._arithmetic),
            self._words,
            self._scales,
            self._biases,
            group_size=self._form.group,
            bits=self._form.bits,
            mode=self._form.mode,
        )
        return product.astype(self._dtype)

    def _arrays(self) -> list[mx.array]:
        arrays = (self._words, self._scales, self._biases, self._order)
        return [array for array in arrays if array is not None]


class PackedLinear(nn.Module):
    """A layer's projection with a packed weight, in place of ``nn.Linear``."""

    def __init__(self, weight: PackedMatrix, bias: mx.array | None) -> None:
        super().__init__()
        self._matrix = weight
        if bias is not None:
            self.bias = bias

    @property
    def matrix(self) -> PackedMatrix:
        """The weight."""
        return self._matrix

    def __call__(self, x: mx.array) -> mx.array:
        """Return [..., O] for x [..., I]."""
        product = self._matrix.multiply(x)
        return product + self["bias"] if "bias" in self else product
