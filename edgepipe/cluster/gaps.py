"""Recent gaps between a node's signs of life. PURE."""

from __future__ import annotations

from collections import deque

_SPAN_S = 120.0
_MAX_GAPS = 4096  # two minutes of beats on several streams
_AGE_S = 1.0  # a percentile older than this is computed again


class GapHistory:
    """Gaps of the last two minutes and their 99th percentile."""

    def __init__(self) -> None:
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_MAX_GAPS)  # (when it ended, length), seconds
        self._p99_s = 0.0
        self._known_at_s = float("-inf")

    def add(self, gap_s: float, *, now: float) -> None:
        """Add a gap that has just ended."""
        self._gaps.append((now, gap_s))

    def clear(self) -> None:
        """Forget all gaps: the node has begun another life."""
        self._gaps.clear()
        self._known_at_s = float("-inf")

    def p99_s(self, *, now: float) -> float:
        """Return the gap that one in a hundred exceeds; 0 while unknown. At most a second old."""
        if now - self._known_at_s >= _AGE_S:
            while self._gaps and now - self._gaps[0][0] > _SPAN_S:
                self._gaps.popleft()
            gaps = sorted(gap for _, gap in self._gaps)
            self._p99_s = gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)] if gaps else 0.0
            self._known_at_s = now
        return self._p99_s
