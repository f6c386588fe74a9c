"""Watchdog for steps that do not come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgepipe.engine.meter import smooth
from edgepipe.engine.settings import EngineTimeouts
from edgepipe.ids import StepId


class Deadlines:
    """Deadlines for the oldest step in flight.

    A step in an otherwise empty ring has its whole turn ahead when it becomes the oldest. Where steps follow one
    another, the oldest is nearly back, so times measured as the oldest do not cover a turn. They cover what the
    prediction omits: sampling, hosts, other programs.
    """

    def __init__(self, timeouts: EngineTimeouts) -> None:
        self._timeouts = timeouts
        self._took_s: dict[int, float] = {}  # smoothed time as the oldest step, by size class

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record the time from a step becoming the oldest to its return."""
        size = num_tokens.bit_length()
        self._took_s[size] = smooth(self._took_s.get(size, 0.0), seconds)

    def limit_s(self, num_tokens: int, turn_s: float) -> float:
        """Return the seconds that a step of that size may take as the oldest.

        turn_s  upper bound on its whole turn; 0 without a prediction
        """
        took_s = self._took_s.get(num_tokens.bit_length())
        least_s = self._timeouts.step_first_s if took_s is None else self._timeouts.step_min_s
        return max(least_s, self._timeouts.step_factor * max(turn_s, took_s or 0.0))


class StepWatch:
    """Watches the oldest step only, since steps retire in order; its deadline starts when it becomes the oldest.

    One timer serves all steps: it checks the remaining time when it fires, at least once per shortest deadline.
    """

    def __init__(
        self, *, timeouts: EngineTimeouts, turn_s: Callable[[], float], on_late: Callable[[StepId, float], None]
    ) -> None:
        """
        turn_s   returns an upper bound on the oldest step's turn; see ``Deadlines.limit_s``
        on_late  called with the step and the seconds waited
        """
        self._deadlines = Deadlines(timeouts)
        self._shortest_s = min(timeouts.step_min_s, timeouts.step_first_s)
        self._turn_s = turn_s
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self._oldest: tuple[StepId, int, float] | None = None  # step, number of tokens, time it became the oldest
        self._timer: asyncio.TimerHandle | None = None

    def oldest_is(self, step: StepId, num_tokens: int) -> None:
        """Set the step that retires next."""
        if self._oldest is None or self._oldest[0] != step:
            self._oldest = (step, num_tokens, self._loop.time())
            if self._timer is None:
                self._timer = self._loop.call_later(self._shortest_s, self._ring)

    def retired(self) -> None:
        """Record that the oldest step came back."""
        if self._oldest is not None:
            _, num_tokens, since_s = self._oldest
            self._deadlines.note(num_tokens, self._loop.time() - since_s)
            self._oldest = None

    def close(self) -> None:
        """Stop watching."""
        self._oldest = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        if self._oldest is None:
            return
        step, num_tokens, since_s = self._oldest
        now_s = self._loop.time()
        late_s = since_s + self._deadlines.limit_s(num_tokens, self._turn_s())
        if now_s < late_s:
            self._timer = self._loop.call_at(min(late_s, now_s + self._shortest_s), self._ring)
        else:
            self._oldest = None
            self._on_late(step, now_s - since_s)
