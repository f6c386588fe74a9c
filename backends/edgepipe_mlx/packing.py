"""Packed weights in MLX's layout, made with numpy alone.

``mx.quantize`` stores a row's codes as one stream of bits in uint32 words, the first code in the lowest bits, also
where a code crosses bytes (5 and 6 bits). Affine value: ``scale * code + bias`` in groups of 32, 64 or 128.

==============================================  ====================================  ==========================
weight                                          here                                  values
==============================================  ====================================  ==========================
4, 5, 6 or 8 bits, groups of 32 and more        affine, its bits, groups up to 128    the file's
IQ4 in groups of 32 and more                    affine 8: its levels are integers     the file's
MXFP4                                           mxfp4                                 the file's
groups of 16 (Q6_K), NF4, FP8                   affine 8, groups of 32                rounded to 255 steps a group
inputs that are no multiple of 32               floats of the compute dtype           as floats are
==============================================  ====================================  ==========================

With float32 scales, "the file's" means the same float32 values (weights stored with float32 scales: within rounding
of the product). In bf16, scale and bias are rounded once per group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgepipe.model.dequantise import round_to_bf16, widen_bf16
from edgepipe.model.packed import Codes, Floats, Packed
from edgepipe.model.packed_form import CODEBOOKS, PackedForm

Words = npt.NDArray[np.uint32]

_GROUPS = (128, 64, 32)  # that MLX's kernels know, the fewest scales first
_BITS = (4, 5, 6, 8)  # of packed forms, in groups that MLX knows
_IQ4_SHIFT = np.float32(128)
_IQ4_LEVELS = (CODEBOOKS["iq4"] + _IQ4_SHIFT).astype(np.uint8)  # -127 to 113, shifted
_SAMPLED_ROWS = 8  # for a weight's mean code
_CHUNK_VALUES = 1 << 18  # codes in a byte each, or widened, at once


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxForm:
    """Arguments of MLX's kernels."""

    mode: Literal["affine", "mxfp4"]
    bits: int
    group: int  # inputs that share a scale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planes:
    """A weight [O, I] in MLX's layout."""

    form: MlxForm
    words: Words  # [O, I * bits / 32]
    scales: npt.NDArray[Any]  # [O, I / group] float32, uint16 as bits of bf16, or uint8 (mxfp4: exponent plus 127)
    biases: npt.NDArray[Any] | None  # like scales; None with mxfp4
    order: npt.NDArray[np.int32] | None  # see Packed


def mlx_form(form: PackedForm, inputs: int) -> MlxForm | None:
    """Return how MLX keeps a weight with ``inputs`` columns; None: as floats."""
    if inputs % _GROUPS[-1]:
        return None
    if form.codebook == "e2m1" and form.group == 32:
        return MlxForm(mode="mxfp4", bits=4, group=32)
    group = next((group for group in _GROUPS if form.group % group == 0), None)
    if group is None or not _affine(form):
        return MlxForm(mode="affine", bits=8, group=32)
    return MlxForm(mode="affine", bits=8 if form.codebook else form.bits, group=group)


def _affine(form: PackedForm) -> bool:
    """Return whether the values of a group are evenly spaced integers times a scale, plus an offset."""
    return form.codebook == "iq4" or (not form.codebook and form.bits in _BITS)


