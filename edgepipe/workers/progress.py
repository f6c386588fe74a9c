"""A child's reports of its progress, by which the daemon detects a hanging child."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgepipe.wire.children import ChildProgress
from edgepipe.workers.daemon_link import DaemonLink

_IDLE_S = 1.0


async def report_progress(link: DaemonLink, look: Callable[[], ChildProgress]) -> None:
    """Report until cancelled: at each check that finds new or unfinished work, and once a second."""
    sent = ChildProgress()
    sent_at_s = float("-inf")
    loop = asyncio.get_running_loop()
    while True:
        progress = look()
        pending = progress.started > progress.finished or progress != sent
        if pending or loop.time() - sent_at_s >= _IDLE_S:
            link.progress(progress)
            sent, sent_at_s = progress, loop.time()
        await asyncio.sleep(link.settings.progress_s)
