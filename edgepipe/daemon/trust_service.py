"""Trust commands of the node's own command line: invite, join, list, promote, remove. Unix socket only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgepipe.cluster.membership import Membership
from edgepipe.cluster.statements import Statement
from edgepipe.cluster.trust import TrustStore
from edgepipe.cluster.trust_keeper import TrustKeeper
from edgepipe.daemon.offers import Contacts, NodeLife
from edgepipe.daemon.pairing.joining import join_cluster
from edgepipe.daemon.pairing.pairing_host import PairingHost
from edgepipe.daemon.services import admit_command_line
from edgepipe.errors import RequestInvalid
from edgepipe.ids import NodeId
from edgepipe.security.trust_view import TrustedPeer
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.trust import (
    InviteCommand,
    JoinDone,
    JoinEvent,
    JoinRequest,
    JoinWaiting,
    ListPeersReply,
    PeerState,
    RemovePeerReply,
)
from edgepipe.wire.v1 import trust_pb2 as pb
from edgepipe.wire.v1 import trust_pb2_grpc

_KEEP = {"keep": True, "drop": False, "": None}


@dataclass(kw_only=True, eq=False)
class TrustService(trust_pb2_grpc.TrustAdminServicer):
    """Thin handlers over ``TrustKeeper`` and ``PairingHost``."""

    trust: TrustKeeper
    pairing: PairingHost
    membership: Membership
    contacts: Contacts
    data_dir: Path
    node_name: str
    node: NodeLife

    def __post_init__(self) -> None:
        self._joining = asyncio.Lock()

    async def Invite(self, request_iterator: Any, context: Any) -> AsyncGenerator[pb.InviteEvent]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run one pairing window."""
        commands = (from_wire(command, InviteCommand) async for command in request_iterator)
        async for event in self.pairing.invite(commands):
            yield to_wire(event, pb.InviteEvent)

    async def Join(self, request: pb.JoinRequest, context: Any) -> AsyncGenerator[pb.JoinEvent]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Join another cluster; afterwards the node starts anew in that cluster."""
        admit_command_line(request)
        events: asyncio.Queue[JoinEvent | None] = asyncio.Queue()
        async with self._joining:
            joining = asyncio.create_task(self._join(from_wire(request, JoinRequest), events), name="joining")
            try:
                while (event := await events.get()) is not None:
                    yield to_wire(event, pb.JoinEvent)
                await joining
            finally:
                joining.cancel()

    async def _join(self, request: JoinRequest, events: asyncio.Queue[JoinEvent | None]) -> None:
        def on_waiting(host_name: str) -> None:
            events.put_nowait(JoinEvent(event=JoinWaiting(host_name=host_name)))

        try:
            joined = await join_cluster(
                self.data_dir,
                node_name=self.node_name,
                code=request.code,
                host=request.host,
                port=request.port,
                new_identity=request.new_identity,
                audit=self.trust.audit,
                on_waiting=on_waiting,
            )
            done = JoinDone(
                cluster_name=joined.store.cluster_name,
                num_peers=len(joined.store.peers) - 1,
                node_name=joined.node_name,
                wanted_name=joined.wanted_name,
            )
            events.put_nowait(JoinEvent(event=done))
            self.node.begin_anew()
        finally:
            events.put_nowait(None)

    async def ListPeers(self, request: pb.ListPeersRequest, context: Any) -> pb.ListPeersReply:
        """List the cluster's members, this node first."""
        admit_command_line(request)
        store = self.trust.store
        added = _added((store.founding, *store.standing.counting))
        addresses = self.contacts.known_addresses()
        peers = sorted(store.peers.values(), key=lambda each: (each.node_id != self.trust.node_id, each.name))
        reply = ListPeersReply(
            cluster_id=store.cluster_id,
            cluster_name=store.cluster_name,
            node_id=self.trust.node_id,
            peers=tuple(self._peer_state(store, peer, added[peer.node_id], addresses) for peer in peers),
        )
        return to_wire(reply, pb.ListPeersReply)

    def _peer_state(
        self, store: TrustStore, peer: TrustedPeer, added: Statement, addresses: Mapping[str, str]
    ) -> PeerState:
        own = peer.node_id == self.trust.node_id
        member = self.membership.member(peer.node_id)
        return PeerState(
            node_id=peer.node_id,
            name=self.node_name if own else member.node.name if member else peer.name,
            role=peer.role,
            state="alive" if own else member.status if member else "unseen",
            address=addresses.get(peer.node_id, ""),
            added_ms=added.made_ms,
            added_by=store.peers[added.signer].name if added.signer in store.peers else added.signer,
            self=own,
        )

    async def RemovePeer(self, request: pb.RemovePeerRequest, context: Any) -> pb.RemovePeerReply:
        """Remove a peer for ever."""
        admit_command_line(request)
        if request.others not in _KEEP:
            raise RequestInvalid(f"'{request.others}' is neither keep nor drop")
        peer = self.trust.find(request.peer)
        others = await self.trust.remove(peer, keep_added=_KEEP[request.others])
        reply = RemovePeerReply(name=peer.name, others=tuple(other.name for other in others))
        return to_wire(reply, pb.RemovePeerReply)

    async def PromotePeer(self, request: pb.PromotePeerRequest, context: Any) -> pb.PromotePeerReply:
        """Make a member an owner."""
        admit_command_line(request)
        peer = self.trust.find(request.peer)
        await self.trust.promote(peer)
        return pb.PromotePeerReply(name=peer.name)


def _added(statements: Iterable[Statement]) -> dict[NodeId, Statement]:
    """Return the first add of each member."""
    adds: dict[NodeId, Statement] = {}
    for statement in statements:
        if statement.role is not None and (
            statement.about not in adds or statement.made_ms < adds[statement.about].made_ms
        ):
            adds[statement.about] = statement
    return adds
