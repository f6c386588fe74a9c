"""What an engine asks its daemon when stages are lost, and what it is told of the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edgepipe.errors import PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.wire.engines import ServeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Where the nodes of a pipeline are."""

    addresses: Mapping[NodeId, str]  # HOST:PORT
    names: Mapping[NodeId, str]

    def updated(self, newer: Nodes) -> Nodes:
        """With what is newer; nodes that a plan leaves are still to be told."""
        return Nodes(addresses={**self.addresses, **newer.addresses}, names={**self.names, **newer.names})

    def name(self, node_id: NodeId) -> str:
        """For people."""
        return self.names.get(node_id) or node_id

    def address(self, node_id: NodeId) -> str:
        """HOST:PORT of a node. Raises PlanInvalid if its address is not known."""
        try:
            return self.addresses[node_id]
        except KeyError:
            raise PlanInvalid(f"the plan names node {node_id}, whose address is not known") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlacement:
    """Where the stages of the next epoch are."""

    spec: ServeSpec
    nodes: Nodes


class Planner(Protocol):
    """Places stages anew when some are lost."""

    async def plan(
        self,
        spec: ServeSpec,
        *,
        quarantined: Mapping[NodeId, float],
        quarantined_links: Mapping[tuple[NodeId, NodeId], float],
    ) -> EpochPlacement:
        """Place ``spec`` without nodes that are gone, and where that is possible without ``quarantined`` ones.

        It avoids placing the second node of a quarantined link right behind the first. Both map to the seconds that
        their quarantine still lasts.
        Stages whose node is there stay where they are if they can. Raises NoFeasiblePlacement, naming what is missing.
        """
        ...


class SamePlan:
    """Plans nothing: every stage is where it was."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    async def plan(
        self,
        spec: ServeSpec,
        *,
        quarantined: Mapping[NodeId, float],
        quarantined_links: Mapping[tuple[NodeId, NodeId], float],
    ) -> EpochPlacement:
        """See Planner."""
        return EpochPlacement(spec=spec, nodes=self._nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """The nodes that the engine's daemon hears; told whenever they, or what their devices can take, change."""

    addresses: Mapping[NodeId, str]  # HOST:PORT
    leaving: frozenset[NodeId] = frozenset()  # of them: those whose stages shall move away
