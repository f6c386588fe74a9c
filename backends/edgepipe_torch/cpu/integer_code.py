"""LLVM code of packed products in integers, for processors that add products of bytes: four at once (VNNI), or two.

Codes of 4 and 8 bits are bytes as they lie. AVX2 adds two products in 16 bits, which hold those of codes of 4 bits.
Inputs are rounded to whole numbers of 8 or 16 bits, times a factor of their group, and a number is one or two digits:
bytes with signs. Sums of integers have no rounding, so a row's result does not depend on the rows beside it.

Prepared inputs of a row: for each block of 8 inputs and each digit, the lowest first, two words of four bytes, in the
order of the codes in their words. Of each group some words: what 1 stands for, times the scales' factor (float), the
sum of the inputs times that of the offsets (float), and for each digit what the codes' zero takes away (int32).

T rows, I in features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from edgepipe_torch.cpu.code_vectors import fma_declaration
from edgepipe_torch.cpu.frame import ATTRIBUTES, load_inputs, read_fields
from edgepipe_torch.cpu.ir_text import PREFETCH_DECLARATION, Function, float_constant
from edgepipe_torch.cpu.ir_vectors import EIGHT, INTS
from edgepipe_torch.cpu.kinds import E2M1_BYTES, SCALE_FACTOR, SUM_FACTOR, TILE, ZERO, Kind, byte_place
from edgepipe_torch.cpu.product_code import CHUNK_ROWS, PANEL_INPUTS, ProductCode
from edgepipe_torch.cpu.row_parts import split_by_counts, split_rows
from edgepipe_torch.cpu.take_code import TakeCode

ByteProducts = Literal["", "fours", "pairs"]
"""How many products of bytes the processor adds with one instruction: none, four, or two."""

BITS: Mapping[ByteProducts, tuple[int, ...]] = {"": (), "fours": (4, 8), "pairs": (4,)}
"""Bits of the codes whose products are added as integers."""

_LARGEST = {1: 127, 2: 127 * 257 - 2}  # largest whole number by digits; for two digits, less the rounding of its factor
_BYTES, _SHORTS = "<32 x i8>", "<16 x i16>"
_ONES = "<" + ", ".join(["i16 1"] * 16) + ">"
_LEAST_UNIT = 2.0**-126  # smaller factors of inputs are zero


def has_integer_products(kind: Kind, products: ByteProducts) -> bool:
    """Return whether codes are whole bytes, or halves of bytes, whose products the processor adds."""
    return kind.bits in BITS[products] and not kind.floats


def integer_code(kind: Kind, *, width: int, digits: int, products: ByteProducts) -> IntegerCode:
    """Return the writer of a kind's functions for vectors of ``width`` floats; ``digits``: of an input, 1 or 2."""
    make = IntegerCode if products == "fours" else PairCode
    return make(kind, width=width, most_rows=8 if width == TILE else 4 // digits, digits=digits)


def rounded_inputs(x: npt.NDArray[np.float32], group: int, digits: int) -> npt.NDArray[np.float64]:
    """Return inputs [T, I] as the products see them."""
    grouped = x.reshape(len(x), -1, group)
    unit = np.abs(grouped).max(2, keepdims=True) * np.float32(1 / _LARGEST[digits])
    with np.errstate(divide="ignore"):
        inverse = np.where(unit < np.float32(_LEAST_UNIT), np.float32(0), np.float32(1) / unit)
    return (np.rint(grouped * inverse).astype(np.float64) * unit).reshape(x.shape)


class IntegerCode(ProductCode):
    """Writes the functions of one kind, as ``ProductCode`` does, and ``prepare_...``."""

    def __init__(self, kind: Kind, *, width: int, most_rows: int, digits: int) -> None:
        """``most_rows``: the most whose sums are in registers together; ``digits``: of an input, 1 or 2."""
        super().__init__(kind, width=width, most_rows=(most_rows, 0), shuffles=True)
        self._digits = digits
        self._sum_words = 2 + digits

    @property
    def panel_rows(self) -> int:
        """More rows than a chunk has: codes are never unpacked to memory."""
        return CHUNK_ROWS + 1

    @property
    def panel_counts(self) -> list[int]:
        """No function multiplies a panel."""
        return []

    def module(self) -> str:
        """Return the text of a module with the functions ``prepare_...``, ``work_...`` and ``take_...``."""
        parts = [
            self._prepare(),
            *(self._tile(count) for count in self.tile_counts),
            self._work(),
            TakeCode(self._kind).text(),
        ]
        parts += [
            *(fma_declaration(width) for width in sorted({self._width, 8})),
            PREFETCH_DECLARATION,
            *self._shuffle_declarations(),
            *self._sum_declarations(),
            f"declare {EIGHT} @llvm.rint.v8f32({EIGHT})",
            f"declare {INTS} @llvm.smax.v8i32({INTS}, {INTS})",
            f"declare float @llvm.vector.reduce.fadd.v8f32(float, {EIGHT})",
            f"declare i32 @llvm.vector.reduce.smax.v8i32({INTS})",
            f"declare i32 @llvm.vector.reduce.add.v8i32({INTS})",
            ATTRIBUTES,
        ]
        return "\n".join(parts)

    # --- inputs -------------------------------------------------------------------------------------------

    def _prepare(self) -> str:
        """Write ``prepare_...``: the prepared inputs and groups of rows."""
        code = Function(
            f"prepare_{self._kind.name}",
            ["ptr %segment", "ptr %x", "i64 %rows", "ptr noalias %xs", "ptr noalias %sums"],
        )
        field = read_fields(code, "%segment")
        factors = {
            name: code.load("float", code.at("float", field["factors"], str(place)))
            for name, place in (("scale", SCALE_FACTOR), ("sum", SUM_FACTOR), ("zero", ZERO))
        }
        whole = code.value(f"fptosi float {factors['zero']} to i32")
        zero = code.value(f"sub i32 0, {whole}")
        spare = code.variable(f"[{PANEL_INPUTS} x float]")
        pitch = code.mul(field["groups"], self._sum_words)

        def row(index: str) -> None:
            source = code.at("float", "%x", code.mul(index, field["inputs"]))
            target = code.at("float", "%xs", code.mul(index, field["inputs"]))
            sums = code.at("float", "%sums", code.mul(index, pitch))

            def group(number: str) -> None:
                first = code.mul(number, field["blocks"])
                unit, total = self._measure(code, field, source, first, spare)
                digits = self._quantise(
                    code, field, unit, spare, code.at("i32", target, code.mul(first, 2 * self._digits))
                )
                at = code.at("float", sums, code.mul(number, self._sum_words))
                code.store("float", code.value(f"fmul float {unit}, {factors['scale']}"), at)
                total = code.value(f"fmul float {total}, {factors['sum']}")
                code.store("float", total, code.at("float", at, "1"))
                for place, each in enumerate(digits):
                    found = code.value(f"call i32 @llvm.vector.reduce.add.v8i32({INTS} {code.load(INTS, each)})")
                    taken = code.value(f"mul i32 {found}, {zero}")
                    code.store("i32", taken, code.at("i32", at, str(2 + place)))

            code.loop("0", field["groups"], group)

        code.loop("0", "%rows", row)
        return code.text()

    def _measure(self, code: Function, field: dict[str, str], source: str, first: str, spare: str) -> tuple[str, str]:
        """Copy a group's inputs in their order. Return what 1 stands for, and the inputs' sum.

        An input that is infinite or NaN makes the former so, and with it every product of the group NaN.
        """
        total, largest = code.variable(EIGHT), code.variable(INTS)
        code.store(EIGHT, "zeroinitializer", total)
        code.store(INTS, "zeroinitializer", largest)
        magnitudes = "<" + ", ".join([f"i32 {0x7FFFFFFF}"] * 8) + ">"

        def block(at: str) -> None:
            values = load_inputs(code, field, source, code.mul(code.add(first, at), 8))
            code.store(EIGHT, values, code.at("float", spare, code.mul(at, 8)))
            code.store(EIGHT, code.value(f"fadd {EIGHT} {code.load(EIGHT, total)}, {values}"), total)
            bits = code.value(f"bitcast {EIGHT} {values} to {INTS}")  # those of sizes have the order of sizes, NaN last
            bits = code.value(f"and {INTS} {bits}, {magnitudes}")
            top = code.value(f"call {INTS} @llvm.smax.v8i32({INTS} {bits}, {INTS} {code.load(INTS, largest)})")
            code.store(INTS, top, largest)

        code.loop("0", field["blocks"], block)
        found = code.value(
            f"call reassoc float @llvm.vector.reduce.fadd.v8f32(float 0.0, {EIGHT} {code.load(EIGHT, total)})"
        )
        top = code.value(f"call i32 @llvm.vector.reduce.smax.v8i32({INTS} {code.load(INTS, largest)})")
        top = code.value(f"bitcast i32 {top} to float")
        return code.value(f"fmul float {top}, {float_constant(1 / _LARGEST[self._digits])}"), found

    def _quantise(self, code: Function, field: dict[str, str], unit: str, spare: str, target: str) -> list[str]:
        """Write a group's digits. Return variables, of vectors whose lanes together hold each digit's sum."""
        sums = [code.variable(INTS) for _ in range(self._digits)]
        for each in sums:
            code.store(INTS, "zeroinitializer", each)
        small = code.value(f"fcmp olt float {unit}, {float_constant(_LEAST_UNIT)}")
        inverse = code.value(f"fdiv float 1.0, {unit}")
        inverse = code.value(f"select i1 {small}, float 0.0, float {inverse}")
        factor = code.splat("float", inverse, 8)
        order = range(8) if self._kind.bits == 8 else sorted(range(8), key=byte_place)
        lanes = ", ".join(f"i32 {lane}" for lane in order)

        def block(at: str) -> None:
            values = code.load(EIGHT, code.at("float", spare, code.mul(at, 8)))
            values = code.value(f"fmul {EIGHT} {values}, {factor}")
            values = code.value(f"call {EIGHT} @llvm.rint.v8f32({EIGHT} {values})")
            rest = code.value(f"fptosi {EIGHT} {values} to {INTS}")
            for digit in range(self._digits):
                narrow = code.value(f"trunc {INTS} {rest} to <8 x i8>")
                wide = code.value(f"sext <8 x i8> {narrow} to {INTS}")
                code.store(INTS, code.value(f"add {INTS} {code.load(INTS, sums[digit])}, {wide}"), sums[digit])
                rest = code.value(f"sub {INTS} {rest}, {wide}")
                rest = code.value(f"ashr {INTS} {rest}, <{', '.join(['i32 8'] * 8)}>")
                if self._kind.bits == 4:
                    narrow = code.value(f"shufflevector <8 x i8> {narrow}, <8 x i8> poison, <8 x i32> <{lanes}>")
                place = code.add(code.mul(at, 2 * self._digits), 2 * digit)
                code.store("<8 x i8>", narrow, code.at("i32", target, place))

        code.loop("0", field["blocks"], block)
        return sums

    # --- one tile -----------------------------------------------------------------------------------------

    def _tile(self, rows: int) -> str:
        """Write the product of ``rows`` rows with one tile."""
        code = self._tile_function(rows)
        totals = [[code.variable(self._floats, "zeroinitializer") for _ in range(self._vectors)] for _ in range(rows)]
        self._start_with_bias(code, totals)
        code.loop("0", "%groups", lambda group: self._group(code, totals, group))
        self._finish_tile(code, totals)
        return code.text()

    def _group(self, code: Function, totals: list[list[str]], group: str) -> None:
        rows, kind = len(totals), self._kind
        pitch = code.mul("%groups", self._sum_words)
        of_group = code.mul(group, self._sum_words)
        places = [code.at("float", "%sums", code.add(code.mul(pitch, row), of_group)) for row in range(rows)]
        sums = [  # [row][digit][vector]
            [[code.variable(self._ints) for _ in range(self._vectors)] for _ in range(self._digits)]
            for _ in range(rows)
        ]
        for place, digits in zip(places, sums, strict=True):
            for digit, vectors in enumerate(digits):
                start = "zeroinitializer"
                if not kind.added:
                    word = code.load("i32", code.at("i32", place, str(2 + digit)))
                    start = code.splat("i32", word, self._width)
                for vector in vectors:
                    code.store(self._ints, start, vector)
        self._add_blocks(code, sums, code.mul(group, "%blocks"))
        base = code.mul(group, TILE)
        units = [code.splat("float", code.load("float", place), self._width) for place in places]
        inputs = [code.splat("float", code.load("float", code.at("float", each, "1")), self._width) for each in places]
        for index in range(self._vectors):
            at = code.add(base, index * self._width)
            scale = self._half(code, "%scale", at)
            offset = self._half(code, "%offset", at) if kind.added else ""
            for row, total in enumerate(totals):
                found = self._joined(code, [code.load(self._ints, digit[index]) for digit in sums[row]])
                factor = code.value(f"fmul {self._floats} {scale}, {units[row]}")
                value = self._fma(code, found, factor, code.load(self._floats, total[index]))
                if offset:
                    value = self._fma(code, offset, inputs[row], value)
                code.store(self._floats, value, total[index])

    def _joined(self, code: Function, digits: list[str]) -> str:
        """Return the floats that sums of digits stand for. Each sum is a float: it is below 2**24."""
        values = [code.value(f"sitofp {self._ints} {digit} to {self._floats}") for digit in digits]
        found = values[-1]
        factor = "<" + ", ".join([f"float {float_constant(256.0)}"] * self._width) + ">"
        for value in reversed(values[:-1]):
            found = self._fma(code, found, factor, value)
        return found

    def _add_blocks(self, code: Function, sums: list[list[list[str]]], first: str) -> None:
        """Add the products of a group, whose first block is ``first``, to its sums [row][digit][vector]."""
        code.loop("0", "%blocks", lambda block: self._block(code, sums, code.add(first, block)))

    def _block(self, code: Function, sums: list[list[list[str]]], block: str) -> None:
        """Add the products of 8 inputs."""
        kind, ints = self._kind, self._ints
        self._prefetch_codes(code, self._ahead(code, block))
        halves: list[list[str]] = []  # four inputs' codes, [vector]
        for word in range(kind.words):
            loaded = [self._word(code, block, word, vector) for vector in range(self._vectors)]
            if kind.bits == 8:
                halves.append(loaded)
                continue
            shifted = [code.value(f"lshr {ints} {each}, {self._all(4)}") for each in loaded]
            for moved in (loaded, shifted):
                codes = [code.value(f"and {ints} {each}, {self._all(0x0F0F0F0F)}") for each in moved]
                halves.append([self._bytes(code, each) for each in codes] if kind.e2m1 else codes)
        for row, digits in enumerate(sums):
            start = code.add(code.mul("%inputs", row), code.mul(block, 2 * self._digits))
            for digit, vectors in enumerate(digits):
                for half, codes in enumerate(halves):
                    word = code.load("i32", code.at("i32", "%x", code.add(start, 2 * digit + half)))
                    x = code.splat("i32", word, self._width)
                    for each, target in zip(codes, vectors, strict=True):
                        self._add_products(code, target, each, x)

    def _sum_declarations(self) -> list[str]:
        ints = self._ints
        return [f"declare {ints} @llvm.x86.avx512.vpdpbusd.{32 * self._width}({ints}, {ints}, {ints})"]

    def _add_products(self, code: Function, target: str, codes: str, x: str) -> None:
        """Add the products of four bytes of ``codes`` and ``x`` in each lane to ``target``."""
        ints = self._ints
        call = f"call {ints} @llvm.x86.avx512.vpdpbusd.{32 * self._width}"
        before = code.load(ints, target)
        code.store(ints, code.value(f"{call}({ints} {before}, {ints} {codes}, {ints} {x})"), target)

    # --- a range of tiles ---------------------------------------------------------------------------------

    def _work(self) -> str:
        """Write ``work_...``: tiles [first, end) of a segment for all rows, by chunks of rows."""
        code = self._work_function()
        field = read_fields(code, "%segment")

        def chunk(first_row: str, last_row: str) -> None:
            def tile(index: str) -> None:
                at = self._tile_addresses(code, field, index)

                def rows(first: str, count: int) -> None:
                    sums = code.mul(code.mul(first, field["groups"]), self._sum_words)
                    self._call_tile(code, field, at, first, sums, count)

                split_by_counts(code, first_row, last_row, self._most_rows[0], self.tile_counts, rows)

            code.loop("%first", "%end", tile)

        split_rows(code, "0", "%rows", CHUNK_ROWS, chunk)
        return code.text() + "declare i64 @llvm.smin.i64(i64, i64)\n"


class PairCode(IntegerCode):
    """Writes the same with AVX2, which adds two products of bytes in 16 bits: few blocks' sums fit in those."""

    @property
    def _blocks_in_16_bits(self) -> int:
        """Blocks of 8 inputs whose products fit, four of them in a lane of each half."""
        largest = max(E2M1_BYTES) if self._kind.e2m1 else 15
        return (1 << 15) // (4 * largest * 128)

    def _sum_declarations(self) -> list[str]:
        return [
            f"declare {_SHORTS} @llvm.x86.avx2.pmadd.ub.sw({_BYTES}, {_BYTES})",
            f"declare {INTS} @llvm.x86.avx2.pmadd.wd({_SHORTS}, {_SHORTS})",
        ]

    def _add_blocks(self, code: Function, sums: list[list[list[str]]], first: str) -> None:
        most = self._blocks_in_16_bits
        short = [[[code.variable(_SHORTS) for _ in vectors] for vectors in digits] for digits in sums]
        pairs = [
            pair
            for digits, own in zip(short, sums, strict=True)
            for vectors, targets in zip(digits, own, strict=True)
            for pair in zip(vectors, targets, strict=True)
        ]

        def some(start: str) -> None:
            for each, _ in pairs:
                code.store(_SHORTS, "zeroinitializer", each)
            left = code.value(f"sub i64 %blocks, {start}")
            count = code.value(f"call i64 @llvm.smin.i64(i64 {left}, i64 {most})")
            begin = code.add(first, start)
            code.loop("0", count, lambda block: self._block(code, short, code.add(begin, block)))
            for each, target in pairs:
                found = code.value(
                    f"call {INTS} @llvm.x86.avx2.pmadd.wd({_SHORTS} {code.load(_SHORTS, each)}, {_SHORTS} {_ONES})"
                )
                code.store(INTS, code.value(f"add {INTS} {code.load(INTS, target)}, {found}"), target)

        code.loop("0", "%blocks", some, step=most)

    def _add_products(self, code: Function, target: str, codes: str, x: str) -> None:
        own, others = (code.value(f"bitcast {INTS} {each} to {_BYTES}") for each in (codes, x))
        found = code.value(f"call {_SHORTS} @llvm.x86.avx2.pmadd.ub.sw({_BYTES} {own}, {_BYTES} {others})")
        code.store(_SHORTS, code.value(f"add {_SHORTS} {code.load(_SHORTS, target)}, {found}"), target)
