"""Parts of the LLVM code of recurrent layers: the argument of ``step``, loops over rows, gates, vectors of a head.

N rows with one token, C channels of the convolution, H heads, G groups of them. A head's state: DeltaNet [K, V],
Mamba-2 [D, M].
"""

from __future__ import annotations

from collections.abc import Callable

from edgepipe_torch.cpu.ir_text import Function, float_constant
from edgepipe_torch.cpu.ir_vectors import EIGHT, exp, fma, log, repeated, sum_of
from edgepipe_torch.cpu.step_code import float_field

STEP_JOB = (  # 64-bit fields of the argument of ``step``; those that a mixer lacks are 0
    "rows",  # N
    "stride",  # floats between the rows of the input product
    "read",  # [N] int64: the slot that each row reads
    "write",  # [N] int64: and writes
    "threads",
    "calls",  # addresses of GOMP_parallel, omp_get_thread_num, omp_get_num_threads
    "x",  # first row's input product: what the convolution takes [C]
    "into",  # short convolution: factors of x [C]
    "out_of",  # short convolution: factors of the convolution's result [C]
    "last",  # the convolution's last inputs [slots, taps - 1, C]
    "weight",  # [taps, C]
    "bias",  # [C], or 0
    "channels",  # C
    "mixed",  # [N, C]: what the convolution gives, after SiLU; short convolution: what enters the output product
    "z",  # first row's input product: [H V] or [H D]
    "first",  # first row's input product: DeltaNet's alpha [H], Mamba-2's dt [H]
    "second",  # first row's input product: DeltaNet's beta [H]
    "memory",  # [slots, H, K, V] or [slots, H, D, M]
    "heads",  # H
    "groups",  # DeltaNet: key heads; Mamba-2: G
    "tiled",  # DeltaNet: value head v uses key head v % groups
    "steps",  # dt_bias [H]
    "rates",  # exp(A_log) [H]
    "skips",  # Mamba-2: D [H]
    "norm",  # [V] or [H D]
    "low",  # bits of a float: least dt
    "high",  # bits of a float: largest dt
    "epsilon",  # bits of a float, of the norm
    "out",  # [N, H V] or [N, H D]: what enters the output product
)
_NUMBERS = ("rows", "stride", "threads", "channels", "heads", "groups", "tiled", "low", "high", "epsilon")
_LENGTH_EPS = 1e-6  # epsilon in the length of queries and keys
_LINEAR = 20.0  # softplus(x) is x above it, as torch computes


