"""Compare the kernels of weights in blocks with float64, before they are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import KernelError, SlowPath
from edgepipe.weights.made_up_packed import checked_weight
from edgepipe_mlx.blocks.kernels import MOST_ROWS, BlockArrays, BlockKernels, MetalKernels
from edgepipe_mlx.blocks.layout import lay_out_blocks
from edgepipe_mlx.kernel_check import KernelCheck

BLOCK_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""GGUF types that are kept in blocks."""

_ROWS = (1, 3, 5, MOST_ROWS)
_FEATURES, _INPUTS = 10, 768  # no whole tile of features, and an odd number of blocks
# Experts of rows, and rows that share one row of x. MLX gives fewer than eight numbers to a kernel in another way.
_EXPERTS = (((4, 0, 3, 1, 2, 2), 2), ((4, 0, 3, 1, 2, 2, 0, 4), 1))
_NUM_EXPERTS, _EXPERT_FEATURES = 5, 6
_ROUNDING = {mx.bfloat16: 2.0**-8, mx.float32: 2.0**-23}
_FLOAT32_SUMS = 2.0**-18  # relative to the sum of all products' sizes

Float64s = npt.NDArray[np.float64]

_CHECK = KernelCheck(
    kernels="of K types",
    slow=SlowPath(
        what="weights of K types are widened to forms that MLX has",
        cost="8B in Q4_K_M: 18 % more bytes a token than the file's, instead of 2 % (arithmetic; no Mac has timed it)",
        reason="",
    ),
)


def checked_kernels(dtype: mx.Dtype, types: Sequence[str] = BLOCK_TYPES) -> BlockKernels | SlowPath:
    """Return kernels that passed their check on the default device, or what the backend lacks without them."""

    def errors(kernels: BlockKernels) -> Iterator[tuple[str, float]]:
        for scheme in types:
            for error in _errors(kernels, scheme, dtype):
                yield f"the error of a product with {scheme}", error

    return _CHECK.passed(MetalKernels, errors)


def block_errors(dtype: mx.Dtype) -> Iterator[KernelError]:
    """Return the error of the kernels of each type."""
    kernels = MetalKernels()
    for scheme in BLOCK_TYPES:
        yield KernelError(kernel=f"product {scheme} at its own size", error=block_error(kernels, scheme, dtype))


def block_error(kernels: BlockKernels, scheme: str, dtype: mx.Dtype) -> float:
    """Return the largest error of a type's products with rows of ``dtype`` and of float32, in units of its bound.

    The bound is one rounding of the result, and the error of float32 sums.
    """
    return max(_errors(kernels, scheme, dtype))


def _errors(kernels: BlockKernels, scheme: str, dtype: mx.Dtype) -> Iterator[float]:
    for count in _ROWS:
        yield _rows_error(kernels, scheme, dtype, count)
    yield _experts_error(kernels, scheme, dtype)
    yield _rows_error(kernels, scheme, mx.float32, 1)


def _rows_error(kernels: BlockKernels, scheme: str, dtype: mx.Dtype, count: int) -> float:
    arrays, exact = _weight(scheme, _FEATURES)
    x, inputs = _rows(count, dtype)
    return _error(kernels.rows(x, arrays, dtype), inputs[:, None], exact[None], dtype)


def _experts_error(kernels: BlockKernels, scheme: str, dtype: mx.Dtype) -> float:
    arrays, exact = _weight(scheme, _NUM_EXPERTS * _EXPERT_FEATURES)
    matrices = exact.reshape(_NUM_EXPERTS, _EXPERT_FEATURES, _INPUTS)
    worst = 0.0
    for experts, sharing in _EXPERTS:
        x, inputs = _rows(len(experts) // sharing, dtype)
        found = kernels.by_expert(x, mx.array(experts, mx.uint32), arrays, _NUM_EXPERTS, dtype)
        shared = np.repeat(inputs, sharing, axis=0)
        worst = max(worst, _error(found, shared[:, None], matrices[list(experts)], dtype))
    return worst


def _weight(scheme: str, rows: int) -> tuple[BlockArrays, Float64s]:
    """Return a weight [rows, I], and its exact values."""
    packed = checked_weight(scheme, rows=rows, inputs=_INPUTS)
    if packed.offset is not None:  # made up, they have the factors of the scales
        assert packed.offset.factor is not None
        other = replace(packed.offset, factor=np.ascontiguousarray(packed.offset.factor[:, ::-1]))
        packed = replace(packed, offset=other)
    made = lay_out_blocks(packed)
    words, factors, bases = mx.array(made.words), mx.array(made.factors), mx.array(made.bases)
    return BlockArrays(form=made.form, words=words, factors=factors, bases=bases), packed.float32().astype(np.float64)


def _rows(count: int, dtype: mx.Dtype) -> tuple[mx.array, Float64s]:
    """Return x [count, I], and its exact values."""
    values = np.random.default_rng(count).standard_normal((count, _INPUTS), np.float32)
    x = mx.array(values).astype(dtype)
    return x, np.array(x.astype(mx.float32)).astype(np.float64)


def _error(found: mx.array, inputs: Float64s, exact: Float64s, dtype: mx.Dtype) -> float:
    """Compare with the sums over the last axis of inputs times exact values; see ``block_error``."""
    products = inputs * exact
    expected, sizes = products.sum(axis=-1), np.abs(products).sum(axis=-1)
    bound = _ROUNDING[dtype] * np.abs(expected) + _FLOAT32_SUMS * sizes
    error = np.abs(np.array(found.astype(mx.float32)).astype(np.float64) - expected) / bound
    return float(np.where(np.isnan(error), np.inf, error).max())
