"""What an engine leaves alone for a while, and what it says of machines that do not reach each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from edgepipe.clock import Clock
from edgepipe.config import CHILD_PORTS
from edgepipe.engine.control import StageSite
from edgepipe.engine.hold_down import HoldDown
from edgepipe.engine.preparation import Nodes
from edgepipe.errors import ConnectTimeout
from edgepipe.ids import NodeId
from edgepipe.wire.engines import ServeSpec, StagePlacement

Way = tuple[NodeId, NodeId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """Connections that an epoch wanted and that could not be made, or did not last."""

    links: tuple[tuple[StageSite, StageSite], ...] = ()  # from a stage to the next; the engine reaches both
    sites: tuple[StageSite, ...] = ()  # that the engine itself did not reach

    def __bool__(self) -> bool:
        return bool(self.links or self.sites)

    def error(self, nodes: Nodes, *, engine: str) -> ConnectTimeout:
        """The first of them, for people. ``engine`` is the name of the engine's node."""
        if self.links:
            one, site = self.links[0]
            source, beside = one.node_name, f", though {engine} reaches both" if engine != one.node_name else ""
        else:
            source, site, beside = engine, self.sites[0], ""
        return ConnectTimeout(
            f"{source} does not reach {site.node_name}",
            fact=f"no connection to {site.address} could be made from there{beside}",
            next_step=f"let TCP {_ports(site, nodes)} through the firewall of {site.node_name}, at least from "
            f"{source}: see 'edgepipe doctor' on {source}",
            node=site.node_name,
            stage=site.label,
        )


class Bars:
    """Nodes and directed links that failed lately, or come and go."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._nodes = HoldDown[NodeId]()
        self._links = HoldDown[Way]()
        self._missed_before: frozenset[NodeId] = frozenset()  # by the last epoch that was opened, or tried

    def lost(self, node_id: NodeId) -> None:
        """A node was lost while it served."""
        self._nodes.lost(node_id, self._clock.monotonic_s())

    def failed(self, node_id: NodeId) -> None:
        """A node refused, or was silent, when it was asked."""
        self._nodes.failed(node_id, self._clock.monotonic_s())

    def note(self, missed: Missed) -> bool:
        """An epoch could not be opened so, or ended; to be told of one that stands, too. Whether that bars anything.

        A node that the engine does not reach is barred after the second time in a row: its stage's process may have
        died just then, and is another one by then.
        """
        now_s = self._clock.monotonic_s()
        for one, other in missed.links:
            self._links.failed((one.node_id, other.node_id), now_s)
        nodes = frozenset(site.node_id for site in missed.sites)
        again = nodes & self._missed_before
        for node_id in again:
            self._nodes.failed(node_id, now_s)
        self._missed_before = nodes
        return bool(missed.links or again)

    def nodes(self) -> dict[NodeId, float]:
        """That a plan leaves out where it can, and for how many seconds still."""
        return self._nodes.barred(self._clock.monotonic_s())

    def links(self) -> dict[Way, float]:
        """From the first to the second of which no stage shall send, where a plan can do without; likewise."""
        return self._links.barred(self._clock.monotonic_s())

    def allow(self, spec: ServeSpec) -> bool:
        """Whether its placement does without them."""
        order = in_order(spec.stages)
        return self.nodes().keys().isdisjoint(order) and self.links().keys().isdisjoint(pairwise(order))


def in_order(stages: Iterable[StagePlacement]) -> list[NodeId]:
    """The nodes that a token comes by, one per slice."""
    slices = sorted((part.index, stage.node_id) for stage in stages for part in stage.slices)
    return [node_id for _, node_id in slices]


def _ports(site: StageSite, nodes: Nodes) -> str:
    """Of the children of a stage's node: the one that was tried, or the range that it is from."""
    port, of_node = (int(address.rpartition(":")[2]) for address in (site.address, nodes.address(site.node_id)))
    first, last = of_node + 1, of_node + CHILD_PORTS
    return f"ports {first}-{last}" if first <= port <= last else f"port {port}"
