"""Tables in terminals of any width: no word is broken that has room, and no column is lost."""

from __future__ import annotations

import io
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from edgepipe.cli.output import bar, make_table

WORDS = st.text("abc…한", min_size=1, max_size=6)
TEXTS = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)


def shown(table: Any, width: int) -> list[str]:
    """The table as lines of plain text."""
    console = Console(file=io.StringIO(), width=width, highlight=False, emoji=False, markup=False)
    console.print(table)
    file: Any = console.file
    return file.getvalue().splitlines()


@given(
    rows=st.lists(st.tuples(TEXTS, TEXTS, TEXTS, WORDS), min_size=1, max_size=4),
    width=st.integers(min_value=30, max_value=120),
)
def test_every_word_stands_whole_somewhere(rows: list[tuple[str, str, str, str]], width: int) -> None:
    table = make_table("FIRST", "SECOND", "THIRD", "NUMBER", right=("NUMBER",))
    for row in rows:
        table.add_row(*row)
    lines = shown(table, width)
    console = Console(width=width)
    assert all(console.measure(line).maximum <= width for line in lines)
    found = {word for line in lines for word in line.split()}
    assert found >= {word for row in rows for cell in row for word in cell.split()}
    assert found >= {"FIRST", "SECOND", "THIRD", "NUMBER"}


def test_columns_without_room_follow_below_behind_the_first_column() -> None:
    table = make_table("NODE", "WEIGHTS", "BUSY", right=("WEIGHTS", "BUSY"))
    table.add_row("living-room", "19.3 GB", "38%")
    assert [line.rstrip() for line in shown(table, 22)] == [
        "NODE         WEIGHTS",
        "living-room  19.3 GB",
        "NODE         BUSY",
        "living-room   38%",
    ]
    assert shown(table, 26) == ["NODE         WEIGHTS  BUSY", "living-room  19.3 GB   38%"]


def test_an_indent_belongs_to_the_first_word() -> None:
    table = make_table("  STAGE", "A", "B", "C", right=("A", "B", "C"))
    table.add_row("  gamer", "96.6 MB", "575.1 MB", "39.0 ms")
    shown_lines = [line.rstrip() for line in shown(table, 33)]
    assert shown_lines[:2] == ["  STAGE        A         B", "  gamer  96.6 MB  575.1 MB"]


def test_a_bar_is_one_word() -> None:
    table = make_table("NODE", "MEMORY")
    table.add_row("a", f"{bar(0.3, width=8)} 12 of 48 GB")
    assert [line.rstrip() for line in shown(table, 18)] == ["NODE  MEMORY", "a     ▕██▍     ▏", "      12 of 48 GB"]
