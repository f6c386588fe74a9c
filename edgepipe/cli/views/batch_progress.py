"""A progress bar on stderr for a batch: lines, tokens per second, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edgepipe.cli.output import make_console
from edgepipe.safe_text import one_line
from edgepipe.units import format_duration_s

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from edgepipe.cli.batch_client import BatchView

_OVER_S = 60.0  # rates are means of so many seconds


class Rates:
    """Rates of a batch over the last minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()  # time, lines done, tokens written

    def text(self, batch: BatchView, *, now_s: float) -> str:
        """Return ``812 tok/s · 1 h 3 min left`` once both are known."""
        self._seen.append((now_s, batch.num_done, batch.output_tokens))
        while len(self._seen) > 2 and self._seen[0][0] < now_s - _OVER_S:
            self._seen.popleft()
        first_s, lines, tokens = self._seen[0]
        seconds, done = now_s - first_s, batch.num_done - lines
        if seconds <= 0 or done <= 0:
            return ""
        left_s = (batch.num_lines - batch.num_done) * seconds / done
        return f"{(batch.output_tokens - tokens) / seconds:.0f} tok/s · {format_duration_s(left_s)} left"


class BatchProgress:
    """The bar of one batch."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._rates = Rates()

    def show(self, batch: BatchView) -> None:
        """Show the newest counts, and why the batch waits."""
        failed = f", {batch.failed:,} failed" if batch.failed else ""
        rates = batch.note or self._rates.text(batch, now_s=time.monotonic())
        self._progress.update(
            self._task,
            completed=batch.num_done,
            total=batch.num_lines or None,
            description=f"{batch.num_done:,}/{batch.num_lines:,}{failed}",
            rates=one_line(rates, most_chars=120),
        )

    def wait(self, why: str) -> None:
        """Show why there is no news."""
        self._progress.update(self._task, rates=one_line(why, most_chars=120))


@contextmanager
def batch_progress(batch_id: str) -> Generator[BatchProgress]:
    """Show a bar while the context lasts; nothing without a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn

    console = make_console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[rates]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield BatchProgress(progress, progress.add_task(one_line(batch_id), total=None, rates=""))
