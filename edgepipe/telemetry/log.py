"""Logging: one line per life-cycle change, to stderr and to a rotating file in the node's data directory.

Fixed field names in messages: ``node= stage= request= epoch= pipeline=``. Never prompts, completions or keys.
"""

from __future__ import annotations

import logging
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
_MOST_HELD = 1000  # lines of a daemon that starts


class LineFormatter(logging.Formatter):
    """One line per message, whatever is in it; the lines of a traceback follow, each behind a mark.

    So no text of a peer begins a line, and none of its control characters reaches whoever reads the log.
    """

    def __init__(self, layout: str = _FORMAT) -> None:
        super().__init__(layout)

    def format(self, record: logging.LogRecord) -> str:
        """The message and, of an error, its traceback."""
        record.message = one_line(record.getMessage())
        record.asctime = self.formatTime(record)
        lines = [self.formatMessage(record)]
        if record.exc_info:
            lines += [_CONTINUED + one_line(line) for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


def set_up_logging(*, level: str, file: Path | None = None, layout: str = _FORMAT) -> None:
    """Log to stderr and, for daemons, to ``file`` with rotation. Called once, by a process's main.

    ``layout``: of a line, in logging's words; children leave out the time, which their daemon adds.
    """
    on_terminal = file is not None and sys.stdout.isatty() and sys.stderr.isatty()
    handlers: list[logging.Handler] = [_HeldHandler() if on_terminal else logging.StreamHandler(sys.stderr)]
    if file is not None:
        handlers.append(RotatingFileHandler(file, maxBytes=_FILE_BYTES, backupCount=_FILE_COUNT, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(LineFormatter(layout))
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    logging.raiseExceptions = False  # a line that a full disk refuses is lost, it need not be a traceback
    for noisy in ("asyncio", "httpx", "httpx2", "httpcore", "httpcore2", "zeroconf", "huggingface_hub", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _HeldHandler(logging.StreamHandler[TextIO]):
    """Holds a daemon's lines below WARNING back while it starts: a person reads first that it is ready, and where.

    The log file has them all. Bounded by what a start logs.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._held: deque[logging.LogRecord] | None = deque(maxlen=_MOST_HELD)

    def emit(self, record: logging.LogRecord) -> None:
        """Write or hold the record."""
        if self._held is None or record.levelno >= logging.WARNING:
            super().emit(record)
        else:
            self._held.append(record)

    def show_held(self) -> None:
        """Write what was held, and from now on everything at once."""
        held, self._held = self._held or (), None
        for record in held:
            super().emit(record)


def show_held_lines() -> None:
    """Let a terminal have the lines that were held back until its person knew that the daemon is ready."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _HeldHandler):
            handler.show_held()


_MAX_KEY_CHARS = 400  # a peer may have a part in it


class Once:
    """What a peer can trigger is logged once at its level, then at DEBUG; the memory of it is bounded."""

    def __init__(self, logger: logging.Logger, *, capacity: int = 256) -> None:
        self._logger = logger
        self._capacity = capacity  # keys; a peer that invents more only gets repeated lines
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
        """Log the next one of ``key`` again."""
        self._seen.pop(key[:_MAX_KEY_CHARS], None)
