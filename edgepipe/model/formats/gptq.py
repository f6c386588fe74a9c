"""GPTQ as AutoGPTQ and GPTQModel store it (``qlinear_torch.py``): inputs packed in int32, 4 or 8 bits.

``qweight`` [I * bits / 32, O], ``qzeros`` [G, O * bits / 32] int32; ``scales`` [G, O]; ``g_idx`` [I] int32, the
group of each input. Version 1 stores the zero minus 1, modulo 2^bits. Value: ``(code - zero) * scale``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.model.formats.common import (
    FLOATS,
    GROUPS,
    StoredPart,
    StoredWeight,
    byte_planes,
    group_misfit,
    group_of,
    pair_nibbles,
    row_chunks,
    scale_bits,
    unpack_words,
)
from edgepipe.model.packed import Codes, Packed, join_planes
from edgepipe.model.packed_form import PackedForm
from edgepipe.model.quantisation import WeightFormat


class Gptq:
    """See the module."""

    scale_part = "scales"
    index_part = "g_idx"

    def __init__(self, *, zero_shift: int) -> None:
        """``zero_shift``: added to stored zeros; 1 in version 1."""
        self._zero_shift = zero_shift

    def label(self, stored: WeightFormat) -> str:
        """See ``StoredFormat.label``."""
        return f"GPTQ {stored.bits}-bit"

    def fault(self, stored: WeightFormat) -> str:
        """See ``StoredFormat.fault``."""
        if stored.bits not in (4, 8):
            return f"GPTQ of {stored.bits} bits"
        good = stored.group in (0, *GROUPS) and stored.scale in FLOATS and stored.rows == 1
        good = good and (not stored.ordered or stored.indexed)
        return "" if good else f"GPTQ with groups of {stored.group}"

    def misfit(self, stored: WeightFormat, shape: tuple[int, int]) -> str:
        """See ``StoredFormat.misfit``."""
        return f"{shape[0]} outputs are not a multiple of 8" if shape[0] % 8 else group_misfit(stored, shape)

    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        """See ``StoredFormat.parts``."""
        outputs, inputs = shape
        groups = inputs // group_of(stored, shape)
        parts = {
            "qweight": StoredPart(shape=(inputs * stored.bits // 32, outputs), types=("I32",)),
            "qzeros": StoredPart(shape=(groups, outputs * stored.bits // 32), types=("I32",)),
            "scales": StoredPart(shape=(groups, outputs), types=(stored.scale,)),
        }
        return parts | ({"g_idx": StoredPart(shape=(inputs,), types=("I32",))} if stored.indexed else {})

    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        """See ``StoredFormat.form``."""
        return PackedForm(
            bits=stored.bits,
            group=group_of(stored, shape),
            base_bits=scale_bits(stored),
            offset="zeros" if stored.zeros else "zero",
            ordered=stored.ordered and bool(stored.group),
        )

    def pack(self, weight: StoredWeight) -> Packed:
        """See ``StoredFormat.pack``."""
        stored = weight.stored
        form = self.form(stored, weight.shape)
        order = input_order(weight, form, weight.arrays["g_idx"]) if stored.indexed else None
        rows = np.ascontiguousarray(weight.arrays["qweight"].T).view(np.uint8)  # [O, I * bits / 8], inputs in order
        low, high = ordered_planes(rows, stored.bits, order)
        zeros = unpack_words(weight.arrays["qzeros"], stored.bits) + np.uint8(self._zero_shift)
        zeros &= np.uint8((1 << stored.bits) - 1)
        middle = 1 << (stored.bits - 1)
        if not stored.zeros and (zeros != middle).any():
            raise weight.invalid(f"config.json says symmetric, but a zero is not {middle}")
        return Packed(
            name=weight.name,
            shape=weight.shape,
            form=form,
            low=low,
            high=high,
            scale=weight.scales(weight.arrays["scales"].T),
            zero=np.ascontiguousarray(zeros.T) if stored.zeros else middle,
            order=order,
        )


def input_order(weight: StoredWeight, form: PackedForm, groups: npt.NDArray[Any]) -> npt.NDArray[np.int32] | None:
    """Return the inputs [I] sorted by ``groups`` [I]; None if the form says that they are in order.

    Raises ModelInvalid if a group is out of range, of another size, or out of order where it must not be.
    """
    count = weight.shape[1] // form.group
    if groups.min() < 0 or groups.max() >= count:
        raise weight.invalid(f"g_idx has group {int(groups.max())}; groups 0 to {count - 1} exist")
    if (np.bincount(groups, minlength=count) != form.group).any():
        raise weight.invalid(f"g_idx does not give {form.group} inputs to every group")
    if form.ordered:
        return np.argsort(groups, kind="stable").astype(np.int32)
    if (np.diff(groups) < 0).any():
        raise weight.invalid("g_idx orders inputs, but config.json says that they are in order")
    return None


def ordered_planes(
    rows: npt.NDArray[np.uint8], bits: int, order: npt.NDArray[np.int32] | None
) -> tuple[Codes, Codes | None]:
    """Return the planes of codes stored as bytes [O, I * bits / 8], with columns in ``order``. ``bits``: 4 or 8."""
    if bits == 8:
        return byte_planes(rows if order is None else np.take(rows, order, axis=1))
    if order is None:
        return rows, None
    low, index = np.empty_like(rows), order.astype(np.intp)
    for chunk in row_chunks((len(rows), len(order))):
        low[chunk] = pair_nibbles(np.take(join_planes(rows[chunk], None, 4), index, axis=1))
    return low, None
