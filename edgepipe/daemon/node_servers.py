"""The two gRPC servers of a node: one for other nodes, one on a Unix socket for its children and for commands."""

from __future__ import annotations

import asyncio
import logging
import secrets

from edgepipe.addresses import with_port
from edgepipe.cluster.reported_states import MAX_BEAT_BYTES  # no other message to a daemon is larger
from edgepipe.daemon.cluster_side import NodePresence
from edgepipe.daemon.context import NodeBasis
from edgepipe.daemon.machine.log_tail import LogTail
from edgepipe.daemon.model_side import NodeHosting
from edgepipe.daemon.network.link_probes import ProbesService
from edgepipe.daemon.offers import NodeLife
from edgepipe.daemon.page_tickets import PageTickets
from edgepipe.daemon.pairing.pairing_host import PairingHost
from edgepipe.daemon.services import AdminService, ChildrenService, NodeService, WeightsService, admit_to
from edgepipe.daemon.trust_service import TrustService
from edgepipe.link.channels import bind, make_server, make_unix_server
from edgepipe.wire.v1 import node_pb2_grpc, trust_pb2_grpc


class NodeServers:
    """The servers, bound first so that the node knows its address; then registered, started and stopped."""

    def __init__(self, basis: NodeBasis) -> None:
        """Bind the port. Raises PortInUse."""
        self._basis = basis
        keepalive = basis.watching.keepalive
        self._server = make_server(basis.security, max_received_bytes=MAX_BEAT_BYTES, keepalive=keepalive)
        self._unix_server = make_unix_server(str(basis.data_dir.socket), keepalive=keepalive)
        self._logs = LogTail()
        port = bind(self._server, basis.security, host=basis.host, port=basis.config.port)
        self.address = with_port(basis.host, port)

    def register(
        self,
        presence: NodePresence,
        hosting: NodeHosting,
        node_life: NodeLife,
    ) -> None:
        """Connect services with the node's parts."""
        basis, server, unix_server = self._basis, self._server, self._unix_server
        admit = admit_to(basis.hello)
        node = NodeService(
            admit=admit,
            security=basis.security,
            heartbeats=presence.heartbeats,
            device=hosting.device,
            engines=hosting.engines,
            models=hosting.models,
            peers=presence.peers,
            book=hosting.book,
            proofs=presence.proofs,
            links=presence.links,
            replication=hosting.replication,
            batches=hosting.batches,
            record_s=basis.timeouts.dead_max_s + basis.timeouts.connect_s,
        )
        admin = AdminService(
            serving=hosting.serving,
            views=hosting.views,
            logs=self._logs,
            node=node_life,
            models=hosting.models,
            guests=hosting.guests,
            drain=hosting.drain,
            replication=hosting.replication,
            presence=presence,
            tickets=PageTickets(now_s=basis.clock.monotonic_s, new_token=lambda: secrets.token_urlsafe(32)),
            tasks=hosting.commands,
        )
        trust = self._trust_service(presence, node_life)
        node_pb2_grpc.add_NodeServicer_to_server(node, server)
        node_pb2_grpc.add_ProbesServicer_to_server(ProbesService(presence.network), server)
        weights = WeightsService(admit=admit, security=basis.security, models=hosting.models)
        node_pb2_grpc.add_WeightsServicer_to_server(weights, server)
        node_pb2_grpc.add_ChildrenServicer_to_server(ChildrenService(basis.children), unix_server)
        node_pb2_grpc.add_AdminServicer_to_server(admin, unix_server)
        trust_pb2_grpc.add_TrustAdminServicer_to_server(trust, unix_server)

    async def start_inside(self) -> None:
        """Start to answer this machine's user and children."""
        logging.getLogger().addHandler(self._logs)
        await self._unix_server.start()
        self._basis.data_dir.socket.chmod(0o600)

    async def start(self) -> None:
        """Start to answer other nodes."""
        await self._server.start()

    async def stop(self) -> None:
        """Stop both servers."""
        await asyncio.gather(self._server.stop(grace=0.2), self._unix_server.stop(grace=0.5))

    def forget(self) -> None:
        """Remove the log handler and the socket, once everything has stopped."""
        logging.getLogger().removeHandler(self._logs)
        self._basis.data_dir.socket.unlink(missing_ok=True)

    def _trust_service(self, presence: NodePresence, node_life: NodeLife) -> TrustService:
        basis = self._basis
        pairing = PairingHost(
            trust=basis.trust,
            hello=basis.hello,
            host=basis.host,
            port=basis.config.port,
            contacts=presence,
            clock=basis.clock,
        )
        return TrustService(
            trust=basis.trust,
            pairing=pairing,
            membership=presence.membership,
            contacts=presence,
            data_dir=basis.data_dir.path,
            node_name=basis.config.name,
            node=node_life,
        )
