"""PURE: nodes and directed links that an engine avoids for a limited time, with reasons."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

from edgepipe.engine.placing import Nodes
from edgepipe.engine.settings import FLAPS, FLAPS_WITHIN_S, LONGEST_QUARANTINE_S, QUARANTINE_S
from edgepipe.engine.sites import StageSite
from edgepipe.errors import ConnectTimeout
from edgepipe.ids import NodeId
from edgepipe.link.shut_ports import shut_port
from edgepipe.wire.engines import Quarantined, ServeSpec, StagePlacement

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Times:
    last_s: float = 0.0  # length of the last quarantine; 0: none yet
    until_s: float = 0.0
    losses: deque[float] = field(default_factory=lambda: deque[float](maxlen=FLAPS))

    def is_on_probation(self, now_s: float) -> bool:
        """Return whether its last quarantine has not ended, or ended at most ten minutes ago."""
        return self.last_s > 0 and now_s <= self.until_s + LONGEST_QUARANTINE_S


class QuarantineTimes(Generic[K]):
    """Quarantine times of nodes, or of links, in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._times: dict[K, _Times] = {}

    def failed(self, item: K, now_s: float) -> None:
        """Quarantine an item for 30 s, doubling (up to 600 s) if it fails again soon after."""
        record = self._times.setdefault(item, _Times())
        record.last_s = min(2 * record.last_s, LONGEST_QUARANTINE_S) if record.is_on_probation(now_s) else QUARANTINE_S
        record.until_s = now_s + record.last_s

    def lost(self, item: K, now_s: float) -> bool:
        """Count a loss of an item while it served. Return whether it is quarantined for that.

        Three losses within five minutes count as a failure; after a quarantine, the next loss does.
        """
        record = self._times.setdefault(item, _Times())
        record.losses.append(now_s)
        full = len(record.losses) == FLAPS and now_s - record.losses[0] <= FLAPS_WITHIN_S
        flaps = full or record.is_on_probation(now_s)
        if flaps:
            record.losses.clear()
            self.failed(item, now_s)
        return flaps

    def quarantined(self, now_s: float) -> dict[K, float]:
        """Return the quarantined items, each with the remaining seconds."""
        return {item: record.until_s - now_s for item, record in self._times.items() if now_s < record.until_s}


Way = tuple[NodeId, NodeId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """Connections of an epoch that failed or broke."""

    # Links from a stage to the next; the engine reached both stages.
    links: tuple[tuple[StageSite, StageSite], ...] = ()
    sites: tuple[StageSite, ...] = ()  # stages that the engine itself did not reach

    def __bool__(self) -> bool:
        return bool(self.links or self.sites)

    def of_node(self, name: str) -> Missed:
        """Return only the sites on the node of that name."""
        return Missed(sites=tuple(site for site in self.sites if site.node_name == name))

    def error(self, nodes: Nodes, *, engine: str) -> ConnectTimeout:
        """Return an error for the first missed connection. ``engine``: name of the engine's node."""
        if self.links:
            item, site = self.links[0]
            source = item.node_name
        else:
            source, site = engine, self.sites[0]
        return shut_port(
            source, site.node_name, address=site.address, node_address=nodes.address(site.node_id), beside=engine
        ).changed(stage=site.label)


class Quarantine:
    """Nodes and directed links that failed recently or keep reconnecting. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._nodes = QuarantineTimes[NodeId]()
        self._links = QuarantineTimes[Way]()
        self._reasons: dict[NodeId | Way, str] = {}  # newest reason, by node or link
        # Nodes that the last epoch missed, whether it opened or not.
        self._missed_before: frozenset[NodeId] = frozenset()

    def lost(self, node_id: NodeId, reason: str, now_s: float) -> bool:
        """Count a loss of a serving node, as ``QuarantineTimes.lost`` does. ``reason``: a clause for people."""
        quarantined = self._nodes.lost(node_id, now_s)
        if quarantined:
            self._reasons[node_id] = reason
        return quarantined

    def failed(self, node_id: NodeId, reason: str, now_s: float) -> None:
        """Quarantine a node for a growing time. ``reason``: a clause for people."""
        self._reasons[node_id] = reason
        self._nodes.failed(node_id, now_s)

    def note(self, missed: Missed, now_s: float) -> bool:
        """Quarantine the missed connections of an epoch that opened, failed to open, or ended. Return whether any was.

        A node that the engine does not reach is quarantined the second time in a row: the first time, its stage process
        may have just died, and a new process may answer.
        """
        for item, other in missed.links:
            self._reasons[item.node_id, other.node_id] = "no connection could be made in that direction"
            self._links.failed((item.node_id, other.node_id), now_s)
        nodes = frozenset(site.node_id for site in missed.sites)
        again = nodes & self._missed_before
        for node_id in again:
            self.failed(node_id, "its stage could not be reached", now_s)
        self._missed_before = nodes
        return bool(missed.links or again)

    def nodes(self, now_s: float) -> dict[NodeId, float]:
        """Return the nodes that plans avoid where possible, each with the remaining seconds."""
        return self._nodes.quarantined(now_s)

    def links(self, now_s: float) -> dict[Way, float]:
        """Return the links (from, to) that plans avoid where possible, each with the remaining seconds."""
        return self._links.quarantined(now_s)

    def left_out(self, now_s: float) -> tuple[Quarantined, ...]:
        """Return all current quarantines, for people and for the next plan."""
        nodes = [
            Quarantined(node_id=node_id, seconds=seconds, reason=self._reasons[node_id])
            for node_id, seconds in self.nodes(now_s).items()
        ]
        links = [
            Quarantined(node_id=way[0], other_id=way[1], seconds=seconds, reason=self._reasons[way])
            for way, seconds in self.links(now_s).items()
        ]
        return (*nodes, *links)

    def allows(self, spec: ServeSpec, now_s: float) -> bool:
        """Return whether a placement avoids all quarantined nodes and links."""
        order = in_order(spec.stages)
        return self.nodes(now_s).keys().isdisjoint(order) and self.links(now_s).keys().isdisjoint(pairwise(order))


def in_order(stages: Iterable[StagePlacement]) -> list[NodeId]:
    """Return the node of each slice, in the order that a token passes them."""
    slices = sorted((part.index, stage.node_id) for stage in stages for part in stage.slices)
    return [node_id for _, node_id in slices]
