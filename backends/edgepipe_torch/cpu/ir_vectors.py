"""Write vectors of 8 floats in LLVM assembly: exp, sums, and what modules that use them must declare."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe_torch.cpu.ir_text import Function, float_constant

EIGHT = "<8 x float>"
INTS = "<8 x i32>"
LOWEST = -3.0e38  # below every finite score

# exp: Cephes' expf (Moshier, cephes/single/expf.c): 2**n * (1 + r + r**2 * polynomial(r)), r = x - n * ln 2
EXP_LOW, _EXP_HIGH = -87.3, 88.3
_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


# ln: Cephes' logf (Moshier, cephes/single/logf.c): x = m * 2**n, sqrt(1/2) <= m < sqrt(2), a polynomial of m - 1
_ROOT_HALF_BITS = 0x3F3504F3
_LOG_TERMS = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)


def vector_declarations() -> list[str]:
    """Return the declarations of all that this module's functions call."""
    two = f"{EIGHT}, {EIGHT}"
    return [
        f"declare {EIGHT} @llvm.maxnum.v8f32({two})",
        f"declare {EIGHT} @llvm.minnum.v8f32({two})",
        f"declare {EIGHT} @llvm.nearbyint.v8f32({EIGHT})",
        f"declare {EIGHT} @llvm.fma.v8f32({two}, {EIGHT})",
        f"declare float @llvm.vector.reduce.fadd.v8f32(float, {EIGHT})",
        f"declare float @llvm.vector.reduce.fmax.v8f32({EIGHT})",
    ]


def exp(code: Function, x: str) -> str:
    """Return exp of 8 floats, within 2 units of the last place; below -87.3 about 1e-38, as of NaN."""
    x = smaller(code, larger(code, x, repeated(EXP_LOW)), repeated(_EXP_HIGH))
    power = nearest(code, code.value(f"fmul {EIGHT} {x}, {repeated(_LOG2E)}"))
    rest = fma(code, power, repeated(-_LN2_HIGH), x)
    rest = fma(code, power, repeated(-_LN2_LOW), rest)
    found = repeated(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        found = fma(code, found, rest, repeated(term))
    square = code.value(f"fmul {EIGHT} {rest}, {rest}")
    found = fma(code, found, square, code.value(f"fadd {EIGHT} {rest}, {repeated(1.0)}"))
    bits = code.value(f"fptosi {EIGHT} {power} to {INTS}")
    bits = code.value(f"shl {INTS} {bits}, {_ints(23)}")
    grown = code.value(f"add {INTS} {code.value(f'bitcast {EIGHT} {found} to {INTS}')}, {bits}")
    return code.value(f"bitcast {INTS} {grown} to {EIGHT}")


def log(code: Function, x: str) -> str:
    """Return the natural logarithm of 8 positive normal floats, within 2 units of the last place."""
    bits = code.value(f"bitcast {EIGHT} {x} to {INTS}")
    shifted = code.value(f"sub {INTS} {bits}, {_ints(_ROOT_HALF_BITS)}")
    power = code.value(f"ashr {INTS} {shifted}, {_ints(23)}")
    mantissa = code.value(f"sub {INTS} {bits}, {code.value(f'shl {INTS} {power}, {_ints(23)}')}")
    power = code.value(f"sitofp {INTS} {power} to {EIGHT}")
    rest = code.value(f"fadd {EIGHT} {code.value(f'bitcast {INTS} {mantissa} to {EIGHT}')}, {repeated(-1.0)}")
    found = repeated(_LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        found = fma(code, found, rest, repeated(term))
    square = code.value(f"fmul {EIGHT} {rest}, {rest}")
    found = code.value(f"fmul {EIGHT} {found}, {code.value(f'fmul {EIGHT} {rest}, {square}')}")
    found = fma(code, power, repeated(_LN2_LOW), found)
    found = fma(code, square, repeated(-0.5), found)
    return fma(code, power, repeated(_LN2_HIGH), code.value(f"fadd {EIGHT} {rest}, {found}"))


def sum_of(code: Function, vector: str) -> str:
    """Add the 8 floats of a vector."""
    return code.value(f"call reassoc float @llvm.vector.reduce.fadd.v8f32(float 0.0, {EIGHT} {vector})")


def sums_of(code: Function, vectors: Sequence[str]) -> str:
    """Return a vector with the sum of each of 8 vectors."""
    halves = [_added(code, a, b, (0, 2, 8, 10, 4, 6, 12, 14)) for a, b in _pairs(vectors)]
    quarters = [_added(code, a, b, (0, 2, 8, 10, 4, 6, 12, 14)) for a, b in _pairs(halves)]
    low = shuffled(code, quarters[0], (0, 1, 2, 3, 8, 9, 10, 11), quarters[1])
    high = shuffled(code, quarters[0], (4, 5, 6, 7, 12, 13, 14, 15), quarters[1])
    return code.value(f"fadd {EIGHT} {low}, {high}")


def largest_of(code: Function, vector: str) -> str:
    """Return the largest of 8 floats; NaNs do not count."""
    return code.value(f"call float @llvm.vector.reduce.fmax.v8f32({EIGHT} {vector})")


def larger(code: Function, a: str, b: str) -> str:
    """Return the larger of each two floats; NaNs do not count."""
    return code.value(f"call {EIGHT} @llvm.maxnum.v8f32({EIGHT} {a}, {EIGHT} {b})")


def smaller(code: Function, a: str, b: str) -> str:
    """Return the smaller of each two floats; NaNs do not count."""
    return code.value(f"call {EIGHT} @llvm.minnum.v8f32({EIGHT} {a}, {EIGHT} {b})")


def nearest(code: Function, vector: str) -> str:
    """Round to whole numbers, halves to even."""
    return code.value(f"call {EIGHT} @llvm.nearbyint.v8f32({EIGHT} {vector})")


def fma(code: Function, a: str, b: str, c: str) -> str:
    """Return ``a * b + c``, rounded once."""
    return code.value(f"call {EIGHT} @llvm.fma.v8f32({EIGHT} {a}, {EIGHT} {b}, {EIGHT} {c})")


def shuffled(code: Function, vector: str, lanes: Sequence[int], second: str = "poison") -> str:
    """Return lanes of two vectors; those of the second count from 8."""
    chosen = ", ".join(f"i32 {lane}" for lane in lanes)
    return code.value(f"shufflevector {EIGHT} {vector}, {EIGHT} {second}, <8 x i32> <{chosen}>")


def repeated(value: float) -> str:
    """Return a constant vector."""
    return "<" + ", ".join([f"float {float_constant(value)}"] * 8) + ">"


def _ints(value: int) -> str:
    return "<" + ", ".join([f"i32 {value}"] * 8) + ">"


def _pairs(vectors: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(vectors[::2], vectors[1::2], strict=True))


def _added(code: Function, a: str, b: str, evens: Sequence[int]) -> str:
    """Add neighbouring lanes of two vectors, as x86 does in one instruction."""
    odds = [lane + 1 for lane in evens]
    return code.value(f"fadd {EIGHT} {shuffled(code, a, evens, b)}, {shuffled(code, a, odds, b)}")
