"""The cluster as this node sees it: for people, and for its gateway."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edgepipe.clock import Clock
from edgepipe.cluster.heartbeats import Heartbeats
from edgepipe.cluster.membership import Member, Membership
from edgepipe.cluster.trust_keeper import TrustKeeper
from edgepipe.daemon.files.models import Models
from edgepipe.daemon.network.handshakes import RefusedHandshakes
from edgepipe.daemon.network.local_node import LocalNode
from edgepipe.daemon.network.neighbours import Neighbours
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.processes.children import Child, Children
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.ids import EngineId, Epoch
from edgepipe.wire.engines import EngineState
from edgepipe.wire.nodes import (
    AbsentNode,
    ChildState,
    ClusterStatus,
    ClusterView,
    MemberState,
    RefusedPeer,
    ServedModel,
)
from edgepipe.wire.serving import BrokenLink, ServeBody

_MOST_LOADABLE = 256  # model names sent to a gateway


@dataclass(kw_only=True, eq=False)
class ClusterViews:
    """Builds both views from the node's parts."""

    local: LocalNode
    membership: Membership
    heartbeats: Heartbeats
    peers: Peers
    models: Models
    trust: TrustKeeper
    neighbours: Neighbours
    children: Children
    handshakes: RefusedHandshakes
    discovery_problem: Callable[[], str]
    load_on_request: bool
    book: ServeBook
    data_dir: Path
    clock: Clock

    def __post_init__(self) -> None:
        self._started_s = self.clock.monotonic_s()

    def for_gateway(self) -> ClusterView:
        """Return the served models whose metadata is here, with their engines, and those whose engine is away."""
        engines = self._engines()
        away = self._with_names(map(self.book.numbered, engines_away(self.book.served(), engines)))
        paths = [self.models.metadata_path(engine.model, engine.manifest_hash) for engine in engines]
        return ClusterView(
            cluster_id=self.trust.store.cluster_id,
            members=self._members(),
            served=tuple(
                ServedModel(engine=engine, model_path=str(path), on_request=self.book.is_on_request(engine.pipeline_id))
                for engine, path in zip(engines, paths, strict=True)
                if path is not None
            )
            + tuple(ServedModel(engine=engine) for engine in away),
            absent=self._absent(),
            loadable=tuple(self._loadable()) if self.load_on_request else (),
            stopped=tuple(self.book.stopped()),
        )

    def _engines(self) -> list[EngineState]:
        """Return all engines, replicas in order, with what the records say of their models."""
        found = self._with_names(self.book.numbered(engine) for node in self.peers.nodes() for engine in node.engines)
        return sorted(found, key=lambda engine: (engine.model, engine.replica))

    def _with_names(self, engines: Iterable[EngineState]) -> list[EngineState]:
        names = self.book.names()
        return [replace(engine, names=names.get(engine.pipeline_id, ())) for engine in engines]

    def _loadable(self) -> list[str]:
        """Return models that are whole on some disk and not served; leave out names of two different contents."""
        nodes = self.peers.nodes()
        served = {engine.model for node in nodes for engine in node.engines if engine.state != "failed"}
        served |= {body.spec.model for body in self.book.served()}  # their engines come back by themselves
        whole = {(found.model, found.manifest_hash) for node in nodes for found in node.models if found.complete}
        contents = Counter(model for model, _ in whole)
        return sorted(model for model, count in contents.items() if count == 1 and model not in served)[:_MOST_LOADABLE]

    def status(self) -> ClusterStatus:
        """Return everything that people may want to know."""
        return ClusterStatus(
            cluster_id=self.trust.store.cluster_id,
            cluster_name=self.trust.store.cluster_name,
            members=self._members(),
            engines=tuple(self._engines()),
            node_id=self.trust.node_id,
            uptime_ms=int((self.clock.monotonic_s() - self._started_s) * 1000),
            children=tuple(_child_state(child) for child in self.children.running()),
            data_dir=str(self.data_dir),
            refused=tuple(RefusedPeer(peer=peer, error=error) for peer, error in self.heartbeats.refusals.items()),
            refused_handshakes=self.handshakes.count(),
            absent=(*self._absent(), *self._stopped()),
            broken_links=tuple(
                BrokenLink(node_id=node_id, other_id=other) for node_id, other in self.membership.broken_links()
            ),
            neighbours=tuple(self.neighbours.others()),
            discovery_problem=self.discovery_problem(),
            removed=not self.trust.belongs,
            trust_damage=self.trust.damage,
            unwritten=tuple(self._unwritten()),
            num_tasks=len(asyncio.all_tasks()),
        )

    def _unwritten(self) -> Iterator[str]:
        """Describe what is not on the disk, since the last write failed."""
        if self.book.unwritten:
            yield f"the record of what is served: {self.book.unwritten}"
        if self.trust.unwritten:
            yield f"the trust store: {self.trust.unwritten}"

    def _members(self) -> tuple[MemberState, ...]:
        """Return this node first, then every reachable member."""
        now_s, skews_ms = self.clock.monotonic_s(), self.heartbeats.clock_skews_ms
        own = MemberState(node=self.local.state, state="alive", self=True)
        others = (
            MemberState(
                node=self.peers.bound(member.node),
                state=member.status,
                rtt_ms=member.rtt_ms,
                gap_ms=member.gaps.p99_s(now=now_s) * 1e3,
                clock_skew_ms=skews_ms.get(member.node.node_id, 0.0),
            )
            for member in self.membership.reachable()
        )
        return (own, *others)

    def _absent(self) -> tuple[AbsentNode, ...]:
        """Return the nodes that went without a goodbye, with the time by this machine's wall clock."""
        return tuple(self._away(member) for member in self.membership.absent())

    def _stopped(self) -> Iterator[AbsentNode]:
        """Yield the nodes that said goodbye, then members of the cluster that this node has not heard yet."""
        yield from (self._away(member) for member in self.membership.stopped())
        started_us = self._wall_us(self._started_s)
        for node_id, peer in sorted(self.trust.store.peers.items()):
            if node_id != self.trust.node_id and self.membership.member(node_id) is None:
                yield AbsentNode(node_id=node_id, name=peer.name, state="unseen", since_us=started_us)

    def _away(self, member: Member) -> AbsentNode:
        return AbsentNode(
            node_id=member.node.node_id,
            name=member.node.name,
            state=member.status,
            since_us=self._wall_us(member.status_since_s),
        )

    def _wall_us(self, at_s: float) -> int:
        """Return the wall clock's time of a monotonic time."""
        return int((self.clock.wall_s() - (self.clock.monotonic_s() - at_s)) * 1e6)


def engines_away(wanted: Iterable[ServeBody], engines: Iterable[EngineState]) -> list[EngineState]:
    """Return the engines of wanted models that no reachable node runs: a gateway asks clients to try again.

    A model that was served anew may still have its former engine, which answers meanwhile.
    """
    running = {engine.pipeline_id: engine.model for engine in engines}
    return [
        EngineState(
            model=body.spec.model,
            pipeline_id=body.pipeline_id,
            epoch=Epoch(0, EngineId("")),
            state="starting",
            message="no reachable machine runs its engine now",
        )
        for body in wanted
        if body.pipeline_id not in running and (body.spec.num_replicas > 1 or body.spec.model not in running.values())
    ]


def _child_state(child: Child) -> ChildState:
    return ChildState(kind=child.kind, pid=child.pid, state=child.state)
