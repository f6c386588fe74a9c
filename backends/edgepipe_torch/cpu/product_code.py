"""LLVM code of the CPU's packed products, whose weights lie as in ``kinds``."""

from __future__ import annotations

from collections.abc import Iterator

from edgepipe_torch.cpu.code_vectors import as_float, e2m1_bytes, fma_declaration, int_list
from edgepipe_torch.cpu.frame import ATTRIBUTES, read_fields
from edgepipe_torch.cpu.ir_text import PREFETCH_DECLARATION, Function
from edgepipe_torch.cpu.kinds import E2M1_BYTES, TILE, Kind, byte_place, code_place, part_place
from edgepipe_torch.cpu.row_parts import part_sizes, split_by_counts, split_rows
from edgepipe_torch.cpu.take_code import TakeCode, tile_strides

PANEL_INPUTS = 256  # 16 outputs of so many inputs take 16 KiB, half of a usual L1 cache; no group has more
CHUNK_ROWS = 128  # rows whose inputs stay in a usual L2 cache
_AHEAD_LINES = 64  # lines of codes between a product and its prefetch: 4 KiB, measured from 1 to 16

_BYTES, _SHUFFLE = "<32 x i8>", "llvm.x86.avx2.pshuf.b"
_WORK = (
    *("ptr %segment", "ptr %x", "ptr %sums", "i64 %rows", "ptr %out", "i64 %stride", "i1 %accumulate"),
    *("i64 %first", "i64 %end"),
)


