"""Pack GGUF blocks without widening the tensor."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
from edgepipe.spec.packed import Codes, GroupValues, Packed, requantise
from edgepipe.spec.packed_form import PackedForm
from edgepipe.spec.tensors import StoredTensor, TensorInfo
from edgepipe.weights.dequantise import block_values
from edgepipe.weights.gguf_blocks import LAYOUTS, BlockLayout, UnpackedParts

_FLOATS = ("F32", "F16", "BF16")
_CHUNK_BYTES = 256 << 10  # bytes of blocks that are unpacked at once: they and their words stay in a core's cache
_MOST_THREADS = 4  # more would wait for the interpreter
_WIDE_CHUNK_VALUES = 1 << 18  # values of requantised types that are widened at once
_REQUANTISED = PackedForm(bits=8, group=32, offset="zero")


def gguf_form(scheme: str) -> PackedForm | None:
    """Return the packed form of a GGUF type; None for plain floats."""
    if scheme in LAYOUTS:
        return LAYOUTS[scheme].form
    return None if scheme in _FLOATS or scheme not in BLOCKS_BY_NAME else _REQUANTISED


def pack_gguf(raw: StoredTensor) -> Packed:
    """Pack a tensor [O, I] of a quantised GGUF type.

    The values are exact, except for IQ1, IQ2 and IQ3, which are requantised to 8 bits. Raises ModelInvalid if bytes
    and shape disagree or a scale is not finite.
    """
    blocks = _blocks(raw)
    layout = LAYOUTS.get(raw.info.scheme)
    packed = _requantised(raw, blocks) if layout is None else _exact(raw, blocks, layout)
    for values in (packed.scale, packed.offset):
        if values is not None and not _finite(values.base):
            raise unusable_scale(raw.info)
    return packed


def unusable_scale(info: TensorInfo) -> ModelInvalid:
    """Return the error for a tensor with a scale that is infinite or NaN."""
    return ModelInvalid(
        f"tensor '{info.name}' cannot be used", fact=f"a scale of its {info.scheme} blocks is no number"
    )


def checked_row_bytes(info: TensorInfo) -> int:
    """Return the bytes of a row of a tensor [O, I] of a quantised GGUF type.

    Raises ModelInvalid if the tensor's size does not fit its shape.
    """
    rows, inputs = info.shape
    block = BLOCKS_BY_NAME[info.scheme]
    if inputs % block.block_values:
        raise ModelInvalid(
            f"tensor '{info.name}' cannot be read",
            fact=f"its rows of {inputs} values are no multiple of {block.block_values}, a {info.scheme} block",
        )
    row_bytes = inputs // block.block_values * block.block_bytes
    if info.num_bytes != rows * row_bytes:
        raise ModelInvalid(
            f"tensor '{info.name}' cannot be read",
            fact=f"shape {info.shape} in {info.scheme} takes {rows * row_bytes} bytes, it has {info.num_bytes}",
        )
    return row_bytes


def _blocks(raw: StoredTensor) -> Codes:
    """Return the blocks [N, block bytes]. Raises ModelInvalid."""
    checked_row_bytes(replace(raw.info, num_bytes=raw.data.nbytes))
    return np.ascontiguousarray(raw.data).reshape(-1, BLOCKS_BY_NAME[raw.info.scheme].block_bytes)


def _exact(raw: StoredTensor, blocks: Codes, layout: BlockLayout) -> Packed:
    rows, inputs = raw.info.shape
    form, count = layout.form, len(blocks)
    values, two_level = BLOCKS_BY_NAME[raw.info.scheme].block_values, form.span > 0
    groups, added = values // form.group, form.offset == "added"
    bases = values // (form.span or form.group)
    parts = UnpackedParts(
        low=np.empty((count, values // 2), np.uint8),
        high=np.empty((count, values * (form.bits - 4) // 8), np.uint8),
        scale=np.empty((count, bases), np.uint16),
        factor=np.empty((count, groups * two_level), layout.factor),
        offset=np.empty((count, bases * added), np.uint16),
        offset_factor=np.empty((count, groups * two_level * added), np.uint8),
    )
    records = blocks.view(layout.struct)[:, 0]
    step = max(1, _CHUNK_BYTES // layout.struct.itemsize)

    def unpack(start: int) -> None:
        chunk = slice(start, start + step)
        layout.unpack(records[chunk], parts.rows(chunk))

    if count <= step:
        unpack(0)
    else:
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="pack") as threads:
            for _ in threads.map(unpack, range(0, count, step)):
                pass
    return Packed(
        name=raw.info.name,
        shape=(rows, inputs),
        form=form,
        low=parts.low.reshape(rows, -1),
        high=parts.high.reshape(rows, -1) if form.bits > 4 else None,
        scale=_group_values(parts.scale.view(layout.base), parts.factor, rows),
        offset=_group_values(parts.offset.view(layout.base), parts.offset_factor, rows) if added else None,
        zero=layout.zero,
    )


def _group_values(base: npt.NDArray[Any], factor: npt.NDArray[Any], rows: int) -> GroupValues:
    return GroupValues(base=base.reshape(rows, -1), factor=factor.reshape(rows, -1) if factor.size else None)


def _requantised(raw: StoredTensor, blocks: Codes) -> Packed:
    rows, inputs = raw.info.shape
    low = np.empty((rows, inputs // 2), np.uint8)
    high = np.empty_like(low)
    scale = np.empty((rows, inputs // _REQUANTISED.group), np.float16)
    per_row = blocks.reshape(rows, -1, blocks.shape[1])
    step = max(1, _WIDE_CHUNK_VALUES // inputs)
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        wide = block_values(raw.info.scheme, per_row[chunk].reshape(-1, blocks.shape[1]))
        part = requantise(raw.info.name, wide.reshape(-1, inputs), group=_REQUANTISED.group)
        assert part.high is not None
        low[chunk], high[chunk], scale[chunk] = part.low, part.high, part.scale.base
    return Packed(
        name=raw.info.name,
        shape=(rows, inputs),
        form=_REQUANTISED,
        low=low,
        high=high,
        scale=GroupValues(base=scale),
        zero=128,
    )


def _finite(base: npt.NDArray[Any]) -> bool:
    """Return whether no value is infinite or NaN: float16, or uint16 as bits of bf16."""
    exponent = np.uint16(0x7C00 if base.dtype == np.float16 else 0x7F80)
    return not bool(((base.view(np.uint16) & exponent) == exponent).any())
