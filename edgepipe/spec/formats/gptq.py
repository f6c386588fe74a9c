"""GPTQ as AutoGPTQ and GPTQModel store it (``qlinear_torch.py``): inputs packed in int32, 2, 3, 4 or 8 bits.

``qweight`` [I * bits / 32, O], ``qzeros`` [G, O * bits / 32] int32, codes of 3 bits also across words; ``scales``
[G, O]; ``g_idx`` [I] int32, the group of each input. Codes of 2 and 3 bits are packed as codes of 4. Version 1 stores
the zero minus 1, modulo 2^bits. Value: ``(code - zero) * scale``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgepipe.spec.formats.common import StoredArrays, StoredFormat, StoredPart, group_misfit, group_of, unpack_words
from edgepipe.spec.formats.integers import are_groups_good, integer_form, pack_integers
from edgepipe.spec.formats.streams import unpack_stream
from edgepipe.spec.packed import Codes, Packed, join_planes
from edgepipe.spec.packed_form import PackedForm
from edgepipe.spec.quantisation import WeightFormat

_CODES_OF_WHOLE_WORDS = {2: 16, 3: 32, 4: 8, 8: 8}  # a multiple of these fills words, and pairs of nibbles


class Gptq(StoredFormat):
    """See the module."""

    index_part = "g_idx"

    def __init__(self, *, zero_shift: int) -> None:
        """``zero_shift``: added to stored zeros; 1 in version 1."""
        self._zero_shift = zero_shift

    def label(self, stored: WeightFormat) -> str:
        return f"GPTQ {stored.bits}-bit"

    def fault(self, stored: WeightFormat) -> str:
        if stored.bits not in (2, 3, 4, 8):
            return f"GPTQ of {stored.bits} bits"
        return "" if are_groups_good(stored) else f"GPTQ with groups of {stored.group}"

    def misfit(self, stored: WeightFormat, shape: tuple[int, int]) -> str:
        words = _CODES_OF_WHOLE_WORDS[stored.bits]
        for count, what in ((shape[0], "outputs"), (shape[1], "inputs")):
            if count % words:
                return f"{count} {what} are not a multiple of {words}"
        return group_misfit(stored, shape)

    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        outputs, inputs = shape
        groups = inputs // group_of(stored, shape)
        parts = {
            "qweight": StoredPart(shape=(inputs * stored.bits // 32, outputs), types=("I32",)),
            "qzeros": StoredPart(shape=(groups, outputs * stored.bits // 32), types=("I32",)),
            "scales": StoredPart(shape=(groups, outputs), types=(stored.scale,)),
        }
        return parts | ({"g_idx": StoredPart(shape=(inputs,), types=("I32",))} if stored.indexed else {})

    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        return integer_form(stored, shape, bits=max(4, stored.bits))

    def pack(self, weight: StoredArrays) -> Packed:
        stored = weight.stored
        form = self.form(stored, weight.shape)
        rows = np.ascontiguousarray(weight.arrays["qweight"].T).view(np.uint8)  # [O, I * bits / 8], inputs in order
        rows = rows if stored.bits in (4, 8) else unpack_stream(rows, stored.bits, form.bits)[0]
        zeros = _zeros(weight.arrays["qzeros"], stored.bits) + np.uint8(self._zero_shift)
        zeros &= np.uint8((1 << stored.bits) - 1)
        middle = 1 << (stored.bits - 1)
        if not stored.zeros and (zeros != middle).any():
            raise weight.invalid(f"config.json says symmetric, but a zero is not {middle}")
        return pack_integers(
            weight,
            form,
            rows,
            groups=weight.arrays["g_idx"] if stored.indexed else None,
            scales=weight.arrays["scales"].T,
            zero=np.ascontiguousarray(zeros.T) if stored.zeros else middle,
        )


def _zeros(words: npt.NDArray[np.int32], bits: int) -> Codes:
    """Return the stored zeros [G, O]."""
    if bits in (4, 8):
        return unpack_words(words, bits)
    return join_planes(unpack_stream(np.ascontiguousarray(words).view(np.uint8), bits, 4)[0], None, 4)
