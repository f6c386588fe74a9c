"""Events on their way to the recovery core."""

from __future__ import annotations

import asyncio
from collections import deque

from edgepipe.clock import Clock
from edgepipe.engine.recovery_types import ClusterChanged, Event, MoveProposed, Stopped, Tick


class EventQueue:
    """Queue of events. It holds at most one of each kind from outside the engine, and one of each of its tasks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: deque[Event | Exception] = deque()
        self._arrived = asyncio.Event()

    def post(self, event: Event) -> None:
        """Queue an event. A newer event from outside replaces a queued one of its kind."""
        if isinstance(event, ClusterChanged | MoveProposed | Stopped):
            for older in [queued for queued in self._events if type(queued) is type(event)]:
                self._events.remove(older)
        self._events.append(event)
        self._arrived.set()

    def fail(self, bug: Exception) -> None:
        """Let ``next`` raise an unexpected exception that ended a task."""
        self._events.append(bug)
        self._arrived.set()

    async def next(self, *, wake_at_s: float | None) -> Event:
        """Wait for the next event, or return a tick at ``wake_at_s``. Raises what ``fail`` was given."""
        while not self._events:
            self._arrived.clear()
            try:
                async with asyncio.timeout(None if wake_at_s is None else max(0.0, wake_at_s - self._now_s())):
                    await self._arrived.wait()
            except TimeoutError:
                return Tick()
        event = self._events.popleft()
        if isinstance(event, Exception):
            raise event
        return event

    def _now_s(self) -> float:
        return self._clock.monotonic_s()
