"""A progress bar on stderr for work on a model's files."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edgepipe.cli.output import make_console
from edgepipe.safe_text import one_line

if TYPE_CHECKING:
    from edgepipe.files.progress import OnProgress, PullProgress


@contextmanager
def file_progress(label: str) -> Generator[OnProgress]:
    """Show bytes, rate and time left while the context lasts; nothing without a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(one_line(label), total=None)

        def show(now: PullProgress) -> None:
            if now.note:
                console.print(one_line(now.note), markup=False, highlight=False)
            progress.update(
                task, description=f"{now.phase:<8}", completed=now.done_bytes, total=now.total_bytes or None
            )

        yield show
