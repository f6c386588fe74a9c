"""Notices that the machine slept: one clock stands still meanwhile, another does not. PURE."""

from __future__ import annotations

from typing import Protocol

_SLEPT_S = 2.0  # clocks are read one after the other, and a busy machine may pause between the two


class BootClock(Protocol):
    """Two clocks that differ by what the machine slept."""

    def monotonic_s(self) -> float:
        """Seconds awake since an arbitrary start."""
        ...

    def boot_s(self) -> float:
        """Seconds since an arbitrary start, sleep included."""
        ...


class SleepWatch:
    """Look often; a look tells what was slept since the one before."""

    def __init__(self, clock: BootClock) -> None:
        self._clock = clock
        self._ahead_s = self._difference_s()

    def slept_s(self) -> float:
        """Seconds slept since the last call; 0 unless it was clearly sleep."""
        ahead_s = self._difference_s()
        slept_s, self._ahead_s = ahead_s - self._ahead_s, ahead_s
        return slept_s if slept_s >= _SLEPT_S else 0.0

    def _difference_s(self) -> float:
        return self._clock.boot_s() - self._clock.monotonic_s()
