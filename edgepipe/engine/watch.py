"""Notices a step that does not come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgepipe.engine.meter import smooth
from edgepipe.engine.settings import EngineTimeouts
from edgepipe.ids import StepId


class StepWatch:
    """Steps retire in order, so only the oldest has a deadline; it runs from when the step became the oldest.

    One timer, which looks when it rings how much is left: a step costs no timer of its own.
    """

    def __init__(self, *, timeouts: EngineTimeouts, on_late: Callable[[StepId, float], None]) -> None:
        self._timeouts = timeouts
        self._on_late = on_late  # step, seconds waited
        self._loop = asyncio.get_running_loop()
        self._turn_s: dict[int, float] = {}  # by size class of a step: smoothed time as the oldest
        self._oldest: tuple[StepId, int, float] | None = None  # step, its tokens, since when
        self._timer: asyncio.TimerHandle | None = None

    def oldest_is(self, step: StepId, num_tokens: int) -> None:
        """The step that retires next."""
        if self._oldest is None or self._oldest[0] != step:
            self._oldest = (step, num_tokens, self._loop.time())
            self._arm()

    def retired(self) -> None:
        """The oldest step came back."""
        if self._oldest is not None:
            _, num_tokens, since_s = self._oldest
            size = num_tokens.bit_length()
            self._turn_s[size] = smooth(self._turn_s.get(size, 0.0), self._loop.time() - since_s)
            self._oldest = None

    def close(self) -> None:
        """Watch no longer."""
        self._oldest = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def limit_s(self, num_tokens: int) -> float:
        """How long a step of that size may take once it is the oldest."""
        turn_s = self._turn_s.get(num_tokens.bit_length())
        if turn_s is None:
            return self._timeouts.step_first_s
        return max(self._timeouts.step_min_s, self._timeouts.step_factor * turn_s)

    def _arm(self) -> None:
        if self._timer is None and self._oldest is not None:
            _, num_tokens, since_s = self._oldest
            self._timer = self._loop.call_at(since_s + self.limit_s(num_tokens), self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._oldest is None:
            return
        step, num_tokens, since_s = self._oldest
        waited_s = self._loop.time() - since_s
        if waited_s < self.limit_s(num_tokens):
            self._arm()
        else:
            self._oldest = None
            self._on_late(step, waited_s)
