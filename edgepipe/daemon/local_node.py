"""What this node tells of itself, and what it shows of the cluster."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping

from edgepipe import __version__
from edgepipe.clock import Clock
from edgepipe.cluster.membership import Membership
from edgepipe.daemon.changes import Changes
from edgepipe.ids import NodeId
from edgepipe.wire.v1 import node_pb2 as pb

Part = Callable[[pb.NodeState], None]  # fills in its fields


class LocalNode:
    """Builds this node's state from its parts, counts its versions and spreads the news."""

    def __init__(
        self,
        *,
        node_id: NodeId,
        incarnation: int,
        name: str,
        address: str,
        on_change: Callable[[], None],
        announce: Callable[[], None],
    ) -> None:
        self.changes = Changes()  # of this node and of the cluster as seen from it
        self.state = pb.NodeState(
            node_id=node_id,
            name=name,
            address=address,
            incarnation=incarnation,
            edgepipe_version=__version__,
            platform=f"{platform.system()} {platform.machine()}",
            version=1,
        )
        self._parts: list[Part] = []
        self._on_change = on_change
        self._announce = announce

    def add_part(self, part: Part) -> None:
        """Let ``part`` fill in its fields whenever the state is built."""
        self._parts.append(part)

    def refresh(self, *, urgent: bool = True) -> None:
        """Build the state again; if it differs, others hear of it: at once when ``urgent``, else with the next beat."""
        fresh = pb.NodeState()
        fresh.CopyFrom(self.state)
        for field in ("devices", "engines", "models", "transfers", "gateways", "serves", "silent"):
            fresh.ClearField(field)
        for part in self._parts:
            part(fresh)
        if fresh == self.state:
            return
        fresh.version += 1
        self.state = fresh  # a new object: beats and views under way keep the old one
        self._on_change()
        self.changes.notify()
        if urgent:
            self._announce()


def member_states(
    local: LocalNode, membership: Membership, clock_skews_ms: Mapping[NodeId, float], *, now_s: float
) -> list[pb.MemberState]:
    """This node first, then every reachable member, as of ``now_s`` on the monotonic clock."""
    own = pb.MemberState(node=local.state, state="alive", self=True)
    others = [
        pb.MemberState(
            node=member.node,
            state=member.status,
            rtt_ms=member.rtt_ms,
            gap_ms=member.gaps.p99_s(now=now_s) * 1e3,
            clock_skew_ms=clock_skews_ms.get(NodeId(member.node.node_id), 0.0),
        )
        for member in membership.reachable()
    ]
    return [own, *others]


def absent_nodes(membership: Membership, clock: Clock) -> list[pb.AbsentNode]:
    """Who went without a goodbye, and since when by this machine's wall clock."""
    now_s, wall_s = clock.monotonic_s(), clock.wall_s()
    return [
        pb.AbsentNode(
            node_id=member.node.node_id,
            name=member.node.name,
            state=member.status,
            since_us=int((wall_s - (now_s - member.status_since_s)) * 1e6),
        )
        for member in membership.absent()
    ]
