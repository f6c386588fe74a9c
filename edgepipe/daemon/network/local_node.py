"""The state that this node reports to the others."""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from edgepipe import __version__
from edgepipe.cluster.changes import Changes
from edgepipe.ids import NodeId
from edgepipe.wire.nodes import NodeState

Part = Callable[[NodeState], NodeState]  # sets some fields anew


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
        self.changes = Changes()  # changes of this node, and of the cluster as this node sees it
        self.state = NodeState(
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
        """Let ``part`` set its fields whenever the state is built."""
        self._parts.append(part)

    def watch(self) -> AsyncIterator[None]:
        """Yield at once, and after every change of this node or of the cluster as this node sees it."""
        return self.changes.watch()

    def refresh(self, *, urgent: bool = True) -> None:
        """Build the state again. Other nodes get a changed state at once when ``urgent``, else with the next beat."""
        fresh = self.state
        for part in self._parts:
            fresh = part(fresh)
        if fresh == self.state:
            return
        self.state = replace(fresh, version=fresh.version + 1)
        self._on_change()
        self.changes.notify()
        if urgent:
            self._announce()
