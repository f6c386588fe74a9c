"""Matrices and experts of K types in blocks. See ``BlockArrays``.

Own kernels multiply few rows. MLX's kernels multiply many rows: they read the same codes, and each product computes
their scales and biases, a fifth of the weight's bytes. MLX has no groups of 16 inputs, so it multiplies a weight with
such groups twice: with the first halves of groups of 32, and with the second halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import accumulate
from math import prod

import mlx.core as mx
import numpy as np

from edgepipe_mlx.blocks.kernels import (
    MOST_ROWS,
    MOST_WITH_EXPERTS,
    BlockArrays,
    BlockKernels,
    block_values,
    group_values,
)
from edgepipe_mlx.blocks.layout import BlockForm, BlockWeight
from edgepipe_mlx.experts import StackedRows
from edgepipe_mlx.matrices import JoiningMatrix, lowered, raised_to_float32

_MLX_GROUP = 32
_LARGEST_HALF = 65504.0

_MlxProduct = Callable[[mx.array, mx.array, mx.array], mx.array]
"""MLX's product of x [..., I] with the codes, with scales and biases [O, I / 32]."""


class BlockMatrix(JoiningMatrix):
    """A matrix in blocks."""

    _planes = ("_words", "_factors", "_bases")

    def __init__(self, weight: BlockWeight, *, dtype: mx.Dtype, in_float32: bool, kernels: BlockKernels) -> None:
        """``in_float32``: multiply many rows in float32; see ``PackedMatrix``."""
        self._form: BlockForm = weight.form
        self._dtype = dtype
        self._kernels = kernels
        self._in_half = dtype == mx.bfloat16 and not in_float32 and _fits_half(weight)
        self._words = mx.array(weight.words)
        self._factors = mx.array(weight.factors)
        self._bases = mx.array(weight.bases)
        mx.eval(self._arrays())

    @property
    def out_features(self) -> int:
        """The number of rows."""
        return self._words.shape[0]

    def rows(self, indices: mx.array) -> mx.array:
        """See ``Matrix``."""
        planes = self._weight
        picked = replace(
            planes, words=planes.words[indices], factors=planes.factors[indices], bases=planes.bases[indices]
        )
        return block_values(picked).astype(self._dtype)

    def multiply(self, x: mx.array) -> mx.array:
        """See ``Matrix``."""
        return self._product(x, self._dtype)

    def multiply_parts(self, x: mx.array, sizes: Sequence[int]) -> list[mx.array]:
        """See ``JoiningMatrix``."""
        return list(mx.split(self.multiply(x), list(accumulate(sizes))[:-1], axis=-1))

    def logits(self, x: mx.array) -> mx.array:
        """See ``Matrix``."""
        return self._product(x, mx.float32)

    @property
    def _weight(self) -> BlockArrays:
        return BlockArrays(form=self._form, words=self._words, factors=self._factors, bases=self._bases)

    def _kind(self) -> object:
        return self._form, self._dtype, self._in_half, self._words.shape[1:]

    def _product(self, x: mx.array, dtype: mx.Dtype) -> mx.array:
        if prod(x.shape[:-1]) > MOST_ROWS:
            return self._product_of_many(x, dtype, self._mlx_product)
        found = self._kernels.rows(x.reshape(-1, x.shape[-1]), self._weight, dtype)
        return found.reshape(*x.shape[:-1], -1)

    def _mlx_product(self, x: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        return mx.quantized_matmul(x, self._words, scales, biases, group_size=_MLX_GROUP, bits=self._form.bits)

    def _product_of_many(self, x: mx.array, dtype: mx.Dtype, multiply: _MlxProduct) -> mx.array:
        """Return the product of x [..., I] in a type."""
        entering = lowered(x) if self._in_half else x.astype(mx.float32)
        parts = _MLX_GROUP // self._form.group
        found: list[mx.array] = []
        for part in range(parts):
            values = partial(group_values, self._weight, first=part, step=parts, half=self._in_half)
            scales = values(0)
            biases = values(1) if self._form.added else scales * -self._form.zero
            product = multiply(_part_of_groups(entering, part, self._form.group), scales, biases)
            found.append(raised_to_float32(product) if self._in_half else product)
        return reduce(mx.add, found).astype(dtype)


def _fits_half(weight: BlockWeight) -> bool:
    """Return whether float16 holds the scales and offsets."""
    factors = np.abs(weight.factors.astype(np.int16)).max(initial=0)
    return float(np.abs(weight.bases).max(initial=0)) * float(factors) * max(1, weight.form.zero) <= _LARGEST_HALF


def _part_of_groups(x: mx.array, part: int, size: int) -> mx.array:
    """Return x [..., I] with zeros for inputs outside part ``part`` of each of MLX's groups."""
    if size == _MLX_GROUP:
        return x
    kept = np.arange(_MLX_GROUP) // size == part
    grouped = x.reshape(*x.shape[:-1], -1, _MLX_GROUP)
    return (grouped * mx.array(kept.astype(np.float32)).astype(x.dtype)).reshape(x.shape)


class BlockStack(StackedRows, BlockMatrix):
    """The matrices of experts in blocks, one below the other."""

    sorted_from = MOST_WITH_EXPERTS + 1

    def __init__(
        self, weight: BlockWeight, *, count: int, dtype: mx.Dtype, in_float32: bool, kernels: BlockKernels
    ) -> None:
        """``count``: experts."""
        super().__init__(weight, dtype=dtype, in_float32=in_float32, kernels=kernels)
        self._count = count

    def multiply_by(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """See ``Stack``."""
        if experts.size <= MOST_WITH_EXPERTS:
            rows, numbers = x.reshape(-1, x.shape[-1]), experts.reshape(-1)
            found = self._kernels.by_expert(rows, numbers, self._weight, self._count, self._dtype)
            return found.reshape(*experts.shape, 1, -1)

        def multiply(rows: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
            planes = (self._each(each) for each in (self._words, scales, biases))
            return mx.gather_qmm(
                rows,
                *planes,
                rhs_indices=experts,
                group_size=_MLX_GROUP,
                bits=self._form.bits,
                sorted_indices=is_sorted,
            )

        return self._product_of_many(x, self._dtype, multiply)

    def parts_by(self, x: mx.array, experts: mx.array, parts: int, *, is_sorted: bool) -> list[mx.array]:
        """See ``StackedRows``."""
        return list(mx.split(self.multiply_by(x, experts, is_sorted=is_sorted), parts, axis=-1))
