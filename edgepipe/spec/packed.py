"""Packed weights: small integers with a scale per group, in the values of their file, without torch or mlx.

A weight [O, I] (out features, in features) is kept as planes of 4 bits plus 0, 1, 2 or 4 high bits::

    value[o, i] = scale[o, g] * level(code[o, i]) + offset[o, g]        g = i // group

``level(code)`` is ``code - zero[o, g]``, or ``codebook[code]``. Scales and offsets are rebuilt in float32 without
rounding. Backends turn a ``Packed`` into their own computing form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.spec.packed_form import CODEBOOKS, PackedForm

Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK_VALUES = 1 << 20  # widened at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupValues:
    """One float per group: ``base[o, g * group // span] * factor[o, g]`` (1 without ``factor``)."""

    base: npt.NDArray[Any]  # [O, I / span] float16, float32, or uint16 as bits of bf16
    factor: npt.NDArray[Any] | None = None  # [O, I / group] uint8 or int8; K types

    @property
    def num_bytes(self) -> int:
        """Bytes of both arrays."""
        return self.base.nbytes + (0 if self.factor is None else self.factor.nbytes)

    def float32(self) -> Floats:
        """Return the values [O, I / group], exact."""
        if self.base.dtype == np.uint16:
            wide = (self.base.astype(np.uint32) << 16).view(np.float32)
        else:
            wide = self.base.astype(np.float32)
        if self.factor is None:
            return wide
        repeat = self.factor.shape[1] // wide.shape[1]
        return np.repeat(wide, repeat, axis=1) * self.factor.astype(np.float32)

    def rows(self, rows: Any) -> GroupValues:
        """Return a selection of rows (a slice or indices)."""
        return GroupValues(base=self.base[rows], factor=None if self.factor is None else self.factor[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """A packed weight [O, I]."""

    name: str  # the logical weight's name, for messages
    shape: tuple[int, int]  # [O, I]
    form: PackedForm
    low: Codes  # [O, I / 2]: input 2j in bits 0-3 of byte j, input 2j + 1 in bits 4-7
    high: Codes | None  # [O, I * high_bits / 8]: input i in bits i * high_bits and up, little-endian
    scale: GroupValues
    offset: GroupValues | None = None  # added to the product
    zero: int | Codes | None = None  # subtracted from the code: one for all groups, or [O, I / group] uint8
    order: npt.NDArray[np.int32] | None = None  # [I]: column j is input order[j] of the product; None: in order

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.low, self.high, self.zero, self.order)
        plain = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
        return plain + self.scale.num_bytes + (0 if self.offset is None else self.offset.num_bytes)

    @property
    def num_groups(self) -> int:
        """Groups of one row."""
        return self.shape[1] // self.form.group

    def codes(self) -> Codes:
        """Return the codes [O, I] uint8, in the order of the stored columns."""
        return join_planes(self.low, self.high, self.form.bits)

    def zeros(self) -> npt.NDArray[np.uint8] | None:
        """Return the integer zeros [O, I / group], or None without zeros."""
        if self.zero is None or isinstance(self.zero, np.ndarray):
            return self.zero
        return np.full((self.shape[0], self.num_groups), self.zero, np.uint8)

    def rows(self, rows: Any) -> Packed:
        """Return a selection of rows: a slice, or indices [R]."""
        low = self.low[rows]
        return replace(
            self,
            shape=(low.shape[0], self.shape[1]),
            low=low,
            high=None if self.high is None else self.high[rows],
            scale=self.scale.rows(rows),
            offset=None if self.offset is None else self.offset.rows(rows),
            zero=self.zero[rows] if isinstance(self.zero, np.ndarray) else self.zero,
        )

    def float32(self) -> Floats:
        """Return the values [O, I]: the product of scale and level is exact or rounded once, then the offset added.

        Columns are in the order of the product's inputs.
        """
        out = np.empty(self.shape, np.float32)
        step = max(1, _CHUNK_VALUES // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            chunk = self.rows(slice(start, start + step))
            out[start : start + step] = _widen(chunk)
        if self.order is None:
            return out
        sorted_back = np.empty_like(out)
        sorted_back[:, self.order] = out
        return sorted_back


def _widen(part: Packed) -> Floats:
    group = part.form.group
    codes = part.codes().reshape(part.shape[0], -1, group)
    if part.form.codebook:
        levels = CODEBOOKS[part.form.codebook][codes]
    else:
        levels = codes.astype(np.float32)
        zeros = part.zeros()
        if zeros is not None:
            levels -= zeros.astype(np.float32)[:, :, None]
    levels *= part.scale.float32()[:, :, None]
    if part.offset is not None:
        levels += part.offset.float32()[:, :, None]
    return levels.reshape(part.shape)


def split_planes(codes: Codes, bits: int) -> tuple[Codes, Codes | None]:
    """Split codes [O, I] of ``bits`` (4, 5, 6 or 8) into the planes of ``Packed``. I is a multiple of 8."""
    fifteen, four = np.uint8(15), np.uint8(4)
    low = (codes[:, 0::2] & fifteen) | ((codes[:, 1::2] & fifteen) << four)
    high_bits = bits - 4
    if not high_bits:
        return np.ascontiguousarray(low), None
    per_byte = 8 // high_bits
    above = (codes >> four).reshape(codes.shape[0], -1, per_byte)
    high = np.zeros(above.shape[:2], np.uint8)
    for index in range(per_byte):
        high |= above[:, :, index] << np.uint8(index * high_bits)
    return np.ascontiguousarray(low), high


def join_planes(low: Codes, high: Codes | None, bits: int) -> Codes:
    """Undo ``split_planes``. Whole words are shifted: single bytes at a stride would take several times as long."""
    words = low.astype("<u2")
    codes = ((words & np.uint16(0x0F)) | ((words & np.uint16(0xF0)) << np.uint16(4))).view(np.uint8)
    if high is None:
        return codes
    high_bits = bits - 4
    per_byte = 8 // high_bits
    wide = np.dtype(f"<u{per_byte}")
    source = high.astype(wide)
    above = np.zeros_like(source)
    for index in range(per_byte):  # code ``index`` of a byte goes to byte ``index`` of the word, above its low bits
        part = (source >> wide.type(index * high_bits)) & wide.type((1 << high_bits) - 1)
        above |= part << wide.type(8 * index + 4)
    codes |= above.view(np.uint8)
    return codes


def requantise(name: str, values: Floats, *, group: int = 32) -> Packed:
    """Round values [O, I] to 8 bits: a float16 scale per group, levels -127 to 127 (as GGUF's Q8_0).

    For types without a packed form of their own (IQ1, IQ2, IQ3).
    """
    rows, inputs = values.shape
    grouped = values.reshape(rows, -1, group)
    scale = (np.abs(grouped).max(axis=2) / np.float32(127)).astype(np.float16)
    wide = scale.astype(np.float32)[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.where(wide > 0, np.rint(grouped / wide), 0)
    codes = (np.clip(levels, -127, 127) + 128).astype(np.uint8).reshape(rows, inputs)
    low, high = split_planes(codes, 8)
    form = PackedForm(bits=8, group=group, offset="zero")
    return Packed(
        name=name, shape=(rows, inputs), form=form, low=low, high=high, scale=GroupValues(base=scale), zero=128
    )


def concatenate(parts: Sequence[Packed]) -> Packed:
    """Join weights along the out features. Raises ValueError if their forms or orders of columns differ."""
    first = parts[0]
    if any(part.form != first.form or not _same_order(part, first) for part in parts):
        raise ValueError(f"'{first.name}' cannot be joined with weights of another form or order of columns")
    return replace(
        first,
        shape=(sum(part.shape[0] for part in parts), first.shape[1]),
        low=np.concatenate([part.low for part in parts]),
        high=None if first.high is None else np.concatenate([part.high for part in parts if part.high is not None]),
        scale=_join([part.scale for part in parts]),
        offset=None if first.offset is None else _join([part.offset for part in parts if part.offset is not None]),
        zero=_joined_zeros(parts),
    )


def _same_order(one: Packed, other: Packed) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return np.array_equal(one.order, other.order)


def _joined_zeros(parts: Sequence[Packed]) -> int | Codes | None:
    plain = {part.zero for part in parts if not isinstance(part.zero, np.ndarray)}
    if len(plain) == 1 and not any(isinstance(part.zero, np.ndarray) for part in parts):
        return plain.pop()
    return np.concatenate([zeros for zeros in (part.zeros() for part in parts) if zeros is not None])


def _join(values: Sequence[GroupValues]) -> GroupValues:
    factors = [value.factor for value in values if value.factor is not None]
    return GroupValues(
        base=np.concatenate([value.base for value in values]), factor=np.concatenate(factors) if factors else None
    )
