"""Where the stages of a running model go: when nodes are gone, when somebody asks, when another place is better."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from edgepipe.daemon.files.model_parts import fetch_bytes
from edgepipe.daemon.files.models import LocalModel, Models
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.serving.capacity import placement_need, rooms_of, stages_of
from edgepipe.daemon.serving.survey import Surveyor
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.ids import NodeId
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.planner.cluster import Cluster
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.placement import Placed
from edgepipe.planner.plan import Wishes, plan
from edgepipe.planner.replacement import replace_lost
from edgepipe.units import LinkShape
from edgepipe.wire.common import slices_from_wire
from edgepipe.wire.profiles import cluster_from_wire
from edgepipe.wire.v1 import engine_pb2
from edgepipe.wire.v1 import node_pb2 as pb

DEFAULT_SEQUENCES = 16
"""Chats side by side that a home cluster's users make, when nobody says."""
DEFAULT_SEQUENCE_TOKENS = 4096
"""A long chat; a longer context shares the same room among fewer sequences."""
_READ_TOKENS = 1024  # that a token attends to on average, as far as a plan is concerned
_UNMEASURED = LinkShape(bytes_per_s=1e9 / 8, one_way_s=0.0005)  # of links that nobody measured yet: a cable at home


def demand_of(config: ModelConfig, spec: pb.ServeSpec, *, must_keep_tokens: int = 0) -> Demand:
    """How a model is used that is served so."""
    context = min(spec.context_length or config.context_length, config.context_length)
    conversation = min(context, DEFAULT_SEQUENCE_TOKENS)
    return Demand(
        config=config,
        objective=Objective.THROUGHPUT if spec.throughput else Objective.LATENCY,
        concurrency=spec.concurrency or DEFAULT_SEQUENCES,
        context_tokens=conversation,
        must_keep_tokens=must_keep_tokens,
        read_tokens=min(_READ_TOKENS, conversation),
    )


def placed_of(spec: pb.ServeSpec) -> tuple[Placed, ...]:
    """Where a spec has its slices, in the order of a token's way."""
    placed = [
        Placed(node_id=NodeId(stage.node_id), part=part)
        for stage in spec.stages
        for part in slices_from_wire(stage.slices)
    ]
    return tuple(sorted(placed, key=lambda one: one.part.index))


