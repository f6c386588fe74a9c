"""Codes of 2, 3, 5 or 6 bits in one stream of bits, the first code lowest, also across words (MLX, GPTQ)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgepipe.spec.formats.common import pair_nibbles, row_chunks
from edgepipe.spec.packed import Codes

Words = npt.NDArray[np.uint64]


def unpack_stream(stream: npt.NDArray[np.uint8], bits: int, form_bits: int) -> tuple[Codes, Codes | None]:
    """Return the planes of a stream of codes of 2, 3, 5 or 6 bits."""
    outputs, inputs = len(stream), stream.shape[1] * 8 // bits
    low = np.empty((outputs, inputs // 2), np.uint8)
    high = np.empty((outputs, inputs * (form_bits - 4) // 8), np.uint8) if form_bits > 4 else None
    for rows in row_chunks((outputs, inputs)):
        words = _spread(stream[rows], bits)
        low[rows] = pair_nibbles(words.view(np.uint8))
        if high is not None:
            high[rows] = _gather_high(words, form_bits - 4)
    return low, high


def _spread(stream: npt.NDArray[np.uint8], bits: int) -> Words:
    """Return codes of ``bits`` bits as words [R, I / 8] of eight bytes each: halves move apart three times."""
    padded = np.zeros((len(stream), stream.shape[1] // bits, 8), np.uint8)
    padded[:, :, :bits] = stream.reshape(len(stream), -1, bits)
    words = padded.view("<u8")[:, :, 0]
    for codes in (4, 2, 1):  # codes in each half of a word
        low = _repeated((1 << codes * bits) - 1, every=16 * codes)
        shift = 8 * codes - codes * bits
        words = (words & np.uint64(low)) | ((words << np.uint64(shift)) & np.uint64(low << 8 * codes))
    return words


def _repeated(mask: int, *, every: int) -> int:
    """Return a mask repeated every so many bits of 64."""
    return sum(mask << start for start in range(0, 64, every))


def _gather_high(words: Words, high_bits: int) -> Codes:
    """Return bits 4 and up of the bytes of words [R, I / 8] as a high plane. ``high_bits``: 1 or 2."""
    if high_bits == 2:
        quads = (words.view("<u4") >> np.uint32(4)) & np.uint32(0x03030303)
        quads |= quads >> np.uint32(6)
        return (quads | (quads >> np.uint32(12))).astype(np.uint8)
    above = (words >> np.uint64(4)) & np.uint64(0x0101010101010101)
    for shift in (7, 14, 28):
        above |= above >> np.uint64(shift)
    return above.astype(np.uint8)
