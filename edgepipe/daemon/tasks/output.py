"""What a task's command prints (PURE): lines of progress, then one JSON document; an error on stderr."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any

from edgepipe.safe_text import one_line

MOST_RESULT_CHARS = 256 << 10  # a plan of 64 machines has about 60 KB
_PROGRESS = '{"progress":'
_MOST_ERROR_LINES = 12
_MOST_LINE_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One line of progress."""

    phase: str
    bytes_done: int
    bytes_total: int


class TaskOutput:
    """Collects the lines of one command, within bounds."""

    def __init__(self) -> None:
        self._result: list[str] = []
        self._result_chars = 0
        self._errors: deque[str] = deque(maxlen=_MOST_ERROR_LINES)

    def line(self, text: str) -> Progress | None:
        """Take a line of stdout; return it if it is a line of progress."""
        if text.startswith(_PROGRESS):
            return _progress(text)
        self._result_chars += len(text)
        if self._result_chars <= MOST_RESULT_CHARS:
            self._result.append(text)
        return None

    def error_line(self, text: str) -> None:
        """Take a line of stderr."""
        if line := one_line(text.rstrip(), most_chars=_MOST_LINE_CHARS):
            self._errors.append(line)

    @property
    def result(self) -> bytes:
        """The JSON document in ASCII, on one line; empty without one, or if it is too long."""
        try:
            return json.dumps(json.loads("".join(self._result))).encode("ascii")
        except ValueError:
            return b""

    @property
    def error(self) -> tuple[str, ...]:
        """The last lines of stderr."""
        return tuple(self._errors)


def progress_line(*, phase: str, bytes_done: int = 0, bytes_total: int = 0) -> str:
    """Write a line of progress, for commands with ``--progress``."""
    fields = {"phase": phase, "bytes_done": bytes_done, "bytes_total": bytes_total}
    return _PROGRESS + json.dumps(fields) + "}"


def _progress(text: str) -> Progress | None:
    """Read a line of progress; None for a line that another version wrote."""
    try:
        fields: dict[str, Any] = json.loads(text)["progress"]
        return Progress(
            phase=one_line(str(fields["phase"]), most_chars=_MOST_LINE_CHARS),
            bytes_done=max(0, int(fields["bytes_done"])),
            bytes_total=max(0, int(fields["bytes_total"])),
        )
    except (ValueError, KeyError, TypeError):
        return None
