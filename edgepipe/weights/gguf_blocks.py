"""Blocks of GGUF's types, turned into the planes and scales of ``Packed`` with whole-word integer operations.

Struct layouts: ``ggml-common.h`` of llama.cpp. N blocks at once; all arrays are little-endian. Bytes that hold several
codes are handled as words of 16 to 64 bits, so a chunk that stays in the cache costs a few passes over its words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.spec.packed import split_planes
from edgepipe.spec.packed_form import PackedForm

Bytes = npt.NDArray[np.uint8]
Blocks = npt.NDArray[np.void]
_U64 = np.uint64


@dataclass(frozen=True, slots=True)
class UnpackedParts:
    """Where the unpacked parts of N blocks go: views of the arrays of a ``Packed``."""

    low: Bytes  # [N, values / 2]
    high: Bytes  # [N, values * high_bits / 8]; empty without high bits
    scale: npt.NDArray[Any]  # [N, base scales]
    factor: npt.NDArray[Any]  # [N, groups] uint8 or int8; empty for one level
    offset: npt.NDArray[Any]  # [N, base offsets]; empty without offsets
    offset_factor: Bytes  # [N, groups]

    def rows(self, blocks: slice) -> UnpackedParts:
        """Return the places of some of the blocks."""
        arrays = (self.low, self.high, self.scale, self.factor, self.offset, self.offset_factor)
        return UnpackedParts(*(array[blocks] for array in arrays))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """How blocks of one type are read."""

    struct: np.dtype[np.void]
    form: PackedForm
    unpack: Callable[[Blocks, UnpackedParts], None]
    zero: int | None = None
    factor: type[np.uint8] | type[np.int8] = np.uint8
    base: npt.DTypeLike = "<f2"  # "<u2": bits of bf16


def _struct(*fields: tuple[str, str] | tuple[str, str, tuple[int, ...]]) -> np.dtype[np.void]:
    return np.dtype(list(fields))


def _words(values: npt.NDArray[Any], dtype: str = "<u8") -> npt.NDArray[Any]:
    """Return a contiguous copy of bytes [N, ...] as words along the last axis."""
    return np.array(values, order="C").view(dtype)  # a copy also of a single block, which callers change


def _split_nibbles(quants: Bytes, low: Bytes) -> None:
    """Reorder nibbles: byte j of n holds values j and j + n; ``low`` wants neighbours 2k and 2k + 1 in a byte.

    quants [N, C, n], low [N, C * n]. Of two bytes, the two inner nibbles are swapped; then the first byte belongs to
    the first half of the values and the second byte to the second half.
    """
    words = _words(quants)
    swapped = words & _U64(0xF00FF00FF00FF00F)
    swapped |= (words << _U64(4)) & _U64(0x0F000F000F000F00)
    swapped |= (words >> _U64(4)) & _U64(0x00F000F000F000F0)
    pairs = swapped.view("<u2")
    out = low.reshape(*quants.shape[:2], 2, quants.shape[2] // 2)
    out[:, :, 0] = pairs  # the lower byte
    pairs >>= np.uint16(8)
    out[:, :, 1] = pairs


def _pair_up(codes: npt.NDArray[Any], low: Bytes) -> None:
    """Join neighbours of codes below 16: words of one code per byte [..., values / 8] to [..., values / 2] bytes."""
    codes |= codes >> _U64(4)
    low[...] = codes.view("<u2")  # the lower byte


def _transpose_bits(bits: Bytes, high: Bytes) -> None:
    """Turn bit i of byte j (value 32 i + j) into bit j % 8 of byte j // 8 of row i: [N, 32] to [N, 32].

    The 8 x 8 transposition of Hacker's Delight, 7-3, with bytes as rows.
    """
    words = _words(bits)
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        moved = (words ^ (words >> _U64(shift))) & _U64(mask)
        words ^= moved ^ (moved << _U64(shift))
    high.reshape(-1, 8, 4)[...] = words.view(np.uint8).reshape(-1, 4, 8).swapaxes(1, 2)


def _transpose_bit_pairs(quants: Bytes, high: Bytes) -> None:
    """Turn bits 2s of byte j (value 32 s + j) into bits of byte j // 4 of row s: [N, C, 32] to [N, C * 32]."""
    words = _words(quants, "<u4")
    for shift, mask in ((6, 0x00CC00CC), (12, 0x0000F0F0)):
        moved = (words ^ (words >> np.uint32(shift))) & np.uint32(mask)
        words ^= moved ^ (moved << np.uint32(shift))
    rows = words.view(np.uint8).reshape(*quants.shape[:2], 8, 4)
    high.reshape(*quants.shape[:2], 4, 8)[...] = rows.swapaxes(2, 3)


