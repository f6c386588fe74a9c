"""MXFP4 (OCP Microscaling Formats 1.0): 32 values of 4 bits share a power of two.

Value: ``e2m1(code) * 2^(scale - 127)``; a scale of 255 is NaN.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.model.packed import GroupValues, Packed
from edgepipe.model.packed_form import PackedForm

MXFP4_FORM = PackedForm(bits=4, group=32, codebook="e2m1")


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
    if (scales == 255).any():
        raise ModelInvalid(f"weight '{name}' cannot be read", fact="a scale is not a finite number")
    bits = np.where(scales == 0, np.uint16(0x40), scales.astype(np.uint16) << np.uint16(7))  # bf16; 2^-127: subnormal
    outputs, groups = scales.shape
    return Packed(
        name=name,
        shape=(outputs, 32 * groups),
        form=MXFP4_FORM,
        low=blocks.reshape(outputs, -1),
        high=None,
        scale=GroupValues(base=bits.astype(np.uint16)),
    )
