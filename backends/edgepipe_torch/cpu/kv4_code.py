"""LLVM code for 4-bit KV; see ``kv_codes.FourBits``. Sums and roundings are those of torch's operations, bit by bit.

A byte of a group has a code of its first half in the low bits, and its counterpart of the second half in the high ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgepipe.spec.kv_forms import KV_8BIT, four_bits
from edgepipe_torch.cpu.ir_text import Function, float_constant
from edgepipe_torch.cpu.ir_vectors import EIGHT, INTS, fma, larger, largest_of, repeated, shuffled, smaller, sum_of
from edgepipe_torch.cpu.kv_code import CodeForm, EightBitCode, code_module
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.kv_codes import FINE_STEPS, LEAST_BITS, MIDDLE, NO_SCALE, SCALE_SHIFT, scale_values

_LEAST_GROUP = 16  # two vectors of codes in eight bytes


def packed_head_module(kv: str, head_dim: int, value_width: int) -> str:
    """Return a module for heads of ``head_dim`` with KV in a form; see ``code_module``. Raises KernelsUnavailable."""
    form: CodeForm = EightBitCode(head_dim) if kv == KV_8BIT else FourBitCode(head_dim, value_width)
    return code_module(form, value_width)


class FourBitCode:
    """See ``CodeForm``."""

    scale_type = "i8"
    has_rests = True

    def __init__(self, head_dim: int, value_width: int) -> None:
        """Raises KernelsUnavailable for sizes whose groups are too small for vectors."""
        self.head_dim = head_dim
        self._group, self._block = four_bits(head_dim, value_width)
        if self._group < _LEAST_GROUP:
            raise KernelsUnavailable(f"groups of {self._group} values are too small for own kernels")
        self.code_bytes = head_dim // 2
        self.num_scales = head_dim // self._group

    def functions(self) -> list[str]:
        """Return ``turn``, the table of scales, and what encoding calls."""
        return [
            _scale_table(),
            _turn(self._block),
            "declare i32 @llvm.smax.i32(i32, i32)",
            "declare i32 @llvm.smin.i32(i32, i32)",
        ]

    def encode(self, code: Function, source: str, codes: str, scales: str, rests: str) -> None:
        vector = code.variable(f"[{self.head_dim} x float]")
        for place in range(0, self.head_dim, 8):
            value = code.load(EIGHT, code.at("float", source, str(place)))
            code.store(EIGHT, value, code.at("float", vector, str(place)))
        self.turn(code, vector, self.head_dim)
        for number in range(self.num_scales):
            start = number * self._group
            parts = [
                code.load(EIGHT, code.at("float", vector, str(start + place))) for place in range(0, self._group, 8)
            ]
            scale = _scale_byte(code, parts)
            code.store("i8", code.value(f"trunc i32 {scale} to i8"), code.at("i8", scales, str(number)), align=1)
            wide = code.splat("float", _scale_of(code, scale), 8)
            whole = [_code_of(code, code.value(f"fdiv {EIGHT} {part}, {wide}")) for part in parts]
            half = len(whole) // 2
            for place, (low, high) in enumerate(zip(whole[:half], whole[half:], strict=True)):
                upper = [code.value(f"lshr {INTS} {each}, {_ints(4)}") for each in (low, high)]
                lower = [code.value(f"and {INTS} {each}, {_ints(15)}") for each in (low, high)]
                for (first, second), target in ((upper, codes), (lower, rests)):
                    both = code.value(f"or {INTS} {first}, {code.value(f'shl {INTS} {second}, {_ints(4)}')}")
                    narrow = code.value(f"trunc {INTS} {both} to <8 x i8>")
                    code.store("<8 x i8>", narrow, code.at("i8", target, str(start // 2 + 8 * place)), align=1)

    def widen(self, code: Function, codes: Sequence[str], scales: Sequence[str], wide: str, size: int) -> str | None:
        half = self._group // 2
        for number, (source, theirs) in enumerate(zip(codes, scales, strict=True)):
            for group in range(size // self._group):
                byte = code.load("i8", code.at("i8", theirs, str(group)), align=1)
                scale = code.splat("float", _scale_of(code, code.value(f"zext i8 {byte} to i32")), 8)
                least = code.value(f"fmul {EIGHT} {scale}, {repeated(-MIDDLE)}")
                start = group * self._group
                for place in range(0, half, 8):
                    found = code.load("<8 x i8>", code.at("i8", source, str(start // 2 + place)), align=1)
                    both = code.value(f"zext <8 x i8> {found} to {INTS}")
                    pair = code.value(f"and {INTS} {both}, {_ints(15)}"), code.value(f"lshr {INTS} {both}, {_ints(4)}")
                    for part, whole in enumerate(pair):
                        value = fma(code, code.value(f"sitofp {INTS} {whole} to {EIGHT}"), scale, least)
                        at = number * size + start + part * half + place
                        code.store(EIGHT, value, code.at("float", wide, str(at)), align=32)
        return None

    def widen_one(
        self, code: Function, codes: str, scales: str, rests: str, is_whole: str, wide: str, size: int
    ) -> None:
        half = self._group // 2
        share = code.value(f"select i1 {is_whole}, float {float_constant(1 / FINE_STEPS)}, float 0.0")
        raised = code.value(f"select i1 {is_whole}, float {float_constant(0.5 / FINE_STEPS)}, float 0.5")
        lowered = code.value(f"fsub float {raised}, {float_constant(MIDDLE + 0.5)}")
        for group in range(size // self._group):
            byte = code.load("i8", code.at("i8", scales, str(group)), align=1)
            scale = _scale_of(code, code.value(f"zext i8 {byte} to i32"))
            wide_scale = code.splat("float", scale, 8)
            lower_scale = code.splat("float", code.value(f"fmul float {scale}, {share}"), 8)
            least = code.splat("float", code.value(f"fmul float {scale}, {lowered}"), 8)
            start = group * self._group
            for place in range(0, half, 8):
                upper, lower = (_pair(code, code.at("i8", each, str(start // 2 + place))) for each in (codes, rests))
                for part in range(2):
                    value = fma(code, upper[part], wide_scale, fma(code, lower[part], lower_scale, least))
                    at = code.at("float", wide, str(start + part * half + place))
                    code.store(EIGHT, value, at, align=32)

    def turn(self, code: Function, vector: str, size: int) -> None:
        code.do(f"call void @turn(ptr {vector}, i64 {size})")


def _turn(block: int) -> str:
    """Write ``turn``: multiply each block of ``size`` floats with the orthonormal Hadamard matrix, in place."""
    code = Function("turn", ["ptr %x", "i64 %size"], internal=True, inline=False)

    def one(start: str) -> None:
        at = code.at("float", "%x", start)
        parts = [code.load(EIGHT, code.at("float", at, str(place))) for place in range(0, block, 8)]
        for half in (1, 2, 4):
            signs = ", ".join(f"float {-1.0 if lane & half else 1.0}" for lane in range(8))
            swap = [lane ^ half for lane in range(8)]
            parts = [fma(code, part, f"<{signs}>", shuffled(code, part, swap)) for part in parts]
        apart = 1
        while apart < len(parts):
            added = list(parts)
            for index in range(len(parts)):
                if not index & apart:
                    first, second = parts[index], parts[index + apart]
                    added[index] = code.value(f"fadd {EIGHT} {first}, {second}")
                    added[index + apart] = code.value(f"fsub {EIGHT} {first}, {second}")
            parts, apart = added, 2 * apart
        for place, part in enumerate(parts):
            value = code.value(f"fmul {EIGHT} {part}, {repeated(block**-0.5)}")
            code.store(EIGHT, value, code.at("float", at, str(8 * place)))

    code.loop("0", "%size", one, step=block)
    return code.text()


def _scale_table() -> str:
    """Write the scales of all bytes; see ``kv_codes.scale_values``."""
    values = scale_values(torch.arange(NO_SCALE + 1, dtype=torch.uint8)).tolist()
    numbers = ", ".join(f"float {float_constant(value)}" for value in values)
    return f"@scales = private unnamed_addr constant [{len(values)} x float] [{numbers}]"


def _scale_of(code: Function, byte: str) -> str:
    """Return the scale of a byte (i32)."""
    index = code.value(f"zext i32 {byte} to i64")
    return code.load("float", code.at("float", "@scales", index))


def _scale_byte(code: Function, parts: Sequence[str]) -> str:
    """Return the byte (i32) of a group's scale; see ``kv_codes.scale_bytes``."""
    highest, unknown = repeated(0.0), repeated(0.0)
    for part in parts:
        highest = larger(code, highest, code.value(f"call {EIGHT} @llvm.fabs.v8f32({EIGHT} {part})"))
        unknown = fma(code, part, repeated(0.0), unknown)
    scale = code.value(f"fmul float {largest_of(code, highest)}, {float_constant(1 / MIDDLE)}")
    scale = code.value(f"fadd float {scale}, {sum_of(code, unknown)}")
    bits = code.value(f"and i32 {code.value(f'bitcast float {scale} to i32')}, {0x7FFFFFFF}")
    bits = code.value(f"lshr i32 {code.value(f'add i32 {bits}, {1 << SCALE_SHIFT - 1}')}, {SCALE_SHIFT}")
    found = code.value(f"call i32 @llvm.smax.i32(i32 {code.value(f'sub i32 {bits}, {LEAST_BITS}')}, i32 0)")
    return code.value(f"call i32 @llvm.smin.i32(i32 {found}, i32 {NO_SCALE})")


def _pair(code: Function, place: str) -> tuple[str, str]:
    """Return the lower and the upper 4 bits of 8 bytes as floats."""
    both = code.value(f"zext <8 x i8> {code.load('<8 x i8>', place, align=1)} to {INTS}")
    parts = code.value(f"and {INTS} {both}, {_ints(15)}"), code.value(f"lshr {INTS} {both}, {_ints(4)}")
    low, high = (code.value(f"sitofp {INTS} {part} to {EIGHT}") for part in parts)
    return low, high


def _code_of(code: Function, value: str) -> str:
    """Return the codes of 8 bits of 8 values in scales; 0 of a NaN."""
    raised = code.value(f"fadd {EIGHT} {value}, {repeated(MIDDLE + 0.5)}")
    raised = code.value(f"fmul {EIGHT} {raised}, {repeated(FINE_STEPS)}")
    kept = smaller(code, larger(code, raised, repeated(0.0)), repeated(255.0))
    return code.value(f"fptosi {EIGHT} {kept} to {INTS}")


def _ints(value: int) -> str:
    return "<" + ", ".join([f"i32 {value}"] * 8) + ">"
