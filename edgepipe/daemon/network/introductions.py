"""Decides which processes may talk to each other, for the daemon and for its children.

The trust store names the nodes of the cluster. A node's state lists the certificates that its gateway and engines made
for their life. That state came over a connection that proved the node's identity. A stage learns its one engine from
this module, and its neighbours from that engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from edgepipe.cluster.membership import Membership
from edgepipe.daemon.network.local_node import LocalNode
from edgepipe.daemon.processes.children import Child, Children
from edgepipe.errors import CertificateInvalid
from edgepipe.ids import NodeId
from edgepipe.security.access import ProcessKind
from edgepipe.security.certificates import Certificate, read_certificate
from edgepipe.security.mutual_tls import MutualTls, Peer
from edgepipe.security.trust_view import TrustView
from edgepipe.wire.children import IntroducedPeer
from edgepipe.wire.nodes import NodeState

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 32  # gateways and engines of one node
_MOST_CERTIFICATES = 1024  # parsed and cached


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """All peers that are known now."""

    callers: list[Peer]  # nodes that may call here
    nodes: list[Peer]  # nodes that may be called
    gateways: list[Peer]
    engines: list[Peer]


@dataclass(kw_only=True, eq=False)
class Introductions:
    """Keeps the daemon's ``security`` and every child up to date. Call ``refresh`` after any change of its inputs."""

    trust: TrustView
    security: MutualTls
    local: LocalNode
    membership: Membership
    children: Children

    def __post_init__(self) -> None:
        self._states: dict[NodeId, NodeState] = {}  # silent nodes included: a short loss of contact cuts no call
        self._certificates: dict[bytes, Certificate | None] = {}

    async def follow_trust(self) -> None:
        """Refresh on every change of trust, until cancelled."""
        async for _ in self.trust.changes():
            self.refresh()

    def refresh(self) -> None:
        """Compute the known peers and send them to all processes. This cuts the calls of peers that are not known."""
        known = self._known()
        self.security.introduce([*known.callers, *known.engines, *known.gateways], nodes=known.nodes)
        for child in self.children.running():
            child.introduce(_peers_of(child, known))

    def greet(self, child: Child) -> None:
        """Send the known peers to one child, after its start or when a stage got its engine."""
        child.introduce(_peers_of(child, self._known()))

    def _known(self) -> _Known:
        own = Peer(node_id=self.local.state.node_id, kind=ProcessKind.NODE, certificate=self.trust.key_pair.certificate)
        callers = {own.node_id: own}
        nodes = {own.node_id: own}
        for found, members in ((callers, self.trust.inbound()), (nodes, self.trust.outbound())):
            for member in members:
                peer = Peer(node_id=member.node_id, kind=ProcessKind.NODE, certificate=member.certificate)
                found.setdefault(member.node_id, peer)
        self._states.update((state.node_id, state) for state in (member.node for member in self.membership.reachable()))
        self._states[own.node_id] = self.local.state
        self._states = {key: state for key, state in self._states.items() if key in nodes}
        states = [state for key, state in self._states.items() if key in callers]
        return _Known(
            callers=list(callers.values()),
            nodes=list(nodes.values()),
            gateways=[peer for state in states for peer in self._peers(state, ProcessKind.GATEWAY, state.gateways)],
            engines=[
                peer
                for state in states
                for peer in self._peers(state, ProcessKind.ENGINE, [engine.certificate for engine in state.engines])
            ],
        )

    def _peers(self, state: NodeState, kind: ProcessKind, pems: Iterable[bytes]) -> list[Peer]:
        certificates = [self._read(pem) for pem in list(pems)[:_MOST_PROCESSES] if pem]
        return [
            Peer(node_id=state.node_id, kind=kind, certificate=certificate)
            for certificate in certificates
            if certificate is not None
        ]

    def _read(self, pem: bytes) -> Certificate | None:
        if pem not in self._certificates:
            if len(self._certificates) >= _MOST_CERTIFICATES:
                self._certificates.clear()
            try:
                self._certificates[pem] = read_certificate(pem)
            except CertificateInvalid as error:
                logger.warning("a node reports a certificate that is not accepted: %s", error)
                self._certificates[pem] = None
        return self._certificates[pem]


def _peers_of(child: Child, known: _Known) -> tuple[IntroducedPeer, ...]:
    callers = {peer.node_id for peer in known.callers}
    peers = list(known.nodes)
    if child.kind == ProcessKind.ENGINE:
        peers += known.gateways
    if child.kind == ProcessKind.STAGE and child.engine is not None and child.engine.node_id in callers:
        peers.append(child.engine)
    return tuple(
        IntroducedPeer(
            node_id=peer.node_id,
            kind=peer.kind,
            certificate=peer.certificate.pem,
            may_not_call=peer.node_id not in callers,
        )
        for peer in peers
    )
