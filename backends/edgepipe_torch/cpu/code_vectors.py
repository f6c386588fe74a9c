"""LLVM code that turns vectors of stored numbers into floats and bytes."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe_torch.cpu.ir_text import Function
from edgepipe_torch.cpu.kinds import E2M1_ZERO, Kind


def as_float(code: Function, kind: Kind, vector: str, width: int) -> str:
    """Return a vector of numbers as float32."""
    if kind.number == "float":
        return vector
    if kind.number == "half":
        return code.value(f"fpext <{width} x half> {vector} to <{width} x float>")
    ints = f"<{width} x i32>"
    wide = code.value(f"zext <{width} x i16> {vector} to {ints}")
    moved = code.value(f"shl {ints} {wide}, {int_list([16] * width)}")
    return code.value(f"bitcast {ints} {moved} to <{width} x float>")


def e2m1_bytes(code: Function, codes: str, width: int) -> str:
    """Return the E2M1_BYTES of codes in the bytes of words. No byte reaches into its neighbour.

    A magnitude t of 4 and more, whose lower bits are r, has ``t + r``, and 2 more for r = 3.
    """
    kind = f"<{width} x i32>"

    def do(operation: str, word: str, other: str | int, *, every_byte: bool = False) -> str:
        number = int(other) * 0x01010101 if every_byte else other
        return code.value(
            f"{operation} {kind} {word}, {int_list([number] * width) if isinstance(number, int) else number}"
        )

    magnitude = do("and", codes, 7, every_byte=True)
    large = do("and", codes, 4, every_byte=True)
    rest = do("and", magnitude, do("sub", large, do("lshr", large, 2)))
    both = do("and", rest, do("lshr", rest, 1))
    value = do("add", do("add", magnitude, rest), do("shl", both, 1))
    sign = do("and", codes, 8, every_byte=True)
    ones = do("sub", do("shl", sign, 2), do("lshr", sign, 3))  # 31 of a negative value: 12 - v is (v ^ 31) + 12 - 31
    return do("sub", do("add", do("xor", value, ones), E2M1_ZERO, every_byte=True), ones)


def fma_declaration(width: int) -> str:
    """Return the declaration of a fused multiply-add."""
    kind = f"<{width} x float>"
    return f"declare {kind} @llvm.fma.v{width}f32({kind}, {kind}, {kind})\n"


def int_list(values: Sequence[int]) -> str:
    """Return a constant vector of 32-bit integers."""
    return "<" + ", ".join(f"i32 {value}" for value in values) + ">"
