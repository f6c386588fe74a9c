"""LLVM code that splits rows into parts of about the same size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgepipe_torch.cpu.ir_text import Function


def parts_of(rows: int, most: int) -> list[int]:
    """Split rows into as few parts of about the same size as possible, of ``most`` rows or fewer: their sizes."""
    count = -(-rows // most)
    return [rows * (index + 1) // count - rows * index // count for index in range(count)]


def part_sizes(rows: range, most: int) -> list[int]:
    """Return the sizes of the parts of any of some numbers of rows."""
    return sorted({size for count in rows for size in parts_of(count, most)})


def split_rows(code: Function, first: str, end: str, most: int, body: Callable[[str, str], None]) -> None:
    """Split rows [first, end) as ``parts_of`` does; ``body`` gets a part's first row and its end."""
    rows = code.value(f"sub i64 {end}, {first}")
    count = code.value(f"sdiv i64 {code.add(rows, most - 1)}, {most}")

    def bound(index: str) -> str:
        return code.add(first, code.value(f"sdiv i64 {code.mul(rows, index)}, {count}"))

    code.loop("0", count, lambda index: body(bound(index), bound(code.add(index, 1))))


def split_by_counts(
    code: Function, first: str, end: str, most: int, sizes: Sequence[int], body: Callable[[str, int], None]
) -> None:
    """Split rows [first, end) as ``parts_of`` does; ``body`` gets a part's first row and its size, one of ``sizes``."""

    def part(begin: str, stop: str) -> None:
        found = code.value(f"sub i64 {stop}, {begin}")
        for size in sizes:
            code.branch(code.value(f"icmp eq i64 {found}, {size}"), lambda size=size: body(begin, size))

    split_rows(code, first, end, most, part)
