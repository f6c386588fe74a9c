"""Types of stored tensors: floats and GGUF's types, and the integers and 8-bit floats of quantised formats."""

from __future__ import annotations

import math

from edgepipe.spec.gguf_types import BLOCKS_BY_NAME

FLOAT_TYPES = {"F32": 4, "F16": 2, "BF16": 2}
CODE_TYPES = {"I64": 8, "I32": 4, "U32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes per element by safetensors' name. These tensors are parts of a weight, never a weight of their own:
``dequantise.py`` does not know them."""


def stored_bytes(shape: tuple[int, ...], scheme: str) -> int | None:
    """Return the bytes of a tensor of a known type; None if the type is unknown or its blocks do not fit."""
    values = math.prod(shape)
    if scheme in CODE_TYPES:
        return values * CODE_TYPES[scheme]
    block = BLOCKS_BY_NAME.get(scheme)
    if block is None or values % block.block_values:
        return None
    return values // block.block_values * block.block_bytes
