"""PURE: how many threads compute beside other programs.

Threads of one product wait for one another some hundred times a token. If other programs take one of their processors,
each wait lasts until the system gives it back: on two busy cores, two threads took ten times as long as one.
"""

from __future__ import annotations

from typing import NamedTuple

_WINDOW_S = 0.5  # between two readings: fewer say little, since systems count in hundredths of a second
_AGREEING = 2  # readings that must ask for more threads before there are more
_PAUSE_S = 0.25  # without a step: what others used meanwhile says nothing of what they use beside steps


class CoreTimes(NamedTuple):
    """Processor time up to a moment."""

    at_s: float  # monotonic
    busy_s: float  # processor time of all programs, this process included
    own_s: float  # processor time of this process


class ThreadChoice:
    """Number of threads, by what other programs leave of the processors."""

    def __init__(self, most: int, *, cores: float) -> None:
        """``most``: threads on a quiet machine, within the process's limits. ``cores``: all logical processors.

        ``CoreTimes`` counts the programs of the whole machine, in a container, too.
        """
        self.threads = most
        self._most = most
        self._cores = cores
        self._last: CoreTimes | None = None  # since then steps followed each other
        self._ended_s = 0.0  # when the newest step ended
        self._more = 0  # newest readings in a row that asked for more threads

    def due(self, now_s: float) -> bool:
        """Whether a reading is due as a step begins. Readings take some tens of microseconds."""
        if now_s - self._ended_s > _PAUSE_S:
            self._last = None
        return self._most > 1 and (self._last is None or now_s - self._last.at_s >= _WINDOW_S)

    def ended(self, now_s: float) -> None:
        """Record that a step ended."""
        self._ended_s = now_s

    def note(self, times: CoreTimes) -> None:
        """Choose by what other programs used since the last reading: fewer threads at once, more after a second one."""
        last, self._last = self._last, times
        if last is None or times.at_s <= last.at_s:
            return
        others_s = max(0.0, times.busy_s - last.busy_s - (times.own_s - last.own_s))
        free = self._cores - others_s / (times.at_s - last.at_s)
        wanted = max(1, min(self._most, int(free + 0.5)))
        self._more = self._more + 1 if wanted > self.threads else 0
        if wanted < self.threads or self._more >= _AGREEING:
            self.threads = wanted
            self._more = 0
