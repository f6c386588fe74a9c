"""A deadline that is moved far more often than it expires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls ``on_expired`` once when ``limit_s`` pass after ``restart`` without another ``restart`` or ``stop``.

    A restart costs two assignments: when the only timer fires, it checks how much time is left.
    """

    def __init__(self, *, limit_s: float, on_expired: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._on_expired = on_expired
        self._since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        """Whether a limit is running."""
        return self._since_s is not None

    def restart(self) -> None:
        """Start the limit anew."""
        self._since_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._ring)

    def stop(self) -> None:
        """Stop the limit."""
        self._since_s = None

    def close(self) -> None:
        """Stop the limit and cancel the timer."""
        self.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        if self._since_s is None:
            return
        left_s = self._since_s + self._limit_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._ring)
        else:
            self.stop()
            self._on_expired()
