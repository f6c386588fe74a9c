"""A clock that moves only by ``advance`` and ``sleep``."""

from __future__ import annotations

START_S = 1_000_000.0
"""Where clocks of tests start. Near 0, the sum and the difference of two times would look alike."""


class FakeClock:
    """A ``Clock`` moved by hand; ``wall_jump`` stands for a machine whose date was set."""

    def __init__(self, *, monotonic_s: float = START_S, wall_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self._slept_s = 0.0

    def monotonic_s(self) -> float:
        """Return the seconds since an arbitrary start."""
        return self._monotonic_s

    def boot_s(self) -> float:
        """Return the seconds since an arbitrary start, sleep included."""
        return self._monotonic_s + self._slept_s

    def wall_s(self) -> float:
        """Return the seconds since 1970."""
        return self._wall_s

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self._monotonic_s += seconds
        self._wall_s += seconds

    def sleep(self, seconds: float) -> None:
        """Let the machine sleep: its monotonic clock stands still meanwhile."""
        self._slept_s += seconds
        self._wall_s += seconds

    def wall_jump(self, seconds: float) -> None:
        """Set the date on or back; monotonic time does not notice."""
        self._wall_s += seconds
