"""Where a running model's stages go: after a node is lost, on a user's request, or to a better placement."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from edgepipe.backend.expert_reads import ExpertShare
from edgepipe.daemon.files.model_parts import fetch_bytes
from edgepipe.daemon.files.models import LocalModel, Models
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.serving.capacity import placement_need, rooms_of, stages_of
from edgepipe.daemon.serving.draft_models import as_drafted
from edgepipe.daemon.serving.survey import Surveyor
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.ids import NodeId
from edgepipe.planner.cluster import Cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.drift import with_expert_shares
from edgepipe.planner.placement import Placed
from edgepipe.planner.plan import plan
from edgepipe.planner.replacement import replace_lost
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.units import LinkShape
from edgepipe.weights.weight_table import FLOATS, WeightTable
from edgepipe.wire.engines import Quarantined, ServeSpec, StagePlacement
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import PlanMade, PlanWanted, Reachable
from edgepipe.wire.surveys import cluster_of

logger = logging.getLogger(__name__)

DEFAULT_SEQUENCES = 16
"""Concurrent chats assumed for a home cluster when a spec gives no number."""
DEFAULT_SEQUENCE_TOKENS = 4096
"""A long chat; with a longer context fewer sequences share the same room."""
_READ_TOKENS = 1024  # tokens that a plan lets each token attend to
UNMEASURED = LinkShape(bytes_per_s=1e9 / 8, one_way_s=0.0005)
"""Assumed for unmeasured links: a cable at home."""


def demand_of(
    config: ModelConfig, spec: ServeSpec, *, weights: WeightTable = FLOATS, must_keep_tokens: int = 0
) -> Demand:
    """Return the demand implied by a serve spec."""
    context = min(spec.settings.context_length or config.context_length, config.context_length)
    conversation = min(context, DEFAULT_SEQUENCE_TOKENS)
    concurrency = spec.concurrency or DEFAULT_SEQUENCES
    if spec.replica:
        concurrency = max(1, ceil(concurrency * (spec.replica_share or 1 / max(1, spec.num_replicas))))
    return Demand(
        config=config,
        weights=weights,
        objective=Objective.THROUGHPUT if spec.throughput else Objective.LATENCY,
        concurrency=concurrency,
        context_tokens=conversation,
        must_keep_tokens=must_keep_tokens,
        read_tokens=min(_READ_TOKENS, conversation),
    )


def placed_of(spec: ServeSpec) -> tuple[Placed, ...]:
    """Return a spec's slices with their nodes, in the order in which a token passes them."""
    placed = [
        Placed(node_id=stage.node_id, part=part, ram_percent=stage.ram_percent)
        for stage in spec.stages
        for part in stage.slices
    ]
    return tuple(sorted(placed, key=lambda piece: piece.part.index))


