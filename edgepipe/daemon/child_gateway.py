"""A gateway process: HTTP in front, the daemon's views behind."""

from __future__ import annotations

import asyncio
import secrets

from edgepipe.cluster.interfaces import LOOPBACK
from edgepipe.daemon.child_link import DaemonLink
from edgepipe.daemon.settings import ChildSettings
from edgepipe.daemon.system import RandomIds, SystemClock
from edgepipe.gateway.service import Gateway, listen


async def run(settings: ChildSettings, link: DaemonLink) -> None:
    """Serve HTTP until cancelled. Raises PortInUse."""
    sock = listen(host=LOOPBACK, port=settings.http_port)
    gateway = Gateway(
        node_id=settings.node_id,
        node_name=settings.node_name,
        clock=SystemClock(),
        ids=RandomIds(),
        new_seed=lambda: secrets.randbits(64),
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(gateway.run(), name="engine-links")
        serving = tasks.create_task(gateway.serve(sock), name="http")
        link.started(port=sock.getsockname()[1])
        async for command in link.commands():
            if command.HasField("cluster"):
                gateway.update(command.cluster)
        await serving
