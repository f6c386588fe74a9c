"""Logging: one line per life-cycle change, to stderr and a rotating file in the node's data directory.

Fixed field names in messages: ``node= stage= request= epoch= pipeline=``. Never prompts, completions or keys.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections import OrderedDict, deque
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from edgepipe.safe_text import one_line

_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
_CONTINUED = "  | "
_FILE_BYTES = 4 << 20  # a quiet node writes some KB a day
_FILE_COUNT = 3
_MOST_HELD = 1000  # lines during a daemon's start


class LineFormatter(logging.Formatter):
    """Formats each message as one line, followed by the marked lines of a traceback.

    So a peer's text can neither start a line nor bring control characters into the log.
    """

    def __init__(self, layout: str = _FORMAT) -> None:
        super().__init__(layout)

    def format(self, record: logging.LogRecord) -> str:
        """Return the message and, for an error, its traceback."""
        record.message = one_line(record.getMessage())
        record.asctime = self.formatTime(record)
        lines = [self.formatMessage(record)]
        if record.exc_info:
            lines += [_CONTINUED + one_line(line) for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


def set_up_logging(*, level: str, file: Path | None = None, layout: str = _FORMAT) -> None:
    """Log to stderr (unless that is a plain file) and, for daemons, to ``file`` with rotation. Call once, in a main.

    ``layout``: format of a line; children omit the time, which their daemon adds.
    """
    on_terminal = file is not None and sys.stdout.isatty() and sys.stderr.isatty()
    handlers: list[logging.Handler] = [_HeldHandler() if on_terminal else logging.StreamHandler(sys.stderr)]
    if file is not None:
        if _is_plain_file(sys.stderr):
            handlers.clear()  # launchd sends stderr to a file that nothing shortens; ``file`` has the same lines
        handlers.append(RotatingFileHandler(file, maxBytes=_FILE_BYTES, backupCount=_FILE_COUNT, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(LineFormatter(layout))
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    logging.raiseExceptions = False  # if the disk is full, lose the line without a traceback
    for noisy in ("asyncio", "httpx", "httpx2", "httpcore", "httpcore2", "zeroconf", "huggingface_hub", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _is_plain_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # closed, or no file at all
        return False


class _HeldHandler(logging.StreamHandler[TextIO]):
    """Holds back a daemon's lines below WARNING during its start, so that its ready message comes first.

    The log file has all lines.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._held: deque[logging.LogRecord] | None = deque(maxlen=_MOST_HELD)

    def emit(self, record: logging.LogRecord) -> None:
        """Write or hold a record."""
        if self._held is None or record.levelno >= logging.WARNING:
            super().emit(record)
        else:
            self._held.append(record)

    def show_held(self) -> None:
        """Write the held records, and all later ones at once."""
        held, self._held = self._held or (), None
        for record in held:
            super().emit(record)


def show_held_lines() -> None:
    """Write the lines held back during the daemon's start to the terminal."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _HeldHandler):
            handler.show_held()


_MAX_KEY_CHARS = 400  # may contain a peer's text


def not_of_a_hang_up(record: logging.LogRecord) -> bool:
    """Return False for gRPC's report that the other side had hung up when a stream's status was sent.

    The code that reads the stream sees the hang-up itself.
    """
    failure = record.exc_info[0] if record.exc_info else None
    return failure is None or failure.__name__ != "ExecuteBatchError"


class Once:
    """Logs events that a peer can trigger once at their level, then at DEBUG, with bounded memory."""

    def __init__(self, logger: logging.Logger, *, capacity: int = 256) -> None:
        self._logger = logger
        self._capacity = capacity  # keys; a peer that invents more only causes repeated lines
        self._seen: OrderedDict[str, None] = OrderedDict()

    def log(self, level: int, key: str, message: str, *args: object) -> None:
        """Log ``message`` at ``level`` unless ``key`` was logged before."""
        key = key[:_MAX_KEY_CHARS]
        first = key not in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        self._logger.log(level if first else logging.DEBUG, message, *args)

    def forget(self, key: str) -> None:
        """Log the next message of ``key`` at its level again."""
        self._seen.pop(key[:_MAX_KEY_CHARS], None)