@dataclass(frozen=True, slots=True, kw_only=True)
class Avoided:
    """Nodes and links that failed an engine lately."""

    nodes: frozenset[str] = frozenset()  # hold no stage
    links: frozenset[tuple[NodeId, NodeId]] = frozenset()  # (sender, receiver) pairs that must not be neighbours

    @classmethod
    def of(cls, left_out: Iterable[Quarantined]) -> Avoided:
        """Collect the entries of an engine's report."""
        entries = list(left_out)
        return cls(
            nodes=frozenset(entry.node_id for entry in entries if not entry.other_id),
            links=frozenset((entry.node_id, entry.other_id) for entry in entries if entry.other_id),
        )

    @classmethod
    def relaxed(cls, left_out: Iterable[Quarantined]) -> list[Avoided]:
        """List ever smaller sets: all entries, then fewer and fewer nodes (soonest expiry first), then no links."""
        entries = sorted(left_out, key=lambda entry: entry.seconds)
        nodes, links = (
            [entry for entry in entries if not entry.other_id],
            [entry for entry in entries if entry.other_id],
        )
        fewer = [cls.of([*nodes[count:], *links]) for count in range(len(nodes) + 1)]
        return list(dict.fromkeys([*fewer, cls()]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Existing measurements of the cluster with the demand of a running model; making this value measures nothing."""

    model: LocalModel
    demand: Demand
    cluster: Cluster


def seen_experts(known: Known, shares: Sequence[ExpertShare]) -> Known:
    """Return the speeds for a model whose steps read these shares of a layer's experts."""
    return replace(known, cluster=with_expert_shares(known.cluster, shares)) if shares else known


class Replanner:
    """Computes placements for the engines beside this daemon, from the known state of the cluster."""

    def __init__(
        self,
        *,
        peers: Peers,
        models: Models,
        surveyor: Surveyor,
        taken: Callable[[str], frozenset[str]] = lambda _: frozenset(),
    ) -> None:
        """``taken`` returns the nodes that other replicas of a pipeline's model use: no stage goes there."""
        self._peers = peers
        self._taken = taken
        self._models = models
        self._surveyor = surveyor

    def reachable(self) -> Reachable:
        """Return the present nodes, this one included."""
        nodes = self._peers.nodes()
        return Reachable(
            nodes=tuple(node.introduction for node in nodes),
            leaving=tuple(node.node_id for node in nodes if node.draining),
        )

    def room_changes(self) -> tuple[object, ...]:
        """Return a value that changes whenever a waiting engine might find room."""
        return tuple(
            (
                node.node_id,
                node.address,
                node.draining,
                tuple((device.state, device.free_bytes) for device in node.devices),
            )
            for node in self._peers.nodes()
        )

    def usable(self, spec: ServeSpec, *, own: str) -> frozenset[str]:
        """Return the nodes that could hold stages of a running pipeline."""
        nodes = self._free_of_others(own)
        return frozenset(node.node_id for node in nodes if rooms_of(node, spec.settings, own=frozenset((own,))))

    def name(self, node_id: str) -> str:
        """Return a node's name for people. Raises NodeUnreachable."""
        return self._peers.node(node_id).name

    async def plan(
        self, pipeline_id: str, wanted: PlanWanted, *, expert_shares: Sequence[ExpertShare] = ()
    ) -> PlanMade:
        """Place lost stages on other nodes if they fit there; else place all stages anew.

        If no placement avoids all that the engine avoids, nodes are allowed again first, soonest expiry first, and
        links last. ``expert_shares``: that the model's steps read, as far as its engine has seen. A draft model that no
        longer fits is left out. Raises NoFeasiblePlacement, ModelUnknown.
        """
        try:
            return await self._plan(pipeline_id, wanted, expert_shares)
        except NoFeasiblePlacement:
            if not wanted.spec.settings.draft_model:
                raise
            bare = replace(wanted.spec, settings=wanted.spec.settings.without_draft_model())
            logger.warning("pipeline=%s goes on without its draft model, which does not fit", pipeline_id)
            return await self._plan(pipeline_id, replace(wanted, spec=bare), expert_shares)

    async def _plan(self, pipeline_id: str, wanted: PlanWanted, expert_shares: Sequence[ExpertShare]) -> PlanMade:
        spec = wanted.spec
        model = await self._model(spec)
        tries = Avoided.relaxed(wanted.left_out)
        known: Known | None = None
        while True:
            avoided = tries.pop(0)
            placed = self._replaced(model, spec, pipeline_id, avoided)
            if placed is not None:
                return self.made(spec, placed)
            known = known or seen_experts(await self.known(pipeline_id, spec), expert_shares)
            try:
                return self.made(spec, await self.search(known, spec, avoided))
            except NoFeasiblePlacement as error:
                if not tries:
                    raise self._with_taken(error, pipeline_id) from error

    async def place_anew(
        self,
        pipeline_id: str,
        spec: ServeSpec,
        avoided: Avoided,
        *,
        num_nodes: int,
        expert_shares: Sequence[ExpertShare] = (),
    ) -> PlanMade:
        """Find the best placement of all stages over ``num_nodes`` nodes (0: as in ``spec``).

        ``expert_shares``: as for ``plan``. Raises NoFeasiblePlacement.
        """
        wanted = replace(spec, num_nodes=num_nodes or spec.num_nodes)
        known = seen_experts(await self.known(pipeline_id, wanted), expert_shares)
        return self.made(wanted, await self.search(known, wanted, avoided))

    async def known(self, pipeline_id: str, spec: ServeSpec, *, measure: Collection[str] = ()) -> Known:
        """Return the measurements of the cluster. Nodes in ``measure`` are idle and are measured first.

        Raises ModelUnknown.
        """
        model = await self._model(spec)
        survey = await self._surveyor.known(model, spec.settings, own=frozenset((pipeline_id,)), measure=measure)
        cluster = cluster_of(survey)
        links = replace(cluster.links, assumed=UNMEASURED)
        taken = self._taken(pipeline_id)
        machines = tuple(machine for machine in cluster.machines if machine.node_id not in taken)
        demand = demand_of(model.config, spec, weights=model.weights)
        return Known(model=model, demand=demand, cluster=replace(cluster, links=links, machines=machines))

    async def _model(self, spec: ServeSpec) -> LocalModel:
        """Return the model as its stages hold it. Raises ModelUnknown."""
        model = await self._models.adopt(spec.model, manifest_hash=spec.manifest_hash)
        return await as_drafted(self._models, spec, model.as_placed(spec.stages))

    async def search(self, known: Known, spec: ServeSpec, avoided: Avoided) -> tuple[Placed, ...]:
        """Find the best placement by known measurements that uses nothing avoided. Raises NoFeasiblePlacement.

        The constraints in ``spec`` count as far as the present nodes allow.
        """
        staying = {node.node_id for node in self._peers.nodes() if not node.draining}  # ``known`` may be older
        machines = [machine for machine in known.cluster.machines if machine.node_id in staying - avoided.nodes]
        names = {name for machine in machines for name in (machine.name, str(machine.node_id))}
        constraints = Constraints(
            num_nodes=min(spec.num_nodes, len(machines)),
            exclude=tuple(name for name in spec.exclude if name in names),
            first=spec.first if spec.first in names else "",
            experts_in_ram=spec.experts_in_ram,
        )
        links = replace(known.cluster.links, unreached=avoided.links)
        found = await asyncio.to_thread(plan, known.demand, machines, links, constraints, explain=False)
        return found.placed

    def made(self, spec: ServeSpec, placed: Sequence[Placed]) -> PlanMade:
        """Build the command that gives a placement to an engine. Raises NodeUnreachable."""
        return self.made_of(spec, stages_of(placed))

    def made_of(self, spec: ServeSpec, stages: Sequence[StagePlacement]) -> PlanMade:
        """Build the command that gives stages to an engine. Raises NodeUnreachable."""
        nodes = tuple(self._peers.node(stage.node_id).introduction for stage in stages)
        return PlanMade(spec=replace(spec, stages=tuple(stages)), nodes=nodes)

    def fetch_bytes(self, model: LocalModel) -> Callable[[NodeId, Sequence[Slice]], int]:
        """Return a function that counts the bytes a node must fetch before it can load slices of the model."""
        return fetch_bytes(self._peers.nodes(), model.stored)

    def _replaced(self, model: LocalModel, spec: ServeSpec, own: str, avoided: Avoided) -> tuple[Placed, ...] | None:
        """Place lost stages elsewhere and keep the others; None if they do not fit."""
        nodes = [node for node in self._free_of_others(own) if node.node_id not in avoided.nodes]
        states = bool(model.config.state_bytes())
        ours = frozenset((own,))
        rooms = [room for node in nodes for room in rooms_of(node, spec.settings, states=states, own=ours)]
        need = placement_need(model.config, spec.settings.context_length, model.weights)
        broken = self._peers.broken_links().union(avoided.links)
        return replace_lost(need, placed_of(spec), rooms, fetch_bytes=self.fetch_bytes(model), broken=broken)

    def _free_of_others(self, own: str) -> list[NodeState]:
        """Return the present nodes without those of the model's other replicas."""
        taken = self._taken(own)
        return [node for node in self._peers.nodes() if node.node_id not in taken]

    def _with_taken(self, error: NoFeasiblePlacement, pipeline_id: str) -> NoFeasiblePlacement:
        """Add to an error which nodes compute other replicas of the model."""
        taken = self._taken(pipeline_id)
        names = sorted(node.name for node in self._peers.nodes() if node.node_id in taken)
        if not names:
            return error
        others = f"{', '.join(names)} compute other replicas of the model"
        return error.changed(fact="; ".join(filter(None, [error.fact, others])))
