"""The state that this node reports to the others."""

from __future__ import annotations

import platform
from collections.abc import Callable

from edgepipe import __version__
from edgepipe.daemon.changes import Changes
from edgepipe.ids import NodeId
from edgepipe.wire.v1 import node_pb2 as pb

Part = Callable[[pb.NodeState], None]  # fills in some fields


class LocalNode:
    """Builds this node's state from its parts, counts its versions and announces changes."""

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
        self.changes = Changes()  # of this node, and of the cluster as this node sees it
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
        """Build the state again. Other nodes get a changed state at once when ``urgent``, else with the next beat."""
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
