"""Pack GGUF blocks without widening the tensor."""

from __future__ import annotations

import numpy as np

from edgepipe.errors import ModelInvalid
from edgepipe.model.gguf_types import BLOCKS_BY_NAME
from edgepipe.model.packed import GroupValues, Packed, split_planes
from edgepipe.model.packed_form import PackedForm
from edgepipe.model.tensors import RawTensor

_FORMS = {
    "Q4_0": PackedForm(bits=4, group=32, offset="zero"),
    "Q4_1": PackedForm(bits=4, group=32, offset="added"),
    "Q8_0": PackedForm(bits=8, group=32, offset="zero"),
}


def gguf_form(scheme: str) -> PackedForm | None:
    """Return the packed form of a GGUF type; None for plain floats."""
    return _FORMS.get(scheme)


def pack_gguf(raw: RawTensor) -> Packed:
    """Pack a tensor [O, I] of a GGUF type. Raises ModelInvalid if bytes and shape disagree."""
    rows, inputs = raw.info.shape
    form, block = _FORMS[raw.info.scheme], BLOCKS_BY_NAME[raw.info.scheme]
    if raw.data.nbytes != rows * inputs // block.block_values * block.block_bytes:
        raise ModelInvalid(f"tensor '{raw.info.name}' cannot be read", fact=f"it has {raw.data.nbytes} bytes")
    blocks = raw.data.reshape(rows, inputs // block.block_values, block.block_bytes)
    scale = GroupValues(base=np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0])
    if raw.info.scheme == "Q8_0":
        codes = (blocks[:, :, 2:] ^ np.uint8(0x80)).reshape(rows, inputs)
        low, high = split_planes(codes, 8)
        return Packed(name=raw.info.name, shape=(rows, inputs), form=form, low=low, high=high, scale=scale, zero=128)
    start = 2 if raw.info.scheme == "Q4_0" else 4
    pairs = blocks[:, :, start:]  # byte j: value j and value j + 16
    codes = np.concatenate([pairs & np.uint8(15), pairs >> np.uint8(4)], axis=2).reshape(rows, inputs)
    low, _ = split_planes(codes, 4)
    offset = None
    if start == 4:
        offset = GroupValues(base=np.ascontiguousarray(blocks[:, :, 2:4]).view("<f2")[:, :, 0])
    zero = 8 if start == 2 else None
    return Packed(
        name=raw.info.name, shape=(rows, inputs), form=form, low=low, high=None, scale=scale, offset=offset, zero=zero
    )
