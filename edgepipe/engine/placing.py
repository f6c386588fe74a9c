"""Interface between an engine and its daemon: placements after a loss, and reachable nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edgepipe.errors import PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.wire.engines import ServeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Addresses and names of a pipeline's nodes."""

    addresses: Mapping[NodeId, str]  # HOST:PORT
    names: Mapping[NodeId, str]

    def updated(self, newer: Nodes) -> Nodes:
        """Merge newer entries in. Keeps nodes that a plan has left, since they must still be released."""
        return Nodes(addresses={**self.addresses, **newer.addresses}, names={**self.names, **newer.names})

    def name(self, node_id: NodeId) -> str:
        """Return the node's name for people, or its id."""
        return self.names.get(node_id) or node_id

    def address(self, node_id: NodeId) -> str:
        """Return HOST:PORT of a node. Raises PlanInvalid if its address is not known."""
        try:
            return self.addresses[node_id]
        except KeyError:
            raise PlanInvalid(f"the plan names node {node_id}, whose address is not known") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlacement:
    """Placement of an epoch's stages, and its nodes."""

    spec: ServeSpec
    nodes: Nodes


class Planner(Protocol):
    """Finds a new placement when stages are lost."""

    async def plan(
        self,
        spec: ServeSpec,
        *,
        quarantined: Mapping[NodeId, float],
        quarantined_links: Mapping[tuple[NodeId, NodeId], float],
    ) -> EpochPlacement:
        """Place ``spec`` without missing nodes and, where possible, without ``quarantined`` ones.

        It avoids placing the second node of a quarantined link right after the first. Both mappings give the remaining
        seconds of the quarantine.
        Stages on reachable nodes stay if possible. Raises NoFeasiblePlacement, which names the shortage.
        """
        ...


class SamePlacement:
    """Planner that keeps every stage on its node."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    async def plan(
        self,
        spec: ServeSpec,
        *,
        quarantined: Mapping[NodeId, float],
        quarantined_links: Mapping[tuple[NodeId, NodeId], float],
    ) -> EpochPlacement:
        """Return the same placement."""
        return EpochPlacement(spec=spec, nodes=self._nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachableNodes:
    """Nodes that the engine's daemon reaches. The daemon reports every change of them and of their free memory."""

    addresses: Mapping[NodeId, str]  # HOST:PORT
    leaving: frozenset[NodeId] = frozenset()  # nodes that are drained: their stages must move
