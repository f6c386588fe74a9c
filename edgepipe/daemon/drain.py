"""Moving everything away from this node, so that it can be switched off without anybody waiting."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from edgepipe.daemon.device import DeviceHost
from edgepipe.daemon.engines import EngineHost
from edgepipe.daemon.peers import Peers
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.wire.v1 import node_pb2 as pb


class Drain:
    """Whether the node is being drained, and how far it is."""

    def __init__(
        self,
        *,
        device: DeviceHost,
        engines: EngineHost,
        peers: Peers,
        changes: Callable[[], AsyncIterator[None]],
        on_change: Callable[[], None],
    ) -> None:
        self.active = False
        self._device = device
        self._engines = engines
        self._peers = peers
        self._changes = changes
        self._on_change = on_change

    async def run(self) -> AsyncGenerator[pb.DrainEvent]:
        """What is still here, whenever that changes, until nothing is; the node then takes nothing until ``undo``.

        Engines elsewhere prepare stages on other nodes before they let go of those here. Raises NoFeasiblePlacement
        when there is no other node, or an engine says that the model fits nowhere else; then all stays as it is.
        """
        if len(self._peers.nodes()) < 2:
            raise NoFeasiblePlacement(
                "there is no other node to move to", next_step="stop the model, or start another node"
            )
        self.active = True
        self._on_change()
        self._engines.abandon_all()
        told: pb.DrainEvent | None = None
        async for _ in self._changes():
            event = pb.DrainEvent(
                stages=self._device.pipelines(), engines=[state.model for state in self._engines.states()]
            )
            if event != told:
                told = event
                yield event
            if not event.stages and not event.engines:
                return

    def undo(self) -> None:
        """Take work again."""
        self.active = False
        self._on_change()