def lay_out(packed: Packed, form: MlxForm, *, bf16: bool) -> Planes:
    """Convert a weight. ``bf16``: scales and biases for kernels that compute in bf16, else float32.

    Raises ValueError for an e2m1 weight whose scales are no powers of two.
    """
    if form.mode == "mxfp4":
        words = packed.low.view(np.uint32)
        return Planes(form=form, words=words, scales=_exponents(packed), biases=None, order=packed.order)
    rows, inputs = packed.shape
    words = np.empty((rows, inputs * form.bits // 32), np.uint32)
    scales = np.empty((rows, inputs // form.group), np.uint16 if bf16 else np.float32)
    biases = np.empty_like(scales)
    mean_code = np.float32(packed.rows(slice(0, _SAMPLED_ROWS)).codes().mean())
    for chunk in _row_chunks(packed.shape):
        words[chunk], scale, bias = _grouped(packed.rows(chunk), form, bf16=bf16, mean_code=mean_code)
        scales[chunk] = round_to_bf16(scale) if bf16 else scale
        biases[chunk] = round_to_bf16(bias) if bf16 else bias
    return Planes(form=form, words=words, scales=scales, biases=biases, order=packed.order)


def widened_bf16(packed: Packed) -> npt.NDArray[np.uint16]:
    """Return the values [O, I] as bits of the nearest bf16, widening a part of the rows at a time."""
    bits = np.empty(packed.shape, np.uint16)
    for chunk in _row_chunks(packed.shape):
        bits[chunk] = round_to_bf16(packed.rows(chunk).float32())
    return bits


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


def _row_chunks(shape: tuple[int, int]) -> Iterator[slice]:
    rows, inputs = shape
    step = max(1, _CHUNK_VALUES // inputs)
    return (slice(start, start + step) for start in range(0, rows, step))


def _grouped(part: Packed, form: MlxForm, *, bf16: bool, mean_code: np.float32) -> tuple[Words, Floats, Floats]:
    """Return words [R, I * bits / 32], scales and biases [R, I / group] of MLX's groups.

    A bias follows from the rounded scale. So zeros stay zeros; with an added offset, the mean code keeps its value.
    """
    if part.form.group % form.group or not _affine(part.form):
        return _requantised(part, form, bf16=bf16)
    exact, words = part.scale.float32(), _words(part, form)
    scale = widen_bf16(round_to_bf16(exact)) if bf16 else exact
    zeros = part.zeros()
    if part.form.codebook:
        bias = -_IQ4_SHIFT * scale
    elif zeros is not None:
        bias = -scale * zeros.astype(np.float32)
    elif part.offset is not None:
        bias = part.offset.float32() + (exact - scale) * mean_code
    else:
        bias = np.zeros_like(scale)
    if bf16:
        words, scale, bias = _flipped(words, scale, bias, form.bits)
    repeat = part.form.group // form.group
    return words, np.repeat(scale, repeat, axis=1), np.repeat(bias, repeat, axis=1)


def _flipped(words: Words, scale: Floats, bias: Floats, bits: int) -> tuple[Words, Floats, Floats]:
    """Count codes from the top, with a negative scale, in groups where bf16 has a value nearer to that bias.

    A rounded bias moves its whole group. In Q4_1 of the demo model, rounding scale and bias adds 0.24 % to the
    quantisation noise; 0.21 % if the mean code keeps its value; 0.15 % with this choice.
    """
    from_top = (bias + scale * ((1 << bits) - 1)).astype(np.float32, copy=False)
    flip = _rounding_error(from_top) < _rounding_error(bias)
    ones = np.where(flip, np.uint32(0xFFFFFFFF), np.uint32(0))  # 32 codes fill ``bits`` words
    words = words ^ np.repeat(ones, words.shape[1] // flip.shape[1], axis=1)
    return words, np.where(flip, -scale, scale), np.where(flip, from_top, bias)


def _rounding_error(values: Floats) -> Floats:
    return np.abs(values - widen_bf16(round_to_bf16(values)))


def _words(part: Packed, form: MlxForm) -> Words:
    if part.form.codebook:
        return pack_bits(_IQ4_LEVELS[part.codes()], form.bits)
    return part.low.view(np.uint32) if form.bits == 4 else pack_bits(part.codes(), form.bits)  # 4 bits: the same


def _requantised(part: Packed, form: MlxForm, *, bf16: bool) -> tuple[Words, Floats, Floats]:
    """Round the values to evenly spaced levels from the group's smallest value, or zero, to its largest.

    Scale and bias are rounded before the values, outwards, so that no value lies beyond the levels.
    """
    values = replace(part, order=None).float32().reshape(part.shape[0], -1, form.group)
    bias = np.minimum(values.min(axis=2), np.float32(0))
    bias = _outwards(bias) if bf16 else bias
    scale = np.maximum(values.max(axis=2) - bias, np.float32(0)) / np.float32((1 << form.bits) - 1)
    scale = _outwards(scale) if bf16 else scale
    steps = np.where(scale > 0, scale, np.float32(1))
    levels = np.rint((values - bias[:, :, None]) / steps[:, :, None])
    codes = np.clip(levels, 0, (1 << form.bits) - 1).astype(np.uint8)
    return pack_bits(codes.reshape(part.shape), form.bits), scale, bias


def _outwards(values: Floats) -> Floats:
    """Round to bf16, away from zero."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def _exponents(packed: Packed) -> npt.NDArray[np.uint8]:
    """Return the scales [O, I / 32] as exponents plus 127 (OCP MX 1.0, E8M0)."""
    scale = packed.scale.float32()
    mantissa, exponent = np.frexp(scale)
    if (mantissa != 0.5).any():
        raise ValueError(f"a scale of '{packed.name}' is no power of two")
    return (exponent + 126).astype(np.uint8)
