"""What ran when, for tests and for people who look into a running stage."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from edgepipe.ids import StepId

TRACE_STEPS = 4096  # about 20 s of a fast pipeline; 0.5 MB


class TraceEntry(NamedTuple):
    """One step on one slice; times are the stage's monotonic clock."""

    step: StepId
    slice_index: int
    submitted_s: float  # submit entered
    collected_s: float  # collect returned


Trace = deque[TraceEntry]


def new_trace() -> Trace:
    """An empty trace that forgets the oldest entries."""
    return deque(maxlen=TRACE_STEPS)
