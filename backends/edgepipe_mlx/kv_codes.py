"""Forms of KV as codes: how vectors are rounded, and how they are read again.

A vector is a head's key or value of one token (D values). What it is stored as depends on it alone: chunks of a prompt,
truncation and copies of blocks leave the same codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import mlx.core as mx

from edgepipe.spec.kv_forms import KV_8BIT, four_bits

_HIGHEST_CODE = 127
_SCALE_MARGIN = 1 + 2**-11  # covers the rounding of a normal float16, so that no code exceeds the highest
_LEAST_SCALE = 2**-24  # the smallest float16: the scale of zeros; covers the rounding of scales near it

_MIDDLE = 7.5  # a value of 4 bits is ``(code - _MIDDLE) * scale``
_FINE_STEPS = 16  # a code of 8 bits counts sixteenths of a scale; its upper 4 bits are the code of 4
_FINE_MIDDLE = 127.5
_SCALE_SHIFT = 20  # a scale is the upper bits of a float32, of which its byte counts up from ``_LEAST_BITS``
_LEAST_BITS = (127 - 20) << 3  # byte of 2**-20, the smallest scale; the largest scale is 3584
_NO_SCALE = 255  # byte of a group with a NaN or an infinity, or with values beyond the scales

_DTYPES = (mx.float32, mx.bfloat16)


class KVCodes(Protocol):
    """A form of KV for vectors of one size."""

    @property
    def kinds(self) -> Sequence[tuple[int, mx.Dtype]]:
        """Width and type of a vector's codes, and of its scales."""
        ...

    def encode(self, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return codes and scales of values [..., D]. A vector with a NaN or an infinity is read as NaN."""
        ...

    def decoded(self, codes: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return vectors [..., D], turned; ``dtype``: float32 or bfloat16."""
        ...

    def turned(self, vectors: mx.array) -> mx.array:
        """Rotate vectors [..., n] as the form's own are: queries before they meet keys, sums of values back again."""
        ...


def _scaled(dtype: mx.Dtype, codes: mx.array, scales: mx.array) -> mx.array:
    return (codes.astype(mx.float32) * scales.astype(mx.float32)).astype(dtype)


_SCALED: Mapping[mx.Dtype, Callable[[mx.array, mx.array], mx.array]] = {
    dtype: mx.compile(partial(_scaled, dtype), shapeless=True)  # one kernel on Metal
    for dtype in _DTYPES
}


class EightBits:
    """An int8 code per value, a float16 scale per vector: a value is ``code * scale``, rounded once to the dtype."""

    def __init__(self, head_dim: int) -> None:
        self.kinds = ((head_dim, mx.int8), (1, mx.float16))

    def encode(self, values: mx.array) -> tuple[mx.array, mx.array]:
        """See ``KVCodes``: values are rounded within half a scale."""
        wide = values.astype(mx.float32)
        highest = mx.abs(wide).max(axis=-1, keepdims=True)
        scales = (highest * (_SCALE_MARGIN / _HIGHEST_CODE) + _LEAST_SCALE).astype(mx.float16)
        scales = scales + (scales - scales)  # NaN where infinite
        return mx.round(wide / scales.astype(mx.float32)).astype(mx.int8), scales

    def decoded(self, codes: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
        return _SCALED[dtype](codes, scales)

    def turned(self, vectors: mx.array) -> mx.array:
        return vectors


def _grouped(dtype: mx.Dtype, codes: mx.array, scales: mx.array) -> mx.array:
    """Return values [..., groups, 2, G / 2] of codes [..., groups, 1, G / 2] and scales [..., groups, 1, 1] float32."""
    pairs = mx.concatenate([codes & 15, codes >> 4], axis=-2)
    return ((pairs.astype(mx.float32) - _MIDDLE) * scales).astype(dtype)


_GROUPED: Mapping[mx.Dtype, Callable[[mx.array, mx.array], mx.array]] = {
    dtype: mx.compile(partial(_grouped, dtype), shapeless=True) for dtype in _DTYPES
}


def _grouped_whole(dtype: mx.Dtype, codes: mx.array, rests: mx.array, scales: mx.array) -> mx.array:
    """Return values as ``_grouped`` does, of codes with 8 bits, whose lower ones are ``rests``."""
    upper = mx.concatenate([codes & 15, codes >> 4], axis=-2).astype(mx.float32)
    lower = mx.concatenate([rests & 15, rests >> 4], axis=-2).astype(mx.float32)
    return ((upper * _FINE_STEPS + lower - _FINE_MIDDLE) * (scales * (1 / _FINE_STEPS))).astype(dtype)


_GROUPED_WHOLE: Mapping[mx.Dtype, Callable[[mx.array, mx.array, mx.array], mx.array]] = {
    dtype: mx.compile(partial(_grouped_whole, dtype), shapeless=True) for dtype in _DTYPES
}


class FourBits:
    """4-bit codes of the rotated vector, and a byte for the scale of each group. See ``docs/adr/kv-4bit.md``."""

    def __init__(self, head_dim: int, value_width: int = 0) -> None:
        """``value_width``: see ``four_bits``. Raises ConfigInvalid for sizes that the form does not have."""
        self._group, self._block = four_bits(head_dim, value_width)
        self.kinds = ((head_dim // 2, mx.uint8), (head_dim // self._group, mx.uint8))

    def encode(self, values: mx.array) -> tuple[mx.array, mx.array]:
        codes, scales, _ = self.encode_whole(values)
        return codes, scales

    def encode_whole(self, values: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return codes, scales, and the lower bits [..., D / 2] that make codes of 8 bits of those of 4.

        A byte has a value of a group's first half and its counterpart of the second.
        """
        groups = mx.unflatten(self.turned(values.astype(mx.float32)), -1, (-1, self._group))
        scales = scale_bytes(mx.abs(groups).max(axis=-1))
        raised = mx.floor((groups / scale_values(scales)[..., None] + (_MIDDLE + 0.5)) * _FINE_STEPS)
        whole = mx.clip(mx.where(mx.isnan(raised), 0, raised), 0, 255).astype(mx.uint8)
        low, high = mx.split(whole, 2, axis=-1)
        codes, rests = (low >> 4) | (high & 0xF0), (low & 0xF) | (high << 4)
        return mx.flatten(codes, -2), scales, mx.flatten(rests, -2)

    def whole(self, codes: mx.array, scales: mx.array, rests: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return vectors [..., D], turned, of codes with 8 bits."""
        upper, lower = (mx.unflatten(each, -1, (scales.shape[-1], 1, -1)) for each in (codes, rests))
        return mx.flatten(_GROUPED_WHOLE[dtype](upper, lower, scale_values(scales)[..., None, None]), -3)

    def decoded(self, codes: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
        groups = mx.unflatten(codes, -1, (scales.shape[-1], 1, -1))
        return mx.flatten(_GROUPED[dtype](groups, scale_values(scales)[..., None, None]), -3)

    def decoded_newest(
        self, codes: mx.array, scales: mx.array, rests: mx.array, begin: int, dtype: mx.Dtype, *, twice: bool
    ) -> mx.array:
        """Return vectors [..., n, D] with 4 bits, then those from ``begin`` on with 8.

        ``twice``: those from ``begin`` on are among the ones with 4 bits, too.
        """
        whole = self.whole(codes[..., begin:, :], scales[..., begin:, :], rests, dtype)
        if not twice:
            codes, scales = codes[..., :begin, :], scales[..., :begin, :]
        return mx.concatenate([self.decoded(codes, scales, dtype), whole], axis=-2)

    def turned(self, vectors: mx.array) -> mx.array:
        """Multiply each block with the orthonormal Hadamard matrix, which is its own inverse."""
        blocks = mx.unflatten(vectors.astype(mx.float32), -1, (-1, self._block))
        return mx.flatten(mx.hadamard_transform(blocks), -2).astype(vectors.dtype)


def codes_of(form: str, head_dim: int, value_width: int = 0) -> KVCodes:
    """Return a form of KV for vectors of one size. Raises ConfigInvalid for one that it does not keep."""
    return EightBits(head_dim) if form == KV_8BIT else FourBits(head_dim, value_width)


def scale_bytes(highest: mx.array) -> mx.array:
    """Return the byte of the scale nearest to that of groups with these largest values (float32).

    It is at most 1/16 too small, so the largest value is within half a scale of the last code's.
    """
    bits = (highest * (1 / _MIDDLE)).view(mx.int32) & 0x7FFFFFFF
    found = ((bits + (1 << (_SCALE_SHIFT - 1))) >> _SCALE_SHIFT) - _LEAST_BITS
    return mx.clip(found, 0, _NO_SCALE).astype(mx.uint8)


def scale_values(scales: mx.array) -> mx.array:
    """Return the scales [...] float32 of bytes; NaN for ``_NO_SCALE``."""
    found = ((scales.astype(mx.int32) + _LEAST_BITS) << _SCALE_SHIFT).view(mx.float32)
    return mx.where(scales == _NO_SCALE, mx.nan, found)
