"""Calls back at a time that may be set anew, so that a pure core gets its ticks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgepipe.clock import Clock


class TickAlarm:
    """One pending time at most; a task of the given group waits for it."""

    def __init__(self, tasks: asyncio.TaskGroup, clock: Clock, ring: Callable[[float], None], *, name: str) -> None:
        """``ring(at_s)``: the time has come; a timer may be a hair early, so use ``at_s`` as the least time."""
        self._tasks = tasks
        self._clock = clock
        self._ring = ring
        self._name = name
        self._at_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    def set(self, at_s: float | None) -> None:
        """Replace the pending time (monotonic seconds); None: no time is pending."""
        if at_s == self._at_s:
            return
        if self._task is not None:
            self._task.cancel()
        self._at_s = at_s
        self._task = self._tasks.create_task(self._wait(at_s), name=self._name) if at_s is not None else None

    async def _wait(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._clock.monotonic_s()))
        self._at_s = self._task = None
        self._ring(at_s)
