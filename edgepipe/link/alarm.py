"""Wakes coroutines at a moment, to about a tenth of a millisecond. An event loop's own timers round to milliseconds.

To wake a thread and then a loop takes time. So the alarm aims early by its recent delay.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from itertools import count
from typing import Protocol

from edgepipe.clock import Clock

_FIRST_LATE_S = 0.0001  # a longer delay comes from a busy host and says nothing of the next one


class Alarm(Protocol):
    """A timer for coroutines."""

    async def until(self, moment_s: float) -> None:
        """Return about at ``moment_s`` (monotonic) or, if that has passed, at once."""
        ...


class ThreadAlarm:
    """A thread that sleeps until the next moment and then wakes the loop; it uses no processor time.

    Create it on the loop of its waiters. ``close`` ends the thread.
    """

    def __init__(self, clock: Clock, *, smoothing: float = 0.1) -> None:
        """``smoothing``: the weight of the newest wait; 0: never aim early."""
        self._smoothing = smoothing
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap
        self._order = count()  # futures do not compare
        self._late_s = 0.0  # smoothed delay of past waits
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="alarm", daemon=True)
        self._thread.start()

    async def until(self, moment_s: float) -> None:
        """See ``Alarm.until``."""
        aim_s = moment_s - self._late_s
        if aim_s <= self._clock.monotonic_s():
            return
        future = self._loop.create_future()
        with self._changed:
            heapq.heappush(self._waiting, (aim_s, next(self._order), future))
            if self._waiting[0][2] is future:
                self._changed.notify()
        await future
        late_s = self._clock.monotonic_s() - aim_s
        self._late_s += self._smoothing * (min(late_s, 2 * self._late_s + _FIRST_LATE_S) - self._late_s)

    def close(self) -> None:
        """End the thread. No coroutine may wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                rest_s = self._waiting[0][0] - self._clock.monotonic_s() if self._waiting else None
                if rest_s is None or rest_s > 0:
                    self._changed.wait(rest_s)
                    continue
                _, _, future = heapq.heappop(self._waiting)
                self._loop.call_soon_threadsafe(_ring, future)


def _ring(future: asyncio.Future[None]) -> None:
    if not future.done():  # its waiter may have been cancelled
        future.set_result(None)
