"""The basis of every part of a node: its settings, identity, keys, clock and child processes."""

from __future__ import annotations

from collections.abc import Callable

from edgepipe.addresses import is_loopback
from edgepipe.cluster.interfaces import interfaces, is_wireless
from edgepipe.cluster.trust_keeper import TrustKeeper
from edgepipe.config import CHILD_PORTS, Config, Timeouts, Watching
from edgepipe.daemon.machine.backends import choose_backend
from edgepipe.daemon.machine.data_dir import DataDir, tier_dir
from edgepipe.daemon.machine.http_keys import keys_in_force
from edgepipe.daemon.network.handshakes import RefusedHandshakes
from edgepipe.daemon.processes.children import Child, Children
from edgepipe.daemon.processes.nursery import Nursery
from edgepipe.security.access import ProcessKind
from edgepipe.security.mutual_tls import Denial, MutualTls
from edgepipe.system import RandomIds, SystemClock
from edgepipe.telemetry.audit import AuditKind
from edgepipe.wire.children import DeniedCall
from edgepipe.wire.common import Hello
from edgepipe.workers.settings import ChildSettings


class NodeBasis:
    """Settings and services that stay the same while the node runs."""

    def __init__(
        self,
        *,
        config: Config,
        data_dir: DataDir,
        trust: TrustKeeper,
        incarnation: int,
        host: str,
        watching: Watching,
        nursery: Nursery | None,
        on_new_child: Callable[[Child], None],
    ) -> None:
        """``on_new_child``: called with a new child, which needs its list of peers."""
        self.config = config
        self.data_dir = data_dir
        self.trust = trust
        self.node_id = trust.node_id
        self.incarnation = incarnation
        self.host = host
        self.address = ""  # HOST:PORT, once the node listens
        self.watching = watching
        self.timeouts = watching.timeouts or _timeouts_for(host)
        self.http_keys = keys_in_force(config, data_dir.path)
        self.clock, self.ids = SystemClock(), RandomIds()
        self.hello = Hello(
            role="node",
            node_id=self.node_id,
            node_name=config.name,
            cluster_id=trust.store.cluster_id,
            cluster_name=trust.store.cluster_name,
        )
        self.security = MutualTls(
            trust.key_pair,
            callers=(ProcessKind.NODE, ProcessKind.ENGINE, ProcessKind.GATEWAY),
            on_denied=self._on_denied,
            keepalive=watching.keepalive,
        )
        self.children = Children(
            self.timeouts,
            self.clock,
            nursery=nursery,
            on_new=on_new_child,
            on_denied=self._on_child_denied,
            hang_check_s=watching.hang_check_s,
        )
        self.handshakes = RefusedHandshakes(tls=self.security, children=self.children, audit=trust.audit)

    def child_settings(self, kind: str, *, http_port: int = 0) -> ChildSettings:
        """Make the settings of a new child (stage | engine | gateway) from the node's own; gateways get a port."""
        config = self.config
        return ChildSettings(
            kind=kind,
            child_id=self.ids.new("child"),
            socket=str(self.data_dir.socket),
            host=self.host,
            ports=self._free_ports(),
            http_port=http_port,
            node_id=self.node_id,
            http_host=config.http_host,
            http_names=config.http_names,
            http_origins=config.http_origins,
            api_keys=self.http_keys.keys,
            key_on_loopback=self.http_keys.on_loopback,
            files_dir=str(self.data_dir.path / "batches"),
            tier_dir=str(tier_dir(self.data_dir.path)),
            files_limit_bytes=config.files_limit_bytes,
            files_days=config.files_days,
            node_name=config.name,
            cluster_id=self.hello.cluster_id,
            address=self.address,
            log_level=config.log_level,
            progress_s=self.watching.progress_s,
            keepalive=self.watching.keepalive,
            link=config.link,
            backend=choose_backend(config.backend),
            device=config.device or "auto",
            dtype=config.dtype,
            threads=config.threads,
            backend_options=dict(pair.split("=", 1) for pair in config.backend_options),
        )

    def _free_ports(self) -> tuple[int, ...]:
        """Return any free port if the daemon's is ephemeral; else the fifteen above it, without living children's."""
        if self.config.port == 0:
            return (0,)
        taken = {child.port for child in self.children.running()}
        ports = range(self.config.port + 1, self.config.port + 1 + CHILD_PORTS)
        return tuple(port for port in ports if port not in taken)

    def _on_denied(self, denial: Denial) -> None:
        self.trust.audit.record(AuditKind.DENIED, who=denial.who, detail=denial.what)

    def _on_child_denied(self, denied: DeniedCall) -> None:
        self._on_denied(Denial(who=denied.who, what=denied.what))


def _timeouts_for(host: str) -> Timeouts:
    if is_loopback(host):
        return Timeouts.loopback()
    return Timeouts.wifi() if is_wireless(host, interfaces()) else Timeouts.lan()
