"""Detects that the machine slept: meanwhile one clock stops, another continues. PURE."""

from __future__ import annotations

from typing import Protocol

_SLEPT_S = 2.0  # clocks are read one after the other, and a busy machine may pause between the two


class BootClock(Protocol):
    """Two clocks; their difference grows by the time slept."""

    def monotonic_s(self) -> float:
        """Return the seconds awake since an arbitrary start."""
        ...

    def boot_s(self) -> float:
        """Return the seconds since an arbitrary start, sleep included."""
        ...


class SleepWatch:
    """Measures the time slept between two calls of ``slept_s``. Call it often."""

    def __init__(self, clock: BootClock) -> None:
        self._clock = clock
        self._ahead_s = self._difference_s()

    def slept_s(self) -> float:
        """Return the seconds slept since the last call; 0 unless it was clearly sleep."""
        ahead_s = self._difference_s()
        slept_s, self._ahead_s = ahead_s - self._ahead_s, ahead_s
        return slept_s if slept_s >= _SLEPT_S else 0.0

    def _difference_s(self) -> float:
        return self._clock.boot_s() - self._clock.monotonic_s()