@dataclass(frozen=True, slots=True, kw_only=True)
class Avoided:
    """What failed an engine lately."""

    nodes: frozenset[str] = frozenset()  # that get no stage
    links: frozenset[tuple[NodeId, NodeId]] = frozenset()  # whose ends are no neighbours in that order

    @classmethod
    def of(cls, left_out: Iterable[engine_pb2.LeftOut]) -> Avoided:
        """What an engine told."""
        told = list(left_out)
        return cls(
            nodes=frozenset(one.node_id for one in told if not one.other_id),
            links=frozenset((NodeId(one.node_id), NodeId(one.other_id)) for one in told if one.other_id),
        )

    @classmethod
    def ever_less(cls, left_out: Iterable[engine_pb2.LeftOut]) -> list[Avoided]:
        """Everything that an engine told, then without one node after the other, the one whose time ends soonest
        first, then without links."""
        told = sorted(left_out, key=lambda one: one.seconds)
        nodes, links = [one for one in told if not one.other_id], [one for one in told if one.other_id]
        fewer = [cls.of([*nodes[count:], *links]) for count in range(len(nodes) + 1)]
        return list(dict.fromkeys([*fewer, cls()]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of the cluster for a model that runs; nothing was measured for it."""

    model: LocalModel
    demand: Demand
    cluster: Cluster


class Replanner:
    """Answers for engines beside this daemon with what it knows of the cluster."""

    def __init__(self, *, peers: Peers, models: Models, surveyor: Surveyor) -> None:
        self._peers = peers
        self._models = models
        self._surveyor = surveyor

    def reachable(self) -> pb.Reachable:
        """The nodes that are there, this one included."""
        told = pb.Reachable()
        for node in self._peers.nodes():
            told.nodes.add(node_id=node.node_id, address=node.address, name=node.name)
            if node.draining:
                told.leaving.append(node.node_id)
        return told

    def room_changes(self) -> tuple[object, ...]:
        """What an engine that waits for memory wants to hear of: equal while nothing of it changes."""
        return tuple(
            (node.node_id, node.address, node.draining, tuple((one.state, one.free_bytes) for one in node.devices))
            for node in self._peers.nodes()
        )

    def usable(self, spec: pb.ServeSpec, *, own: str) -> frozenset[str]:
        """Nodes that could hold stages of a running pipeline."""
        return frozenset(node.node_id for node in self._peers.nodes() if rooms_of(node, spec.dtype, own=own))

    def name(self, node_id: str) -> str:
        """Of a node, for people. Raises NodeUnreachable."""
        return self._peers.node(node_id).name

    async def plan(self, pipeline_id: str, wanted: pb.PlanWanted) -> pb.PlanMade:
        """Survivors keep their stages where lost ones fit on others; else everything is placed anew.

        Where no placement avoids all that the engine does, the nodes come back first whose time ends soonest, and links
        last.
        Raises NoFeasiblePlacement, ModelUnknown.
        """
        spec = wanted.spec
        model = await self._models.adopt(spec.model, manifest_hash=spec.manifest_hash)
        tries = Avoided.ever_less(wanted.left_out)
        known: Known | None = None
        while True:
            avoided = tries.pop(0)
            placed = self._replaced(model, spec, pipeline_id, avoided)
            if placed is not None:
                return self.made(spec, placed)
            known = known or await self.known(pipeline_id, spec)
            try:
                return self.made(spec, await self.search(known, spec, avoided))
            except NoFeasiblePlacement:
                if not tries:
                    raise

    async def anew(self, pipeline_id: str, spec: pb.ServeSpec, avoided: Avoided, *, num_nodes: int) -> pb.PlanMade:
        """The best placement over ``num_nodes`` nodes (0: as was wished before). Raises NoFeasiblePlacement."""
        wanted = pb.ServeSpec()
        wanted.CopyFrom(spec)
        wanted.num_nodes = num_nodes or spec.num_nodes
        return self.made(wanted, await self.search(await self.known(pipeline_id, wanted), wanted, avoided))

    async def known(self, pipeline_id: str, spec: pb.ServeSpec, *, measure: Collection[str] = ()) -> Known:
        """The cluster as far as it has been measured; nodes that do nothing yet may be measured for it.

        Raises ModelUnknown.
        """
        model = await self._models.adopt(spec.model, manifest_hash=spec.manifest_hash)
        survey = await self._surveyor.known(model, spec.dtype, own=pipeline_id, measure=measure)
        cluster = cluster_from_wire(survey)
        links = replace(cluster.links, assumed=_UNMEASURED)
        return Known(model=model, demand=demand_of(model.config, spec), cluster=replace(cluster, links=links))

    async def search(self, known: Known, spec: pb.ServeSpec, avoided: Avoided) -> tuple[Placed, ...]:
        """The best placement as far as is known, without what is avoided. Raises NoFeasiblePlacement.

        What somebody once wished counts as far as the nodes that are there allow.
        """
        staying = {node.node_id for node in self._peers.nodes() if not node.draining}  # ``known`` may be older
        machines = [one for one in known.cluster.machines if one.node_id in staying - avoided.nodes]
        names = {name for one in machines for name in (one.name, str(one.node_id))}
        wishes = Wishes(
            num_nodes=min(spec.num_nodes, len(machines)),
            exclude=tuple(name for name in spec.exclude if name in names),
            first=spec.first if spec.first in names else "",
        )
        links = replace(known.cluster.links, unreached=avoided.links)
        found = await asyncio.to_thread(plan, known.demand, machines, links, wishes, explain=False)
        return found.placed

    def made(self, spec: pb.ServeSpec, placed: Sequence[Placed]) -> pb.PlanMade:
        """A placement as engines take it. Raises NodeUnreachable."""
        made = pb.PlanMade(spec=spec)
        del made.spec.stages[:]
        made.spec.stages.extend(stages_of(placed))
        for node_id in {stage.node_id for stage in made.spec.stages}:
            node = self._peers.node(node_id)
            made.nodes.add(node_id=node_id, address=node.address, name=node.name)
        return made

    def fetch_bytes(self, model: LocalModel) -> Callable[[NodeId, Sequence[Slice]], int]:
        """What a node would have to fetch before it can load slices of the model."""
        return fetch_bytes(self._peers.nodes(), model.stored)

    def _replaced(self, model: LocalModel, spec: pb.ServeSpec, own: str, avoided: Avoided) -> tuple[Placed, ...] | None:
        """Lost stages elsewhere, the others where they are; None if they do not fit so."""
        nodes = [node for node in self._peers.nodes() if node.node_id not in avoided.nodes]
        rooms = [room for node in nodes for room in rooms_of(node, spec.dtype, own=own)]
        need = placement_need(model.config, spec.context_length)
        broken = self._peers.broken_links().union(avoided.links)
        return replace_lost(need, placed_of(spec), rooms, fetch_bytes=self.fetch_bytes(model), broken=broken)
