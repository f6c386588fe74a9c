"""A gateway process: serves HTTP from the daemon's views of the cluster."""

from __future__ import annotations

import asyncio
import secrets
import socket
from pathlib import Path

from edgepipe.cluster.interfaces import LOOPBACK
from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.batches.store import FilesSettings
from edgepipe.gateway.service import Gateway, listen
from edgepipe.link.admin_client import Admin, admin_at
from edgepipe.system import RandomIds, SystemClock
from edgepipe.wire.children import KeptModels, LoadFailed, LoadQueue, LoadWanted, UnloadWanted
from edgepipe.wire.nodes import ClusterView
from edgepipe.workers.daemon_link import DaemonLink
from edgepipe.workers.settings import ChildSettings

_EVERYWHERE = ("0.0.0.0", "::")


async def run(settings: ChildSettings, link: DaemonLink) -> None:
    """Serve HTTP until cancelled. Raises PortInUse."""
    async with admin_at(settings.socket, role="gateway") as admin:
        await _serve(settings, link, admin)


async def _serve(settings: ChildSettings, link: DaemonLink, admin: Admin) -> None:
    sockets = _listen(settings)
    gateway = Gateway(
        node_id=settings.node_id,
        node_name=settings.node_name,
        security=link.security,
        clock=SystemClock(),
        load_model=lambda model, owner: link.report(LoadWanted(model=model, owner=owner)),
        unload_model=lambda model: link.report(UnloadWanted(model=model)),
        keep_models=link.report,
        report_batches=link.report,
        admin=admin,
        ids=RandomIds(),
        new_seed=lambda: secrets.randbits(64),
        rules=AccessRules.of(
            keys=settings.api_keys,
            key_on_loopback=settings.key_on_loopback,
            host_names=_names(settings),
            origins=settings.http_origins,
        ),
        files=FilesSettings(
            folder=Path(settings.files_dir), most_bytes=settings.files_limit_bytes, kept_days=settings.files_days
        ),
    )
    async with asyncio.TaskGroup() as links, asyncio.TaskGroup() as tasks:  # answers end before the links they come by
        links.create_task(gateway.run(), name="engine-links")
        serving = tasks.create_task(gateway.serve(*sockets), name="http")
        link.started(port=sockets[0].getsockname()[1])
        async for command in link.commands():
            match command:
                case ClusterView():
                    gateway.update(command)
                case LoadFailed():
                    gateway.not_loaded(command.model, command.error)
                case LoadQueue():
                    gateway.loads_changed(command)
                case KeptModels():
                    gateway.keep_as_before(command)
                case _:
                    pass
        await serving


def _listen(settings: ChildSettings) -> list[socket.socket]:
    """Listen on the configured address, and always on loopback: this machine's command line connects there."""
    if settings.http_host in _EVERYWHERE:
        return [listen(host=settings.http_host, port=settings.http_port)]
    first = listen(host=LOOPBACK, port=settings.http_port)
    if settings.http_host == LOOPBACK:
        return [first]
    return [first, listen(host=settings.http_host, port=first.getsockname()[1])]


def _names(settings: ChildSettings) -> list[str]:
    """Return the host names that clients may use for this machine; addresses need no entry."""
    host = socket.gethostname().lower()
    short = host.split(".")[0]
    return [host, short, f"{short}.local", *settings.http_names]
