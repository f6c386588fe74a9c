"""A child's listening port."""

from __future__ import annotations

import grpc.aio

from edgepipe.errors import PortInUse
from edgepipe.link.channels import bind
from edgepipe.security.mutual_tls import Security
from edgepipe.workers.settings import ChildSettings


def bind_one_of(server: grpc.aio.Server, security: Security, settings: ChildSettings) -> int:
    """Listen on the first free port of the child's ports; return it. Raises PortInUse."""
    for port in settings.ports:
        try:
            return bind(server, security, host=settings.host, port=port)
        except PortInUse:
            continue
    raise PortInUse(
        f"none of the ports for this node's processes can be used on {settings.host}",
        fact=f"tried {', '.join(map(str, settings.ports))}",
        next_step="choose another range with --port (0: any free ones)",
    )
