"""What the engine measures while it runs: rates over the last seconds, and smoothed timings of stages and links."""

from __future__ import annotations

from collections import deque

from edgepipe.clock import Clock
from edgepipe.wire.plans import StepTiming

_WINDOW_S = 5.0  # "the last seconds"
_WINDOW_ENTRIES = 8192  # bounds memory at 1600 steps a second
_SMOOTHING = 0.1  # weight of the newest value: about the last twenty count


class WindowSum:
    """The sum of what was added in the last seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: deque[tuple[float, float]] = deque(maxlen=_WINDOW_ENTRIES)

    def add(self, amount: float) -> None:
        """Count ``amount`` as of now."""
        self._entries.append((self._clock.monotonic_s(), amount))

    def per_second(self) -> float:
        """Mean rate over the window, or since the first entry if that is younger (but at least over one second)."""
        now_s = self._clock.monotonic_s()
        while self._entries and self._entries[0][0] < now_s - _WINDOW_S:
            self._entries.popleft()
        if not self._entries:
            return 0.0
        return sum(amount for _, amount in self._entries) / max(1.0, now_s - self._entries[0][0])


def smooth(old: float, new: float) -> float:
    """The next value of an exponentially weighted mean; 0 stands for "nothing yet"."""
    return new if old == 0.0 else old + _SMOOTHING * (new - old)


class StageMeter:
    """One stage and its outgoing link."""

    def __init__(self, clock: Clock) -> None:
        self._computing_s = WindowSum(clock)
        self.step_ms = 0.0
        self.upload_ms = 0.0
        self.one_way_ms = 0.0
        self.last_step = 0  # the newest that it has told of

    def note_timing(self, timing: StepTiming) -> None:
        """Count one step on one of its slices."""
        self.last_step = max(self.last_step, timing.step)
        self._computing_s.add(timing.compute_us * 1e-6)
        self.step_ms = smooth(self.step_ms, timing.compute_us * 1e-3)
        if timing.upload_us:
            self.upload_ms = smooth(self.upload_ms, timing.upload_us * 1e-3)

    def note_one_way(self, seconds: float) -> None:
        """Count the latency of one step's way over its outgoing link."""
        self.one_way_ms = smooth(self.one_way_ms, seconds * 1e3)

    @property
    def busy(self) -> float:
        """Fraction of the last seconds that it computed."""
        return min(1.0, self._computing_s.per_second())
