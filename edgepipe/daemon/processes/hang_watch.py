"""Detects a hanging child by its reports: a working or waiting child keeps reporting."""

from __future__ import annotations

from edgepipe.wire.children import ChildProgress

_LATE_S = 0.25  # lag of the daemon's own checks: while the daemon did not run, it could read no report


class HangWatch:
    """Watches one child. It must report as often as it announced, and must finish what it has started."""

    def __init__(self, *, hang_s: float, now: float) -> None:
        self._hang_s = hang_s  # the least limit; a child may announce a longer one
        self._limit_s = hang_s
        self._reported_at_s = now
        self._progress_at_s = now
        self._counts = (0, 0, 0, 0)
        self._working = False
        self._looked_at_s = now

    def report(self, progress: ChildProgress, *, now: float) -> None:
        """Take a progress report of the child."""
        counts = (progress.received, progress.started, progress.finished, progress.sent)
        working = progress.started > progress.finished
        if counts[1:3] != self._counts[1:3] or not working:
            self._progress_at_s = now
        self._counts, self._working = counts, working
        self._limit_s = max(self._hang_s, progress.limit_ms / 1e3)
        self._reported_at_s = now

    def why_hung(self, *, now: float, every_s: float) -> str:
        """Return the evidence that the child hangs; empty without evidence. Call it every ``every_s`` seconds."""
        self._forgive(now - self._looked_at_s - every_s)
        self._looked_at_s = now
        if now - self._reported_at_s >= self._limit_s:
            return f"it has reported nothing for {now - self._reported_at_s:.1f} s"
        if self._working and now - self._progress_at_s >= self._limit_s:
            _, started, finished, _ = self._counts
            return f"step {finished + 1} of {started} started ones runs for {now - self._progress_at_s:.1f} s"
        return ""

    def _forgive(self, lag_s: float) -> None:
        if lag_s >= _LATE_S:
            self._reported_at_s += lag_s
            self._progress_at_s += lag_s