class ProductCode:
    """Writes the functions of one kind for vectors of ``width`` floats."""

    def __init__(self, kind: Kind, *, width: int, most_rows: tuple[int, int], shuffles: bool = False) -> None:
        """``most_rows``: the most that share an unpacked weight in registers, and in a panel.

        ``shuffles``: the CPU has AVX2's shuffle of bytes.
        """
        self._kind = kind
        self._shuffles = shuffles and width % 8 == 0 and kind.e2m1
        self._width = width
        self._vectors = TILE // width
        self._most_rows = most_rows
        self._floats = f"<{width} x float>"
        self._ints = f"<{width} x i32>"

    @property
    def panel_rows(self) -> int:
        """Rows from which on weights are unpacked to memory once for all, measured.

        With vectors of 16 floats earlier for two planes, whose codes take more work. With narrower ones, four parts of
        four rows are faster.
        """
        if self._width < TILE:
            return 17
        return 13 if self._kind.split else 25

    @property
    def tile_counts(self) -> list[int]:
        """Numbers of rows with a ``tile`` function of their own."""
        return part_sizes(range(1, self.panel_rows), self._most_rows[0])

    @property
    def panel_counts(self) -> list[int]:
        """Numbers of rows with a ``panel`` function of their own."""
        return part_sizes(range(self.panel_rows, CHUNK_ROWS + 1), self._most_rows[1])

    def module(self) -> str:
        """Return the text of a module with the functions ``work_...`` and ``take_...``."""
        parts = [self._tile(count) for count in self.tile_counts]
        parts += [self._unpack(), *(self._panel(count) for count in self.panel_counts)]
        parts += [
            *(self._start_totals(), self._store_totals(), self._work_panels()),
            self._work(),
            TakeCode(self._kind).text(),
            *(fma_declaration(width) for width in {self._width, 8}),
            PREFETCH_DECLARATION,
            *self._shuffle_declarations(),
            ATTRIBUTES,
        ]
        return "\n".join(parts)

    def _shuffle_declarations(self) -> list[str]:
        return [f"declare {_BYTES} @{_SHUFFLE}({_BYTES}, {_BYTES})\n"] if self._shuffles else []

    # --- one tile -----------------------------------------------------------------------------------------

    def _tile_function(self, rows: int) -> Function:
        return Function(
            f"tile{rows}",
            [
                *(f"ptr noalias %{name}" for name in ("x", "sums", "low", "high", "scale", "offset")),
                *("ptr %bias", "ptr noalias %out", "i64 %stride", "i64 %inputs", "i64 %groups", "i64 %blocks"),
                *("i64 %lanes", "i1 %accumulate"),
            ],
            internal=True,
            inline=False,
        )

    def _tile(self, rows: int) -> str:
        """Write the product of ``rows`` rows with one tile."""
        code = self._tile_function(rows)
        totals = [[code.variable(self._floats, "zeroinitializer") for _ in range(self._vectors)] for _ in range(rows)]
        self._start_with_bias(code, totals)
        at_once = 2 if rows * self._vectors <= 4 else 1  # groups, whose independent sums hide the latency of an fma
        left = code.value(f"srem i64 %groups, {at_once}")
        several = code.value(f"sub i64 %groups, {left}")
        code.loop("0", several, lambda group: self._groups(code, totals, group, at_once), step=at_once)
        if at_once > 1:
            code.loop(several, "%groups", lambda group: self._groups(code, totals, group, 1))
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

    def _groups(self, code: Function, totals: list[list[str]], first: str, count: int) -> None:
        """Add the products of ``count`` groups from ``first`` on to the totals, of one group after the other."""
        numbers = [code.add(first, index) for index in range(count)]
        starts = [code.mul(number, "%blocks") for number in numbers]
        sums = [self._sums(code, "%sums", "%groups", number, len(totals)) for number in numbers]  # [group][row]
        parts = [self._group_sums(code, own) for own in sums]  # [group][row][vector]

        def unit(block: str) -> None:
            for start, own in zip(starts, parts, strict=True):
                self._unit(code, own, code.add(start, block))

        code.loop("0", "%blocks", unit, step=self._kind.unit)
        for number, own, of_inputs in zip(numbers, parts, sums, strict=True):
            self._add_group(code, totals, own, of_inputs, number)

    def _sums(self, code: Function, base: str, pitch: str, group: str, rows: int) -> list[str]:
        """Read each row's sum of a group's inputs, repeated in a vector."""
        places = [code.at("float", base, code.add(code.mul(pitch, row), group)) for row in range(rows)]
        return [code.splat("float", code.load("float", place), self._width) for place in places]

    def _group_sums(self, code: Function, sums: list[str]) -> list[list[str]]:
        """Return variables [row][vector] for a group's products, which begin with what the codes' zero takes away."""
        starts = ["zeroinitializer" if self._kind.added else each for each in sums]
        found = [[code.variable(self._floats) for _ in range(self._vectors)] for _ in sums]
        for start, vectors in zip(starts, found, strict=True):
            for vector in vectors:
                code.store(self._floats, start, vector)
        return found

    def _add_group(
        self,
        code: Function,
        totals: list[list[str]],
        parts: list[list[str]],
        sums: list[str],
        group: str,
        *,
        stay: bool = False,
    ) -> None:
        """Add one group's products times its scale, and its offset, to the totals: the same way for any rows.

        ``stay``: the totals are in memory and stay there, since registers do not hold them beside the parts.
        """
        base = code.mul(group, TILE)
        for index in range(self._vectors):
            at = code.add(base, index * self._width)
            scale = "" if self._kind.number else self._half(code, "%scale", at)
            offset = self._half(code, "%offset", at) if self._kind.added else ""
            for total, part, of_inputs in zip(totals, parts, sums, strict=True):
                before = code.load(self._floats, total[index], volatile=stay)
                found = code.load(self._floats, part[index])
                if scale:
                    value = self._fma(code, found, scale, before)
                else:
                    value = code.value(f"fadd {self._floats} {found}, {before}")
                if offset:
                    value = self._fma(code, offset, of_inputs, value)
                code.store(self._floats, value, total[index], volatile=stay)

    def _unit(self, code: Function, parts: list[list[str]], block: str) -> None:
        """Add the products of one unit's inputs.

        Processors fetch codes ahead only up to the end of a page, and too few of them at a time.
        """
        start = code.mul(block, 8)
        self._prefetch_codes(code, self._ahead(code, block))
        for place, levels in enumerate(self._levels(code, block)):
            for row, vectors in enumerate(parts):
                at = code.add(code.add(code.mul("%inputs", row), start), place)
                x = code.splat("float", code.load("float", code.at("float", "%x", at)), self._width)
                for level, target in zip(levels, vectors, strict=True):
                    code.store(self._floats, self._fma(code, level, x, code.load(self._floats, target)), target)

    def _ahead(self, code: Function, block: str) -> str:
        """Return the unit to fetch while that of ``block`` is multiplied."""
        return code.add(block, _AHEAD_LINES // self._kind.words * self._kind.unit)

    def _levels(self, code: Function, block: str) -> Iterator[list[str]]:
        """Write the codes of the unit that begins with ``block`` as floats, times two to their first bits.

        Each step yields one input's, [vector].
        """
        kind, ints = self._kind, self._ints
        if kind.e2m1:
            yield from self._e2m1_levels(code, block)
            return
        if kind.number:
            yield from self._numbers(code, block)
            return
        last: list[str] = []  # codes made of parts
        for word in range(kind.words + bool(kind.high_bits)):
            loaded = [self._word(code, block, word, vector) for vector in range(self._vectors)]
            for place in range(8 * kind.unit - kind.split):
                at, first_bit = code_place(kind, place)
                if at == word:
                    yield [self._level(code, each, first_bit) for each in loaded]
            if kind.split:
                first_bit = part_place(kind, word)
                parts = [code.value(f"lshr {ints} {each}, {self._all(first_bit)}") for each in loaded]
                if word:
                    parts = [code.value(f"shl {ints} {each}, {self._all(2 * word)}") for each in parts]
                    parts = [code.value(f"or {ints} {one}, {two}") for one, two in zip(last, parts, strict=True)]
                last = parts
        if kind.split:
            yield [code.value(f"sitofp {ints} {each} to {self._floats}") for each in last]

    def _numbers(self, code: Function, block: str) -> Iterator[list[str]]:
        """Write the values of a unit as ``_levels`` does."""
        kind, width = self._kind, self._width
        for place in range(8):
            base = code.add(code.mul(block, 8 * TILE), place * TILE)
            found: list[str] = []
            for vector in range(self._vectors):
                at = code.at(kind.number, "%low", code.add(base, vector * width))
                found.append(as_float(code, kind, code.load(f"<{width} x {kind.number}>", at, align=2), width))
            yield found

    def _e2m1_levels(self, code: Function, block: str) -> Iterator[list[str]]:
        """Write the codes of a unit as ``_levels`` does, by their bytes."""
        nibbles = self._all(0x0F0F0F0F)
        halves: list[list[str]] = [[], []]  # bytes of even and of odd inputs, [vector]
        for vector in range(self._vectors):
            word = self._word(code, block, 0, vector)
            shifted = code.value(f"lshr {self._ints} {word}, {self._all(4)}")
            for half, moved in zip(halves, (word, shifted), strict=True):
                codes = code.value(f"and {self._ints} {moved}, {nibbles}")
                half.append(self._bytes(code, codes))
        for place in range(8):
            odd, first_bit = byte_place(place)
            yield [self._level(code, each, first_bit, size=8) for each in halves[odd]]

    def _bytes(self, code: Function, codes: str) -> str:
        """Return the E2M1_BYTES of codes in the bytes of words."""
        if not self._shuffles:
            return e2m1_bytes(code, codes, self._width)
        count = self._width // 8
        table = "<" + ", ".join([f"i8 {value}" for value in E2M1_BYTES] * 2) + ">"
        found: list[str] = []
        for index in range(count):
            lanes = int_list(list(range(8 * index, 8 * index + 8)))
            part = code.value(f"shufflevector {self._ints} {codes}, {self._ints} poison, <8 x i32> {lanes}")
            part = code.value(f"bitcast <8 x i32> {part} to {_BYTES}")
            part = code.value(f"call {_BYTES} @{_SHUFFLE}({_BYTES} {table}, {_BYTES} {part})")
            found.append(code.value(f"bitcast {_BYTES} {part} to <8 x i32>"))
        if count == 1:
            return found[0]
        lanes = int_list(list(range(16)))
        return code.value(f"shufflevector <8 x i32> {found[0]}, <8 x i32> {found[1]}, <16 x i32> {lanes}")

    def _word(self, code: Function, block: str, word: int, vector: int) -> str:
        """Read a unit's word; the last one is of the second plane."""
        kind, lane = self._kind, vector * self._width
        unit = block if kind.unit == 1 else code.value(f"ashr exact i64 {block}, 1")
        if word < kind.words:
            at = code.add(code.mul(unit, TILE * kind.words), word * TILE + lane)
            return code.load(self._ints, code.at("i32", "%low", at))
        at = code.add(code.mul(unit, TILE), lane)
        if kind.high_bits == 32:
            return code.load(self._ints, code.at("i32", "%high", at))
        short = f"<{self._width} x i16>"
        return code.value(f"zext {short} {code.load(short, code.at('i16', '%high', at), align=2)} to {self._ints}")

    def _level(self, code: Function, word: str, first_bit: int, *, size: int = 0) -> str:
        """Return codes of ``size`` bits (0: the kind's) at a place of words as floats, times two to their first bit."""
        kind, ints, size = self._kind, self._ints, size or self._kind.bits
        if kind.floats:  # sign to bit 31, exponent and mantissa where a float32 has them
            moved = code.value(f"shl {ints} {word}, {self._all(24 - first_bit)}")
            moved = code.value(f"ashr {ints} {moved}, {self._all(4)}")
            bits = code.value(f"and {ints} {moved}, {self._all(0x87F00000 - (1 << 32))}")
            return code.value(f"bitcast {ints} {bits} to {self._floats}")
        if first_bit + size == 32:
            found = code.value(f"lshr {ints} {word}, {self._all(first_bit)}")
        else:
            found = code.value(f"and {ints} {word}, {self._all(((1 << size) - 1) << first_bit)}")
        return code.value(f"sitofp {ints} {found} to {self._floats}")

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
        code = self._work_function()
        many = code.value(f"icmp sge i64 %rows, {self.panel_rows}")
        names = ", ".join(_WORK)
        code.branch(many, lambda: code.do(f"call void @work_panels({names})"), lambda: self._work_tiles(code))
        return code.text() + "declare i64 @llvm.smin.i64(i64, i64)\n"

    def _work_function(self) -> Function:
        return Function(f"work_{self._kind.name}", _WORK)

    def _work_tiles(self, code: Function) -> None:
        """Unpack each weight once for a few rows, in registers."""
        field = read_fields(code, "%segment")

        def tile(index: str) -> None:
            at = self._tile_addresses(code, field, index)

            def rows(first: str, count: int) -> None:
                self._call_tile(code, field, at, first, code.mul(first, field["groups"]), count)

            split_by_counts(code, "0", "%rows", self._most_rows[0], self.tile_counts, rows)

        code.loop("%first", "%end", tile)

    def _call_tile(
        self, code: Function, field: dict[str, str], at: dict[str, str], first: str, sums: str, count: int
    ) -> None:
        """Multiply rows from ``first`` on with the tile of addresses. ``sums``: place of the first row's."""
        x = code.at("float", "%x", code.mul(first, field["inputs"]))
        sums = code.at("float", "%sums", sums)
        target = code.at("float", at["out"], code.mul(first, "%stride"))
        code.do(
            f"call void @tile{count}(ptr {x}, ptr {sums}, ptr {at['low']}, ptr {at['high']}, "
            f"ptr {at['scale']}, ptr {at['offset']}, ptr {at['bias']}, ptr {target}, i64 %stride, "
            f"i64 {field['inputs']}, i64 {field['groups']}, i64 {field['blocks']}, i64 {at['lanes']}, "
            "i1 %accumulate)"
        )

    def _tile_addresses(self, code: Function, field: dict[str, str], index: str) -> dict[str, str]:
        """Return a tile's addresses, and how many of its 16 outputs exist."""
        low, high = tile_strides(code, self._kind, field["inputs"])
        values = code.mul(field["groups"], TILE)
        output = code.mul(index, TILE)
        bias = code.at("float", field["bias"], output)
        left = code.value(f"sub i64 {field['outputs']}, {output}")
        return {
            "low": code.at("i32", field["low"], code.mul(index, low)),
            "high": code.at(f"i{self._kind.high_bits or 32}", field["high"], code.mul(index, high)),
            "scale": code.at("half", field["scale"], code.mul(index, values)),
            "offset": code.at("half", field["offset"], code.mul(index, values)),
            "bias": code.value(f"select i1 {code.is_null(field['bias'])}, ptr null, ptr {bias}"),
            "lanes": code.value(f"call i64 @llvm.smin.i64(i64 {left}, i64 {TILE})"),
            "out": code.at("float", "%out", code.add(field["column"], output)),
        }

    # --- many rows ----------------------------------------------------------------------------------------

    def _work_panels(self) -> str:
        """Write the same for many rows: unpack the codes of a tile's next groups, a panel, to a core's cache, then
        multiply them with all rows of a chunk."""
        code = Function("work_panels", _WORK, internal=True)
        field = read_fields(code, "%segment")
        panel = code.variable(f"[{PANEL_INPUTS * TILE} x float]")
        totals = code.variable(f"[{CHUNK_ROWS * TILE} x float]")
        size = code.mul(field["blocks"], 8)
        most = code.value(f"sdiv i64 {PANEL_INPUTS}, {size}")  # groups of a panel
        panels = code.value(f"sdiv i64 {code.add(field['groups'], code.add(most, -1))}, {most}")

        def chunk(first_row: str, last_row: str) -> None:
            def tile(index: str) -> None:
                at = self._tile_addresses(code, field, index)

                def groups(number: str) -> None:
                    first_group = code.mul(number, most)
                    left = code.value(f"sub i64 {field['groups']}, {first_group}")
                    count = code.value(f"call i64 @llvm.smin.i64(i64 {left}, i64 {most})")
                    start = code.mul(first_group, size)
                    first_block, blocks = (code.mul(each, field["blocks"]) for each in (first_group, count))
                    code.do(
                        f"call void @unpack(ptr {at['low']}, ptr {at['high']}, i64 {first_block}, i64 {blocks}, "
                        f"ptr {panel})"
                    )
                    values = code.mul(first_group, TILE)
                    scale, offset = (code.at("half", at[name], values) for name in ("scale", "offset"))

                    def rows(first: str, count_of_rows: int) -> None:
                        x = code.at("float", "%x", code.add(code.mul(first, field["inputs"]), start))
                        sums = code.at("float", "%sums", code.add(code.mul(first, field["groups"]), first_group))
                        own = code.value(f"sub i64 {first}, {first_row}")
                        target = code.at("float", totals, code.mul(own, TILE))
                        code.do(
                            f"call void @panel{count_of_rows}(ptr {x}, ptr {sums}, ptr {panel}, ptr {scale}, "
                            f"ptr {offset}, ptr {target}, i64 {field['inputs']}, i64 {field['groups']}, i64 {count}, "
                            f"i64 {size})"
                        )

                    split_by_counts(code, first_row, last_row, self._most_rows[1], self.panel_counts, rows)

                count = code.value(f"sub i64 {last_row}, {first_row}")
                code.do(f"call void @start_totals(ptr {at['bias']}, ptr {totals}, i64 {count})")
                code.loop("0", panels, groups)
                target = code.at("float", at["out"], code.mul(first_row, "%stride"))
                code.do(
                    f"call void @store_totals(ptr {totals}, ptr {target}, i64 %stride, i64 {count}, "
                    f"i64 {at['lanes']}, i1 %accumulate)"
                )

            code.loop("%first", "%end", tile)

        split_rows(code, "0", "%rows", CHUNK_ROWS, chunk)
        return code.text()

    def _start_totals(self) -> str:
        """Write ``start_totals``: the bias, or zero, in the totals [count, 16] of a tile."""
        code = Function("start_totals", ["ptr %bias", "ptr noalias %totals", "i64 %count"], internal=True)
        values = [code.variable(self._floats, "zeroinitializer") for _ in range(self._vectors)]
        self._start_with_bias(code, [values])

        def row(index: str) -> None:
            target = code.at("float", "%totals", code.mul(index, TILE))
            for vector, value in enumerate(values):
                at = code.at("float", target, str(vector * self._width))
                code.store(self._floats, code.load(self._floats, value), at)

        code.loop("0", "%count", row)
        return code.text()

    def _store_totals(self) -> str:
        """Write ``store_totals``: the first ``lanes`` totals of each row to the rows of ``out``, or added to them."""
        code = Function(
            "store_totals",
            [
                *("ptr noalias %totals", "ptr noalias %out", "i64 %stride", "i64 %count", "i64 %lanes"),
                "i1 %accumulate",
            ],
            internal=True,
        )

        def row(index: str) -> None:
            source = code.at("float", "%totals", code.mul(index, TILE))
            target = code.at("float", "%out", code.mul(index, "%stride"))

            def lane(number: str) -> None:
                at = code.at("float", target, number)
                before = code.value(f"select i1 %accumulate, float {code.load('float', at)}, float 0.0")
                value = code.load("float", code.at("float", source, number))
                code.store("float", code.value(f"fadd float {value}, {before}"), at)

            code.loop("0", "%lanes", lane)

        code.loop("0", "%count", row)
        return code.text()

    def _unpack(self) -> str:
        """Write what ``_levels`` gives of a tile's blocks [first, first + count) to ``panel`` [8 count, 16]."""
        code = Function(
            "unpack",
            ["ptr noalias %low", "ptr noalias %high", "i64 %first", "i64 %count", "ptr noalias %panel"],
            internal=True,
            inline=False,
        )

        def unit(index: str) -> None:
            out = code.at("float", "%panel", code.mul(index, 8 * TILE))
            self._prefetch_codes(code, code.add(code.add("%first", "%count"), index))  # codes of the next panel
            for place, levels in enumerate(self._levels(code, code.add("%first", index))):
                for vector, level in enumerate(levels):
                    at = code.at("float", out, str(place * TILE + vector * self._width))
                    code.store(self._floats, level, at)

        code.loop("0", "%count", unit, step=self._kind.unit)
        return code.text()

    def _prefetch_codes(self, code: Function, block: str) -> None:
        """Fetch a unit, which may be of the next tile, whose codes follow, into the L2 cache."""
        kind = self._kind
        unit = block if kind.unit == 1 else code.value(f"ashr exact i64 {block}, 1")
        for word in range(kind.words):
            code.prefetch(code.at("i32", "%low", code.add(code.mul(unit, TILE * kind.words), word * TILE)))
        if kind.high_bits:
            code.prefetch(code.at(f"i{kind.high_bits}", "%high", code.mul(unit, TILE)))

    def _panel(self, rows: int) -> str:
        """Write the products of ``rows`` rows with a panel of ``count`` groups, added to their totals [rows, 16].

        Each sum has the same terms in the same order as that of a tile, so that a row's result does not depend on how
        many rows there are.
        """
        code = Function(
            f"panel{rows}",
            [
                *(f"ptr noalias %{name}" for name in ("x", "sums", "panel", "scale", "offset", "totals")),
                *("i64 %inputs", "i64 %groups", "i64 %count", "i64 %size"),
            ],
            internal=True,
            inline=False,
        )
        totals = [
            [code.at("float", "%totals", str(row * TILE + vector * self._width)) for vector in range(self._vectors)]
            for row in range(rows)
        ]

        def group(number: str) -> None:
            sums = self._sums(code, "%sums", "%groups", number, rows)
            parts = self._group_sums(code, sums)
            start = code.mul(number, "%size")

            def some(first: str) -> None:
                for place in range(8):
                    self._input(code, parts, code.add(code.add(start, first), place))

            code.loop("0", "%size", some, step=8)
            self._add_group(code, totals, parts, sums, number, stay=self._width < TILE)

        code.loop("0", "%count", group)
        return code.text()

    def _input(self, code: Function, parts: list[list[str]], index: str) -> None:
        """Add the products of one input of a panel."""
        base = code.at("float", "%panel", code.mul(index, TILE))
        places = [code.at("float", base, str(vector * self._width)) for vector in range(self._vectors)]
        values = [code.load(self._floats, place) for place in places]
        for row, vectors in enumerate(parts):
            at = code.add(code.mul("%inputs", row), index)
            x = code.splat("float", code.load("float", code.at("float", "%x", at)), self._width)
            for value, part in zip(values, vectors, strict=True):
                code.store(self._floats, self._fma(code, value, x, code.load(self._floats, part)), part)

    def _half(self, code: Function, base: str, index: str) -> str:
        """Read a vector of float16 as float32."""
        halves = code.load(f"<{self._width} x half>", code.at("half", base, index), align=2)
        return code.value(f"fpext <{self._width} x half> {halves} to {self._floats}")

    def _fma(self, code: Function, a: str, b: str, c: str) -> str:
        kind = self._floats
        return code.value(f"call {kind} @llvm.fma.v{self._width}f32({kind} {a}, {kind} {b}, {kind} {c})")

    def _all(self, value: int) -> str:
        """Return a constant vector."""
        return int_list([value] * self._width)
