"""LLVM code of single rows of packed weights, such as those of an embedding table."""

from __future__ import annotations

from edgepipe_torch.cpu.code_vectors import as_float, e2m1_bytes, int_list
from edgepipe_torch.cpu.frame import read_fields
from edgepipe_torch.cpu.ir_text import Function
from edgepipe_torch.cpu.kinds import LAST, SCALE_FACTOR, SUM_FACTOR, TILE, ZERO, Kind, code_place, part_place


class TakeCode:
    """Writes the function ``take_...`` of one kind. It needs ``fma_declaration(8)``."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def text(self) -> str:
        """Write ``take_...``: the values [count, I] of rows ``ids``."""
        code = Function(f"take_{self._kind.name}", ["ptr %segment", "ptr %ids", "i64 %count", "ptr %out"])
        field = read_fields(code, "%segment")
        kind = self._kind
        low_stride, high_stride = tile_strides(code, self._kind, field["inputs"])
        values = code.mul(field["groups"], TILE)
        factor = code.load("float", code.at("float", field["factors"], str(SCALE_FACTOR)))
        factors = code.splat("float", factor, 8)
        total_blocks = code.value(f"sdiv i64 {field['inputs']}, 8")

        def row(index: str) -> None:
            number = code.load("i64", code.at("i64", "%ids", index))
            tile, lane = code.value(f"sdiv i64 {number}, {TILE}"), code.value(f"srem i64 {number}, {TILE}")
            low = code.at("i32", field["low"], code.mul(tile, low_stride))
            low = code.at(kind.number or "i32", low, lane)
            high = code.at(f"i{kind.high_bits or 32}", field["high"], code.add(code.mul(tile, high_stride), lane))
            scale = code.at("half", field["scale"], code.add(code.mul(tile, values), lane))
            offset = code.at("half", field["offset"], code.add(code.mul(tile, values), lane))
            out = code.at("float", "%out", code.mul(index, field["inputs"]))

            def unit(number: str) -> None:
                group = code.mul(code.value(f"sdiv i64 {number}, {field['blocks']}"), TILE)
                scales = "" if kind.number else code.splat("float", self._single(code, scale, group), 8)
                for index, levels in enumerate(self._eights(code, low, high, number)):
                    value = levels
                    if not kind.number:
                        value = self._values(code, field, levels, scales, factors, offset, group)
                    code.store("<8 x float>", value, code.at("float", out, code.mul(code.add(number, index), 8)))

            code.loop("0", total_blocks, unit, step=kind.unit)

        code.loop("0", "%count", row)
        return code.text()

    def _values(
        self, code: Function, field: dict[str, str], levels: str, scales: str, factors: str, offset: str, group: str
    ) -> str:
        """Return one output's values of 8 inputs."""
        if self._kind.added:  # factors[SUM_FACTOR]: of the offset; without rounding the product of scale and code
            shift = code.load("float", code.at("float", field["factors"], str(SUM_FACTOR)))
            added = code.value(f"fmul float {self._single(code, offset, group)}, {shift}")
            scales = code.value(f"fmul <8 x float> {scales}, {factors}")
            parts = (levels, scales, code.splat("float", added, 8))
            return code.value(f"call <8 x float> @llvm.fma.v8f32({', '.join(f'<8 x float> {part}' for part in parts)})")
        zero = code.load("float", code.at("float", field["factors"], str(ZERO)))
        centred = code.value(f"fsub <8 x float> {levels}, {code.splat('float', zero, 8)}")
        centred = code.value(f"fmul <8 x float> {centred}, {factors}")
        return code.value(f"fmul <8 x float> {centred}, {scales}")

    def _eights(self, code: Function, low: str, high: str, block: str) -> list[str]:
        """Return the levels of one output's inputs of the unit that begins with ``block``, 8 in each vector."""
        kind = self._kind
        if kind.number:
            return [self._eight_numbers(code, low, block)]
        unit = code.value(f"sdiv i64 {block}, {kind.unit}")
        base = code.mul(unit, TILE * kind.words)
        words = [code.load("i32", code.at("i32", low, code.add(base, TILE * word))) for word in range(kind.words)]
        last = ""  # the code made of parts
        if kind.split:
            element = f"i{kind.high_bits}"
            above = code.load(element, code.at(element, high, code.mul(unit, TILE)), align=2)
            words.append(above if kind.bits == 6 else code.value(f"zext i16 {above} to i32"))
            for word, each in enumerate(words):
                top = code.value(f"lshr i32 {each}, {part_place(kind, word)}")
                last = code.value(f"or i32 {last}, {code.value(f'shl i32 {top}, {2 * word}')}") if last else top
        found: list[str] = []
        for first in range(0, 8 * kind.unit, 8):
            vector, shifts = "poison", []
            for lane in range(8):
                word, shift = code_place(kind, first + lane)
                source, shift = (last, 0) if last and first + lane == LAST else (words[word], shift)
                vector = code.value(f"insertelement <8 x i32> {vector}, i32 {source}, i32 {lane}")
                shifts.append(shift)
            moved = code.value(f"lshr <8 x i32> {vector}, {int_list(shifts)}")
            codes = code.value(f"and <8 x i32> {moved}, {int_list([(1 << kind.bits) - 1] * 8)}")
            if kind.floats:
                sign = code.value(f"and <8 x i32> {codes}, {int_list([128] * 8)}")
                rest = code.value(f"and <8 x i32> {codes}, {int_list([127] * 8)}")
                sign, rest = (
                    code.value(f"shl <8 x i32> {each}, {int_list([by] * 8)}") for each, by in ((sign, 24), (rest, 20))
                )
                found.append(
                    code.value(f"bitcast <8 x i32> {code.value(f'or <8 x i32> {sign}, {rest}')} to <8 x float>")
                )
            elif kind.e2m1:
                levels = code.value(f"and <8 x i32> {e2m1_bytes(code, codes, 8)}, {int_list([255] * 8)}")
                found.append(code.value(f"sitofp <8 x i32> {levels} to <8 x float>"))
            else:
                found.append(code.value(f"sitofp <8 x i32> {codes} to <8 x float>"))
        return found

    def _eight_numbers(self, code: Function, low: str, block: str) -> str:
        """Return the values of one output's inputs of a block."""
        number, vector = self._kind.number, "poison"
        for lane in range(8):
            at = code.at(number, low, code.add(code.mul(block, 8 * TILE), lane * TILE))
            each = code.load(number, at, align=2)
            vector = code.value(f"insertelement <8 x {number}> {vector}, {number} {each}, i32 {lane}")
        return as_float(code, self._kind, vector, 8)

    def _single(self, code: Function, base: str, index: str) -> str:
        half = code.load("half", code.at("half", base, index), align=2)
        return code.value(f"fpext half {half} to float")


def tile_strides(code: Function, kind: Kind, inputs: str) -> tuple[str, str]:
    """Return the elements of a tile in both planes."""
    units = code.value(f"sdiv i64 {inputs}, {8 * kind.unit}")
    return code.mul(units, TILE * kind.words), code.mul(units, TILE) if kind.high_bits else "0"
