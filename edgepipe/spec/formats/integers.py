"""Integer codes with a scale per group of inputs, as GPTQ and compressed-tensors store them, maybe with act-order.

Act-order (``desc_act``): the inputs of a group are anywhere in a row, and ``g_idx`` [I] names each input's group. The
packed form has the columns sorted by group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.spec.formats.common import (
    FLOATS,
    GROUPS,
    StoredArrays,
    byte_planes,
    group_of,
    pair_nibbles,
    row_chunks,
    scale_bits,
)
from edgepipe.spec.packed import Codes, Packed, join_planes
from edgepipe.spec.packed_form import PackedForm
from edgepipe.spec.quantisation import WeightFormat


def are_groups_good(stored: WeightFormat) -> bool:
    """Return whether groups, scales and act-order are those that exist."""
    good = stored.group in (0, *GROUPS) and stored.scale in FLOATS and stored.rows == 1
    return good and (not stored.ordered or stored.indexed)


def integer_form(stored: WeightFormat, shape: tuple[int, int], *, bits: int) -> PackedForm:
    """Return the packed form of a weight [O, I] with codes of ``bits``: 4 or 8."""
    return PackedForm(
        bits=bits,
        group=group_of(stored, shape),
        base_bits=scale_bits(stored),
        offset="zeros" if stored.zeros else "zero",
        ordered=stored.ordered and bool(stored.group),
    )


def pack_integers(
    weight: StoredArrays,
    form: PackedForm,
    rows: npt.NDArray[np.uint8],
    *,
    groups: npt.NDArray[Any] | None,
    scales: npt.NDArray[Any],
    zero: Codes | int,
) -> Packed:
    """Pack codes whose inputs are in order.

    rows    [O, I * bits / 8] codes as bytes, the first input in the lowest bits
    groups  [I] each input's group; None: in order
    scales  [O, G] as stored
    zero    [O, G] codes, or one for all

    Raises ModelInvalid for groups or scales that cannot be right.
    """
    order = None if groups is None else _input_order(weight, form, groups)
    low, high = _ordered_planes(rows, form.bits, order)
    return Packed(
        name=weight.name,
        shape=weight.shape,
        form=form,
        low=low,
        high=high,
        scale=weight.scales(scales),
        zero=zero,
        order=order,
    )


def _input_order(weight: StoredArrays, form: PackedForm, groups: npt.NDArray[Any]) -> npt.NDArray[np.int32] | None:
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


def _ordered_planes(
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
