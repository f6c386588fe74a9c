"""MLX's quantised layers (``mx.quantize``): affine of 2 to 8 bits, mxfp4, mxfp8 and nvfp4.

``weight`` [O, I * bits / 32] uint32: a stream of bits, the first code lowest, also across words (3, 5 and 6 bits).
Affine: ``scales`` and ``biases`` [O, I / group]; value ``scale * code + bias``. The others: ``scales`` [O, I / group]
uint8, as exponents plus 127 (mxfp4, mxfp8) or as e4m3 without a sign (nvfp4).
"""

from __future__ import annotations

import numpy as np

from edgepipe.spec.formats.common import (
    FLOATS,
    StoredArrays,
    StoredFormat,
    StoredPart,
    byte_planes,
    group_misfit,
    scale_bits,
)
from edgepipe.spec.formats.mxfp4 import MXFP4_FORM, e8m0_scales, pack_mxfp4
from edgepipe.spec.formats.streams import unpack_stream
from edgepipe.spec.packed import GroupValues, Packed
from edgepipe.spec.packed_form import CODEBOOKS, MXFP8_FORM, NVFP4_FORM, PackedForm
from edgepipe.spec.quantisation import WeightFormat

_E4M3_NAN = 0x7F


class MlxAffine(StoredFormat):
    """See the module."""

    def label(self, stored: WeightFormat) -> str:
        return f"MLX {stored.bits}-bit"

    def fault(self, stored: WeightFormat) -> str:
        good = stored.bits in (2, 3, 4, 5, 6, 8) and stored.group in (16, 32, 64, 128) and stored.scale in FLOATS
        good = good and stored.rows == 1 and not (stored.zeros or stored.indexed or stored.ordered)
        return "" if good else f"MLX of {stored.bits} bits with groups of {stored.group}"

    def misfit(self, stored: WeightFormat, shape: tuple[int, int]) -> str:
        if shape[1] * stored.bits % 32:
            return f"{shape[1]} inputs of {stored.bits} bits do not fill words"
        return group_misfit(stored, shape)

    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        outputs, inputs = shape
        values = StoredPart(shape=(outputs, inputs // stored.group), types=(stored.scale,))
        words = StoredPart(shape=(outputs, inputs * stored.bits // 32), types=("U32",))
        return {"weight": words, "scales": values, "biases": values}

    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        return PackedForm(bits=max(4, stored.bits), group=stored.group, base_bits=scale_bits(stored), offset="added")

    def pack(self, weight: StoredArrays) -> Packed:
        form = self.form(weight.stored, weight.shape)
        stream = weight.arrays["weight"].view(np.uint8)  # [O, I * bits / 8]
        if weight.stored.bits == 4:
            low, high = stream, None
        elif weight.stored.bits == 8:
            low, high = byte_planes(stream)
        else:
            low, high = unpack_stream(stream, weight.stored.bits, form.bits)
        return Packed(
            name=weight.name,
            shape=weight.shape,
            form=form,
            low=low,
            high=high,
            scale=weight.scales(weight.arrays["scales"]),
            offset=weight.scales(weight.arrays["biases"]),
        )


class _MlxFloat(StoredFormat):
    """What the formats with codes in floating point share."""

    def __init__(self, name: str, packed_form: PackedForm) -> None:
        """``name``: for people."""
        self._name, self._form = name, packed_form

    def label(self, stored: WeightFormat) -> str:
        return self._name

    def fault(self, stored: WeightFormat) -> str:
        good = (stored.bits, stored.group) == (self._form.bits, self._form.group)
        good = good and stored.scale == "U8" and stored.rows == 1
        good = good and not (stored.zeros or stored.indexed or stored.ordered)
        return "" if good else f"{self._name} of {stored.bits} bits with groups of {stored.group}"

    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        outputs, inputs = shape
        return {
            "weight": StoredPart(shape=(outputs, inputs * self._form.bits // 32), types=("U32",)),
            "scales": StoredPart(shape=(outputs, inputs // self._form.group), types=("U8",)),
        }

    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        return self._form


class MlxMxfp4(_MlxFloat):
    """See the module."""

    def __init__(self) -> None:
        super().__init__("MXFP4", MXFP4_FORM)

    def pack(self, weight: StoredArrays) -> Packed:
        blocks = weight.arrays["weight"].view(np.uint8).reshape(weight.shape[0], -1, 16)
        return pack_mxfp4(weight.name, blocks, weight.arrays["scales"])


class MlxMxfp8(_MlxFloat):
    """See the module."""

    def __init__(self) -> None:
        super().__init__("MXFP8", MXFP8_FORM)

    def pack(self, weight: StoredArrays) -> Packed:
        codes = weight.arrays["weight"].view(np.uint8)
        if ((codes & np.uint8(0x7F)) == _E4M3_NAN).any():
            raise weight.invalid("a weight is not a number")
        low, high = byte_planes(codes)
        scale = e8m0_scales(weight.name, weight.arrays["scales"])
        return Packed(name=weight.name, shape=weight.shape, form=MXFP8_FORM, low=low, high=high, scale=scale)


class MlxNvfp4(_MlxFloat):
    """See the module."""

    def __init__(self) -> None:
        super().__init__("NVFP4", NVFP4_FORM)

    def pack(self, weight: StoredArrays) -> Packed:
        scales = weight.arrays["scales"]
        if (scales >= _E4M3_NAN).any():
            raise weight.invalid("a scale is negative or not a number")
        low = weight.arrays["weight"].view(np.uint8)
        scale = GroupValues(base=CODEBOOKS["e4m3"].astype(np.float16)[scales])
        return Packed(name=weight.name, shape=weight.shape, form=NVFP4_FORM, low=low, high=None, scale=scale)
