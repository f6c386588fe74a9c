"""float8_e4m3 weights with scales: blocks (DeepSeek-V3, Qwen3-FP8), rows or one for all (compressed-tensors).

``weight`` [O, I]; blocks: ``weight_scale_inv`` or ``weight_scale`` [ceil(O / rows), ceil(I / group)] (DeepSeek-V3's
``kernel.py``, weight_dequant); rows: ``weight_scale`` [O, 1]; one for all: one value. Value: ``code * scale``.
"""

from __future__ import annotations

import math

import numpy as np

from edgepipe.spec.formats.common import FLOATS, StoredArrays, StoredFormat, StoredPart, byte_planes, scale_bits
from edgepipe.spec.packed import Packed
from edgepipe.spec.packed_form import MXFP8_FORM, PackedForm
from edgepipe.spec.quantisation import WeightFormat

_MAX_BLOCK = 1 << 12
_MIN_GROUP = 16  # least group of a packed form


class Fp8(StoredFormat):
    """See the module."""

    def __init__(self, *, scale_part: str) -> None:
        """``scale_part``: suffix of the scales' name."""
        self.scale_part = scale_part

    def label(self, stored: WeightFormat) -> str:
        return "FP8"

    def fault(self, stored: WeightFormat) -> str:
        good = stored.bits == 8 and stored.scale in FLOATS and not (stored.zeros or stored.indexed or stored.ordered)
        good = good and stored.group <= _MAX_BLOCK and stored.group % _MIN_GROUP == 0 and stored.rows <= _MAX_BLOCK
        good = good and (stored.rows > 0 or stored.group == 0)
        return "" if good else f"FP8 in blocks of {stored.rows} x {stored.group}"

    def misfit(self, stored: WeightFormat, shape: tuple[int, int]) -> str:
        if shape[1] % 8 or (stored.group and _group(stored, shape) < _MIN_GROUP):
            return f"blocks of {stored.group} inputs do not fit {shape[1]}"
        return ""

    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        down = -(-shape[0] // stored.rows) if stored.rows else 1
        across = -(-shape[1] // stored.group) if stored.group else 1
        return {
            "weight": StoredPart(shape=shape, types=("F8_E4M3",)),
            self.scale_part: StoredPart(shape=(down, across), types=(stored.scale,)),
        }

    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        return PackedForm(bits=8, group=_group(stored, shape), base_bits=scale_bits(stored), codebook="e4m3")

    def pack(self, weight: StoredArrays) -> Packed:
        codes = weight.arrays["weight"]
        if ((codes & np.uint8(0x7F)) == 0x7F).any():
            raise weight.invalid("a weight is not a number")
        stored, (outputs, inputs) = weight.stored, weight.shape
        group = _group(stored, weight.shape)
        row = np.arange(outputs) // (stored.rows or outputs)
        column = np.arange(0, inputs, group) // (stored.group or inputs)
        low, high = byte_planes(codes)
        return Packed(
            name=weight.name,
            shape=weight.shape,
            form=self.form(stored, weight.shape),
            low=low,
            high=high,
            scale=weight.scales(weight.arrays[self.scale_part][row[:, None], column]),
        )


def _group(stored: WeightFormat, shape: tuple[int, int]) -> int:
    """Return the largest group that divides the row, lies within one block, and is not MXFP8's."""
    largest = math.gcd(stored.group, shape[1])
    return largest // 2 if largest == MXFP8_FORM.group and scale_bits(stored) == MXFP8_FORM.base_bits else largest
