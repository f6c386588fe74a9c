"""Time on the emulated device: steps run one after the other, each as long as the cost model says."""

from __future__ import annotations

import time

from edgepipe.backend.cost import Jitter

_SMOOTHING = 0.1  # weight of the newest sleep
_FIRST_LATE_S = 0.0001  # a sleep that a busy host held up by more says nothing of the next one


class DeviceQueue:
    """Says when each step would be done and waits for that moment without burning CPU.

    A thread's sleep on Linux and macOS ends about 0.1 ms after the asked time, no device's time: sleeps aim early by as
    much as the last ones were late, so that steps take on average what they should. A time factor of 0 never waits.
    """

    def __init__(self, *, time_factor: float, jitter: Jitter) -> None:
        self._time_factor = time_factor
        self._jitter = jitter
        self._free_at_s = 0.0
        self._late_s = 0.0  # smoothed, of sleeps' ends

    def enqueue(self, duration_s: float) -> float:
        """Put a step behind those before it; the moment (monotonic, s) at which it will be done."""
        start_s = max(time.monotonic(), self._free_at_s)
        self._free_at_s = start_s + duration_s * self._time_factor * self._jitter.factor()
        return self._free_at_s

    def wait_until(self, moment_s: float) -> None:
        """Return at ``moment_s``, give or take a tenth of a millisecond, or, if that has passed, at once."""
        rest_s = moment_s - self._late_s - time.monotonic()
        if self._time_factor > 0 and rest_s > 0:
            time.sleep(rest_s)
            late_s = self._late_s + time.monotonic() - moment_s  # than asked of this sleep
            self._late_s += _SMOOTHING * (min(late_s, 2 * self._late_s + _FIRST_LATE_S) - self._late_s)
