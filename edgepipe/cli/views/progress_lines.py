"""Progress as JSON lines on stdout, for programs that run a command: ``--json --progress``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edgepipe.daemon.tasks.output import progress_line

if TYPE_CHECKING:
    from edgepipe.files.progress import PullProgress

_EVERY_S = 0.25


class ProgressLines:
    """Prints a line when the phase changes, and a few a second while it lasts."""

    def __init__(self) -> None:
        self._phase = ""
        self._printed_s = 0.0

    def show(self, phase: str, *, bytes_done: int = 0, bytes_total: int = 0) -> None:
        """Print the progress, if a line is due."""
        now_s = time.monotonic()
        if phase == self._phase and now_s - self._printed_s < _EVERY_S:
            return
        self._phase, self._printed_s = phase, now_s
        print(progress_line(phase=phase, bytes_done=bytes_done, bytes_total=bytes_total), flush=True)

    def show_pull(self, now: PullProgress) -> None:
        """Print the progress of a pull."""
        self.show(now.note or now.phase, bytes_done=now.done_bytes, bytes_total=now.total_bytes)
