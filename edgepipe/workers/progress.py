"""A child's reports of how far it is: the daemon ends a child that hangs, and this is how it knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.workers.daemon_link import DaemonLink

_BUSY_S = 0.25  # ARCHITECTURE: four times a second while work is pending
_IDLE_S = 1.0


async def report_progress(link: DaemonLink, look: Callable[[], pb.ChildProgress]) -> None:
    """Report until cancelled: at every look that finds something new or unfinished, and once a second."""
    told = pb.ChildProgress()
    told_at_s = float("-inf")
    loop = asyncio.get_running_loop()
    while True:
        progress = look()
        pending = progress.started > progress.finished or progress != told
        if pending or loop.time() - told_at_s >= _IDLE_S:
            link.progress(progress)
            told, told_at_s = progress, loop.time()
        await asyncio.sleep(_BUSY_S)
