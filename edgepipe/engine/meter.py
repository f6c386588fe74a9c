"""The engine's measurements: rates over the last seconds, and smoothed timings of stages and links."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import replace

from edgepipe.clock import Clock
from edgepipe.telemetry import HOP_LATENCY_S
from edgepipe.wire.engines import StageState
from edgepipe.wire.reports import StepTiming

_WINDOW_S = 5.0  # length of a window
_WINDOW_ENTRIES = 8192  # bounds memory at 1600 steps a second
_SMOOTHING = 0.1  # weight of the newest value: about the last twenty count


class WindowSum:
    """Rate of amounts added in the last seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: deque[tuple[float, float]] = deque()
        self._sum = 0.0  # total of the entries' amounts

    def add(self, amount: float) -> None:
        """Add ``amount`` at the current time."""
        self._entries.append((self._clock.monotonic_s(), amount))
        self._sum += amount
        if len(self._entries) > _WINDOW_ENTRIES:
            self._drop()

    def per_second(self) -> float:
        """Return the mean rate over the window, or since the first entry if that is later (at least one second)."""
        now_s = self._clock.monotonic_s()
        while self._entries and self._entries[0][0] < now_s - _WINDOW_S:
            self._drop()
        if not self._entries:
            self._sum = 0.0  # so that no rounding stays
            return 0.0
        return self._sum / max(1.0, now_s - self._entries[0][0])

    def _drop(self) -> None:
        self._sum -= self._entries.popleft()[1]


def smooth(old: float, new: float) -> float:
    """Return the next value of an exponentially weighted mean. An ``old`` of 0 means no value yet."""
    return new if old == 0.0 else old + _SMOOTHING * (new - old)


class StageMeter:
    """Measurements of one stage and its outgoing link since the epoch began."""

    def __init__(self, clock: Clock) -> None:
        self._computing_s = WindowSum(clock)
        self._computed_s = 0.0
        self._bubble_s = 0.0
        self._step_ms = 0.0
        self._upload_ms = 0.0
        self._one_way_ms = 0.0
        self._hop_bytes = 0
        self._hop_latency_counts = [0] * (len(HOP_LATENCY_S) + 1)
        self._hop_latency_s = 0.0
        self._newest_steps = [0, 0]  # newest steps that the stage reported: express, bulk

    def newest_step(self, *, bulk: bool) -> int:
        """Return the newest reported step with prompt tokens (``bulk``) or without; 0 before the first."""
        return self._newest_steps[bulk]

    def note_timing(self, timing: StepTiming, *, working_s: float) -> None:
        """Count one step on one of the stage's slices.

        ``working_s``: seconds since the ring last became busy. Idle time before that is not a bubble.
        """
        bulk = timing.num_tokens > timing.num_rows
        self._newest_steps[bulk] = max(self._newest_steps[bulk], timing.step)
        computed_s = timing.compute_us * 1e-6
        self._computing_s.add(computed_s)
        self._computed_s += computed_s
        self._bubble_s += min(timing.wait_us * 1e-6, working_s)
        self._step_ms = smooth(self._step_ms, timing.compute_us * 1e-3)
        if timing.upload_us:
            self._upload_ms = smooth(self._upload_ms, timing.upload_us * 1e-3)

    def note_hop(self, *, num_bytes: int, one_way_s: float) -> None:
        """Count one step's trip over the outgoing link."""
        self._one_way_ms = smooth(self._one_way_ms, one_way_s * 1e3)
        self._hop_bytes += num_bytes
        self._hop_latency_counts[bisect_left(HOP_LATENCY_S, one_way_s)] += 1
        self._hop_latency_s += one_way_s

    def measured(self, stage: StageState) -> StageState:
        """Return the stage's state with its measurements filled in."""
        return replace(
            stage,
            busy=min(1.0, self._computing_s.per_second()),
            step_ms=self._step_ms,
            upload_ms=self._upload_ms,
            one_way_ms=self._one_way_ms,
            computed_s=self._computed_s,
            bubble_s=self._bubble_s,
            hop_bytes=self._hop_bytes,
            hop_latency_counts=tuple(self._hop_latency_counts),
            hop_latency_s=self._hop_latency_s,
        )
