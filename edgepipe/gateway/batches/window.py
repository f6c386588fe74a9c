"""How many lines of a batch are under way at a time, and which errors end a line. PURE."""

from __future__ import annotations

from edgepipe.errors import (
    CapacityError,
    ClusterError,
    EdgepipeError,
    KVCacheFull,
    LinkError,
    ModelUnknown,
    StageError,
    StageLost,
)

MOST_LINES = 224  # one user's running choices and some that wait: the engine's steps stay full
MOST_BYTES = 4 << 20  # bound on the input lines under way: their token ids take some ten times that
_MAX_ATTEMPTS = 3  # attempts at a line that fails on its own
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 30.0


class Window:
    """Number of lines that may be under way: it shrinks when the cluster refuses lines, and grows with each answer."""

    def __init__(self, *, most_lines: int = MOST_LINES, most_bytes: int = MOST_BYTES) -> None:
        self._base_lines = self._most_lines = most_lines
        self._most_bytes = most_bytes
        self._limit = most_lines
        self._failures = 0  # count since the last answer

    @property
    def limit(self) -> int:
        """Lines that may be under way now."""
        return self._limit

    def widen(self, *, num_engines: int) -> None:
        """Take note of the number of pipelines that answer for the model: each gets a whole window."""
        before, self._most_lines = self._most_lines, self._base_lines * num_engines
        if self._limit == before:
            self._limit = self._most_lines
        self._limit = min(self._limit, self._most_lines)

    def has_room(self, *, num_lines: int, num_bytes: int, next_bytes: int) -> bool:
        """Return whether one more line may start beside ``num_lines``. A line of any size may run alone."""
        return num_lines == 0 or (num_lines < self._limit and num_bytes + next_bytes <= self._most_bytes)

    def answered(self) -> None:
        """Count a line that got an answer."""
        self._failures = 0
        self._limit = min(self._most_lines, self._limit + 1)

    def refused(self, *, num_lines: int) -> None:
        """Take note that a queue was full with ``num_lines`` other lines under way."""
        self._limit = max(1, min(self._limit, num_lines))

    def failed(self) -> float:
        """Take note that a line could not run for now. Return the seconds until the next attempt."""
        self._limit = 1
        self._failures += 1
        return min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures - 1, 10))


def is_fault(error: EdgepipeError) -> bool:
    """Return whether the line itself may be the error's cause: a step failed, or the KV cache was full."""
    return isinstance(error, (StageError, KVCacheFull)) and not isinstance(error, StageLost)


def ends_line(error: EdgepipeError, *, attempts: int) -> bool:
    """Return whether a line has failed for good. ``attempts``: how often ``is_fault`` held for it.

    What the cluster lacks for now ends no line.
    """
    if is_fault(error):
        return attempts >= _MAX_ATTEMPTS
    return not isinstance(error, (CapacityError, ClusterError, LinkError, ModelUnknown, StageLost))
