"""Time limits for the compute thread: beyond the announced limit, the daemon treats the stage as hung."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from edgepipe.backend.cost import SliceCost, StepWork
from edgepipe.scheduler.step_time import SliceTimes

_FACTOR = 8.0  # limit in multiples of the predicted time of a step with its tokens
_LEAST_S = 5.0
_FIRST_S = 60.0  # minimum for a new size (kernels are compiled, caches are cold), and for calls that are not steps


class StepTimes:
    """Limit for the current work. The compute thread writes; the loop reads ``limit_s``, one value, without a lock."""

    def __init__(self) -> None:
        self._slices: dict[int, SliceTimes] = {}
        self._outstanding: deque[tuple[SliceTimes, StepWork]] = deque()  # submitted but not collected, in order
        self._limit_s = _LEAST_S

    @property
    def limit_s(self) -> float:
        """Limit in seconds for the current work: for the oldest step, since steps are collected in order."""
        return self._limit_s

    def expect(self, costs: Mapping[int, SliceCost]) -> None:
        """Replace the slices and predict their times from the device's data sheet."""
        self._slices = {index: SliceTimes(cost) for index, cost in costs.items()}

    def starts(self, slice_index: int, work: StepWork) -> None:
        """Record the start of a submit after the outstanding steps.

        Submitting may compile kernels, so until it returns the longer of the step's and the oldest step's limit counts.
        """
        times = self._slices.get(slice_index)
        if times is None:
            times = self._slices[slice_index] = SliceTimes()
        self._outstanding.append((times, work))
        limit_s = _limit_s(*self._outstanding[-1])
        self._limit_s = limit_s if len(self._outstanding) == 1 else max(limit_s, _limit_s(*self._outstanding[0]))

    def submitted(self) -> None:
        """Record that the device accepted the step."""
        self._watch_oldest()

    def refused(self) -> None:
        """Record that the device rejected the step."""
        self._outstanding.pop()
        self._watch_oldest()

    def ended(self, seconds: float | None) -> None:
        """Record the oldest step's seconds on the device; None if it failed."""
        times, work = self._outstanding.popleft()
        if seconds is not None:
            times.note(work, seconds)
        self._watch_oldest()

    def calls(self, *, calling: bool) -> None:
        """Begin or end a call that is not a step, such as loading. No step may be outstanding."""
        self._limit_s = _FIRST_S if calling else _LEAST_S

    def _watch_oldest(self) -> None:
        self._limit_s = _limit_s(*self._outstanding[0]) if self._outstanding else _LEAST_S


def _limit_s(times: SliceTimes, work: StepWork) -> float:
    return max(_LEAST_S if times.seen(work) else _FIRST_S, _FACTOR * times.bound_s(work))
