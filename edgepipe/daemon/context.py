"""The basis of every part of a node: its settings, identity, keys, clock and child processes."""

from __future__ import annotations

from collections.abc import Callable

from edgepipe.addresses import is_loopback
from edgepipe.cluster.interfaces import interfaces, is_wireless
from edgepipe.cluster.trust_keeper import TrustKeeper
from edgepipe.config import Config, Timeouts, Watching
from edgepipe.daemon.machine.data_dir import DataDir
from edgepipe.daemon.machine.http_keys import keys_in_force
from edgepipe.daemon.network.handshakes import RefusedHandshakes
from edgepipe.daemon.processes.child_settings import ChildSettingsMaker
from edgepipe.daemon.processes.children import Child, Children
from edgepipe.security.access import ProcessKind
from edgepipe.security.mutual_tls import Denial, MutualTls, Plaintext, Security
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
        encrypted: bool,
        watching: Watching,
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
        self.tls = MutualTls(
            trust.key_pair,
            callers=(ProcessKind.NODE, ProcessKind.ENGINE),
            on_denied=self._on_denied,
            keepalive=watching.keepalive,
        )
        self.security: Security = self.tls if encrypted else Plaintext()
        self.children = Children(
            self.timeouts,
            self.clock,
            on_new=on_new_child,
            on_denied=self._on_child_denied,
            hang_check_s=watching.hang_check_s,
        )
        self.handshakes = RefusedHandshakes(tls=self.tls, children=self.children, audit=trust.audit)
        self._settings = ChildSettingsMaker(
            config=config,
            hello=self.hello,
            host=host,
            address=lambda: self.address,
            socket=data_dir.socket,
            http_keys=self.http_keys,
            encrypted=encrypted,
            watching=watching,
            ids=self.ids,
            children=self.children,
        )

    def child_settings(self, kind: str, *, http_port: int = 0) -> ChildSettings:
        """Make the settings of a new child: stage | engine | gateway."""
        return self._settings.make(kind, http_port=http_port)

    def _on_denied(self, denial: Denial) -> None:
        self.trust.audit.record(AuditKind.DENIED, who=denial.who, detail=denial.what)

    def _on_child_denied(self, denied: DeniedCall) -> None:
        self._on_denied(Denial(who=denied.who, what=denied.what))


def _timeouts_for(host: str) -> Timeouts:
    if is_loopback(host):
        return Timeouts.loopback()
    return Timeouts.wifi() if is_wireless(host, interfaces()) else Timeouts.lan()
