"""Where the stages of a running model go when nodes are gone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edgepipe.daemon.models import Models
from edgepipe.daemon.peers import Peers
from edgepipe.daemon.rooms import placement_need, rooms_of, stages_of
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.ids import NodeId
from edgepipe.planner.placement import Need, NodeRoom, Placed, place
from edgepipe.planner.replacement import replace_lost
from edgepipe.wire.common import slices_from_wire
from edgepipe.wire.v1 import node_pb2 as pb


class Replanner:
    """Answers engines beside this daemon with what it knows of the cluster."""

    def __init__(self, *, peers: Peers, models: Models) -> None:
        self._peers = peers
        self._models = models

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

    async def plan(self, pipeline_id: str, wanted: pb.PlanWanted) -> pb.PlanMade:
        """Survivors keep their stages where lost ones fit on others; else everything is placed anew.

        Raises NoFeasiblePlacement, ModelUnknown.
        """
        model = await self._models.adopt(wanted.spec.model, manifest_hash=wanted.spec.manifest_hash)
        need = placement_need(model.config, wanted.spec.context_length)
        rooms = [room for node in self._peers.nodes() for room in rooms_of(node, wanted.spec.dtype, own=pipeline_id)]
        try:
            placed = self._place(need, wanted.spec, rooms, avoided=frozenset(wanted.barred))
        except NoFeasiblePlacement:
            if not wanted.barred:
                raise
            placed = self._place(need, wanted.spec, rooms, avoided=frozenset())
        return self._made(wanted.spec, placed)

    async def anew(self, pipeline_id: str, spec: pb.ServeSpec, *, num_nodes: int) -> pb.PlanMade:
        """Everything placed anew over ``num_nodes`` nodes (0: all that can compute). Raises NoFeasiblePlacement."""
        model = await self._models.adopt(spec.model, manifest_hash=spec.manifest_hash)
        need = placement_need(model.config, spec.context_length)
        rooms = [room for node in self._peers.nodes() for room in rooms_of(node, spec.dtype, own=pipeline_id)]
        count = num_nodes or min(len(rooms), model.config.num_layers)
        return self._made(spec, place(need, rooms, num_nodes=count))

    def _made(self, spec: pb.ServeSpec, placed: Sequence[Placed]) -> pb.PlanMade:
        made = pb.PlanMade(spec=spec)
        del made.spec.stages[:]
        made.spec.stages.extend(stages_of(placed))
        for node_id in {stage.node_id for stage in made.spec.stages}:
            node = self._peers.node(node_id)
            made.nodes.add(node_id=node_id, address=node.address, name=node.name)
        return made

    def _place(
        self, need: Need, spec: pb.ServeSpec, rooms: Sequence[NodeRoom], *, avoided: Collection[str]
    ) -> tuple[Placed, ...]:
        rooms = [room for room in rooms if room.node_id not in avoided]
        standing = [
            Placed(node_id=NodeId(stage.node_id), part=part)
            for stage in spec.stages
            for part in slices_from_wire(stage.slices)
        ]
        return replace_lost(need, standing, rooms, fetch_bytes=self._fetch_bytes(spec)) or place(need, rooms)

    def _fetch_bytes(self, spec: pb.ServeSpec) -> dict[NodeId, int]:
        """What of the model is not on a node's disk; of a node that never told of it, more than of any that did."""
        on_disk = {
            node.node_id: next((one for one in node.models if one.manifest_hash == spec.manifest_hash), None)
            for node in self._peers.nodes()
        }
        whole = max((one.num_bytes for one in on_disk.values() if one is not None), default=0)
        return {
            NodeId(node_id): whole + 1 if one is None else 0 if one.complete else whole - one.num_bytes
            for node_id, one in on_disk.items()
        }
