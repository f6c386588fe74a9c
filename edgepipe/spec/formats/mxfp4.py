"""MXFP4 (OCP Microscaling Formats 1.0): 32 values of 4 bits share a power of two.

Value: ``e2m1(code) * 2^(scale - 127)``; a scale of 255 is NaN. gpt-oss stores ``blocks`` and ``scales`` of all experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.spec.formats.common import StoredArrays, StoredFormat, StoredPart
from edgepipe.spec.packed import GroupValues, Packed
from edgepipe.spec.packed_form import MXFP4_FORM, PackedForm
from edgepipe.spec.quantisation import WeightFormat


class Mxfp4(StoredFormat):
    """``blocks`` [O, I / 32, 16] and ``scales`` [O, I / 32], see ``pack_mxfp4``."""

    def label(self, stored: WeightFormat) -> str:
        return "MXFP4"

    def fault(self, stored: WeightFormat) -> str:
        good = stored == WeightFormat(kind=stored.kind, bits=4, group=32, scale="U8")
        return "" if good else f"MXFP4 of {stored.bits} bits with groups of {stored.group}"

    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        outputs, groups = shape[0], shape[1] // 32
        return {
            "blocks": StoredPart(shape=(outputs, groups, 16), types=("U8",)),
            "scales": StoredPart(shape=(outputs, groups), types=("U8",)),
        }

    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        return MXFP4_FORM

    def pack(self, weight: StoredArrays) -> Packed:
        return pack_mxfp4(weight.name, weight.arrays["blocks"], weight.arrays["scales"])


def pack_mxfp4(name: str, blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Packed:
    """Pack a matrix, or one expert as gpt-oss stores it.

    blocks  [O, I / 32, 16]  two codes in a byte, the first in the low bits
    scales  [O, I / 32]      exponents plus 127

    Raises ModelInvalid for a scale of 255 or shapes that disagree.
    """
    if blocks.ndim != 3 or blocks.shape[2] != 16 or scales.shape != blocks.shape[:2]:
        raise ModelInvalid(
            f"weight '{name}' cannot be read", fact=f"blocks {list(blocks.shape)}, scales {list(scales.shape)}"
        )
    outputs, groups = scales.shape
    return Packed(
        name=name,
        shape=(outputs, 32 * groups),
        form=MXFP4_FORM,
        low=blocks.reshape(outputs, -1),
        high=None,
        scale=e8m0_scales(name, scales),
    )


def e8m0_scales(name: str, scales: npt.NDArray[np.uint8]) -> GroupValues:
    """Return powers of two, stored as exponents plus 127 (E8M0). Raises ModelInvalid for a scale of 255 (NaN)."""
    if (scales == 255).any():
        raise ModelInvalid(f"weight '{name}' cannot be read", fact="a scale is not a finite number")
    bits = np.where(scales == 0, np.uint16(0x40), scales.astype(np.uint16) << np.uint16(7))  # bf16; 2^-127: subnormal
    return GroupValues(base=bits.astype(np.uint16))
