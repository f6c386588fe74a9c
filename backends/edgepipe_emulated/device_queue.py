"""Timing of the emulated device: steps run one after another, each for the time of the cost model."""

from __future__ import annotations

import time

from edgepipe.backend.cost import Jitter

_SMOOTHING = 0.1  # weight of the newest sleep
_FIRST_LATE_S = 0.0001  # a larger delay comes from a busy host and does not predict the next one


class DeviceQueue:
    """Computes when each step is done, and waits for it without using CPU time.

    A thread's sleep on Linux and macOS ends about 0.1 ms late. So sleeps end earlier by the mean delay of recent ones,
    and steps take the right time on average. A time factor of 0 never waits.
    """

    def __init__(self, *, time_factor: float, jitter: Jitter) -> None:
        self._time_factor = time_factor
        self._jitter = jitter
        self._free_at_s = 0.0
        self._late_s = 0.0  # smoothed delay of sleeps

    def enqueue(self, duration_s: float) -> float:
        """Add a step after the queued ones. Return the time (monotonic, s) at which it will be done."""
        start_s = max(time.monotonic(), self._free_at_s)
        self._free_at_s = start_s + duration_s * self._time_factor * self._jitter.factor()
        return self._free_at_s

    def wait_until(self, moment_s: float) -> None:
        """Wait until ``moment_s``, within about 0.1 ms; return at once if it has passed."""
        rest_s = moment_s - self._late_s - time.monotonic()
        if self._time_factor > 0 and rest_s > 0:
            time.sleep(rest_s)
            late_s = self._late_s + time.monotonic() - moment_s  # compared to the requested time
            self._late_s += _SMOOTHING * (min(late_s, 2 * self._late_s + _FIRST_LATE_S) - self._late_s)
