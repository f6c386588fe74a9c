"""Errors of products with packed weights against float64, for people who measure a machine."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import KernelError
from edgepipe.weights.dequantise import widen_bf16
from edgepipe.weights.made_up_packed import CHECKED_TYPES, checked_weight
from edgepipe_mlx.loading import WeightTypes
from edgepipe_mlx.matrices import PackedMatrix
from edgepipe_mlx.packing import MlxWeight, lay_out, mlx_form

_ROWS = (1, 5, 16, 64)
_FEATURES, _INPUTS = 1000, 2048
_BF16_ROUNDING, _FLOAT32_SUMS = 2.0**-8, 2.0**-18
# Share of the sum of all products' sizes that float16 may lose: inputs, scales and sums are rounded to 11 bits.
_FLOAT16_SUMS = 2.0**-11


def packed_errors(types: WeightTypes) -> Iterator[KernelError]:
    """Return the error of each type's product with the values that the device keeps, in units of its bound."""
    for scheme in CHECKED_TYPES:
        yield KernelError(kernel=f"product {scheme}", error=_error(scheme, types))


def _kept(planes: MlxWeight) -> npt.NDArray[np.float64]:
    """Return the values [O, I] of 8-bit codes: a form without a kernel of its own is rounded to them once."""
    assert planes.biases is not None  # affine
    values = (planes.scales, planes.biases)
    wide = [widen_bf16(each) if each.dtype == np.uint16 else each.astype(np.float32) for each in values]
    scale, bias = (np.repeat(each.astype(np.float64), planes.form.group, axis=1) for each in wide)
    return planes.words.view(np.uint8) * scale + bias


def _error(scheme: str, types: WeightTypes) -> float:
    weight = checked_weight(scheme, rows=_FEATURES, inputs=_INPUTS)
    form = mlx_form(weight.form, _INPUTS)
    assert form is not None  # 32 divides the inputs
    narrow = types.dtype == mx.bfloat16
    planes = lay_out(weight, form, narrow=narrow)
    matrix = PackedMatrix(planes, dtype=types.dtype, in_float32=types.in_float32)
    exact = _kept(planes) if form.mode == "affine" and form.bits == 8 else weight.float32().astype(np.float64)
    random, worst = np.random.default_rng(5), 0.0
    for count in _ROWS:
        x = mx.array(random.standard_normal((count, _INPUTS), np.float32)).astype(types.dtype)
        found = np.array(matrix.multiply(x).astype(mx.float32)).astype(np.float64)
        inputs = np.array(x.astype(mx.float32)).astype(np.float64)
        expected = inputs @ exact.T
        rounding, sums = (_BF16_ROUNDING if narrow else 0.0), (_FLOAT16_SUMS if narrow else _FLOAT32_SUMS)
        bound = rounding * np.abs(expected) + sums * (np.abs(inputs) @ np.abs(exact).T)
        error = np.abs(found - expected) / bound
        worst = max(worst, float(np.where(np.isnan(error), np.inf, error).max()))
    return worst
