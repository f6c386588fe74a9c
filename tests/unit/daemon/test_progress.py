"""A child's progress reports come as often as its settings say."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from edgepipe.wire.children import ChildProgress
from edgepipe.workers.daemon_link import DaemonLink
from edgepipe.workers.progress import report_progress
from tests.support.daemon.stage_settings import STAGE_SETTINGS


class Noting(DaemonLink):
    """Notes the reports instead of queueing them; leaves after so many."""

    def __init__(self, *, progress_s: float, most: int) -> None:
        super().__init__(replace(STAGE_SETTINGS, progress_s=progress_s))
        self.noted: list[ChildProgress] = []
        self.enough = asyncio.Event()
        self._most = most

    def progress(self, progress: ChildProgress) -> None:
        """Note it."""
        self.noted.append(progress)
        if len(self.noted) == self._most:
            self.enough.set()


async def _reports(link: Noting, *, most_s: float) -> int:
    """Return the number of reports of a child with a step under way."""
    reporter = asyncio.create_task(report_progress(link, lambda: ChildProgress(started=1)))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(link.enough.wait(), most_s)
    reporter.cancel()
    return len(link.noted)


async def test_a_busy_child_reports_once_in_each_period() -> None:
    assert await _reports(Noting(progress_s=0.001, most=4), most_s=10.0) == 4


async def test_a_long_period_leaves_the_first_report_alone() -> None:
    assert await _reports(Noting(progress_s=1e6, most=2), most_s=0.05) == 1
