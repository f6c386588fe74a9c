"""Planes of codes as the CPU's kernels read them (``kinds``), by numpy.

I in features, W words, U units of 16 inputs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgepipe_torch.cpu.kinds import E2M1_BYTES, LAST, Kind, code_place, part_place

LAYOUT_VERSION = 2
"""Version of a ``TiledWeight``'s arrays: raise it with every change of the layout or of the rounding of scales.
Repacked weights on users' disks (``shard_cache``) have the version in their names."""


def planes_of(
    kind: Kind, codes: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int16] | npt.NDArray[np.int32] | None]:
    """Return the planes [n, W] and [n, U] of codes [n, I] of 5, 6 or 8 bits; the latter only of 5 and 6 bits."""
    codes = np.ascontiguousarray(codes)
    return _split_planes(kind, codes) if kind.split else (codes.view("<i4"), None)


def codes_of(
    kind: Kind, low: npt.NDArray[np.int32], high: npt.NDArray[np.int16] | npt.NDArray[np.int32] | None
) -> npt.NDArray[np.int32]:
    """Return the codes [n, I] of planes [n, W] and [n, U]."""
    words = low.view(np.uint32).reshape(len(low), -1, kind.words)
    if high is not None:
        above = high.view(np.uint16 if kind.high_bits == 16 else np.uint32).astype(np.uint32)
        words = np.concatenate([words, above[:, :, None]], axis=2)
    places = [code_place(kind, index) for index in range(8 * kind.unit)]
    codes = np.empty((*words.shape[:2], len(places)), np.uint32)
    for index, (word, first_bit) in enumerate(places):
        if kind.split and index == LAST:
            parts = [words[:, :, part] >> np.uint32(part_place(kind, part)) for part in range(kind.words + 1)]
            codes[:, :, index] = parts[0] | parts[1] << np.uint32(2) | parts[2] << np.uint32(4)
        else:
            codes[:, :, index] = words[:, :, word] >> np.uint32(first_bit)
    return (codes & np.uint32((1 << kind.bits) - 1)).astype(np.int32).reshape(len(low), -1)


def integer_levels(
    kind: Kind, low: npt.NDArray[np.int32], high: npt.NDArray[np.int16] | npt.NDArray[np.int32] | None
) -> npt.NDArray[np.int32]:
    """Return the integers [n, I] that codes stand for, of which the kernels subtract the weight's zero."""
    codes = codes_of(kind, low, high)
    return np.array(E2M1_BYTES, np.int32)[codes] if kind.e2m1 else codes


def joining_steps(kind: Kind) -> list[tuple[int, int, int]]:
    """Return how 8 bytes of a 64-bit word become 8 codes side by side: steps of a shift and two masks.

    A step turns ``word`` into ``(word & first) | (word >> shift & second)``: neighbouring fields become one.
    """
    steps: list[tuple[int, int, int]] = []
    for size in (1, 2, 4):
        field = (1 << (kind.bits * size)) - 1
        mask = sum(field << (16 * size * index) for index in range(4 // size))
        steps.append(((8 - kind.bits) * size, mask, mask << (kind.bits * size)))
    return steps


def _split_planes(
    kind: Kind, codes: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int16] | npt.NDArray[np.int32]]:
    bits, whole, whole_second = kind.bits, kind.codes_per_word, 2 * kind.codes_per_word - 8
    eights = codes.view("<u8")
    for shift, first_mask, second_mask in joining_steps(kind):
        eights = (eights & np.uint64(first_mask)) | ((eights >> np.uint64(shift)) & np.uint64(second_mask))
    first, second = eights[:, 0::2], eights[:, 1::2]  # inputs 0 to 7 and 8 to 15 of each unit
    last = second >> np.uint64(7 * bits)
    low = np.empty((*first.shape, 2), np.uint32)
    part = np.uint64(part_place(kind, 0))
    low[:, :, 0] = _lowest(first, whole * bits) | (_lowest(last, 2) << part)
    low[:, :, 1] = (
        (first >> np.uint64(whole * bits))
        | (_lowest(second, whole_second * bits) << np.uint64((8 - whole) * bits))
        | (_lowest(last >> np.uint64(2), 2) << part)
    )
    above = _lowest(second >> np.uint64(whole_second * bits), (7 - whole_second) * bits)
    above |= (last >> np.uint64(4)) << np.uint64(part_place(kind, 2))
    high = above.astype(f"<u{kind.high_bits // 8}").view(f"<i{kind.high_bits // 8}")
    return low.reshape(len(codes), -1).view(np.int32), high


def _lowest(words: npt.NDArray[np.uint64], bits: int) -> npt.NDArray[np.uint64]:
    return words & np.uint64((1 << bits) - 1)
