"""Output that all verbs share: errors in three lines on stderr, JSON on stdout, tables."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO, cast, get_args, get_type_hints

from edgepipe.errors import EdgepipeError
from edgepipe.ids import NodeId
from edgepipe.plain_words import plain
from edgepipe.safe_text import json_text, one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

_PIPE_COLUMNS = 1 << 14  # longer than any line
_ERROR_FIELDS = ("code", "what", "fact", "next_step", "node", "stage", "request_id")
_MARKS = ("error: ", "       ", "   try: ")


def print_error(error: EdgepipeError) -> None:
    """Print an error: what failed, the measured fact, the command to type next."""
    problem, *rest = error.lines()
    width = columns(sys.stderr)
    lines = [wrapped(problem, first=_MARKS[0], width=width)]
    for line in rest:
        is_step = line == one_line(error.next_step)  # one line of any length, so that it can be copied
        lines.append(_MARKS[2] + line if is_step else wrapped(line, first=_MARKS[1], width=width))
    print("\n".join(lines), file=sys.stderr)


def print_bug(error: BaseException) -> None:
    """Print one line for an error that edgepipe did not foresee."""
    fact = f": {one_line(plain(error), most_chars=200)}" if isinstance(error, OSError) else ""
    print(f"error: edgepipe made a mistake{fact}; details: 'edgepipe --debug ...', 'edgepipe logs'", file=sys.stderr)


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print one JSON document on stdout."""
    print(json_text(value))


def say(text: str, *, first: str = "") -> None:
    """Print a sentence on stdout after ``first``; lines break between words at the terminal's width."""
    print(wrapped(text, first=first, width=columns(sys.stdout)), flush=True)


def columns(stream: TextIO) -> int:
    """Return the columns of the stream's terminal; for a pipe or a file, more than any line has."""
    return shutil.get_terminal_size().columns if stream.isatty() else sys.maxsize


def wrapped(text: str, *, first: str, width: int) -> str:
    """Put the text after ``first``; lines break between words at ``width`` columns."""
    rest = " " * len(first)
    wrapper = textwrap.TextWrapper(
        width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    lines: list[str] = []
    for line in text.split("\n"):
        lines += wrapper.wrap(line)
        wrapper.initial_indent = rest
    return "\n".join(lines)


def as_dict(value: object) -> dict[str, Any]:
    """Convert a dataclass to plain values: numbers as numbers, bytes as text, an unset id as empty text."""
    return {
        name: absent if (part := getattr(value, name)) is None else _plain(part)
        for name, absent in _absent(type(value)).items()
    }


@cache
def _absent(kind: type[Any]) -> dict[str, str | None]:
    """Return the names of a dataclass's fields, each with what stands for None."""
    return {name: "" if NodeId in get_args(hint) else None for name, hint in get_type_hints(kind).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[Any, ...]", value)]
    if isinstance(value, bytes):  # a certificate in PEM, or what is signed
        return value.decode("ascii", errors="replace")
    if isinstance(value, EdgepipeError):
        return {name: getattr(value, name) for name in _ERROR_FIELDS}
    if isinstance(value, Enum):
        return value.value
    return as_dict(value) if is_dataclass(value) else value


def make_console(*, stderr: bool = False) -> Console:
    """Build a rich console that prints text as it is: no colored numbers, no markup from names in brackets, no links.

    In a pipe or a file, lines do not break, so that paths and commands stay whole.
    """
    from rich.console import Console
    from rich.theme import Theme

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else shutil.get_terminal_size((_PIPE_COLUMNS, 24)).columns
    theme = Theme({"markdown.code": "bold cyan"})  # rich's default has a black background
    return Console(stderr=stderr, width=width, highlight=False, emoji=False, markup=False, theme=theme)


def make_table(*columns: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """Build a table without lines. Columns in ``right`` hold numbers, columns in ``whole`` hold text to copy.

    In a narrow terminal the other columns break between words, and columns without room follow below; no text is cut.
    """
    from edgepipe.cli.listing import Listing

    table = Listing()
    for column in columns:
        if column in right:
            table.add_column(column, justify="right", no_wrap=True)
        elif column in whole:
            table.add_column(column, no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def indented(text: Text, *, by: int = 2) -> Padding:
    """Indent all lines of a text, also those that a narrow terminal makes."""
    from rich.padding import Padding

    return Padding.indent(text, by)


def bar(fraction: float, *, width: int) -> str:
    """Draw a bar: ``▕███▌      ▏``."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    partial = " ▏▎▍▌▋▊▉"[rest] if rest else ""
    return "▕" + ("█" * full + partial).ljust(width) + "▏"
