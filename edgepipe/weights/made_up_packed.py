"""Packed weights of random codes in any form, for measuring and checking a device without a model's files."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.spec.packed import GroupValues, Packed
from edgepipe.spec.packed_form import CODEBOOKS, PackedForm
from edgepipe.weights.gguf_packing import gguf_form

DEVIATION = 0.02
"""Standard deviation of the values: about that of trained weights."""

_FINITE_CODES = 0x77  # every fp8 code but not a number, by its bits
_FACTORS = (32, 64)  # least factor of a group with a base scale, and the end of their range
_RANDOM_BYTES = 1 << 16  # repeated as often as a weight needs


def made_up_packed(name: str, shape: tuple[int, int], form: PackedForm) -> Packed:
    """Return a weight [O, I] of random codes, with scales that give them the deviation of trained weights."""
    rows, inputs = shape
    groups = inputs // form.group
    scale = _scale_for(form)
    middle = 1 << (form.bits - 1)
    zero: int | npt.NDArray[np.uint8] | None = None
    if form.offset == "zero":
        zero = middle
    elif form.offset == "zeros":
        zero = np.full((rows, groups), middle, np.uint8)
    added = form.offset == "added"
    return Packed(
        name=name,
        shape=shape,
        form=form,
        low=_codes((rows, inputs // 2), form),
        high=_codes((rows, inputs * (form.bits - 4) // 8), form) if form.bits > 4 else None,
        scale=_values(rows, inputs, form, scale),
        offset=_values(rows, inputs, form, -scale * (middle - 0.5)) if added else None,
        zero=zero,
        order=np.arange(inputs, dtype=np.int32)[::-1].copy() if form.ordered else None,
    )


@cache
def _bytes() -> npt.NDArray[np.uint8]:
    found = np.random.default_rng(0).integers(0, 256, _RANDOM_BYTES, dtype=np.uint8)
    found.setflags(write=False)
    return found


def _codes(shape: tuple[int, int], form: PackedForm) -> npt.NDArray[np.uint8]:
    """Return random codes; of fp8 none that is not a number (0x7F, 0xFF)."""
    codes = np.resize(_bytes(), shape)
    return codes & np.uint8(_FINITE_CODES) if form.codebook == "e4m3" else codes


def _values(rows: int, inputs: int, form: PackedForm, value: float) -> GroupValues:
    """Return values around ``value``."""
    kind: Any = np.float32 if form.base_bits == 32 else np.float16
    if not form.span:
        return GroupValues(base=np.full((rows, inputs // form.group), value, kind))
    low, high = _FACTORS
    factor = low + np.resize(_bytes(), (rows, inputs // form.group)) % np.uint8(high - low)
    base = np.full((rows, inputs // form.span), value / high, kind)
    return GroupValues(base=base, factor=factor.astype(np.int8 if form.bits == 6 else np.uint8))


def _scale_for(form: PackedForm) -> float:
    """Return a scale that gives random codes the usual deviation."""
    if form.codebook:
        scale = DEVIATION / float(np.nanstd(CODEBOOKS[form.codebook]))
        return 2.0 ** round(math.log2(scale)) if form.codebook == "e2m1" else scale  # MXFP4 stores powers of two
    return DEVIATION / (2**form.bits / math.sqrt(12))  # uniform codes deviate so from their mean


CHECKED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
"""GGUF types whose products a backend compares with float64 (``CheckingBackend``)."""


def checked_weight(scheme: str, *, rows: int, inputs: int) -> Packed:
    """Return a made-up weight [rows, inputs] in the form of a GGUF type."""
    form = gguf_form(scheme)
    assert form is not None, f"{scheme} is not packed"
    return made_up_packed(scheme, (rows, inputs), form)
