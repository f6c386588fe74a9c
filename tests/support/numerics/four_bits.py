"""What the bytes of 4-bit KV say, in float64, read without the package's own code."""

from __future__ import annotations

from functools import reduce

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]


def group_and_block(head_dim: int, value_width: int) -> tuple[int, int]:
    block = next(size for size in (512, 256, 128, 64, 32, 16, 8, 4) if head_dim % size == value_width % size == 0)
    return min(block, 32), block


def hadamard(size: int) -> Floats:
    """The orthonormal matrix, by Sylvester's construction."""
    two = np.array([[1.0, 1.0], [1.0, -1.0]])
    return reduce(np.kron, [two] * (size.bit_length() - 1), np.ones((1, 1))) / np.sqrt(size)


def turned(vectors: npt.ArrayLike, block: int) -> Floats:
    wide = np.asarray(vectors, np.float64)
    return (wide.reshape(*wide.shape[:-1], -1, block) @ hadamard(block)).reshape(wide.shape)


def scales_of(stored: Bytes) -> Floats:
    """Three bits behind the point, the others the exponent."""
    whole = stored.astype(np.float64)
    return np.where(stored == 255, np.nan, (1 + whole % 8 / 8) * 2.0 ** (whole // 8 - 20))


def values_of(codes: Bytes, scales: Bytes, group: int) -> Floats:
    """What bytes [..., D / 2] and [..., groups] say, rotated as they are stored."""
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // (group // 2), group // 2)
    levels = np.concatenate([pairs % 16, pairs // 16], -1) - 7.5
    return (levels * scales_of(scales)[..., None]).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def whole_values_of(codes: Bytes, scales: Bytes, rests: Bytes, group: int) -> Floats:
    """What bytes say together with those of the lower bits: sixteenths of a scale."""
    upper, lower = (each.reshape(*each.shape[:-1], -1, group // 2) for each in (codes, rests))
    levels = np.concatenate([upper % 16 * 16.0 + lower % 16, upper // 16 * 16.0 + lower // 16], -1) - 127.5
    return (levels / 16 * scales_of(scales)[..., None]).reshape(*codes.shape[:-1], -1)
