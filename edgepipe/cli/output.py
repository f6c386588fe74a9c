"""What every verb prints alike: errors in three lines on stderr, JSON on stdout, tables."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from edgepipe.errors import EdgepipeError
from edgepipe.safe_text import json_text, one_line

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console
    from rich.table import Table

_PIPE_COLUMNS = 1 << 14  # longer than any line
_MARKS = ("error: ", "       ", "   try: ")


def print_error(error: EdgepipeError) -> None:
    """What failed, the measured fact, what to type next."""
    problem, *rest = error.lines()
    width = columns(sys.stderr)
    lines = [wrapped(problem, first=_MARKS[0], width=width)]
    for line in rest:
        is_step = line == one_line(error.next_step)  # one line, however long: it is there to be copied
        lines.append(_MARKS[2] + line if is_step else wrapped(line, first=_MARKS[1], width=width))
    print("\n".join(lines), file=sys.stderr)


def print_bug(error: BaseException) -> None:
    """One line for a mistake of our own."""
    kind = type(error).__name__
    print(
        f"error: edgepipe made a mistake ({kind}: {one_line(str(error), most_chars=200)}); "
        "'edgepipe --debug ...' shows where, 'edgepipe logs' what the node saw",
        file=sys.stderr,
    )


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on stdout."""
    print(json_text(value))


def say(text: str, *, first: str = "") -> None:
    """A sentence on stdout behind ``first``, broken between words where the terminal ends."""
    print(wrapped(text, first=first, width=columns(sys.stdout)), flush=True)


def columns(stream: TextIO) -> int:
    """How wide the terminal is that the stream goes to; without end where it goes elsewhere."""
    return shutil.get_terminal_size().columns if stream.isatty() else sys.maxsize


def wrapped(text: str, *, first: str, width: int) -> str:
    """The text behind ``first``, broken between words where ``width`` columns end."""
    rest = " " * len(first)
    wrapper = textwrap.TextWrapper(
        width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    lines: list[str] = []
    for line in text.split("\n"):
        lines += wrapper.wrap(line)
        wrapper.initial_indent = rest
    return "\n".join(lines)


def as_dict(message: Message) -> dict[str, Any]:
    """A protobuf message as plain values: every field by its name in the .proto, numbers as numbers, bytes as text."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value: Any = getattr(message, field.name)
        if field.message_type is None:
            result[field.name] = [_plain(item) for item in value] if field.is_repeated else _plain(value)
        elif field.is_repeated:
            result[field.name] = [as_dict(item) for item in value]
        else:
            result[field.name] = as_dict(value) if message.HasField(field.name) else None
    return result


def _plain(value: Any) -> Any:
    """Bytes in what is shown are certificates, which are text."""
    return value.decode("ascii", errors="replace") if isinstance(value, bytes) else value


def make_console(*, stderr: bool = False) -> Console:
    """A rich console that lets numbers be numbers and text be text: a name in brackets is no markup, and no link.

    Lines that go to a pipe or a file are not broken: paths and commands in them stay whole.
    """
    from rich.console import Console
    from rich.theme import Theme

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else shutil.get_terminal_size((_PIPE_COLUMNS, 24)).columns
    theme = Theme({"markdown.code": "bold cyan"})  # rich's own has a black background
    return Console(stderr=stderr, width=width, highlight=False, emoji=False, markup=False, theme=theme)


def make_table(*columns: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """A table without lines; the columns in ``right`` hold numbers, those in ``whole`` what is to be copied.

    In a narrow terminal the others break, and none is cut.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        if column in right:
            table.add_column(column, justify="right", no_wrap=True)
        elif column in whole:
            table.add_column(column, no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def bar(fraction: float, *, width: int) -> str:
    """``▕███▌      ▏``"""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    partial = " ▏▎▍▌▋▊▉"[rest] if rest else ""
    return "▕" + ("█" * full + partial).ljust(width) + "▏"
