"""What every verb prints alike: errors in three lines on stderr, JSON on stdout, tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgepipe.errors import EdgepipeError

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console
    from rich.table import Table

_MARKS = ("error: ", "       ", "   try: ")


def print_error(error: EdgepipeError) -> None:
    """What failed, the measured fact, what to type next."""
    what, *rest = error.lines()
    lines = [_MARKS[0] + what]
    lines += [_MARKS[2 if line == error.next_step else 1] + line for line in rest]
    print("\n".join(printable(line) for line in lines), file=sys.stderr)


def print_bug(error: BaseException) -> None:
    """One line for a mistake of our own."""
    kind = type(error).__name__
    print(
        f"error: edgepipe made a mistake ({kind}: {printable(str(error))[:200]}); "
        "'edgepipe --debug ...' shows where, 'edgepipe logs' what the node saw",
        file=sys.stderr,
    )


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, ensure_ascii=False, indent=2))


def printable(text: str) -> str:
    """Text from elsewhere without control characters: a name must not move the cursor."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


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
    """A rich console that lets numbers be numbers and text be text."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False)


def make_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines; the columns in ``right`` hold numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def bar(fraction: float, *, width: int) -> str:
    """``▕███▌      ▏``"""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    partial = " ▏▎▍▌▋▊▉"[rest] if rest else ""
    return "▕" + ("█" * full + partial).ljust(width) + "▏"
