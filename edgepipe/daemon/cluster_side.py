"""This node in its cluster: finds and reaches the other nodes, and exchanges states with them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from edgepipe.addresses import host_and_port
from edgepipe.cluster.address_watch import MemberContact
from edgepipe.cluster.discovery import Announcement, Discovery
from edgepipe.cluster.heartbeats import Heartbeats
from edgepipe.cluster.membership import MemberChanged, Membership, MembershipLimits, MemberStatus
from edgepipe.daemon.context import NodeBasis
from edgepipe.daemon.network.introductions import Introductions
from edgepipe.daemon.network.link_probes import LinkProbes
from edgepipe.daemon.network.local_node import LocalNode
from edgepipe.daemon.network.neighbours import Neighbours
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.network.remembered import RememberedAddresses
from edgepipe.daemon.offers import NodeLife
from edgepipe.daemon.serving.alive_proof import AliveProofs
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.daemon.serving.takeover import Vacancies
from edgepipe.link.shaped import make_network
from edgepipe.wire.nodes import NodeState

logger = logging.getLogger(__name__)


class NodePresence:
    """Membership with everything that feeds it or follows it."""

    def __init__(
        self,
        basis: NodeBasis,
        node: NodeLife,
    ) -> None:
        self._node = node
        self._basis = basis
        self._discovery: Discovery | None = None
        self.membership = _new_membership(basis)
        self.local = LocalNode(
            node_id=basis.node_id,
            incarnation=basis.incarnation,
            name=basis.config.name,
            address=basis.address,
            on_change=lambda: self.introductions.refresh(),
            announce=lambda: self.heartbeats.announce(),
        )
        self.local.add_part(self._tell_silent)
        self.introductions = Introductions(
            trust=basis.trust,
            security=basis.security,
            local=self.local,
            membership=self.membership,
            children=basis.children,
        )
        self.heartbeats = Heartbeats(
            membership=self.membership,
            hello=basis.hello,
            trust=basis.trust,
            security=basis.security,
            state=lambda: self.local.state,
            clock=basis.clock,
            timeouts=basis.timeouts,
            on_change=self._on_member,
            on_identity_taken=node.yield_identity,
        )
        self.vacancies = Vacancies()
        self.proofs = AliveProofs(basis.trust, basis.clock)
        self.book: ServeBook = ServeBook(
            basis.data_dir.path / "served.bin",
            trust=basis.trust,
            signs=self,
            clock=basis.clock,
            local=self.local,
        )
        self.peers: Peers = Peers(
            local=self.local,
            membership=self.membership,
            hello=basis.hello,
            security=basis.security,
            timeouts=basis.timeouts,
            clock=basis.clock,
            book=self.book,
        )
        self.network = make_network(basis.config.link, basis.clock)
        self.links = LinkProbes(peers=self.peers, clock=basis.clock, timeouts=basis.timeouts, network=self.network)
        self.neighbours = Neighbours(
            trust=basis.trust, dial=lambda address, node_id: self.heartbeats.found(address, node_id=node_id)
        )
        self._remembered = RememberedAddresses(basis.data_dir.path / "addresses.json")

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Find other nodes and announce this one, as long as ``tasks`` run."""
        tasks.create_task(self.introductions.follow_trust(), name="introductions")
        tasks.create_task(self._remembered.run(), name="addresses")
        tasks.create_task(self.heartbeats.run(), name="heartbeats")
        for address in self._basis.config.peers:
            self.heartbeats.found(address, manual=True)
        for node_id, address in self._remembered.all().items():
            self.heartbeats.found(address, node_id=node_id, remembered=True)
        if self._basis.config.discovery:
            self._discovery = Discovery(self._announcement(), self.neighbours.found)
            await self._discovery.start()
            tasks.create_task(self._discovery.run(), name="discovery")

    async def stop(self) -> None:
        """Close the channels and withdraw the announcement; ``heartbeats.leave`` comes long before."""
        await self.peers.close()
        if self.network is not None:
            self.network.close()
        if self._discovery is not None:
            await self._discovery.stop()

    def is_gone(self, node_id: str) -> bool:
        """Return whether a node is certainly away, or hands its engines over."""
        return self.peers.is_gone(node_id)

    def lacks_engine(self, node_id: str, pipeline_id: str) -> bool:
        """Return whether a node has long been without the pipeline's engine."""
        return self.vacancies.has_long_lacked(pipeline_id, node_id, now_s=self._basis.clock.monotonic_s())

    def engine_state(self, node_id: str, pipeline_id: str) -> str:
        """Return the state that a node reports for its engine; empty without one."""
        return self.peers.engine_state(node_id, pipeline_id)

    def known_addresses(self) -> dict[str, str]:
        """Return the members' present or last addresses, by node id."""
        return {**self._remembered.all(), self._basis.node_id: self._basis.address}

    def contacts(self) -> list[MemberContact]:
        """Return the members that answer, with where, and whether they reach this node."""
        return [
            MemberContact(
                host=host_and_port(member.node.address)[0],
                reaches_us=self.heartbeats.is_called_by(member.node.node_id),
            )
            for member in self.membership.reachable()
        ]

    async def listen_on(self, addresses: list[str]) -> None:
        """Also hear nodes that announce themselves in the networks of these addresses of this machine."""
        if self._discovery is not None:
            await self._discovery.listen_on(addresses)

    def discovery_problem(self) -> str:
        """Return why mDNS finds no node; empty if it works."""
        return self._discovery.problem if self._discovery else "it is switched off"

    async def announce_pairing(self, port: int) -> None:
        """Announce this node's pairing port by mDNS; 0: it is closed."""
        if self._discovery is not None:
            await self._discovery.announce_pairing(port)

    async def spread(self) -> None:
        """Wait until the other nodes and this node's engines know the newest state, or a short time has passed."""
        await self.heartbeats.spread()
        await asyncio.gather(*(child.knows_peers() for child in self._basis.children.running("engine")))

    def _announcement(self) -> Announcement:
        host, port = host_and_port(self._basis.address)
        return Announcement(
            cluster_id=self._basis.hello.cluster_id,
            cluster_name=self._basis.hello.cluster_name,
            node_id=self._basis.node_id,
            node_name=self._basis.config.name,
            host=host,
            port=int(port),
            incarnation=self._basis.incarnation,
        )

    def _tell_silent(self, state: NodeState) -> NodeState:
        dead = (member for member in self.membership.absent() if member.status is MemberStatus.DEAD)
        return replace(state, silent=tuple(member.node.node_id for member in dead))

    def _on_member(self, change: MemberChanged) -> None:
        self.introductions.refresh()
        if (member := self.membership.member(change.node_id)) is not None:
            self._remembered.note(change.node_id, member.node.address)
        elif self._basis.trust.store.peers.get(change.node_id) is None:
            self._remembered.forget(change.node_id)
        if change.status in (MemberStatus.DEAD, MemberStatus.LEFT):
            self._log_gone(change)
            self._node.lost(change.node_id)
        self.local.refresh()  # its list of silent nodes may have changed
        self.local.changes.notify()

    def _log_gone(self, change: MemberChanged) -> None:
        if change.status is MemberStatus.LEFT:
            logger.info("node has left node=%s", change.node_id)
        elif not self._node.ends():  # a node that ends may be the one that does not listen
            logger.warning("node is dead node=%s", change.node_id)


def _new_membership(basis: NodeBasis) -> Membership:
    timeouts = basis.timeouts
    return Membership(
        node_id=basis.node_id,
        incarnation=basis.incarnation,
        address=basis.address,
        limits=MembershipLimits(
            refused_s=timeouts.refused_s,
            dead_min_s=timeouts.dead_min_s,
            dead_max_s=timeouts.dead_max_s,
            forget_s=timeouts.forget_s,
            tick_s=timeouts.tick_s,
        ),
    )
