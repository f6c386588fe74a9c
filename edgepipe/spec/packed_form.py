"""The form of a packed weight: what its size and the choice of a kernel depend on, known without its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # llama.cpp, kvalues_iq4nl
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # OCP MX, 5.3.3
_NF4 = (  # QLoRA (Dettmers et al. 2023), appendix E
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def _e4m3() -> npt.NDArray[np.float32]:
    """Return the values of all 256 codes of float8_e4m3fn (OCP 8-bit floating point, 5.2); 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


CODEBOOKS: Mapping[str, npt.NDArray[np.float32]] = {
    "iq4": np.array(_IQ4, np.float32),
    "e2m1": np.array(_E2M1, np.float32),
    "nf4": np.array(_NF4, np.float32),
    "e4m3": _e4m3(),
}
"""Levels by code, of the forms that look their levels up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedForm:
    """How a weight [O, I] is packed."""

    bits: int  # 4, 5, 6 or 8 per code
    group: int  # inputs that share a scale: 16, 32, 64, 128, 256, or all of a row
    span: int = 0  # inputs that share a base scale, for two-level scales (K types: 256); 0: one level
    base_bits: int = 16  # bits of a base scale: 16 or 32
    offset: Literal["none", "zero", "zeros", "added"] = "none"  # zero: one integer for all; zeros: one per group
    codebook: str = ""  # a key of CODEBOOKS
    ordered: bool = False  # columns are sorted by group (GPTQ's act-order)

    def num_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of a ``Packed`` of this form and shape [O, I]."""
        rows, inputs = shape
        groups = rows * (inputs // self.group)
        values = rows * (inputs // (self.span or self.group)) * self.base_bits // 8 + (groups if self.span else 0)
        total = rows * inputs * self.bits // 8 + values
        total += values if self.offset == "added" else 0
        total += groups if self.offset == "zeros" else 0
        return total + (4 * inputs if self.ordered else 0)


MXFP4_FORM = PackedForm(bits=4, group=32, codebook="e2m1")
MXFP8_FORM = PackedForm(bits=8, group=32, codebook="e4m3")
"""Scales are powers of two, as bits of bf16 (OCP Microscaling Formats 1.0). No other format has these forms."""
NVFP4_FORM = PackedForm(bits=4, group=16, codebook="e2m1")
"""Scales are values of e4m3 without a sign, as float16. No other format has this form."""
