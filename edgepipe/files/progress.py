"""Progress reports of pulling a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProgress:
    """Progress of a pull. Sent often, so listeners must be quick."""

    phase: str  # "download" | "waiting" (for the hub or the network) | "copy" | "check" | "hash"
    file: str
    done_bytes: int  # bytes done, summed over all files of this phase
    total_bytes: int  # bytes of all files of this phase; 0: unknown
    note: str = ""  # a sentence that a person should read, sent once


OnProgress = Callable[[PullProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file to fetch in a pull."""

    name: str
    num_bytes: int
    sha256: str = ""  # set if the source provides it
    git_sha1: str = ""  # SHA-1 of the git blob, if the source provides only that


class ProgressCounter:
    """Sums up the bytes of a phase and reports them."""

    def __init__(self, on_progress: OnProgress, phase: str, total_bytes: int) -> None:
        self._on_progress = on_progress
        self._phase = phase
        self._total_bytes = total_bytes
        self.done_bytes = 0
        self._waits_for = ""  # the failure after which a file is asked for again

    def add(self, file: str, num_bytes: int) -> None:
        """Count bytes of a file, negative ones if they were dropped, and report the progress."""
        self.done_bytes += num_bytes
        self._waits_for = ""
        self._report(self._phase, file)

    def say(self, file: str, note: str) -> None:
        """Report a sentence about a file."""
        self._report(self._phase, file, note)

    def waits(self, file: str, reason: str, *, pause_s: float) -> None:
        """Report that a file is asked for again after a pause. The reason is sent once until bytes arrive."""
        note = "" if reason == self._waits_for else f"{file}: {reason}; asking again in {pause_s:.0f} s"
        self._waits_for = reason
        self._report("waiting", file, note)

    def _report(self, phase: str, file: str, note: str = "") -> None:
        done, total = self.done_bytes, self._total_bytes
        self._on_progress(PullProgress(phase=phase, file=file, done_bytes=done, total_bytes=total, note=note))
