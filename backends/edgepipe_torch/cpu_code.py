"""LLVM code of the CPU's packed products.

A weight [O, I] lies in tiles of 16 outputs, so that a vector holds one input's codes of neighbouring outputs::

    low     [tiles, I / n, 16] int32    n = 8 codes of 4 bits, or 4 of 8 bits: input j in bits j * bits and up
    high    [tiles, ceil(I * h / 32), 16] int32    h high bits; block b = i // 8 shares a word with 4 / h blocks:
                                                   input i in bits (4 * (i % 8) + 4 + h * (b % (4 / h))) % 32 and up
    scale   [tiles, groups, 16] float16
    offset  [tiles, groups, 16] float16 (added forms only)

A code becomes a float by one mask and one conversion: it stays where it lies in its word, times ``2 ** (j * bits)``.
``prepare`` has divided the input by that, which is exact. The uppermost code is shifted instead, since its mask would
make negative numbers. Every group is summed in float32 and then multiplied by its scale. Zeros and offsets need only
the sum of the group's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from edgepipe_torch.ir_text import Function, float_constant

TILE = 16  # outputs

SEGMENT = (  # 64-bit fields of a part of a product, in order
    "next",  # the next segment, or 0
    "work",  # function of the kind
    "slot",  # of the prepared inputs
    "prepares",  # 1: this segment prepares its slot
    "order",  # int32 [I], or 0
    "low",
    "high",
    "scale",
    "offset",
    "bias",  # float32 [tiles * 16], or 0
    "factors",  # float32 [12]: of the inputs i % 8, of the groups' sums, of the scale; the codes' zero; of offsets
    "inputs",
    "groups",
    "blocks",  # of 8 inputs in a group
    "outputs",
    "column",  # of the first output
)
PANEL_INPUTS = 256  # with 16 outputs 16 KiB: half of a usual L1 cache
CHUNK_ROWS = 128  # rows whose inputs stay in a usual L2 cache
CALL_FIELDS = 11  # of a recorded call: the function's address and its arguments
SUM_FACTOR, SCALE_FACTOR, ZERO, OFFSET_FACTOR, NUM_FACTORS = 8, 9, 10, 11, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the code of a product depends on."""

    bits: Literal[4, 5, 6, 8]
    added: bool = False  # an offset per group
    floats: bool = False  # codes are float8_e4m3fn

    @property
    def name(self) -> str:
        """Return a name for functions."""
        return f"b{self.bits}{'a' if self.added else ''}{'f' if self.floats else ''}"

    @property
    def high_bits(self) -> int:
        """Bits of a code in the second plane."""
        return self.bits - 4 if self.bits in (5, 6) else 0

    @property
    def words(self) -> int:
        """Words of the first plane for 8 inputs."""
        return 2 if self.bits == 8 else 1

    @property
    def panel_rows(self) -> int:
        """Rows from which on weights are unpacked to memory once for all, measured: earlier with two planes."""
        return 12 if self.high_bits else 24

    @property
    def gain_exponent(self) -> int:
        """Exponent of the power of two that float codes lack; the inputs bring it."""
        return 100 if self.floats else 0

    @property
    def scale_exponent(self) -> int:
        """Exponent of the power of two that the scales bring; both together are 120, the biases' difference."""
        return 20 if self.floats else 0


