"""compressed-tensors' integers: ``pack-quantized`` (4 or 8 bits in int32) and ``int-quantized`` (int8).

Packed (``pack_quantized.py`` of compressed-tensors): ``weight_packed`` [O, I * bits / 32] int32 holds the signed value
plus 2^(bits - 1), the first input lowest; ``weight_scale`` [O, G]; if asymmetric, ``weight_zero_point``
[O * bits / 32, G] int32, shifted alike and packed along the outputs; ``weight_g_idx`` [I] with act-order.
int8: ``weight`` [O, I], ``weight_scale`` and ``weight_zero_point`` [O, G]. Value: ``(code - zero) * scale``.
"""

from __future__ import annotations

import numpy as np

from edgepipe.spec.formats.common import (
    FLOATS,
    GROUPS,
    StoredArrays,
    StoredFormat,
    StoredPart,
    byte_planes,
    group_of,
    scale_bits,
    unpack_words,
)
from edgepipe.spec.formats.integers import are_groups_good, integer_form, pack_integers
from edgepipe.spec.packed import Codes, Packed
from edgepipe.spec.packed_form import PackedForm
from edgepipe.spec.quantisation import WeightFormat


class PackedIntegers(StoredFormat):
    """See the module."""

    scale_part = "weight_scale"
    index_part = "weight_g_idx"

    def label(self, stored: WeightFormat) -> str:
        return f"W{stored.bits}A16"

    def fault(self, stored: WeightFormat) -> str:
        if stored.bits not in (4, 8):
            return f"compressed-tensors of {stored.bits} bits"
        return "" if are_groups_good(stored) else f"compressed-tensors with groups of {stored.group}"

    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        outputs, inputs = shape
        groups = inputs // group_of(stored, shape)
        parts = {
            "weight_packed": StoredPart(shape=(outputs, inputs * stored.bits // 32), types=("I32",)),
            "weight_scale": StoredPart(shape=(outputs, groups), types=(stored.scale,)),
        }
        if stored.zeros:
            words = -(-outputs * stored.bits // 32)
            parts["weight_zero_point"] = StoredPart(shape=(words, groups), types=("I32",))
        return parts | ({"weight_g_idx": StoredPart(shape=(inputs,), types=("I32",))} if stored.indexed else {})

    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        return integer_form(stored, shape, bits=stored.bits)

    def pack(self, weight: StoredArrays) -> Packed:
        stored = weight.stored
        return pack_integers(
            weight,
            self.form(stored, weight.shape),
            weight.arrays["weight_packed"].view(np.uint8),
            groups=weight.arrays["weight_g_idx"] if stored.indexed else None,
            scales=weight.arrays["weight_scale"],
            zero=_zeros(weight) if stored.zeros else 1 << (stored.bits - 1),
        )


class Int8(StoredFormat):
    """See the module."""

    scale_part = "weight_scale"

    def label(self, stored: WeightFormat) -> str:
        return "INT8"

    def fault(self, stored: WeightFormat) -> str:
        good = stored.bits == 8 and stored.group in (0, *GROUPS) and stored.scale in FLOATS and stored.rows in (0, 1)
        good = good and not (stored.indexed or stored.ordered or (stored.zeros and stored.rows == 0))
        return "" if good else f"compressed-tensors int-quantized of {stored.bits} bits, groups of {stored.group}"

    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        scales = (shape[0], shape[1] // group_of(stored, shape)) if stored.rows else (1, 1)
        parts = {
            "weight": StoredPart(shape=shape, types=("I8",)),
            "weight_scale": StoredPart(shape=scales, types=(stored.scale,)),
        }
        return parts | ({"weight_zero_point": StoredPart(shape=scales, types=("I8",))} if stored.zeros else {})

    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        offset = "zeros" if stored.zeros else "zero"
        return PackedForm(bits=8, group=group_of(stored, shape), base_bits=scale_bits(stored), offset=offset)

    def pack(self, weight: StoredArrays) -> Packed:
        low, high = byte_planes(_unsigned(weight, "weight"))
        scale = weight.arrays["weight_scale"]
        return Packed(
            name=weight.name,
            shape=weight.shape,
            form=self.form(weight.stored, weight.shape),
            low=low,
            high=high,
            scale=weight.scales(scale if weight.stored.rows else np.repeat(scale, weight.shape[0], axis=0)),
            zero=_unsigned(weight, "weight_zero_point") if weight.stored.zeros else 128,
        )


def _unsigned(weight: StoredArrays, part: str) -> Codes:
    """Return int8 values plus 128."""
    return weight.arrays[part].view(np.uint8) ^ np.uint8(0x80)


def _zeros(weight: StoredArrays) -> Codes:
    words = weight.arrays["weight_zero_point"]
    codes = unpack_words(np.ascontiguousarray(words.T), weight.stored.bits)  # [G, O and padding]
    return np.ascontiguousarray(codes[:, : weight.shape[0]].T)
