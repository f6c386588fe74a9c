"""Packed weights in MLX's layout, made with numpy alone.

``mx.quantize`` stores a row's codes as one stream of bits in uint32 words, the first code in the lowest bits, also
where a code crosses bytes (5 and 6 bits). Affine value: ``scale * code + bias`` in groups of 32, 64 or 128.

==============================================  ====================================  ==========================
weight                                          here                                  values
==============================================  ====================================  ==========================
4, 5, 6 or 8 bits, groups of 32 and more        affine, its bits, groups up to 128    the file's
IQ4 in groups of 32 and more                    affine 8: its levels are integers     the file's
MXFP4, MXFP8, NVFP4                             mxfp4, mxfp8, nvfp4                   the file's
groups of 16 (Q6_K), NF4, FP8                   affine 8, groups of 32                rounded, 255 steps at most
inputs that are no multiple of 32               floats of the compute dtype           as floats are
==============================================  ====================================  ==========================

With float32 scales, "the file's" means the same float32 values (weights stored with float32 scales: within rounding
of the product). With 16-bit scales, scale and bias are rounded once per group, to float16 or bf16. Float16 holds those
of GGUF's Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL exactly, and bf16 those of most MLX models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgepipe.spec.packed import Codes, Floats, Packed
from edgepipe.spec.packed_form import CODEBOOKS, MXFP4_FORM, MXFP8_FORM, NVFP4_FORM, PackedForm
from edgepipe.weights.dequantise import round_to_bf16, widen_bf16

Words = npt.NDArray[np.uint32]

_GROUPS = (128, 64, 32)  # group sizes that MLX's kernels know, the fewest scales first
_BITS = (4, 5, 6, 8)  # bits per code of packed forms, in groups that MLX knows
_IQ4_SHIFT = np.float32(128)
_IQ4_LEVELS = (CODEBOOKS["iq4"] + _IQ4_SHIFT).astype(np.uint8)  # -127 to 113, shifted
_CHUNK_VALUES = 1 << 18  # codes in a byte each, or widened, at once


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxForm:
    """Arguments of MLX's kernels."""

    mode: Literal["affine", "mxfp4", "mxfp8", "nvfp4"]
    bits: int
    group: int  # inputs that share a scale


