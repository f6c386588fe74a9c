"""AWQ as AutoAWQ's GEMM layout: eight outputs in an int32, interleaved (``awq/utils/packing_utils.py``).

``qweight`` [I, O / 8], ``qzeros`` [G, O / 8] int32; ``scales`` [G, O]. Of eight outputs, bits 4p to 4p + 3 hold
``_ORDER[p]``. Value: ``(code - zero) * scale``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.spec.formats.common import (
    FLOATS,
    GROUPS,
    StoredArrays,
    StoredFormat,
    StoredPart,
    group_misfit,
    group_of,
    scale_bits,
)
from edgepipe.spec.packed import Codes, Packed
from edgepipe.spec.packed_form import PackedForm
from edgepipe.spec.quantisation import WeightFormat

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLES = np.uint32(0x0F0F0F0F)


class Awq(StoredFormat):
    """See the module."""

    def label(self, stored: WeightFormat) -> str:
        return "AWQ"

    def fault(self, stored: WeightFormat) -> str:
        if stored.bits != 4:
            return f"AWQ of {stored.bits} bits"
        good = stored.group in (0, *GROUPS) and stored.scale in FLOATS and stored.zeros and stored.rows == 1
        return "" if good and not stored.indexed and not stored.ordered else f"AWQ with groups of {stored.group}"

    def misfit(self, stored: WeightFormat, shape: tuple[int, int]) -> str:
        return f"{shape[0]} outputs are not a multiple of 8" if shape[0] % 8 else group_misfit(stored, shape)

    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        outputs, inputs = shape
        groups = inputs // group_of(stored, shape)
        return {
            "qweight": StoredPart(shape=(inputs, outputs // 8), types=("I32",)),
            "qzeros": StoredPart(shape=(groups, outputs // 8), types=("I32",)),
            "scales": StoredPart(shape=(groups, outputs), types=(stored.scale,)),
        }

    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        return PackedForm(bits=4, group=group_of(stored, shape), base_bits=scale_bits(stored), offset="zeros")

    def pack(self, weight: StoredArrays) -> Packed:
        return Packed(
            name=weight.name,
            shape=weight.shape,
            form=self.form(weight.stored, weight.shape),
            low=_pair_inputs(weight.arrays["qweight"]),
            high=None,
            scale=weight.scales(weight.arrays["scales"].T),
            zero=_zeros(weight.arrays["qzeros"]),
        )


def _pair_inputs(words: npt.NDArray[Any]) -> Codes:
    """Return codes of words [I, O / 8] as the plane [O, I / 2]: two inputs of one output in a byte."""
    unsigned = words.view(np.uint32)
    first, second = unsigned[0::2], unsigned[1::2]
    even = (first & _NIBBLES) | ((second & _NIBBLES) << np.uint32(4))  # byte k: output _ORDER[2k] of both inputs
    odd = ((first >> np.uint32(4)) & _NIBBLES) | (second & (_NIBBLES << np.uint32(4)))  # output _ORDER[2k + 1]
    low = np.empty((words.shape[1], 8, words.shape[0] // 2), np.uint8)
    for parity, pairs in enumerate((even, odd)):
        columns = np.ascontiguousarray(pairs.T).view(np.uint8).reshape(words.shape[1], -1, 4)
        for byte in range(4):
            low[:, _ORDER[2 * byte + parity]] = columns[:, :, byte]
    return low.reshape(8 * words.shape[1], -1)


def _zeros(words: npt.NDArray[Any]) -> Codes:
    """Return the zeros [O, G] of words [G, O / 8]."""
    zeros = np.empty((words.shape[1], 8, words.shape[0]), np.uint8)
    for position, output in enumerate(_ORDER):
        zeros[:, output] = ((words.T >> (4 * position)) & 15).astype(np.uint8)
    return zeros.reshape(8 * words.shape[1], -1)
