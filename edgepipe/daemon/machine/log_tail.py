"""The daemon's log for the command line: the last lines, then new ones."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator

from edgepipe.telemetry.log import LineFormatter

_KEPT_LINES = 2000  # about 200 KB
_MAX_WAITING = 1000  # lines for one slow reader; it misses older ones


class LogTail(logging.Handler):
    """Keeps the newest lines in memory and passes new ones on. Create it on the event loop of its readers."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())
        self._loop = asyncio.get_running_loop()
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._readers: set[asyncio.Queue[str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record from logging, on the thread that logs."""
        for line in self.format(record).split("\n"):
            self._lines.append(line)
            for reader in list(self._readers):
                self._loop.call_soon_threadsafe(_offer, reader, line)

    async def lines(self, *, last: int, follow: bool) -> AsyncIterator[str]:
        """Yield the last lines, oldest first, and with ``follow`` all new ones."""
        reader: asyncio.Queue[str] = asyncio.Queue(_MAX_WAITING)
        known = list(self._lines)[-last:] if last else []
        self._readers.add(reader)
        try:
            for line in known:
                yield line
            while follow:
                yield await reader.get()
        finally:
            self._readers.discard(reader)


def _offer(reader: asyncio.Queue[str], line: str) -> None:
    if reader.full():
        reader.get_nowait()
    reader.put_nowait(line)