def _k_scales(scales: Bytes, factor: Bytes, offset_factor: Bytes) -> None:
    """Split the 12 bytes of 8 scales and 8 offsets, 6 bits each (``get_scale_min_k4``)."""
    first, second, upper = np.moveaxis(_words(scales, "<u4"), 1, 0)
    four, six, top = np.uint32(0x0F0F0F0F), np.uint32(0x3F3F3F3F), np.uint32(0x30303030)
    for source, mixed, out in ((first, upper, factor), (second, upper >> np.uint32(4), offset_factor)):
        words = np.stack([source & six, (mixed & four) | ((source >> np.uint32(2)) & top)], axis=1)
        out[...] = words.view(np.uint8)


def _negated(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values ^ np.uint16(0x8000)


def _q4_0(blocks: Blocks, out: UnpackedParts) -> None:
    out.scale[:, 0] = blocks["d"]
    _split_nibbles(blocks["qs"][:, None], out.low)


def _q4_1(blocks: Blocks, out: UnpackedParts) -> None:
    out.offset[:, 0] = blocks["m"]
    _q4_0(blocks, out)


def _q5_0(blocks: Blocks, out: UnpackedParts) -> None:
    out.high[...] = blocks["qh"]
    _q4_0(blocks, out)


def _q5_1(blocks: Blocks, out: UnpackedParts) -> None:
    out.high[...] = blocks["qh"]
    _q4_1(blocks, out)


def _q8_0(blocks: Blocks, out: UnpackedParts) -> None:
    out.scale[:, 0] = blocks["d"]
    words = _words(blocks["qs"])
    words ^= _U64(0x8080808080808080)
    lower = words & _U64(0x0F0F0F0F0F0F0F0F)
    _pair_up(lower, out.low)
    words >>= _U64(4)
    words &= _U64(0x0F0F0F0F0F0F0F0F)
    _pair_up(words, out.high)


def _q2_k(blocks: Blocks, out: UnpackedParts) -> None:
    out.scale[:, 0] = blocks["d"]
    out.offset[:, 0] = _negated(blocks["dmin"])
    scales = blocks["scales"]
    out.factor[...] = scales & np.uint8(15)
    out.offset_factor[...] = scales >> np.uint8(4)
    _bit_pairs(blocks["qs"], out.low)


def _bit_pairs(quants: Bytes, low: Bytes) -> None:
    """Spread bits 2s of byte j (value 32 s + j) to nibbles: quants [N, 2, 32], low [N, 2 * 64]."""
    words = _words(quants)
    for step in range(4):
        codes = (words >> _U64(2 * step)) & _U64(0x0303030303030303)
        _pair_up(codes, low.reshape(-1, 2, 4, 16)[:, :, step])


def _q3_k(blocks: Blocks, out: UnpackedParts) -> None:
    out.scale[:, 0] = blocks["d"]
    lower, upper = _words(blocks["scales"][:, :8], "<u4"), _words(blocks["scales"][:, 8:], "<u4")
    for step in range(4):
        four = (lower[:, step % 2] >> np.uint32(4 * (step // 2))) & np.uint32(0x0F0F0F0F)
        two = (upper[:, 0] >> np.uint32(2 * step)) & np.uint32(0x03030303)
        scales = (four | (two << np.uint32(4))).view(np.uint8) - np.uint8(32)
        out.factor[:, 4 * step : 4 * step + 4] = scales.view(np.int8).reshape(-1, 4)
    words, mask = _words(blocks["qs"]), _words(blocks["hmask"])
    masks = np.stack([mask, mask >> _U64(4)], axis=1)  # masks of the first and the second 128 values
    low = out.low.reshape(-1, 2, 4, 16)
    for step in range(4):
        codes = (words >> _U64(2 * step)) & _U64(0x0303030303030303)
        codes |= ((masks >> _U64(step)) & _U64(0x0101010101010101)) << _U64(2)
        _pair_up(codes, low[:, :, step])


def _q4_k(blocks: Blocks, out: UnpackedParts) -> None:
    out.scale[:, 0] = blocks["d"]
    out.offset[:, 0] = _negated(blocks["dmin"])
    _k_scales(blocks["scales"], out.factor, out.offset_factor)
    _split_nibbles(blocks["qs"], out.low)


def _q5_k(blocks: Blocks, out: UnpackedParts) -> None:
    _q4_k(blocks, out)
    _transpose_bits(blocks["qh"], out.high)


def _q6_k(blocks: Blocks, out: UnpackedParts) -> None:
    out.scale[:, 0] = blocks["d"]
    out.factor[...] = blocks["scales"]
    _split_nibbles(blocks["ql"], out.low)
    _transpose_bit_pairs(blocks["qh"], out.high)


def _iq4_xs(blocks: Blocks, out: UnpackedParts) -> None:
    out.scale[:, 0] = blocks["d"]
    lower, index = blocks["scales_l"], np.arange(8, dtype=np.uint16)
    upper = (blocks["scales_h"][:, None] >> (2 * index)).astype(np.uint8) & np.uint8(3)
    nibbles = np.stack([lower & np.uint8(15), lower >> np.uint8(4)], axis=2).reshape(-1, 8)
    out.factor[...] = ((nibbles | (upper << np.uint8(4))) - np.uint8(32)).view(np.int8)
    _split_nibbles(blocks["qs"], out.low)


def _mxfp4(blocks: Blocks, out: UnpackedParts) -> None:
    exponent = blocks["e"].astype(np.uint16)
    out.scale[:, 0] = np.where(exponent == 0, np.uint16(0x40), exponent << np.uint16(7))  # 2 ** (e - 127) as bf16
    _split_nibbles(blocks["qs"][:, None], out.low)


def _ue4m3_table() -> npt.NDArray[np.float16]:
    """Return the values of NVFP4's scale bytes as ggml reads them: the sign bit is ignored, 0x7F is zero."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[0x7F] = 0
    return value.astype(np.float16)


_UE4M3 = _ue4m3_table()


def _nvfp4(blocks: Blocks, out: UnpackedParts) -> None:
    out.scale[...] = _UE4M3[blocks["d"]].view(out.scale.dtype)
    _split_nibbles(blocks["qs"], out.low)


def _trits(count: int) -> npt.NDArray[np.uint8]:
    """Return [256, count]: digit n of a byte is ``(byte * 3**n mod 256) * 3 >> 8``."""
    scaled = (np.arange(256)[:, None] * 3 ** np.arange(count)[None]) & 0xFF
    return ((scaled * 3) >> 8).astype(np.uint8)


_TRITS = _trits(5)


def _tq1_0(blocks: Blocks, out: UnpackedParts) -> None:
    out.scale[:, 0] = blocks["d"]
    quants = blocks["qs"]
    parts = ((quants[:, :32], 5), (quants[:, 32:], 5), (blocks["qh"], 4))
    digits = [_TRITS[part][:, :, :count].swapaxes(1, 2).reshape(len(blocks), -1) for part, count in parts]
    out.low[...] = split_planes(np.concatenate(digits, axis=1), 4)[0]


def _tq2_0(blocks: Blocks, out: UnpackedParts) -> None:
    out.scale[:, 0] = blocks["d"]
    _bit_pairs(blocks["qs"], out.low)


_D = ("d", "<u2")  # scales stay bits of float16 until a Packed holds them
_K_HEAD = (_D, ("dmin", "<u2"), ("scales", "u1", (12,)))

LAYOUTS: Mapping[str, BlockLayout] = {
    "Q4_0": BlockLayout(
        struct=_struct(_D, ("qs", "u1", (16,))),
        form=PackedForm(bits=4, group=32, offset="zero"),
        unpack=_q4_0,
        zero=8,
    ),
    "Q4_1": BlockLayout(
        struct=_struct(_D, ("m", "<u2"), ("qs", "u1", (16,))),
        form=PackedForm(bits=4, group=32, offset="added"),
        unpack=_q4_1,
    ),
    "Q5_0": BlockLayout(
        struct=_struct(_D, ("qh", "u1", (4,)), ("qs", "u1", (16,))),
        form=PackedForm(bits=5, group=32, offset="zero"),
        unpack=_q5_0,
        zero=16,
    ),
    "Q5_1": BlockLayout(
        struct=_struct(_D, ("m", "<u2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))),
        form=PackedForm(bits=5, group=32, offset="added"),
        unpack=_q5_1,
    ),
    "Q8_0": BlockLayout(
        struct=_struct(_D, ("qs", "u1", (32,))),
        form=PackedForm(bits=8, group=32, offset="zero"),
        unpack=_q8_0,
        zero=128,
    ),
    "Q2_K": BlockLayout(
        struct=_struct(("scales", "u1", (16,)), ("qs", "u1", (2, 32)), _D, ("dmin", "<u2")),
        form=PackedForm(bits=4, group=16, span=256, offset="added"),
        unpack=_q2_k,
    ),
    "Q3_K": BlockLayout(
        struct=_struct(("hmask", "u1", (32,)), ("qs", "u1", (2, 32)), ("scales", "u1", (12,)), _D),
        form=PackedForm(bits=4, group=16, span=256, offset="zero"),
        unpack=_q3_k,
        zero=4,
        factor=np.int8,
    ),
    "Q4_K": BlockLayout(
        struct=_struct(*_K_HEAD, ("qs", "u1", (4, 32))),
        form=PackedForm(bits=4, group=32, span=256, offset="added"),
        unpack=_q4_k,
    ),
    "Q5_K": BlockLayout(
        struct=_struct(*_K_HEAD, ("qh", "u1", (32,)), ("qs", "u1", (4, 32))),
        form=PackedForm(bits=5, group=32, span=256, offset="added"),
        unpack=_q5_k,
    ),
    "Q6_K": BlockLayout(
        struct=_struct(("ql", "u1", (2, 64)), ("qh", "u1", (2, 32)), ("scales", "i1", (16,)), _D),
        form=PackedForm(bits=6, group=16, span=256, offset="zero"),
        unpack=_q6_k,
        zero=32,
        factor=np.int8,
    ),
    "IQ4_NL": BlockLayout(
        struct=_struct(_D, ("qs", "u1", (16,))),
        form=PackedForm(bits=4, group=32, codebook="iq4"),
        unpack=_q4_0,
    ),
    "IQ4_XS": BlockLayout(
        struct=_struct(_D, ("scales_h", "<u2"), ("scales_l", "u1", (4,)), ("qs", "u1", (8, 16))),
        form=PackedForm(bits=4, group=32, span=256, codebook="iq4"),
        unpack=_iq4_xs,
        factor=np.int8,
    ),
    "MXFP4": BlockLayout(
        struct=_struct(("e", "u1"), ("qs", "u1", (16,))),
        form=PackedForm(bits=4, group=32, codebook="e2m1"),
        unpack=_mxfp4,
        base="<u2",
    ),
    "NVFP4": BlockLayout(
        struct=_struct(("d", "u1", (4,)), ("qs", "u1", (4, 8))),
        form=PackedForm(bits=4, group=16, codebook="e2m1"),
        unpack=_nvfp4,
    ),
    "TQ1_0": BlockLayout(
        struct=_struct(("qs", "u1", (48,)), ("qh", "u1", (4,)), _D),
        form=PackedForm(bits=4, group=256, offset="zero"),
        unpack=_tq1_0,
        zero=1,
    ),
    "TQ2_0": BlockLayout(
        struct=_struct(("qs", "u1", (2, 32)), _D),
        form=PackedForm(bits=4, group=256, offset="zero"),
        unpack=_tq2_0,
        zero=1,
    ),
}
"""Types whose values a ``Packed`` holds exactly."""
