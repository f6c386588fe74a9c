"""LLVM code that turns blocks of GGUF's common types into the tiles of ``kinds``, without anything in between.

A function reads 16 rows side by side, one block of each, so that the words it writes stay in the L1 cache. Codes are
handled 32 at a time, as four words of eight bytes with a code in each. Layouts: ``edgepipe.weights.gguf_blocks``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
from edgepipe.weights.gguf_blocks import LAYOUTS
from edgepipe_torch.cpu.frame import ATTRIBUTES
from edgepipe_torch.cpu.ir_text import Function
from edgepipe_torch.cpu.kinds import TILE, Kind, part_place
from edgepipe_torch.cpu.layout import joining_steps

REPACK_ARGUMENTS = (
    "blocks",
    "order",  # int64 [outputs]: row of ``blocks`` for each output; 0: as they are
    "low",
    "high",  # 0 without high bits
    "scale",  # float32 [tiles, groups, 16]
    "offset",  # float32 [tiles, groups, 16]; 0 without offsets
    "per_row",  # blocks of a row
    "outputs",  # number of outputs, counted from the first tile's first lane
)
_WORDS, _HALVES = "<4 x i64>", "<4 x i32>"
_Read = Callable[[Function, str, int], str]  # arguments: the writer, a block's address, the number of 32 values


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCode:
    """How to read blocks of one GGUF type."""

    low: _Read  # <4 x i64>: bytes of the low four bits, or of the whole codes of 8 bits, of 32 values
    high: _Read | None = None  # the bits above those of ``low``
    scales: Callable[[Function, str], tuple[str, str]]  # float vectors of a block's scales and offsets, by group


def repack_module(name: str) -> str:
    """Return a module with the function ``repack`` for a type of BLOCK_CODES; its arguments are REPACK_ARGUMENTS."""
    pointers = ("blocks", "low", "high", "scale", "offset")
    code = Function(
        "repack",
        [
            f"ptr noalias %{name}" if name in pointers else f"{'ptr' if name == 'order' else 'i64'} %{name}"
            for name in REPACK_ARGUMENTS
        ],
    )
    row_bytes = code.mul("%per_row", BLOCKS_BY_NAME[name].block_bytes)
    rows = code.variable(f"[{TILE} x ptr]")
    row = code.variable("i64")
    ordered = code.value("icmp ne ptr %order, null")

    def tile(index: str) -> None:
        first = code.mul(index, TILE)
        left = code.value(f"sub i64 %outputs, {first}")
        lanes = code.value(f"call i64 @llvm.smin.i64(i64 {left}, i64 {TILE})")

        def find_row(lane: str) -> None:
            output = code.add(first, lane)
            code.store("i64", output, row)
            code.branch(ordered, lambda: code.store("i64", code.load("i64", code.at("i64", "%order", output)), row))
            start = code.at("i8", "%blocks", code.mul(code.load("i64", row), row_bytes))
            code.store("ptr", start, code.at("ptr", rows, lane))

        code.loop("0", lanes, find_row)

        def column(number: str) -> None:
            place = code.add(code.mul(index, "%per_row"), number)
            code.loop("0", lanes, lambda lane: _repack_block(code, name, rows, number, place, lane))

        code.loop("0", "%per_row", column)

    tiles = code.value(f"sdiv i64 {code.add('%outputs', TILE - 1)}, {TILE}")
    code.loop("0", tiles, tile)
    return "\n".join([code.text(), "declare i64 @llvm.smin.i64(i64, i64)", ATTRIBUTES])


def _repack_block(code: Function, name: str, rows: str, number: str, place: str, lane: str) -> None:
    """Write one block of a row to its lane. ``place``: of the block among those of all tiles."""
    block, stored, form = BLOCK_CODES[name], BLOCKS_BY_NAME[name], LAYOUTS[name].form
    values = stored.block_values
    row = code.load("ptr", code.at("ptr", rows, lane))
    source = code.at("i8", row, code.mul(number, stored.block_bytes))

    def start(base: str, count: int, element: str = "i32") -> str:
        """Return the address of the block's first element in an array with ``count`` for each block."""
        return code.at(element, base, code.add(code.mul(place, count * TILE), lane))

    kind = Kind(bits=6 if form.bits == 6 else 5)  # the codes have high bits
    element = f"i{kind.high_bits}"
    low = start("%low", values // (4 if form.bits == 8 else 8))
    for index in range(values // 32):
        codes = block.low(code, source, index)
        if block.high is not None:
            whole = _or(code, codes, _shifted(code, block.high(code, source, index), -4))
            words, above = _split_planes(code, kind, whole)
            _scatter(code, "i32", words, 4, low, 4 * index)
            _scatter(code, element, above, 2, start("%high", values // 16, element), 2 * index)
        elif form.bits == 8:
            _scatter(code, "i32", code.value(f"bitcast {_WORDS} {codes} to <8 x i32>"), 8, low, 8 * index)
        else:
            _scatter(code, "i32", _nibbles(code, codes), 4, low, 4 * index)
    groups = values // form.group
    for found, base in zip(block.scales(code, source), ("%scale", "%offset"), strict=True):
        if found:
            _scatter(code, "float", found, groups, start(base, groups), 0)


def _scatter(code: Function, kind: str, vector: str, count: int, base: str, first: int) -> None:
    """Store a vector's values a tile's width apart, from value ``first`` on."""
    for index in range(count):
        value = code.value(f"extractelement <{count} x {kind}> {vector}, i32 {index}")
        code.store(kind, value, code.at(kind, base, str((first + index) * TILE)), align=2 if kind == "i16" else 4)


def _nibbles(code: Function, words: str) -> str:
    """Join the eight bytes of each word, all below 16, to eight nibbles: <4 x i64> to <4 x i32>."""
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)):
        words = _or(code, words, _shifted(code, words, shift))
        words = code.value(f"and {_WORDS} {words}, {_all(mask)}")
    return code.value(f"trunc {_WORDS} {words} to {_HALVES}")


def _split_planes(code: Function, kind: Kind, codes: str) -> tuple[str, str]:
    """Turn 32 bytes of codes of 5 or 6 bits into two units' words, <4 x i32>, and elements of the second plane."""
    bits, whole, whole_second = kind.bits, kind.codes_per_word, 2 * kind.codes_per_word - 8
    for shift, first_mask, second_mask in joining_steps(kind):
        near = code.value(f"and {_WORDS} {codes}, {_all(first_mask)}")
        codes = _or(code, near, code.value(f"and {_WORDS} {_shifted(code, codes, shift)}, {_all(second_mask)}"))
    two = "<2 x i64>"

    def half(lanes: str) -> str:
        return code.value(f"shufflevector {_WORDS} {codes}, {_WORDS} poison, <2 x i32> <{lanes}>")

    def shifted(words: str, left: int) -> str:
        return code.value(f"{'shl' if left > 0 else 'lshr'} {two} {words}, {_all(abs(left), 2)}")

    def lowest(words: str, count: int) -> str:
        return code.value(f"and {two} {words}, {_all((1 << count) - 1, 2)}")

    def joined(first: str, *others: str) -> str:
        for other in others:
            first = code.value(f"or {two} {first}, {other}")
        return first

    first, second = half("i32 0, i32 2"), half("i32 1, i32 3")  # inputs 0 to 7 and 8 to 15 of each unit
    last = shifted(second, -7 * bits)
    one = joined(lowest(first, whole * bits), shifted(lowest(last, 2), part_place(kind, 0)))
    other = joined(
        shifted(first, -whole * bits),
        shifted(lowest(second, whole_second * bits), (8 - whole) * bits),
        shifted(lowest(shifted(last, -2), 2), part_place(kind, 1)),
    )
    above = joined(
        lowest(shifted(second, -whole_second * bits), (7 - whole_second) * bits),
        shifted(shifted(last, -4), part_place(kind, 2)),
    )
    one, other = (code.value(f"trunc {two} {each} to <2 x i32>") for each in (one, other))
    lanes = "<4 x i32> <i32 0, i32 2, i32 1, i32 3>"
    words = code.value(f"shufflevector <2 x i32> {one}, <2 x i32> {other}, {lanes}")
    return words, code.value(f"trunc {two} {above} to <2 x i{kind.high_bits}>")


# --- words ------------------------------------------------------------------------------------------------------


def _all(value: int, count: int = 4, kind: str = "i64") -> str:
    """Return a constant vector."""
    return "<" + ", ".join([f"{kind} {value}"] * count) + ">"


def _bytes(value: int) -> str:
    """Return a constant <4 x i64> of one byte, repeated."""
    return _all(value * 0x0101010101010101)


def _or(code: Function, a: str, b: str) -> str:
    return code.value(f"or {_WORDS} {a}, {b}")


def _shifted(code: Function, words: str, right: int) -> str:
    """Shift words to the right, or to the left by a negative number."""
    return code.value(f"{'lshr' if right > 0 else 'shl'} {_WORDS} {words}, {_all(abs(right))}")


def _load(code: Function, block: str, offset: int, kind: str = _WORDS) -> str:
    return code.load(kind, code.at("i8", block, str(offset)), align=1)


def _field(code: Function, words: str, right: int, mask: int) -> str:
    """Return ``mask`` of every byte, after a shift that moves no wanted bit into another byte."""
    return code.value(f"and {_WORDS} {_shifted(code, words, right) if right else words}, {_bytes(mask)}")


def _stored_float(code: Function, block: str, offset: int) -> str:
    """Return a float16 as float32."""
    return code.value(f"fpext half {_load(code, block, offset, 'half')} to float")


# --- codes: offsets are bytes from the block's start ------------------------------------------------------------


def _halves(offset: int) -> _Read:
    """Read 16 bytes: byte j has value j in its lower half and value j + 16 in its upper half."""

    def read(code: Function, block: str, _index: int) -> str:
        two = _load(code, block, offset, "<2 x i64>")
        lanes = "<4 x i32> <i32 0, i32 1, i32 0, i32 1>"
        wide = code.value(f"shufflevector <2 x i64> {two}, <2 x i64> poison, {lanes}")
        return _field(code, code.value(f"lshr {_WORDS} {wide}, <i64 0, i64 0, i64 4, i64 4>"), 0, 15)

    return read


def _single_bits(offset: int) -> _Read:
    """Read 4 bytes: bit i belongs to value i."""

    def read(code: Function, block: str, _index: int) -> str:
        words = code.value(f"zext <4 x i8> {_load(code, block, offset, '<4 x i8>')} to {_WORDS}")
        for left in (8, 16, 32):
            words = _or(code, words, _shifted(code, words, -left))
        words = code.value(f"and {_WORDS} {words}, {_all(0x8040201008040201 - (1 << 64))}")  # bit k of byte k
        return _field(code, code.value(f"add {_WORDS} {words}, {_bytes(0x7F)}"), 7, 1)

    return read


def _q4_k_low(code: Function, block: str, index: int, *, offset: int = 16) -> str:
    return _field(code, _load(code, block, offset + 32 * (index // 2)), 4 * (index % 2), 15)


def _q5_k_low(code: Function, block: str, index: int) -> str:
    return _q4_k_low(code, block, index, offset=48)


def _q5_k_high(code: Function, block: str, index: int) -> str:
    return _field(code, _load(code, block, 16), index, 1)


def _q6_k_low(code: Function, block: str, index: int) -> str:
    half, step = divmod(index, 4)
    return _field(code, _load(code, block, 64 * half + 32 * (step % 2)), 4 * (step // 2), 15)


def _q6_k_high(code: Function, block: str, index: int) -> str:
    half, step = divmod(index, 4)
    return _field(code, _load(code, block, 128 + 32 * half), 2 * step, 3)


def _q8_0_codes(code: Function, block: str, _index: int) -> str:
    return code.value(f"xor {_WORDS} {_load(code, block, 2)}, {_bytes(0x80)}")


def _q2_k_codes(code: Function, block: str, index: int, *, offset: int = 16) -> str:
    half, step = divmod(index, 4)
    return _field(code, _load(code, block, offset + 32 * half), 2 * step, 3)


def _q3_k_codes(code: Function, block: str, index: int) -> str:
    above = _field(code, _load(code, block, 0), index, 1)
    return _or(code, _q2_k_codes(code, block, index, offset=32), _shifted(code, above, -2))


# --- scales -----------------------------------------------------------------------------------------------------


def _one(scale: int, offset: int | None = None) -> Callable[[Function, str], tuple[str, str]]:
    """Read a block's only scale, and its offset."""

    def read(code: Function, block: str) -> tuple[str, str]:
        found = ["" if at is None else _stored_float(code, block, at) for at in (scale, offset)]
        kind = "<1 x float>"
        one, other = (each and code.value(f"insertelement {kind} poison, float {each}, i32 0") for each in found)
        return one, other

    return read


def _products(code: Function, base: str, factors: str, count: int, *, signed: bool = False) -> str:
    """Return a float times each of ``count`` bytes."""
    kind = f"<{count} x float>"
    wide = code.value(f"{'sitofp' if signed else 'uitofp'} <{count} x i8> {factors} to {kind}")
    return code.value(f"fmul {kind} {code.splat('float', base, count)}, {wide}")


def _negative(code: Function, value: str) -> str:
    return code.value(f"fneg float {value}")


def _k_scales(code: Function, block: str) -> tuple[str, str]:
    """Read 8 scales and 8 offsets of 6 bits (``get_scale_min_k4``) with their bases."""
    first, second, upper = (_load(code, block, 4 + 4 * index, "i32") for index in range(3))
    found: list[str] = []
    for source, shift in ((first, 0), (second, 4)):
        six = code.value(f"and i32 {source}, {0x3F3F3F3F}")
        four = code.value(f"and i32 {code.value(f'lshr i32 {upper}, {shift}')}, {0x0F0F0F0F}")
        top = code.value(f"and i32 {code.value(f'lshr i32 {source}, 2')}, {0x30303030}")
        pair = code.value(f"insertelement <2 x i32> poison, i32 {six}, i32 0")
        pair = code.value(f"insertelement <2 x i32> {pair}, i32 {code.value(f'or i32 {four}, {top}')}, i32 1")
        found.append(code.value(f"bitcast <2 x i32> {pair} to <8 x i8>"))
    scale, offset = _stored_float(code, block, 0), _negative(code, _stored_float(code, block, 2))
    return _products(code, scale, found[0], 8), _products(code, offset, found[1], 8)


def _q6_k_scales(code: Function, block: str) -> tuple[str, str]:
    factors = _load(code, block, 192, "<16 x i8>")
    return _products(code, _stored_float(code, block, 208), factors, 16, signed=True), ""


def _q2_k_scales(code: Function, block: str) -> tuple[str, str]:
    both = _load(code, block, 0, "<16 x i8>")
    lower = code.value(f"and <16 x i8> {both}, {_all(15, 16, 'i8')}")
    upper = code.value(f"lshr <16 x i8> {both}, {_all(4, 16, 'i8')}")
    scale, offset = _stored_float(code, block, 80), _negative(code, _stored_float(code, block, 82))
    return _products(code, scale, lower, 16), _products(code, offset, upper, 16)


def _q3_k_scales(code: Function, block: str) -> tuple[str, str]:
    two = _load(code, block, 96, "<2 x i32>")
    lanes = "<4 x i32> <i32 0, i32 1, i32 0, i32 1>"
    lower = code.value(f"shufflevector <2 x i32> {two}, <2 x i32> poison, {lanes}")
    lower = code.value(f"lshr {_HALVES} {lower}, <i32 0, i32 0, i32 4, i32 4>")
    lower = code.value(f"and {_HALVES} {lower}, {_all(0x0F0F0F0F, 4, 'i32')}")
    upper = code.splat("i32", _load(code, block, 104, "i32"), 4)
    upper = code.value(f"lshr {_HALVES} {upper}, <i32 0, i32 2, i32 4, i32 6>")
    upper = code.value(f"and {_HALVES} {upper}, {_all(0x03030303, 4, 'i32')}")
    upper = code.value(f"shl {_HALVES} {upper}, {_all(4, 4, 'i32')}")
    joined = code.value(f"bitcast {_HALVES} {code.value(f'or {_HALVES} {lower}, {upper}')} to <16 x i8>")
    factors = code.value(f"sub <16 x i8> {joined}, {_all(32, 16, 'i8')}")
    return _products(code, _stored_float(code, block, 108), factors, 16, signed=True), ""


BLOCK_CODES: Mapping[str, BlockCode] = {
    "Q4_0": BlockCode(low=_halves(2), scales=_one(0)),
    "Q4_1": BlockCode(low=_halves(4), scales=_one(0, 2)),
    "Q5_0": BlockCode(low=_halves(6), high=_single_bits(2), scales=_one(0)),
    "Q5_1": BlockCode(low=_halves(8), high=_single_bits(4), scales=_one(0, 2)),
    "Q8_0": BlockCode(low=_q8_0_codes, scales=_one(0)),
    "Q2_K": BlockCode(low=_q2_k_codes, scales=_q2_k_scales),
    "Q3_K": BlockCode(low=_q3_k_codes, scales=_q3_k_scales),
    "Q4_K": BlockCode(low=_q4_k_low, scales=_k_scales),
    "Q5_K": BlockCode(low=_q5_k_low, high=_q5_k_high, scales=_k_scales),
    "Q6_K": BlockCode(low=_q6_k_low, high=_q6_k_high, scales=_q6_k_scales),
}
"""Keys are names of types. The rest of a type is in ``BLOCKS_BY_NAME`` and ``LAYOUTS``."""
