"""Settings that a node gives each child at its start, made from the node's own configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgepipe.config import CHILD_PORTS, Config, Watching
from edgepipe.daemon.machine.backends import choose_backend
from edgepipe.daemon.machine.http_keys import HttpKeys
from edgepipe.daemon.processes.children import Children
from edgepipe.ids import IdSource
from edgepipe.wire.common import Hello
from edgepipe.workers.settings import ChildSettings


class ChildSettingsMaker:
    """Makes the settings of each child."""

    def __init__(
        self,
        *,
        config: Config,
        hello: Hello,
        host: str,
        address: Callable[[], str],
        socket: Path,
        http_keys: HttpKeys,
        encrypted: bool,
        watching: Watching,
        ids: IdSource,
        children: Children,
    ) -> None:
        """``hello``: this node's introduction; ``address``: HOST:PORT of its daemon, known once the daemon listens."""
        self._config = config
        self._hello = hello
        self._host = host
        self._address = address
        self._socket = socket
        self._http_keys = http_keys
        self._encrypted = encrypted
        self._watching = watching
        self._ids = ids
        self._children = children

    def make(self, kind: str, *, http_port: int = 0) -> ChildSettings:
        """Make the settings of a child of that kind; gateways also get their HTTP port."""
        config = self._config
        return ChildSettings(
            kind=kind,
            child_id=self._ids.new("child"),
            socket=str(self._socket),
            host=self._host,
            ports=self._free_ports(),
            http_port=http_port,
            node_id=self._hello.node_id,
            http_host=config.http_host,
            http_names=config.http_names,
            http_origins=config.http_origins,
            api_keys=self._http_keys.keys,
            key_on_loopback=self._http_keys.on_loopback,
            node_name=config.name,
            cluster_id=self._hello.cluster_id,
            address=self._address(),
            log_level=config.log_level,
            encrypted=self._encrypted,
            progress_s=self._watching.progress_s,
            keepalive=self._watching.keepalive,
            link=config.link,
            backend=choose_backend(config.backend),
            device=config.device or "auto",
            dtype=config.dtype,
            threads=config.threads,
            backend_options=dict(pair.split("=", 1) for pair in config.backend_options),
        )

    def _free_ports(self) -> tuple[int, ...]:
        """Return any free port if the daemon's is ephemeral; else the fifteen above it, without living children's."""
        if self._config.port == 0:
            return (0,)
        taken = {child.port for child in self._children.running()}
        ports = range(self._config.port + 1, self._config.port + 1 + CHILD_PORTS)
        return tuple(port for port in ports if port not in taken)
