"""Write LLVM assembly: a function's text with numbered values, counted loops and branches.

Pointers are opaque and variables live on the stack; LLVM's optimiser turns them into registers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache

PREFETCH_DECLARATION = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)\n"


class Function:
    """The body of one function while it is written. Values are names such as ``%v3``, or constants such as ``7``."""

    def __init__(self, name: str, parameters: Sequence[str], *, internal: bool = False, inline: bool = True) -> None:
        """``parameters``: type and name, such as ``ptr %x``."""
        linkage, inlining = "internal " if internal else "", "" if inline else " noinline"
        self._head = f"define {linkage}void @{name}({', '.join(parameters)}){inlining} #0"
        self._variables: list[str] = []
        self._lines: list[str] = []
        self._count = 0

    def text(self) -> str:
        """Return the finished function, which returns nothing."""
        return "\n".join([f"{self._head} {{", "entry:", *self._variables, *self._lines, "  ret void", "}", ""])

    def value(self, operation: str) -> str:
        """Write an operation; return the name of its result."""
        self._count += 1
        self._lines.append(f"  %v{self._count} = {operation}")
        return f"%v{self._count}"

    def do(self, operation: str) -> None:
        """Write an operation without a result."""
        self._lines.append(f"  {operation}")

    def variable(self, kind: str, initial: str | None = None) -> str:
        """Make a variable on the stack; return its address."""
        self._count += 1
        address = f"%a{self._count}"
        self._variables.append(f"  {address} = alloca {kind}, align 64")
        if initial is not None:
            self.store(kind, initial, address)
        return address

    def label(self, name: str) -> None:
        """Begin a block that a branch names; the block before has ended with a branch."""
        self._lines.append(f"{name}:")

    def load(self, kind: str, address: str, *, align: int = 4, volatile: bool = False) -> str:
        """Read a value. ``volatile``: at this very place, not from a register."""
        return self.value(f"load {'volatile ' * volatile}{kind}, ptr {address}, align {align}")

    def store(self, kind: str, value: str, address: str, *, align: int = 4, volatile: bool = False) -> None:
        """Write a value. ``volatile``: at this very place."""
        self.do(f"store {'volatile ' * volatile}{kind} {value}, ptr {address}, align {align}")

    def prefetch(self, address: str) -> None:
        """Fetch the cache line of an address, which need not exist, into the L2 cache."""
        self.do(f"call void @llvm.prefetch.p0(ptr {address}, i32 0, i32 2, i32 1)")

    def at(self, kind: str, base: str, index: str) -> str:
        """Return the address of an array's element."""
        return self.value(f"getelementptr {kind}, ptr {base}, i64 {index}")

    def add(self, a: str, b: str | int) -> str:
        """Add 64-bit integers."""
        return self.value(f"add i64 {a}, {b}")

    def mul(self, a: str, b: str | int) -> str:
        """Multiply 64-bit integers."""
        return self.value(f"mul i64 {a}, {b}")

    def is_null(self, address: str) -> str:
        """Compare an address with null (i1)."""
        return self.value(f"icmp eq ptr {address}, null")

    def splat(self, kind: str, value: str, width: int) -> str:
        """Return a vector that repeats a value."""
        vector = f"<{width} x {kind}>"
        first = self.value(f"insertelement {vector} poison, {kind} {value}, i32 0")
        return self.value(f"shufflevector {vector} {first}, {vector} poison, <{width} x i32> zeroinitializer")

    def loop(self, start: str, end: str, body: Callable[[str], None], *, step: int = 1) -> None:
        """Call ``body`` once, to write the loop's body for index ``start``, ``start + step`` ... below ``end``."""
        index = self.variable("i64", start)
        self._count += 1
        name = self._count
        self.do(f"br label %head{name}")
        self._lines.append(f"head{name}:")
        current = self.load("i64", index)
        going = self.value(f"icmp slt i64 {current}, {end}")
        self.do(f"br i1 {going}, label %body{name}, label %done{name}")
        self._lines.append(f"body{name}:")
        body(current)
        self.store("i64", self.add(current, step), index)
        self.do(f"br label %head{name}")
        self._lines.append(f"done{name}:")

    def branch(self, condition: str, then: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
        """Write both arms of a condition (i1)."""
        self._count += 1
        name = self._count
        self.do(f"br i1 {condition}, label %then{name}, label %else{name}")
        for label, arm in (("then", then), ("else", otherwise)):
            self._lines.append(f"{label}{name}:")
            if arm is not None:
                arm()
            self.do(f"br label %end{name}")
        self._lines.append(f"end{name}:")


def float_constant(value: float) -> str:
    """Return a float32 constant. LLVM writes it as the bits of the double of the same value."""
    (single,) = struct.unpack("<f", struct.pack("<f", value))
    return f"0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X}"


@cache
def float_bits(value: float) -> int:
    """Return the bits of a float32, sign-extended."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return bits
