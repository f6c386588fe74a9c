"""bitsandbytes' NF4 (QLoRA, Dettmers et al. 2023): blocks of 64 values over the flattened weight.

``weight`` [O * I / 2] uint8, the first code in the high bits; ``weight.absmax`` [O * I / 64];
``weight.quant_map`` [16]; ``weight.quant_state.bitsandbytes__nf4``: JSON. With double quantisation ``absmax`` is uint8
and means ``nested_quant_map[absmax] * nested_absmax[block // 256] + nested_offset`` (``bitsandbytes/functional.py``).
Value: ``nf4(code) * absmax``. Blocks must not cross rows: 64 divides the inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.files.fields import Fields
from edgepipe.files.strict_json import parse_json_object
from edgepipe.spec.formats.common import StoredArrays, StoredFormat, StoredPart
from edgepipe.spec.packed import Packed
from edgepipe.spec.packed_form import CODEBOOKS, PackedForm
from edgepipe.spec.quantisation import WeightFormat

_NESTED_BLOCK = 256
_STATE = "weight.quant_state.bitsandbytes__nf4"


class Nf4(StoredFormat):
    """See the module. ``WeightFormat.scale``: F32, or U8 with double quantisation."""

    scale_part = "weight.absmax"

    def label(self, stored: WeightFormat) -> str:
        return "NF4"

    def fault(self, stored: WeightFormat) -> str:
        good = stored.bits == 4 and stored.group == 64 and stored.scale in ("F32", "U8") and stored.rows == 1
        good = good and not (stored.zeros or stored.indexed or stored.ordered)
        return "" if good else f"bitsandbytes of {stored.bits} bits with blocks of {stored.group}"

    def parts(self, stored: WeightFormat, shape: tuple[int, int]) -> dict[str, StoredPart]:
        values = shape[0] * shape[1]
        blocks = values // stored.group
        parts = {
            "weight": StoredPart(shape=(values // 2,), types=("U8",)),
            "weight.absmax": StoredPart(shape=(blocks,), types=(stored.scale,)),
            "weight.quant_map": StoredPart(shape=(16,), types=("F32",)),
        }
        if stored.scale == "U8":
            parts["weight.nested_absmax"] = StoredPart(shape=(-(-blocks // _NESTED_BLOCK),), types=("F32",))
            parts["weight.nested_quant_map"] = StoredPart(shape=(256,), types=("F32",))
        return parts | {_STATE: StoredPart(shape=None, types=("U8",))}

    def form(self, stored: WeightFormat, shape: tuple[int, int]) -> PackedForm:
        return PackedForm(bits=4, group=stored.group, base_bits=32, codebook="nf4")

    def pack(self, weight: StoredArrays) -> Packed:
        if (weight.arrays["weight.quant_map"] != CODEBOOKS["nf4"]).any():
            raise weight.invalid("its table is not NF4's")
        scale = self._absmax(weight, _state(weight))
        pairs = weight.arrays["weight"]
        return Packed(
            name=weight.name,
            shape=weight.shape,
            form=self.form(weight.stored, weight.shape),
            low=((pairs << np.uint8(4)) | (pairs >> np.uint8(4))).reshape(weight.shape[0], -1),
            high=None,
            scale=weight.scales(scale.reshape(weight.shape[0], -1)),
        )

    def _absmax(self, weight: StoredArrays, state: Fields) -> npt.NDArray[Any]:
        absmax = weight.arrays["weight.absmax"]
        if weight.stored.scale != "U8":
            return absmax
        state.integer("nested_blocksize", low=_NESTED_BLOCK, high=_NESTED_BLOCK)
        offset = np.float32(state.number("nested_offset", low=-1e30, high=1e30))
        outer = np.repeat(weight.arrays["weight.nested_absmax"], _NESTED_BLOCK)[: len(absmax)]
        with np.errstate(over="ignore", invalid="ignore"):  # checked with the other scales
            return weight.arrays["weight.nested_quant_map"][absmax] * outer + offset


def _state(weight: StoredArrays) -> Fields:
    """Return the description in JSON. Raises ModelInvalid if it contradicts the weight."""
    what = f"the quant_state of '{weight.name}'"
    state = Fields(parse_json_object(weight.arrays[_STATE].tobytes(), what=what), what=what)
    kind, shape = state.text("quant_type", default="nf4"), state.items("shape")
    block = state.integer("blocksize", low=1, high=1 << 16, default=weight.stored.group)
    if kind != "nf4" or block != weight.stored.group or (shape and shape != list(weight.shape)):
        raise weight.invalid(f"its quant_state says {kind[:20]}, blocks of {block}, shape {str(shape)[:40]}")
    return state