class Phase:
    """A function that computes a thread's share of the items of each row."""

    def __init__(self, name: str) -> None:
        self.code = Function(name, ["ptr %job", "i64 %thread", "i64 %count"], internal=True)
        self.field = read_job(self.code)

    def each(self, items: str, body: Callable[[str, str], None]) -> str:
        """Write the loop over a thread's share of N rows x ``items``: ``body`` of row and item. Return the text."""
        code = self.code
        total = code.mul(self.field["rows"], items)
        start = code.value(f"sdiv i64 {code.mul(total, '%thread')}, %count")
        end = code.value(f"sdiv i64 {code.mul(total, code.add('%thread', 1))}, %count")

        def item(index: str) -> None:
            body(code.value(f"sdiv i64 {index}, {items}"), code.value(f"srem i64 {index}, {items}"))

        code.loop(start, end, item)
        return code.text()

    def made(self, name: str, row: str) -> str:
        """Return the address of a part of a row's input product."""
        return self.code.at("float", self.field[name], self.code.mul(row, self.field["stride"]))

    def slots(self, base: str, row: str, size: str) -> tuple[str, str]:
        """Return the addresses of the states of ``size`` floats that a row reads and writes."""
        code = self.code
        numbers = [code.load("i64", code.at("i64", self.field[name], row), align=8) for name in ("read", "write")]
        read, write = (code.at("float", self.field[base], code.mul(number, size)) for number in numbers)
        return read, write

    def number(self, base: str, index: str) -> str:
        """Return a float, repeated."""
        return self.code.splat("float", self.code.load("float", self.code.at("float", base, index)), 8)

    def eight(self, base: str, place: str) -> str:
        """Return 8 floats."""
        return self.code.load(EIGHT, self.code.at("float", base, place))

    def keep(self, value: str, base: str, place: str) -> None:
        """Store 8 floats."""
        self.code.store(EIGHT, value, self.code.at("float", base, place))

    def do(self, operation: str, a: str, b: str) -> str:
        """Return ``fadd``, ``fsub``, ``fmul`` or ``fdiv`` of 8 floats."""
        return self.code.value(f"{operation} {EIGHT} {a}, {b}")

    def silu(self, x: str) -> str:
        """Return ``x * sigmoid(x)`` of 8 floats."""
        return self.do("fdiv", x, self._one_and_exp_of_minus(x))

    def sigmoid(self, x: str) -> str:
        """Return ``1 / (1 + exp(-x))`` of 8 floats."""
        return self.do("fdiv", repeated(1.0), self._one_and_exp_of_minus(x))

    def _one_and_exp_of_minus(self, x: str) -> str:
        return self.do("fadd", exp(self.code, self.code.value(f"fneg {EIGHT} {x}")), repeated(1.0))

    def softplus(self, x: str) -> str:
        """Return ``ln(1 + exp(x))``, of a large x itself. The quotient makes up for what ``1 + exp(x)`` rounds off."""
        code, grown = self.code, exp(self.code, x)
        one_more = self.do("fadd", grown, repeated(1.0))
        rounded = self.do("fsub", one_more, repeated(1.0))
        found = self.do("fmul", log(code, one_more), self.do("fdiv", grown, rounded))
        tiny = code.value(f"fcmp oeq {EIGHT} {rounded}, zeroinitializer")
        found = code.value(f"select <8 x i1> {tiny}, {EIGHT} {grown}, {EIGHT} {found}")
        large = code.value(f"fcmp ogt {EIGHT} {x}, {repeated(_LINEAR)}")
        return code.value(f"select <8 x i1> {large}, {EIGHT} {x}, {EIGHT} {found}")

    def decay(self, step: str, head: str) -> str:
        """Return ``exp(-rate * step)`` of a head."""
        negative = self.code.value(f"fneg {EIGHT} {self.number(self.field['rates'], head)}")
        return exp(self.code, self.do("fmul", step, negative))

    def inverse_root(self, square: str, epsilon: str) -> str:
        """Return ``1 / sqrt(square + epsilon)`` of floats, repeated."""
        code = self.code
        root = code.value(f"call float @llvm.sqrt.f32(float {code.value(f'fadd float {square}, {epsilon}')})")
        return code.splat("float", code.value(f"fdiv float 1.0, {root}"), 8)

    def unit(self, source: str, target: str, size: int, *, factor: float = 1.0) -> None:
        """Write a vector of length ``factor`` in the direction of ``source``."""
        code = self.code
        scale = self.inverse_root(self.dot(source, source, str(size)), float_constant(_LENGTH_EPS))
        if factor != 1:
            scale = self.do("fmul", scale, repeated(factor))
        code.loop(
            "0",
            str(size),
            lambda place: self.keep(self.do("fmul", self.eight(source, place), scale), target, place),
            step=8,
        )

    def dot(self, a: str, b: str, size: str) -> str:
        """Return the product of two vectors of ``size`` floats."""
        code, sums = self.code, self.code.variable(EIGHT, "zeroinitializer")

        def add(place: str) -> None:
            code.store(EIGHT, fma(code, self.eight(a, place), self.eight(b, place), code.load(EIGHT, sums)), sums)

        code.loop("0", size, add, step=8)
        return sum_of(code, code.load(EIGHT, sums))

    def head_states(self, row: str, head: str, size: int) -> tuple[str, str]:
        """Return the addresses of a head's state of ``size`` floats that a row reads and writes."""
        at = self.code.mul(head, size)
        read, write = self.slots("memory", row, self.code.mul(self.field["heads"], size))
        return self.code.at("float", read, at), self.code.at("float", write, at)

    def mean_root(self, base: str, size: str) -> str:
        """Return the factor of an RMSNorm of ``size`` floats, repeated."""
        code = self.code
        count = code.value(f"sitofp i64 {size} to float")
        mean = code.value(f"fdiv float {self.dot(base, base, size)}, {count}")
        return self.inverse_root(mean, float_field(code, self.field["epsilon"]))


def read_job(code: Function) -> dict[str, str]:
    """Read the fields of ``%job``."""
    return {
        name: code.load("i64" if name in _NUMBERS else "ptr", code.at("i64", "%job", str(index)), align=8)
        for index, name in enumerate(STEP_JOB)
    }
