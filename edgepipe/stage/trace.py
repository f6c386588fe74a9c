"""Trace of computed steps, for tests and diagnosis."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from edgepipe.ids import StepId

TRACE_STEPS = 4096  # about 20 s of a fast pipeline; 0.5 MB


class TraceEntry(NamedTuple):
    """One step on one slice; times are the stage's monotonic clock."""

    step: StepId
    slice_index: int
    submitted_s: float  # call of submit
    collected_s: float  # return of collect


Trace = deque[TraceEntry]


def new_trace() -> Trace:
    """Return an empty trace that drops its oldest entries."""
    return deque(maxlen=TRACE_STEPS)
