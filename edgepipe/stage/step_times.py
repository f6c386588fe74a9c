"""Limit what the compute thread does: beyond the limit that a stage announces, its daemon takes it for hung."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from edgepipe.backend.cost import SliceCost, StepWork
from edgepipe.scheduler.step_time import SliceTimes

_FACTOR = 8.0  # ARCHITECTURE: deadline max(5 s, 8 x predicted for its tokens)
_LEAST_S = 5.0
_FIRST_S = 60.0  # at least, for a size not seen before: kernels are compiled, caches are cold; also for what is no step


class StepTimes:
    """Written on the compute thread. The loop reads ``limit_s``, a single value, so no lock is needed."""

    def __init__(self) -> None:
        self._slices: dict[int, SliceTimes] = {}
        self._outstanding: deque[tuple[SliceTimes, StepWork]] = deque()  # submitted and not collected, in that order
        self._limit_s = _LEAST_S

    @property
    def limit_s(self) -> float:
        """Seconds for what runs now. Of several steps the oldest counts: steps are collected in order."""
        return self._limit_s

    def expect(self, costs: Mapping[int, SliceCost]) -> None:
        """Forget the slices before and predict the times of these by the device's data sheet."""
        self._slices = {index: SliceTimes(cost) for index, cost in costs.items()}

    def starts(self, slice_index: int, work: StepWork) -> None:
        """Begin to submit a step behind the outstanding ones.

        Submitting may compile kernels: meanwhile the step's own limit counts if it is longer than the oldest's.
        """
        self._outstanding.append((self._slices.setdefault(slice_index, SliceTimes()), work))
        self._limit_s = max(_limit_s(*self._outstanding[0]), _limit_s(*self._outstanding[-1]))

    def submitted(self) -> None:
        """The device took the step."""
        self._watch_oldest()

    def refused(self) -> None:
        """The device did not take the step."""
        self._outstanding.pop()
        self._watch_oldest()

    def ended(self, seconds: float | None) -> None:
        """Take the oldest step's seconds on the device; None if it failed."""
        times, work = self._outstanding.popleft()
        if seconds is not None:
            times.note(work, seconds)
        self._watch_oldest()

    def calls(self, *, calling: bool) -> None:
        """Begin or end something that is no step: loading, allocating, profiling. No step is outstanding then."""
        self._limit_s = _FIRST_S if calling else _LEAST_S

    def _watch_oldest(self) -> None:
        self._limit_s = _limit_s(*self._outstanding[0]) if self._outstanding else _LEAST_S


def _limit_s(times: SliceTimes, work: StepWork) -> float:
    return max(_LEAST_S if times.seen(work) else _FIRST_S, _FACTOR * times.bound_s(work))
