"""Convert weights to bf16 bits or float32. Imports ``gguf.quants`` only for a tensor of a quantised type."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import StoredTensor

logger = logging.getLogger(__name__)

_CHUNK_PACKED = 1 << 18  # values of a packed weight that are widened at once
_CHUNK_VALUES = 1 << 21  # values converted at once, so that no large tensor is ever whole in float32


def as_bf16_bits(raw: StoredTensor | Packed) -> npt.NDArray[np.uint16]:
    """Return the weight in its logical shape as bits of the nearest bf16 (ties to even).

    Raises ModelInvalid if the scheme is unknown or the bytes do not fit the shape.
    """
    if isinstance(raw, Packed):
        return _rounded(raw)
    _check(raw)
    if raw.info.scheme == "BF16":
        bits = raw.data.view("<u2")
    else:
        bits = np.empty(_num_values(raw), np.uint16)
        for start, values in _float_chunks(raw):
            bits[start : start + values.size] = round_to_bf16(values)
    _warn_if_all_nan(raw, bits)
    return bits.reshape(raw.info.shape)


def as_float32(raw: StoredTensor | Packed) -> npt.NDArray[np.float32]:
    """Return the weight in its logical shape as float32: exact, or rounded to bf16 if ``info.rounded``.

    Raises ModelInvalid like ``as_bf16_bits``.
    """
    if isinstance(raw, Packed):
        return raw.float32()
    if raw.info.rounded or raw.info.scheme == "BF16":
        return widen_bf16(as_bf16_bits(raw))
    _check(raw)
    if raw.info.scheme == "F32":
        out = raw.data.view("<f4")
    else:
        out = np.empty(_num_values(raw), np.float32)
        for start, values in _float_chunks(raw):
            out[start : start + values.size] = values
    if out.size and np.isnan(out[0]) and bool(np.isnan(out).all()):
        _warn_of_nan(raw)
    return out.reshape(raw.info.shape)


def _rounded(packed: Packed) -> npt.NDArray[np.uint16]:
    """Round a packed weight to bf16, a part of the rows at a time."""
    bits = np.empty(packed.shape, np.uint16)
    step = max(1, _CHUNK_PACKED // packed.shape[1])
    for start in range(0, packed.shape[0], step):
        rows = slice(start, start + step)
        bits[rows] = round_to_bf16(packed.rows(rows).float32())
    return bits


def round_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Convert float32 to bits of the nearest bf16, ties to even; NaN stays NaN. Any shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = (bits[nan] >> 16).astype(np.uint16) | np.uint16(0x40)
    return rounded


def widen_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Convert bf16 bits to float32 of the same value. Any shape."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _check(raw: StoredTensor) -> None:
    block = BLOCKS_BY_NAME.get(raw.info.scheme)
    if block is None:
        raise ModelInvalid(
            f"tensor '{raw.info.name}' cannot be read", fact=f"its scheme '{raw.info.scheme}' is unknown"
        )
    expected = _num_values(raw) // block.block_values * block.block_bytes
    if raw.data.nbytes != expected or _num_values(raw) % block.block_values:
        raise ModelInvalid(
            f"tensor '{raw.info.name}' cannot be read",
            fact=f"shape {raw.info.shape} in {raw.info.scheme} takes {expected} bytes, it has {raw.data.nbytes}",
        )


def _num_values(raw: StoredTensor) -> int:
    count = 1
    for dim in raw.info.shape:
        count *= dim
    return count


def _float_chunks(raw: StoredTensor) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Yield (index of the first value, values as float32), at most ``_CHUNK_VALUES`` at once."""
    block = BLOCKS_BY_NAME[raw.info.scheme]
    blocks = raw.data.reshape(-1, block.block_bytes)
    step = max(1, _CHUNK_VALUES // block.block_values)
    for start in range(0, len(blocks), step):
        yield start * block.block_values, block_values(raw.info.scheme, blocks[start : start + step]).reshape(-1)


def block_values(scheme: str, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Convert blocks ``[N, block bytes]`` to the float32 values of all blocks, exact, in their order."""
    flat = blocks.reshape(-1)
    if scheme == "F32":
        return flat.view("<f4")
    if scheme == "F16":
        return flat.view("<f2").astype(np.float32)
    if scheme == "BF16":
        return widen_bf16(flat.view("<u2"))
    from gguf import GGMLQuantizationType, quants

    return quants.dequantize(_rows(blocks), GGMLQuantizationType[scheme])


def _rows(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Reshape to rows of about 64 blocks: the library processes 16 rows at a time, so its groups become large."""
    per_row = next(width for width in (64, 16, 4, 1) if len(blocks) % width == 0)
    return blocks.reshape(-1, per_row * blocks.shape[1])


def _warn_if_all_nan(raw: StoredTensor, bits: npt.NDArray[np.uint16]) -> None:
    flat = bits.reshape(-1)
    if flat.size and (flat[0] & 0x7FFF) > 0x7F80 and bool(((flat & 0x7FFF) > 0x7F80).all()):
        _warn_of_nan(raw)


def _warn_of_nan(raw: StoredTensor) -> None:
    logger.warning("tensor %s contains only NaN: the model will produce nonsense", raw.info.name)
