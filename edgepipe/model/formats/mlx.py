"""MLX's quantised layers (``mx.quantize``): affine of 2 to 8 bits, and mxfp4.

``weight`` [O, I * bits / 32] uint32: a stream of bits, the first code lowest, also across words (3, 5 and 6 bits).
Affine: ``scales`` and ``biases`` [O, I / group]; value ``scale * code + bias``. mxfp4: ``scales`` [O, I / 32] uint8.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgepipe.model.formats.common import (
    FLOATS,
    StoredPart,
    StoredWeight,
    byte_planes,
    group_misfit,
    pair_nibbles,
    row_chunks,
    scale_bits,
)
from edgepipe.model.formats.mxfp4 import MXFP4_FORM, pack_mxfp4
from edgepipe.model.packed import Codes, Packed
from edgepipe.model.packed_form import PackedForm
from edgepipe.model.quantisation import WeightFormat

Words = npt.NDArray[np.uint64]


class MlxAffine:
    """See the module."""

    scale_part = "scales"
    index_part = ""

    def label(self, stored: WeightFormat) -> str:
        """See ``StoredFormat.label``."""
        return f"MLX {stored.bits}-bit"

    def fault(self, stored: WeightFormat) -> str:
        """See ``StoredFormat.fault``."""
        good = stored.bits in (2, 3, 4, 5, 6, 8) and stored.group in (16, 32, 64, 128) and stored.scale in FLOATS
        good = good and stored.rows == 1 and not (stored.zeros or stored.indexed or stored.ordered)
        return "" if good else f"MLX of {stored.bits} bits with groups of {stored.group}"

    def misfit(self, stored: WeightFormat, shape: tuple[int, int]) -> str:
        """See ``StoredFormat.misfit``."""
        if shape[1] * stored.bits % 32:
            return f"{shape[1]} inputs of {stored.bits} bits do not fill words"
        return group_misfit(stored, shape)

    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        """See ``StoredFormat.parts``."""
        outputs, inputs = shape
        values = StoredPart(shape=(outputs, inputs // stored.group), types=(stored.scale,))
        words = StoredPart(shape=(outputs, inputs * stored.bits // 32), types=("U32",))
        return {"weight": words, "scales": values, "biases": values}

    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        """See ``StoredFormat.form``."""
        return PackedForm(bits=max(4, stored.bits), group=stored.group, base_bits=scale_bits(stored), offset="added")

    def pack(self, weight: StoredWeight) -> Packed:
        """See ``StoredFormat.pack``."""
        form = self.form(weight.stored, weight.shape)
        stream = weight.arrays["weight"].view(np.uint8)  # [O, I * bits / 8]
        if weight.stored.bits == 4:
            low, high = stream, None
        elif weight.stored.bits == 8:
            low, high = byte_planes(stream)
        else:
            low, high = _unpacked(stream, weight.stored.bits, form.bits)
        return Packed(
            name=weight.name,
            shape=weight.shape,
            form=form,
            low=low,
            high=high,
            scale=weight.scales(weight.arrays["scales"]),
            offset=weight.scales(weight.arrays["biases"]),
        )


class MlxMxfp4:
    """See the module."""

    scale_part = "scales"
    index_part = ""

    def label(self, stored: WeightFormat) -> str:
        """See ``StoredFormat.label``."""
        return "MXFP4"

    def fault(self, stored: WeightFormat) -> str:
        """See ``StoredFormat.fault``."""
        good = stored.bits == 4 and stored.group == 32 and stored.scale == "U8" and stored.rows == 1
        good = good and not (stored.zeros or stored.indexed or stored.ordered)
        return "" if good else f"MXFP4 of {stored.bits} bits with groups of {stored.group}"

    def misfit(self, stored: WeightFormat, shape: tuple[int, int]) -> str:
        """See ``StoredFormat.misfit``."""
        return group_misfit(stored, shape)

    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        """See ``StoredFormat.parts``."""
        outputs, inputs = shape
        return {
            "weight": StoredPart(shape=(outputs, inputs // 8), types=("U32",)),
            "scales": StoredPart(shape=(outputs, inputs // 32), types=("U8",)),
        }

    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        """See ``StoredFormat.form``."""
        return MXFP4_FORM

    def pack(self, weight: StoredWeight) -> Packed:
        """See ``StoredFormat.pack``."""
        blocks = weight.arrays["weight"].view(np.uint8).reshape(weight.shape[0], -1, 16)
        return pack_mxfp4(weight.name, blocks, weight.arrays["scales"])


def _unpacked(stream: npt.NDArray[np.uint8], bits: int, form_bits: int) -> tuple[Codes, Codes | None]:
    """Return the planes of a stream of codes of 2, 3, 5 or 6 bits."""
    outputs, inputs = len(stream), stream.shape[1] * 8 // bits
    low = np.empty((outputs, inputs // 2), np.uint8)
    high = np.empty((outputs, inputs * (form_bits - 4) // 8), np.uint8) if form_bits > 4 else None
    for rows in row_chunks((outputs, inputs)):
        words = _spread(stream[rows], bits)
        low[rows] = pair_nibbles(words.view(np.uint8))
        if high is not None:
            high[rows] = _gather_high(words, form_bits - 4)
    return low, high


def _spread(stream: npt.NDArray[np.uint8], bits: int) -> Words:
    """Return codes of ``bits`` bits as words [R, I / 8] of eight bytes each: halves move apart three times."""
    padded = np.zeros((len(stream), stream.shape[1] // bits, 8), np.uint8)
    padded[:, :, :bits] = stream.reshape(len(stream), -1, bits)
    words = padded.view("<u8")[:, :, 0]
    for codes in (4, 2, 1):  # in each half
        low = _repeated((1 << codes * bits) - 1, every=16 * codes)
        shift = 8 * codes - codes * bits
        words = (words & np.uint64(low)) | ((words << np.uint64(shift)) & np.uint64(low << 8 * codes))
    return words


def _repeated(mask: int, *, every: int) -> int:
    """Return a mask repeated every so many bits of 64."""
    return sum(mask << start for start in range(0, 64, every))


def _gather_high(words: Words, high_bits: int) -> Codes:
    """Return bits 4 and up of the bytes of words [R, I / 8] as a high plane. ``high_bits``: 1 or 2."""
    if high_bits == 2:
        quads = (words.view("<u4") >> np.uint32(4)) & np.uint32(0x03030303)
        quads |= quads >> np.uint32(6)
        return (quads | (quads >> np.uint32(12))).astype(np.uint8)
    above = (words >> np.uint64(4)) & np.uint64(0x0101010101010101)
    for shift in (7, 14, 28):
        above |= above >> np.uint64(shift)
    return above.astype(np.uint8)