_NATIVE: Mapping[PackedForm, MlxForm] = {
    MXFP4_FORM: MlxForm(mode="mxfp4", bits=4, group=32),
    MXFP8_FORM: MlxForm(mode="mxfp8", bits=8, group=32),
    NVFP4_FORM: MlxForm(mode="nvfp4", bits=4, group=16),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlxWeight:
    """A weight [O, I] in MLX's layout."""

    form: MlxForm
    words: Words  # [O, I * bits / 32]
    scales: npt.NDArray[Any]  # [O, I / group] float32, float16, bf16's bits (uint16), or uint8 (other modes)
    biases: npt.NDArray[Any] | None  # shape of scales; None with the other modes
    order: npt.NDArray[np.int32] | None  # see Packed


def mlx_form(form: PackedForm, inputs: int) -> MlxForm | None:
    """Return how MLX keeps a weight with ``inputs`` columns; None: as floats."""
    if inputs % _GROUPS[-1]:
        return None
    native = _NATIVE.get(replace(form, ordered=False))
    if native is not None:
        return native
    group = next((group for group in _GROUPS if form.group % group == 0), None)
    if group is None or not _affine(form):
        return MlxForm(mode="affine", bits=8, group=32)
    return MlxForm(mode="affine", bits=8 if form.codebook else form.bits, group=group)


def _affine(form: PackedForm) -> bool:
    """Return whether the values of a group are evenly spaced integers times a scale, plus an offset."""
    return form.codebook == "iq4" or (not form.codebook and form.bits in _BITS)


@dataclass(frozen=True, slots=True)
class _ValueType:
    """A type of scales and biases."""

    dtype: npt.DTypeLike
    narrow: Callable[[Floats], npt.NDArray[Any]]
    widen: Callable[[npt.NDArray[Any]], Floats]


_FLOAT32 = _ValueType(np.float32, lambda values: values, lambda kept: kept)
_FLOAT16 = _ValueType(np.float16, lambda values: values.astype(np.float16), lambda kept: kept.astype(np.float32))
_BF16 = _ValueType(np.uint16, round_to_bf16, widen_bf16)


class _GroupValues:
    """Scales and biases of a weight, and what rounding them to their type loses."""

    def __init__(self, kind: _ValueType, num_groups: tuple[int, int]) -> None:
        self.arrays = np.empty((2, *num_groups), kind.dtype)
        self.lost = 0.0  # sum of all rounding errors; infinite if a value overflows
        self._kind = kind

    def put(self, rows: slice, values: Floats) -> None:
        """Keep the values [2, R, I / group] of some rows."""
        with np.errstate(over="ignore"):
            self.arrays[:, rows] = self._kind.narrow(values)
        self.lost += float(np.abs(self._kind.widen(self.arrays[:, rows]) - values).sum(dtype=np.float64))


def lay_out(packed: Packed, form: MlxForm, *, narrow: bool) -> MlxWeight:
    """Convert a weight.

    ``narrow``: scales and biases in 16 bits, else in float32. The type is bf16 or float16, whichever loses less; bf16
    if equal.

    Raises ValueError if MLX's type of scales does not hold one of MXFP4, MXFP8 or NVFP4.
    """
    if form.mode != "affine":
        words = packed.low.view(np.uint32) if form.bits == 4 else pack_bits(packed.codes(), form.bits)
        scales = _e4m3_codes(packed) if form.mode == "nvfp4" else _exponents(packed)
        return MlxWeight(form=form, words=words, scales=scales, biases=None, order=packed.order)
    rows, inputs = packed.shape
    words = np.empty((rows, inputs * form.bits // 32), np.uint32)
    kinds = (_BF16, _FLOAT16) if narrow else (_FLOAT32,)
    choices = [_GroupValues(kind, (rows, inputs // form.group)) for kind in kinds]
    for chunk in row_chunks(packed.shape):
        words[chunk], scale, bias = _grouped(packed.rows(chunk), form, narrow=narrow)
        for choice in choices:
            choice.put(chunk, np.stack([scale, bias]))
    scales, biases = min(choices, key=lambda choice: choice.lost).arrays
    return MlxWeight(form=form, words=words, scales=scales, biases=biases, order=packed.order)


def pack_bits(codes: Codes, bits: int) -> Words:
    """Pack codes [R, I] as ``mx.quantize`` does: words [R, I * bits / 32]. I is a multiple of 32."""
    if bits == 8:
        return codes.view(np.uint32)
    eights = codes.reshape(codes.shape[0], -1, 8)
    stream = np.zeros(eights.shape[:2], "<u8")
    for index in range(8):
        stream |= eights[:, :, index].astype(np.uint64) << np.uint64(bits * index)
    used = stream.view(np.uint8).reshape(*stream.shape, 8)[:, :, :bits]  # eight codes fill ``bits`` bytes
    return np.ascontiguousarray(used).reshape(codes.shape[0], -1).view(np.uint32)


def row_chunks(shape: tuple[int, int]) -> Iterator[slice]:
    """Yield the rows [O, I] in pieces of which a byte for each value is little memory."""
    rows, inputs = shape
    step = max(1, _CHUNK_VALUES // inputs)
    return (slice(start, start + step) for start in range(0, rows, step))


def _grouped(part: Packed, form: MlxForm, *, narrow: bool) -> tuple[Words, Floats, Floats]:
    """Return words [R, I * bits / 32], scales and biases [R, I / group] of MLX's groups."""
    if part.form.group % form.group or not _affine(part.form):
        return _requantised(part, form, narrow=narrow)
    scale, words = part.scale.float32(), _words(part, form)
    zeros = part.zeros()
    if part.form.codebook:
        bias = -_IQ4_SHIFT * scale
    elif zeros is not None:
        bias = -scale * zeros.astype(np.float32)
    elif part.offset is not None:
        bias = part.offset.float32()
    else:
        bias = np.zeros_like(scale)
    repeat = part.form.group // form.group
    return words, np.repeat(scale, repeat, axis=1), np.repeat(bias, repeat, axis=1)


def _words(part: Packed, form: MlxForm) -> Words:
    if part.form.codebook:
        return pack_bits(_IQ4_LEVELS[part.codes()], form.bits)
    return part.low.view(np.uint32) if form.bits == 4 else pack_bits(part.codes(), form.bits)  # 4 bits: the same


def _requantised(part: Packed, form: MlxForm, *, narrow: bool) -> tuple[Words, Floats, Floats]:
    """Round the values of each group to evenly spaced levels: over its range, or in parts of a step of its own.

    Steps of its own keep one of the two groups of 16 (Q6_K) exactly. Each group takes what loses less.

    Narrow scales and biases are rounded before the values, outwards, so that no value lies beyond the levels.
    """
    values = replace(part, order=None).float32().reshape(part.shape[0], -1, form.group)
    ways = [_over_range(values, form, narrow=narrow)]
    if not part.form.codebook and part.offset is None and form.group % part.form.group == 0:
        own = np.abs(part.scale.float32()).reshape(*values.shape[:2], -1).max(axis=2)
        ways.append(_in_own_steps(values, own, form, narrow=narrow))
    codes, scale, bias, lost = ways[0]
    for other in ways[1:]:
        better = other[3] < lost
        codes = np.where(better[:, :, None], other[0], codes)
        scale, bias = np.where(better, other[1], scale), np.where(better, other[2], bias)
    return pack_bits(codes.reshape(part.shape), form.bits), scale, bias


_Levels = tuple[Codes, Floats, Floats, Floats]
"""Codes [R, G, group], scales and biases [R, G], and the squared errors [R, G]."""


def _over_range(values: Floats, form: MlxForm, *, narrow: bool) -> _Levels:
    """Space levels from the group's smallest value, or zero, to its largest."""
    bias = np.minimum(values.min(axis=2), np.float32(0))
    bias = _outwards(bias) if narrow else bias
    scale = np.maximum(values.max(axis=2) - bias, np.float32(0)) / np.float32((1 << form.bits) - 1)
    return _levels(values, _outwards(scale) if narrow else scale, bias, form)


def _in_own_steps(values: Floats, own: Floats, form: MlxForm, *, narrow: bool) -> _Levels:
    """Space levels by a whole part of ``own`` [R, G], the largest step of the group's values, with zero on a level."""
    own = np.where(own > 0, own, np.float32(1))
    below = np.floor(np.minimum(values.min(axis=2), np.float32(0)) / own)
    above = np.ceil(np.maximum(values.max(axis=2), np.float32(0)) / own)
    parts = np.maximum(np.floor(((1 << form.bits) - 1) / np.maximum(above - below, 1)), 1).astype(np.float32)
    scale = own / parts
    scale = _outwards(scale) if narrow else scale
    bias = scale * parts * below
    return _levels(values, scale, _outwards(bias) if narrow else bias, form)


def _levels(values: Floats, scale: Floats, bias: Floats, form: MlxForm) -> _Levels:
    levels = values - bias[:, :, None]
    levels /= np.where(scale > 0, scale, np.float32(1))[:, :, None]
    np.clip(np.rint(levels, out=levels), 0, (1 << form.bits) - 1, out=levels)
    codes = levels.astype(np.uint8)
    levels *= scale[:, :, None]
    levels += bias[:, :, None]
    levels -= values
    return codes, scale, bias, np.einsum("rgi,rgi->rg", levels, levels)


def _outwards(values: Floats) -> Floats:
    """Round to float16, away from zero. Values beyond float16 stay as they are; such a weight gets bf16 scales."""
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float16)
        farther = np.nextafter(nearest, np.copysign(np.float16(np.inf), nearest))
    rounded = np.where(np.abs(nearest.astype(np.float32)) < np.abs(values), farther, nearest).astype(np.float32)
    return np.where(np.isfinite(rounded), rounded, values)


def _exponents(packed: Packed) -> npt.NDArray[np.uint8]:
    """Return the scales [O, I / 32] as exponents plus 127 (OCP MX 1.0, E8M0)."""
    scale = packed.scale.float32()
    mantissa, exponent = np.frexp(scale)
    if (mantissa != 0.5).any():
        raise ValueError(f"a scale of '{packed.name}' is no power of two")
    return (exponent + 126).astype(np.uint8)


def _e4m3_codes(packed: Packed) -> npt.NDArray[np.uint8]:
    """Return the scales [O, I / 16] as codes of e4m3 (OCP 8-bit floating point, 5.2)."""
    scale, levels = packed.scale.float32(), CODEBOOKS["e4m3"][:127]  # levels in ascending order
    codes = np.searchsorted(levels, scale).astype(np.uint8)
    if (levels[np.minimum(codes, 126)] != scale).any():
        raise ValueError(f"a scale of '{packed.name}' is no value of e4m3")
    return codes
