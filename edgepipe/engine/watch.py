"""Notices a step that does not come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgepipe.engine.meter import smooth
from edgepipe.engine.settings import EngineTimeouts
from edgepipe.ids import StepId


class Deadlines:
    """Limit the time of the oldest step in flight.

    A step that was sent into an empty ring has its whole turn before it when it becomes the oldest. Where steps follow
    one another, the oldest is nearly back: the times that steps took as the oldest do not cover a turn. They cover what
    the prediction of a turn leaves out: sampling, hosts, other programs.
    """

    def __init__(self, timeouts: EngineTimeouts) -> None:
        self._timeouts = timeouts
        self._took_s: dict[int, float] = {}  # by size class of a step: smoothed time as the oldest

    def note(self, num_tokens: int, seconds: float) -> None:
        """Take the time between a step's becoming the oldest and its return."""
        size = num_tokens.bit_length()
        self._took_s[size] = smooth(self._took_s.get(size, 0.0), seconds)

    def limit_s(self, num_tokens: int, turn_s: float) -> float:
        """Seconds that a step of that size may take as the oldest.

        turn_s  bound on its whole turn; 0 where there is no prediction
        """
        took_s = self._took_s.get(num_tokens.bit_length())
        least_s = self._timeouts.step_first_s if took_s is None else self._timeouts.step_min_s
        return max(least_s, self._timeouts.step_factor * max(turn_s, took_s or 0.0))


class StepWatch:
    """Steps retire in order, so only the oldest has a deadline; it runs from when the step became the oldest.

    One timer, which looks when it rings how much is left: a step costs no timer of its own. It rings at least as often
    as the shortest deadline passes, so that none is missed.
    """

    def __init__(
        self, *, timeouts: EngineTimeouts, turn_s: Callable[[], float], on_late: Callable[[StepId, float], None]
    ) -> None:
        """
        turn_s   bound on the oldest step's turn, see ``Deadlines.limit_s``
        on_late  called with the step and the seconds waited
        """
        self._deadlines = Deadlines(timeouts)
        self._shortest_s = min(timeouts.step_min_s, timeouts.step_first_s)
        self._turn_s = turn_s
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self._oldest: tuple[StepId, int, float] | None = None  # step, its tokens, since when
        self._timer: asyncio.TimerHandle | None = None

    def oldest_is(self, step: StepId, num_tokens: int) -> None:
        """The step that retires next."""
        if self._oldest is None or self._oldest[0] != step:
            self._oldest = (step, num_tokens, self._loop.time())
            if self._timer is None:
                self._timer = self._loop.call_later(self._shortest_s, self._ring)

    def retired(self) -> None:
        """The oldest step came back."""
        if self._oldest is not None:
            _, num_tokens, since_s = self._oldest
            self._deadlines.note(num_tokens, self._loop.time() - since_s)
            self._oldest = None

    def close(self) -> None:
        """Watch no longer."""
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