def input_factor(kind: Kind, index: int) -> float:
    """Return what input ``index`` (0 to 7) of a block is multiplied by, except for the scale's exponent."""
    if kind.floats:
        return 2.0**kind.gain_exponent
    width = 8 if kind.bits == 8 else 4
    place = index % (32 // width)
    return 1.0 if place == 32 // width - 1 else 2.0 ** (-width * place)


_WORK = (
    *("ptr %segment", "ptr %x", "ptr %sums", "i64 %rows", "ptr %out", "i64 %stride", "i1 %accumulate"),
    *("i64 %first", "i64 %end"),
)


class ProductCode:
    """Writes the functions of one kind for vectors of ``width`` floats."""

    def __init__(self, kind: Kind, *, width: int, row_counts: Sequence[int], panel_counts: Sequence[int]) -> None:
        """Counts of rows that share an unpacked weight, falling, the last 1: of registers, and of a panel."""
        self._kind = kind
        self._width = width
        self._vectors = TILE // width
        self._row_counts = row_counts
        self._panel_counts = panel_counts
        self._floats = f"<{width} x float>"
        self._ints = f"<{width} x i32>"

    def module(self) -> str:
        """Return the text of a module with the functions ``work_...`` and ``take_...``."""
        parts = [self._tile(count) for count in self._row_counts]
        parts += [self._unpack(), *(self._panel(count) for count in self._panel_counts)]
        parts += [
            self._work_panels(),
            self._work(),
            self._take(),
            *(fma_declaration(width) for width in {self._width, 8}),
            ATTRIBUTES,
        ]
        return "\n".join(parts)

    # --- one tile -----------------------------------------------------------------------------------------

    def _tile(self, rows: int) -> str:
        """Write the product of ``rows`` rows with one tile."""
        code = Function(
            f"tile{rows}",
            [
                *(f"ptr noalias %{name}" for name in ("x", "sums", "low", "high", "scale", "offset")),
                *("ptr %bias", "ptr noalias %out", "i64 %stride", "i64 %inputs", "i64 %groups", "i64 %blocks"),
                *("i64 %lanes", "i1 %accumulate"),
            ],
            internal=True,
        )
        totals = [[code.variable(self._floats, "zeroinitializer") for _ in range(self._vectors)] for _ in range(rows)]
        self._start_with_bias(code, totals)
        code.loop("0", "%groups", lambda group: self._group(code, totals, group))
        self._finish_tile(code, totals)
        return code.text()

    def _finish_tile(self, code: Function, totals: list[list[str]]) -> None:
        whole = code.value(f"icmp eq i64 %lanes, {TILE}")
        code.branch(whole, lambda: self._store_whole(code, totals), lambda: self._store_some(code, totals))

    def _start_with_bias(self, code: Function, totals: list[list[str]]) -> None:
        def start() -> None:
            for row in totals:
                for index, total in enumerate(row):
                    at = code.at("float", "%bias", str(index * self._width))
                    code.store(self._floats, code.load(self._floats, at), total)

        code.branch(code.value("icmp ne ptr %bias, null"), start)

    def _group(self, code: Function, totals: list[list[str]], group: str) -> None:
        """Add one group's products to the totals."""
        chains = min(4, max(1, 8 // (len(totals) * self._vectors)))  # independent sums hide the latency of an fma
        added = self._kind.added
        sums: list[str] = []
        sets: list[list[list[str]]] = []  # [row][vector][chain]
        for row in range(len(totals)):
            at = code.at("float", "%sums", code.add(code.mul("%groups", row), group))
            sums.append(code.splat("float", code.load("float", at), self._width))
            zero = "zeroinitializer"
            sets.append([[code.variable(self._floats) for _ in range(chains)] for _ in range(self._vectors)])
            for vector in sets[-1]:
                for index, chain in enumerate(vector):
                    code.store(self._floats, zero if added or index else sums[-1], chain)
        first = code.mul(group, "%blocks")
        code.loop(first, code.add(first, "%blocks"), lambda block: self._block(code, sets, block))
        base = code.mul(group, TILE)
        for index in range(self._vectors):
            at = code.add(base, index * self._width)
            scale = self._half(code, "%scale", at)
            offset = self._half(code, "%offset", at) if added else ""
            for row, total in enumerate(totals):
                chain = sets[row][index]
                found = code.load(self._floats, chain[0])
                for other in chain[1:]:
                    found = code.value(f"fadd {self._floats} {found}, {code.load(self._floats, other)}")
                value = self._fma(code, found, scale, code.load(self._floats, total[index]))
                if added:
                    value = self._fma(code, offset, sums[row], value)
                code.store(self._floats, value, total[index])

    def _block(self, code: Function, sets: list[list[list[str]]], block: str) -> None:
        """Add the products of 8 inputs."""
        kind = self._kind
        words = self._words(code, block)
        highs = self._high_words(code, block)
        start = code.mul(block, 8)
        for place in range(8):
            word, position = divmod(place, 8 // kind.words)
            levels = [
                self._level(code, words[word][index], highs[index] if highs else "", position)
                for index in range(self._vectors)
            ]
            for row, vectors in enumerate(sets):
                at = code.add(code.add(code.mul("%inputs", row), start), place)
                x = code.splat("float", code.load("float", code.at("float", "%x", at)), self._width)
                for index, chain in enumerate(vectors):
                    target = chain[place % len(chain)]
                    code.store(self._floats, self._fma(code, levels[index], x, code.load(self._floats, target)), target)

    def _words(self, code: Function, block: str) -> list[list[str]]:
        """Return a block's words of the first plane, [word][vector]."""
        words = self._kind.words
        base = code.at("i32", "%low", code.mul(block, TILE * words))
        return [
            [
                code.load(self._ints, code.at("i32", base, str(word * TILE + index * self._width)))
                for index in range(self._vectors)
            ]
            for word in range(words)
        ]

    def _high_words(self, code: Function, block: str) -> list[str]:
        """Return the words of high bits, shifted so that the block's bits are where its low codes end."""
        bits = self._kind.high_bits
        if not bits:
            return []
        shared = 4 // bits
        word = code.value(f"sdiv i64 {block}, {shared}")
        shift = code.value(f"trunc i64 {code.mul(code.value(f'srem i64 {block}, {shared}'), bits)} to i32")
        amounts = code.splat("i32", shift, self._width)
        base = code.at("i32", "%high", code.mul(word, TILE))
        loaded = [
            code.load(self._ints, code.at("i32", base, str(index * self._width))) for index in range(self._vectors)
        ]
        return [code.value(f"lshr {self._ints} {each}, {amounts}") for each in loaded]

    def _level(self, code: Function, word: str, high: str, position: int) -> str:
        """Return the codes at a position of their words as floats, times the power of two of the position."""
        kind, ints = self._kind, self._ints
        if kind.floats:  # sign to bit 31, exponent and mantissa where a float32 has them
            moved = code.value(f"shl {ints} {word}, {self._all(24 - 8 * position)}")
            moved = code.value(f"ashr {ints} {moved}, {self._all(4)}")
            bits = code.value(f"and {ints} {moved}, {self._all(0x87F00000 - (1 << 32))}")
            return code.value(f"bitcast {ints} {bits} to {self._floats}")
        width = 8 if kind.bits == 8 else 4
        last = position == 32 // width - 1
        if last:
            bits = code.value(f"lshr {ints} {word}, {self._all(32 - width)}")
        else:
            bits = code.value(f"and {ints} {word}, {self._all(((1 << width) - 1) << (width * position))}")
        if high:
            mask = (1 << kind.high_bits) - 1
            place = 0 if last else 4 * position + 4
            above = code.value(f"and {ints} {high}, {self._all(mask << place)}")
            if last:
                above = code.value(f"shl {ints} {above}, {self._all(4)}")
            bits = code.value(f"or {ints} {bits}, {above}")
        return code.value(f"sitofp {ints} {bits} to {self._floats}")

    def _store_whole(self, code: Function, totals: list[list[str]]) -> None:
        for row, vectors in enumerate(totals):
            for index, total in enumerate(vectors):
                at = code.at("float", "%out", code.add(code.mul("%stride", row), index * self._width))
                value = code.load(self._floats, total)
                kind, before = self._floats, code.load(self._floats, at)
                before = code.value(f"select i1 %accumulate, {kind} {before}, {kind} zeroinitializer")
                code.store(self._floats, code.value(f"fadd {self._floats} {value}, {before}"), at)

    def _store_some(self, code: Function, totals: list[list[str]]) -> None:
        """Store the first ``%lanes`` outputs, since the row's next outputs belong to another segment."""
        spare = code.variable(f"[{TILE} x float]")
        for row, vectors in enumerate(totals):
            for index, total in enumerate(vectors):
                code.store(
                    self._floats, code.load(self._floats, total), code.at("float", spare, str(index * self._width))
                )
            start = code.mul("%stride", row)

            def copy(lane: str, start: str = start) -> None:
                at = code.at("float", "%out", code.add(start, lane))
                before = code.value(f"select i1 %accumulate, float {code.load('float', at)}, float 0.0")
                value = code.load("float", code.at("float", spare, lane))
                code.store("float", code.value(f"fadd float {value}, {before}"), at)

            code.loop("0", "%lanes", copy)

    # --- a range of tiles ---------------------------------------------------------------------------------

    def _work(self) -> str:
        """Write ``work_...``: tiles [first, end) of a segment for all rows."""
        code = Function(f"work_{self._kind.name}", _WORK)
        many = code.value(f"icmp sge i64 %rows, {self._kind.panel_rows}")
        names = ", ".join(_WORK)
        code.branch(many, lambda: code.do(f"call void @work_panels({names})"), lambda: self._work_tiles(code))
        return code.text() + "declare i64 @llvm.smin.i64(i64, i64)\n"

    def _work_tiles(self, code: Function) -> None:
        """Unpack each weight once for a few rows, in registers."""
        field = read_fields(code, "%segment")

        def tile(index: str) -> None:
            at = self._tile_addresses(code, field, index)

            def rows(first: str, count: int) -> None:
                x = code.at("float", "%x", code.mul(first, field["inputs"]))
                sums = code.at("float", "%sums", code.mul(first, field["groups"]))
                target = code.at("float", at["out"], code.mul(first, "%stride"))
                code.do(
                    f"call void @tile{count}(ptr {x}, ptr {sums}, ptr {at['low']}, ptr {at['high']}, "
                    f"ptr {at['scale']}, ptr {at['offset']}, ptr {at['bias']}, ptr {target}, i64 %stride, "
                    f"i64 {field['inputs']}, i64 {field['groups']}, i64 {field['blocks']}, i64 {at['lanes']}, "
                    "i1 %accumulate)"
                )

            _by_counts(code, "0", "%rows", self._row_counts, rows)

        code.loop("%first", "%end", tile)

    def _tile_addresses(self, code: Function, field: dict[str, str], index: str) -> dict[str, str]:
        """Return a tile's addresses, and how many of its 16 outputs exist."""
        words = code.mul(field["inputs"], 2 * self._kind.words)  # of a tile: I / 8 blocks * 16 lanes
        values = code.mul(field["groups"], TILE)
        output = code.mul(index, TILE)
        bias = code.at("float", field["bias"], output)
        left = code.value(f"sub i64 {field['outputs']}, {output}")
        return {
            "low": code.at("i32", field["low"], code.mul(index, words)),
            "high": code.at("i32", field["high"], code.mul(index, self._high_stride(code, field["inputs"]))),
            "scale": code.at("half", field["scale"], code.mul(index, values)),
            "offset": code.at("half", field["offset"], code.mul(index, values)),
            "bias": code.value(f"select i1 {code.is_null(field['bias'])}, ptr null, ptr {bias}"),
            "lanes": code.value(f"call i64 @llvm.smin.i64(i64 {left}, i64 {TILE})"),
            "out": code.at("float", "%out", code.add(field["column"], output)),
        }

    # --- many rows ----------------------------------------------------------------------------------------

    def _work_panels(self) -> str:
        """Write the same for many rows: unpack a panel of ``PANEL_INPUTS`` inputs of a tile to a core's cache, then
        multiply it with all rows of a chunk."""
        code = Function("work_panels", _WORK, internal=True)
        field = read_fields(code, "%segment")
        panel = code.variable(f"[{PANEL_INPUTS * TILE} x float]")

        def chunk(first_row: str) -> None:
            rest = code.value(f"sub i64 %rows, {first_row}")
            last_row = code.add(first_row, code.value(f"call i64 @llvm.smin.i64(i64 {rest}, i64 {CHUNK_ROWS})"))

            def tile(index: str) -> None:
                at = self._tile_addresses(code, field, index)

                def inputs(start: str) -> None:
                    left = code.value(f"sub i64 {field['inputs']}, {start}")
                    count = code.value(f"call i64 @llvm.smin.i64(i64 {left}, i64 {PANEL_INPUTS})")
                    code.do(
                        f"call void @unpack(ptr {at['low']}, ptr {at['high']}, ptr {at['scale']}, ptr {at['offset']}, "
                        f"ptr {field['factors']}, i64 {field['blocks']}, i64 {start}, i64 {count}, ptr {panel})"
                    )
                    begins = code.value(f"icmp eq i64 {start}, 0")
                    bias = code.value(f"select i1 {begins}, ptr {at['bias']}, ptr null")
                    adds = code.value(f"select i1 {begins}, i1 %accumulate, i1 true")

                    def rows(first: str, count_of_rows: int) -> None:
                        x = code.at("float", "%x", code.add(code.mul(first, field["inputs"]), start))
                        target = code.at("float", at["out"], code.mul(first, "%stride"))
                        code.do(
                            f"call void @panel{count_of_rows}(ptr {x}, ptr {panel}, ptr {bias}, ptr {target}, "
                            f"i64 %stride, i64 {field['inputs']}, i64 {count}, i64 {at['lanes']}, i1 {adds})"
                        )

                    _by_counts(code, first_row, last_row, self._panel_counts, rows)

                code.loop("0", field["inputs"], inputs, step=PANEL_INPUTS)

            code.loop("%first", "%end", tile)

        code.loop("0", "%rows", chunk, step=CHUNK_ROWS)
        return code.text()

    def _unpack(self) -> str:
        """Write the values of a tile's inputs [start, start + count) to ``panel`` [count, 16].

        They are divided by the factors of their inputs, which ``prepare`` has multiplied in.
        """
        code = Function(
            "unpack",
            [
                *(f"ptr noalias %{name}" for name in ("low", "high", "scale", "offset", "factors")),
                *("i64 %blocks", "i64 %start", "i64 %count", "ptr noalias %panel"),
            ],
            internal=True,
        )
        kind = self._kind
        zero = code.load("float", code.at("float", "%factors", str(ZERO)))
        zeros = code.splat("float", code.value(f"fneg float {zero}"), self._width)
        shift = code.splat("float", code.load("float", code.at("float", "%factors", str(OFFSET_FACTOR))), self._width)
        first = code.value("sdiv i64 %start, 8")

        def block(number: str) -> None:
            index = code.add(first, number)
            group = code.mul(code.value(f"sdiv i64 {index}, %blocks"), TILE)
            words, highs = self._words(code, index), self._high_words(code, index)
            out = code.at("float", "%panel", code.mul(number, 8 * TILE))
            for vector in range(self._vectors):
                at = code.add(group, vector * self._width)
                scale = self._half(code, "%scale", at)
                added = code.value(
                    f"fmul {self._floats} {self._half(code, '%offset', at)}, {shift}"
                    if kind.added
                    else f"fmul {self._floats} {scale}, {zeros}"
                )
                for place in range(8):
                    word, position = divmod(place, 8 // kind.words)
                    level = self._level(code, words[word][vector], highs[vector] if highs else "", position)
                    power = 1.0 if kind.floats else 1.0 / input_factor(kind, place)
                    term = code.value(f"fmul {self._floats} {added}, {self._all_floats(power)}")
                    value = self._fma(code, level, scale, term)
                    code.store(self._floats, value, code.at("float", out, str(place * TILE + vector * self._width)))

        code.loop("0", code.value("sdiv i64 %count, 8"), block)
        return code.text()

    def _panel(self, rows: int) -> str:
        """Write the product of ``rows`` rows with a panel."""
        code = Function(
            f"panel{rows}",
            [
                *("ptr noalias %x", "ptr noalias %panel", "ptr %bias", "ptr noalias %out", "i64 %stride"),
                *("i64 %inputs", "i64 %count", "i64 %lanes", "i1 %accumulate"),
            ],
            internal=True,
        )
        totals = [[code.variable(self._floats, "zeroinitializer") for _ in range(self._vectors)] for _ in range(rows)]
        self._start_with_bias(code, totals)

        def some(start: str) -> None:
            for place in range(4):
                index = code.add(start, place)
                base = code.at("float", "%panel", code.mul(index, TILE))
                values = [
                    code.load(self._floats, code.at("float", base, str(vector * self._width)))
                    for vector in range(self._vectors)
                ]
                for row, vectors in enumerate(totals):
                    at = code.add(code.mul("%inputs", row), index)
                    x = code.splat("float", code.load("float", code.at("float", "%x", at)), self._width)
                    for value, total in zip(values, vectors, strict=True):
                        code.store(self._floats, self._fma(code, value, x, code.load(self._floats, total)), total)

        code.loop("0", "%count", some, step=4)
        self._finish_tile(code, totals)
        return code.text()

    def _high_stride(self, code: Function, inputs: str) -> str:
        """Return the words of high bits in a tile."""
        bits = self._kind.high_bits
        if not bits:
            return "0"
        blocks = code.value(f"sdiv i64 {inputs}, 8")
        shared = 4 // bits
        return code.mul(code.value(f"sdiv i64 {code.add(blocks, shared - 1)}, {shared}"), TILE)

    # --- single weights' rows -----------------------------------------------------------------------------

    def _take(self) -> str:
        """Write ``take_...``: the values [count, I] of rows ``ids``."""
        code = Function(f"take_{self._kind.name}", ["ptr %segment", "ptr %ids", "i64 %count", "ptr %out"])
        field = read_fields(code, "%segment")
        kind = self._kind
        words = code.mul(field["inputs"], 2 * kind.words)
        high_words = self._high_stride(code, field["inputs"])
        values = code.mul(field["groups"], TILE)
        factor = code.load("float", code.at("float", field["factors"], str(SCALE_FACTOR)))
        factors = code.splat("float", factor, 8)
        total_blocks = code.value(f"sdiv i64 {field['inputs']}, 8")

        def row(index: str) -> None:
            number = code.load("i64", code.at("i64", "%ids", index))
            tile, lane = code.value(f"sdiv i64 {number}, {TILE}"), code.value(f"srem i64 {number}, {TILE}")
            low = code.at("i32", field["low"], code.add(code.mul(tile, words), lane))
            high = code.at("i32", field["high"], code.add(code.mul(tile, high_words), lane))
            scale = code.at("half", field["scale"], code.add(code.mul(tile, values), lane))
            offset = code.at("half", field["offset"], code.add(code.mul(tile, values), lane))
            out = code.at("float", "%out", code.mul(index, field["inputs"]))

            def block(number: str) -> None:
                levels = self._eight(code, low, high, number)
                group = code.mul(code.value(f"sdiv i64 {number}, {field['blocks']}"), TILE)
                scales = code.splat("float", self._single(code, scale, group), 8)
                if kind.added:  # factors[SUM_FACTOR]: of the offset; without rounding the product of scale and code
                    shift = code.load("float", code.at("float", field["factors"], str(SUM_FACTOR)))
                    added = code.value(f"fmul float {self._single(code, offset, group)}, {shift}")
                    scales = code.value(f"fmul <8 x float> {scales}, {factors}")
                    parts = (levels, scales, code.splat("float", added, 8))
                    value = code.value(
                        f"call <8 x float> @llvm.fma.v8f32({', '.join(f'<8 x float> {part}' for part in parts)})"
                    )
                else:
                    zero = code.load("float", code.at("float", field["factors"], str(ZERO)))
                    centred = code.value(f"fsub <8 x float> {levels}, {code.splat('float', zero, 8)}")
                    centred = code.value(f"fmul <8 x float> {centred}, {factors}")
                    value = code.value(f"fmul <8 x float> {centred}, {scales}")
                code.store("<8 x float>", value, code.at("float", out, code.mul(number, 8)))

            code.loop("0", total_blocks, block)

        code.loop("0", "%count", row)
        return code.text()

    def _eight(self, code: Function, low: str, high: str, block: str) -> str:
        """Return the levels of one output's 8 inputs of a block."""
        kind = self._kind
        base = code.mul(block, TILE * kind.words)
        word = code.splat("i32", code.load("i32", code.at("i32", low, base)), 8)
        if kind.bits == 8:
            second = code.splat("i32", code.load("i32", code.at("i32", low, code.add(base, TILE))), 8)
            lanes = ", ".join(f"i32 {lane}" for lane in (0, 1, 2, 3, 12, 13, 14, 15))
            word = code.value(f"shufflevector <8 x i32> {word}, <8 x i32> {second}, <8 x i32> <{lanes}>")
        width = 8 if kind.bits == 8 else 4
        moved = code.value(f"lshr <8 x i32> {word}, {_list([width * (place % (32 // width)) for place in range(8)])}")
        codes = code.value(f"and <8 x i32> {moved}, {_list([(1 << width) - 1] * 8)}")
        if kind.floats:
            sign = code.value(
                f"shl <8 x i32> {code.value(f'and <8 x i32> {codes}, {_list([128] * 8)}')}, {_list([24] * 8)}"
            )
            rest = code.value(
                f"shl <8 x i32> {code.value(f'and <8 x i32> {codes}, {_list([127] * 8)}')}, {_list([20] * 8)}"
            )
            return code.value(f"bitcast <8 x i32> {code.value(f'or <8 x i32> {sign}, {rest}')} to <8 x float>")
        if bits := kind.high_bits:
            shared = 4 // bits
            at = code.mul(code.value(f"sdiv i64 {block}, {shared}"), TILE)
            above = code.splat("i32", code.load("i32", code.at("i32", high, at)), 8)
            amount = code.value(f"trunc i64 {code.mul(code.value(f'srem i64 {block}, {shared}'), bits)} to i32")
            amounts = code.value(
                f"add <8 x i32> {code.splat('i32', amount, 8)}, {_list([(4 * place + 4) % 32 for place in range(8)])}"
            )
            above = code.value(f"lshr <8 x i32> {above}, {amounts}")
            above = code.value(f"and <8 x i32> {above}, {_list([(1 << bits) - 1] * 8)}")
            codes = code.value(f"or <8 x i32> {codes}, {code.value(f'shl <8 x i32> {above}, {_list([4] * 8)}')}")
        return code.value(f"sitofp <8 x i32> {codes} to <8 x float>")

    def _single(self, code: Function, base: str, index: str) -> str:
        half = code.load("half", code.at("half", base, index), align=2)
        return code.value(f"fpext half {half} to float")

    def _half(self, code: Function, base: str, index: str) -> str:
        """Read a vector of float16 as float32."""
        halves = code.load(f"<{self._width} x half>", code.at("half", base, index), align=2)
        return code.value(f"fpext <{self._width} x half> {halves} to {self._floats}")

    def _fma(self, code: Function, a: str, b: str, c: str) -> str:
        kind = self._floats
        return code.value(f"call {kind} @llvm.fma.v{self._width}f32({kind} {a}, {kind} {b}, {kind} {c})")

    def _all_floats(self, value: float) -> str:
        return "<" + ", ".join([f"float {float_constant(value)}"] * self._width) + ">"

    def _all(self, value: int) -> str:
        """Return a constant vector."""
        return _list([value] * self._width)


def _by_counts(code: Function, first: str, end: str, counts: Sequence[int], body: Callable[[str, int], None]) -> None:
    """Cover rows [first, end) by ``counts`` at a time, the largest first; ``body`` gets the first row and the count."""
    row = code.variable("i64", first)
    for count in counts:
        start = code.load("i64", row)
        rest = code.value(f"srem i64 {code.value(f'sub i64 {end}, {start}')}, {count}")
        covered = code.value(f"sub i64 {end}, {rest}")
        code.loop(start, covered, lambda index, count=count: body(index, count), step=count)
        code.store("i64", covered, row)


def frame_module() -> str:
    """Return the module with ``multiply``, which prepares inputs and shares tiles among threads, and ``replay``."""
    return "\n".join([_multiply(), _team(), _share(), _prepare(), _replay(), ATTRIBUTES])


def _multiply() -> str:
    """Write ``multiply``: x [rows, I] times all segments into out, whose rows are ``stride`` floats apart.

    ``scratch``: ``num_slots * rows * slot`` floats, slot = I + the most groups. ``calls``: addresses of GOMP_parallel,
    omp_get_thread_num and omp_get_num_threads, for a ``count`` of several threads.
    """
    names = ["ptr %segment", "ptr %x", "i64 %rows", "ptr %out", "i64 %stride", "i64 %accumulate", "ptr %scratch"]
    code = Function("multiply", [*names, "i64 %slot", "i64 %count", "ptr %calls"])
    current = code.variable("ptr", "%segment")
    code.do("br label %prepare")
    code.label("prepare")
    segment = code.load("ptr", current)
    field = read_fields(code, segment)
    wanted = code.value(f"icmp ne i64 {field['prepares']}, 0")
    xs, sums = _slot(code, field, "%scratch", "%rows", "%slot")
    code.branch(wanted, lambda: code.do(f"call void @prepare(ptr {segment}, ptr %x, i64 %rows, ptr {xs}, ptr {sums})"))
    code.store("ptr", field["next"], current)
    code.do(f"br i1 {code.is_null(field['next'])}, label %compute, label %prepare")
    code.label("compute")
    job = code.variable("[8 x i64]")
    arguments = ["%segment", "%rows", "%out", "%stride", "%accumulate", "%scratch", "%slot", "%calls"]
    for index, value in enumerate(arguments):
        kind = "ptr" if value in ("%segment", "%out", "%scratch", "%calls") else "i64"
        code.store(kind, value, code.at("i64", job, str(index)))
    alone = code.value("icmp sle i64 %count, 1")
    threads = code.value("trunc i64 %count to i32")
    code.branch(
        alone,
        lambda: code.do(f"call void @share(ptr {job}, i64 0, i64 1)"),
        lambda: code.do(f"call void {code.load('ptr', '%calls')}(ptr @team, ptr {job}, i32 {threads}, i32 0)"),
    )
    return code.text()


def _team() -> str:
    """Write what every thread of a team runs."""
    code = Function("team", ["ptr %job"], internal=True)
    calls = code.load("ptr", code.at("i64", "%job", "7"))
    found = [code.value(f"call i32 {code.load('ptr', code.at('i64', calls, str(index)))}()") for index in (1, 2)]
    thread, count = (code.value(f"sext i32 {each} to i64") for each in found)
    code.do(f"call void @share(ptr %job, i64 {thread}, i64 {count})")
    return code.text()


def _share() -> str:
    """Write one thread's share: its range of tiles in every segment."""
    code = Function("share", ["ptr %job", "i64 %thread", "i64 %count"], internal=True)
    kinds = ["ptr", "i64", "ptr", "i64", "i64", "ptr", "i64"]
    first, rows, out, stride, accumulate, scratch, slot = (
        code.load(kind, code.at("i64", "%job", str(index))) for index, kind in enumerate(kinds)
    )
    adds = code.value(f"icmp ne i64 {accumulate}, 0")
    current = code.variable("ptr", first)
    code.do("br label %segment")
    code.label("segment")
    segment = code.load("ptr", current)
    field = read_fields(code, segment)
    tiles = code.value(f"sdiv i64 {code.add(field['outputs'], TILE - 1)}, {TILE}")
    start = code.value(f"sdiv i64 {code.mul(tiles, '%thread')}, %count")
    end = code.value(f"sdiv i64 {code.mul(tiles, code.add('%thread', 1))}, %count")
    xs, sums = _slot(code, field, scratch, rows, slot)
    code.do(
        f"call void {field['work']}(ptr {segment}, ptr {xs}, ptr {sums}, i64 {rows}, ptr {out}, i64 {stride}, "
        f"i1 {adds}, i64 {start}, i64 {end})"
    )
    code.store("ptr", field["next"], current)
    code.do(f"br i1 {code.is_null(field['next'])}, label %done, label %segment")
    code.label("done")
    return code.text()


def _prepare() -> str:
    """Write ``prepare``: inputs times their factors, and the sums of groups times theirs."""
    code = Function("prepare", ["ptr %segment", "ptr %x", "i64 %rows", "ptr noalias %xs", "ptr noalias %sums"])
    field = read_fields(code, "%segment")
    eight = "<8 x float>"
    factors = code.load(eight, field["factors"])
    sum_factor = code.load("float", code.at("float", field["factors"], str(SUM_FACTOR)))
    spare = code.variable("[8 x float]")
    ordered = code.value(f"icmp ne ptr {field['order']}, null")

    def row(index: str) -> None:
        source = code.at("float", "%x", code.mul(index, field["inputs"]))
        target = code.at("float", "%xs", code.mul(index, field["inputs"]))

        def group(number: str) -> None:
            total = code.variable(eight, "zeroinitializer")
            code.store(eight, "zeroinitializer", total)
            first = code.mul(number, field["blocks"])

            def block(at: str) -> None:
                start = code.mul(at, 8)

                def gather() -> None:
                    for place in range(8):
                        place_at = code.add(start, place)
                        from_index = code.load("i32", code.at("i32", field["order"], place_at))
                        wide = code.value(f"sext i32 {from_index} to i64")
                        value = code.load("float", code.at("float", source, wide))
                        code.store("float", value, code.at("float", spare, str(place)))

                def copy() -> None:
                    code.store(eight, code.load(eight, code.at("float", source, start)), spare)

                code.branch(ordered, gather, copy)
                values = code.load(eight, spare)
                code.store(eight, code.value(f"fadd {eight} {code.load(eight, total)}, {values}"), total)
                code.store(eight, code.value(f"fmul {eight} {values}, {factors}"), code.at("float", target, start))

            code.loop(first, code.add(first, field["blocks"]), block)
            found = code.value(
                f"call reassoc float @llvm.vector.reduce.fadd.v8f32(float 0.0, {eight} {code.load(eight, total)})"
            )
            at = code.at("float", "%sums", code.add(code.mul(index, field["groups"]), number))
            code.store("float", code.value(f"fmul float {found}, {sum_factor}"), at)

        code.loop("0", field["groups"], group)

    code.loop("0", "%rows", row)
    return code.text() + "declare float @llvm.vector.reduce.fadd.v8f32(float, <8 x float>)\n"


def _replay() -> str:
    """Write ``replay``: ``count`` recorded calls, each an address and ten 64-bit arguments.

    A function takes as many arguments as it has: in the calling conventions of x86-64 and arm64 the caller removes the
    others.
    """
    code = Function("replay", ["ptr %calls", "i64 %count"])

    def call(index: str) -> None:
        start = code.at("i64", "%calls", code.mul(index, CALL_FIELDS))
        function = code.load("ptr", start)
        arguments = [code.load("i64", code.at("i64", start, str(number))) for number in range(1, CALL_FIELDS)]
        code.do(f"call void {function}({', '.join(f'i64 {argument}' for argument in arguments)})")

    code.loop("0", "%count", call)
    return code.text()


def _slot(code: Function, field: dict[str, str], scratch: str, rows: str, slot: str) -> tuple[str, str]:
    """Return the addresses of a slot's inputs and sums."""
    start = code.mul(code.mul(field["slot"], rows), slot)
    xs = code.at("float", scratch, start)
    return xs, code.at("float", xs, code.mul(rows, field["inputs"]))


def read_fields(code: Function, segment: str) -> dict[str, str]:
    """Read a segment's fields; unused ones cost nothing after optimisation."""
    addresses = ("next", "work", "order", "low", "high", "scale", "offset", "bias", "factors")
    return {
        name: code.load("ptr" if name in addresses else "i64", code.at("i64", segment, str(index)))
        for index, name in enumerate(SEGMENT)
    }


def fma_declaration(width: int) -> str:
    """Return the declaration of a fused multiply-add."""
    kind = f"<{width} x float>"
    return f"declare {kind} @llvm.fma.v{width}f32({kind}, {kind}, {kind})\n"


ATTRIBUTES = 'attributes #0 = { nounwind "min-legal-vector-width"="512" }\n'


def _list(values: Sequence[int]) -> str:
    return "<" + ", ".join(f"i32 {value}" for value in values) + ">"
