"""Matrices [O, I] that take rows and multiply: as floats, or packed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import accumulate
from typing import Protocol, Self

import mlx.core as mx

from edgepipe_mlx.packing import MlxWeight

_SHIFT = 5
"""Inputs of products in float16 are divided by 2^5, and results multiplied by it. So values up to 2,000,000 do not
overflow (the demo model has 22,500); values above 0.002 keep all digits of bf16."""


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
        """Return ``x @ weight.T`` [..., O] in the compute dtype: x [..., I] in that or in float32."""
        ...

    def logits(self, x: mx.array) -> mx.array:
        """Return ``x @ weight.T`` in float32, without rounding it to the compute dtype before."""
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
        return x.astype(self._weight.dtype) @ self._weight.T

    def logits(self, x: mx.array) -> mx.array:
        """See ``Matrix``. The product has the weight's type."""
        return self.multiply(x).astype(mx.float32)


@partial(mx.compile, shapeless=True)  # one kernel on Metal
def lowered(x: mx.array) -> mx.array:
    """Return the input of a product in float16."""
    return (x * 2.0**-_SHIFT).astype(mx.float16)


@partial(mx.compile, shapeless=True)
def raised(product: mx.array) -> mx.array:
    """Return a product in float16 as bf16."""
    return product.astype(mx.bfloat16) * 2.0**_SHIFT


@partial(mx.compile, shapeless=True)
def raised_to_float32(product: mx.array) -> mx.array:
    """Return a product in float16 as float32."""
    return product.astype(mx.float32) * 2.0**_SHIFT


class JoiningMatrix(ABC):
    """A packed matrix [O, I], which joins others of its kind."""

    _planes: Sequence[str]
    """Names of the attributes that hold arrays [O, n], or None."""

    @property
    def num_bytes(self) -> int:
        """See ``Matrix``."""
        return sum(array.nbytes for array in self._arrays())

    @property
    @abstractmethod
    def out_features(self) -> int:
        """The number of rows."""

    def joins(self, other: JoiningMatrix) -> bool:
        """Return whether one kernel can multiply with this matrix and another."""
        return type(self) is type(other) and self._kind() == other._kind()

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return a matrix of the rows of parts that join, which it copies and evaluates."""
        whole = copy(parts[0])
        for name in cls._planes:
            arrays = [part._places(getattr(part, name)) for part in parts if getattr(part, name) is not None]
            setattr(whole, name, _below(arrays) if arrays else None)
        mx.eval(whole._arrays())
        return whole

    @abstractmethod
    def rows(self, indices: mx.array) -> mx.array:
        """See ``Matrix``."""

    @abstractmethod
    def multiply(self, x: mx.array) -> mx.array:
        """See ``Matrix``."""

    @abstractmethod
    def multiply_parts(self, x: mx.array, sizes: Sequence[int]) -> list[mx.array]:
        """Return what ``multiply`` does in parts with so many out features."""

    @abstractmethod
    def logits(self, x: mx.array) -> mx.array:
        """See ``Matrix``."""

    @abstractmethod
    def _kind(self) -> object:
        """Return what matrices that join have in common."""

    def _places(self, array: mx.array) -> mx.array:
        """Return an array [O, n] as [places, rows, n]: rows of other parts come below these in each place."""
        return array[None]

    def _arrays(self) -> list[mx.array]:
        return [array for name in self._planes if (array := getattr(self, name)) is not None]


class PackedMatrix(JoiningMatrix):
    """A packed matrix, which MLX's kernels unpack as they multiply.

    A kernel's input, scales and result have one type. Weights with float16 scales multiply in float16, which is more
    exact than bf16; on M1 and M2, prompts are faster, too: 17 ms instead of 31 ms for 512 rows of a 6656 x 19968
    matrix (mlx#4216). Decoding gets two small kernels more per product.
    """

    _planes = ("_words", "_scales", "_biases")

    def __init__(self, planes: MlxWeight, *, dtype: mx.Dtype, in_float32: bool) -> None:
        """``in_float32``: multiply in float32, whatever the scales.

        The CPU device sums in the input's type; in bf16 its error is 20 times as large, and it takes longer.
        """
        self._form = planes.form
        self._dtype = dtype
        self._in_float32 = in_float32
        self._words = mx.array(planes.words)
        self._scales = mx.array(planes.scales)
        self._biases = None if planes.biases is None else mx.array(planes.biases)
        if planes.scales.dtype == "uint16":
            self._scales = self._scales.view(mx.bfloat16)
            self._biases = None if self._biases is None else self._biases.view(mx.bfloat16)
        self._in_half = self._scales.dtype == mx.float16
        self._order = None if planes.order is None else mx.array(planes.order)
        mx.eval(self._arrays())

    @property
    def out_features(self) -> int:
        """The number of rows."""
        return self._words.shape[0]

    def _kind(self) -> tuple[object, ...]:
        kinds = self._scales.dtype, self._biases is not None, self._words.shape[1:]
        # Columns in an order of their own join no others.
        return self._form, self._dtype, self._in_float32, *kinds, None if self._order is None else id(self)

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
        return self._leaving(self._product(x))

    def multiply_parts(self, x: mx.array, sizes: Sequence[int]) -> list[mx.array]:
        """Return what ``multiply`` does in parts with so many out features."""
        ends = list(accumulate(sizes))[:-1]
        return [self._leaving(part) for part in mx.split(self._product(x), ends, axis=-1)]

    def logits(self, x: mx.array) -> mx.array:
        """See ``Matrix``."""
        product = self._product(x)
        return raised_to_float32(product) if self._in_half else product.astype(mx.float32)

    def _product(self, x: mx.array) -> mx.array:
        """Return the kernel's result; in float16, it is that of the lowered input."""
        product = mx.quantized_matmul(
            self._entering(x),
            self._words,
            self._scales,
            self._biases,
            group_size=self._form.group,
            bits=self._form.bits,
            mode=self._form.mode,
        )
        return product.astype(mx.float16) if self._in_half else product

    def _entering(self, x: mx.array) -> mx.array:
        """Return x [..., I] in the order and type of the kernel's input; lowered for float16."""
        if self._order is not None:
            x = mx.take(x, self._order, axis=-1)
        rows = lowered(x) if self._in_half else x
        return rows.astype(mx.float32 if self._in_float32 else mx.float16 if self._in_half else self._dtype)

    def _leaving(self, product: mx.array) -> mx.array:
        """Return a kernel's product in the compute dtype."""
        return raised(product.astype(mx.float16)) if self._in_half else product.astype(self._dtype)

    def _arrays(self) -> list[mx.array]:
        return [*super()._arrays(), *([] if self._order is None else [self._order])]


def _below(arrays: list[mx.array]) -> mx.array:
    """Join arrays [places, rows, n] to [all rows, n]."""
    return mx.concatenate(arrays, axis=1).reshape(-1, arrays[0].shape[-1])


class Linear:
    """A projection: a matrix [O, I], and a bias [O]."""

    def __init__(self, matrix: Matrix, bias: mx.array | None) -> None:
        self.matrix = matrix
        self.bias = bias

    def multiply(self, x: mx.array) -> mx.array:
        """Return [..., O] for x [..., I]."""
        product = self.matrix.multiply(x)
        return product if self.bias is None else product + self.bias

    def float32(self, x: mx.array) -> mx.array:
        """Return what ``multiply`` does in float32, without rounding the product to the compute dtype before."""
        product = self.matrix.logits(x)
        return product if self.bias is None else product + self.bias.astype(mx.float32)
