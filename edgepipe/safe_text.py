"""Text from elsewhere made safe to show: names, errors and messages that another machine, or a stranger, has chosen.

A terminal obeys control characters, a log takes every line end for the end of an entry, and a bidirectional override
shows another order than the text has. Such characters are shown as escapes (``\\x1b``, ``\\n``, ``\\u202e``).
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

MAX_LINE_CHARS = 4096  # of one line shown or logged; an error has about 4,000 at most
_JOINERS = "\u200c\u200d"  # emoji and Persian need them, and they only shape their neighbours


def one_line(text: str, *, most_chars: int = MAX_LINE_CHARS) -> str:
    """Text that stays on its line and steers no terminal, cut to ``most_chars``. Safe text comes back as it is."""
    shown = visible(text[: most_chars + 1])
    return shown if len(shown) <= most_chars else shown[: most_chars - 1] + "…"


def visible(text: str, *, keep: str = "") -> str:
    """The same for text of several lines: unsafe characters but those in ``keep`` become escapes; nothing is cut."""
    if text.isprintable():
        return text
    return "".join(char if char in keep or _is_safe(char) else _escape(char) for char in text)


def as_utf8(text: str) -> str:
    """Make text of a terminal, a pipe or a command line fit for UTF-8: other bytes become ``U+FFFD``."""
    return text.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


def json_text(value: Any) -> str:
    """A JSON document to read: unsafe characters are JSON's own escapes, so that it means the same."""
    document = json.dumps(value, ensure_ascii=False, indent=2)
    return "".join(char if char == "\n" or _is_safe(char) else json.dumps(char)[1:-1] for char in document)


def _is_safe(char: str) -> bool:
    """Neither a control character nor a format character, a surrogate, a line or a paragraph separator."""
    return char.isprintable() or char in _JOINERS or unicodedata.category(char) == "Zs"


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
