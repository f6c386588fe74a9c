"""Make foreign text safe to show: names, errors and messages that another machine or a stranger has chosen.

A terminal executes control characters, a log treats a line end as the end of an entry, and a bidirectional override
reorders text. Such characters are shown as escapes (``\\x1b``, ``\\n``, ``\\u202e``).
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

MAX_LINE_CHARS = 4096  # longest line that is shown or logged; an error has about 4,000 characters at most
_JOINERS = "\u200c\u200d"  # needed for emoji and Persian; they only affect the shape of their neighbours


def one_line(text: str, *, most_chars: int = MAX_LINE_CHARS) -> str:
    """Return text as one safe line, cut to ``most_chars``. Safe text is returned unchanged."""
    shown = visible(text[: most_chars + 1])
    return shown if len(shown) <= most_chars else shown[: most_chars - 1] + "…"


def visible(text: str, *, keep: str = "") -> str:
    """Return text with unsafe characters as escapes, except those in ``keep``. It may have several lines, uncut."""
    if text.isprintable():
        return text
    return "".join(char if char in keep or _is_safe(char) else _escape(char) for char in text)


def as_utf8(text: str) -> str:
    """Make text of a terminal, a pipe or a command line fit for UTF-8: other bytes become ``U+FFFD``."""
    return text.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


def json_text(value: Any) -> str:
    """Format a JSON document. Unsafe characters become JSON escapes, so the meaning is the same."""
    document = json.dumps(value, ensure_ascii=False, indent=2)
    return "".join(char if char == "\n" or _is_safe(char) else json.dumps(char)[1:-1] for char in document)


def _is_safe(char: str) -> bool:
    """Return False for control, format and surrogate characters, and for line and paragraph separators."""
    return char.isprintable() or char in _JOINERS or unicodedata.category(char) == "Zs"


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
