"""Logging: one line per life-cycle change, to stderr and to a rotating file in the node's data directory.

Fixed field names in messages: ``node= stage= request= epoch= pipeline=``. Never prompts, completions or keys.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from logging.handlers import RotatingFileHandler
from pathlib import Path

from edgepipe.safe_text import one_line

_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
_CONTINUED = "  | "
_FILE_BYTES = 4 << 20  # a quiet node writes some KB a day
_FILE_COUNT = 3


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
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        handlers.append(RotatingFileHandler(file, maxBytes=_FILE_BYTES, backupCount=_FILE_COUNT, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(LineFormatter(layout))
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    logging.raiseExceptions = False  # a line that a full disk refuses is lost, it need not be a traceback
    for noisy in ("asyncio", "httpx", "httpx2", "httpcore", "httpcore2", "zeroconf", "huggingface_hub", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


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
