"""Moves all stages and engines off this node, so that it can be switched off without interrupting requests.

Stages go first: their engines prepare replacements before the stages here end. Then engines are handed over: the node
that will start them has a process ready before the engines here end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass

from edgepipe.daemon.device.device import DeviceHost
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.offers import EngineDirectory, PublishedState
from edgepipe.daemon.serving.capacity import device_is_coming
from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.daemon.serving.replanning import Replanner
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.errors import EdgepipeError, NoFeasiblePlacement
from edgepipe.wire.serving import DrainEvent, PlanWanted, ServeBody

logger = logging.getLogger(__name__)

DEVICE_S = 15.0  # time for devices to start: importing torch and measuring takes 2-10 s, more on a busy machine


@dataclass(kw_only=True, eq=False)
class Drain:
    """The drain of this node: whether it is active, and how far it is."""

    device: DeviceHost
    engines: EngineHost
    peers: Peers
    replanner: Replanner
    book: ServeBook
    directory: EngineDirectory
    local: PublishedState

    def __post_init__(self) -> None:
        self.active = False
        self._ending: set[str] = set()  # pipelines that end with this node: other replicas of their models go on

    @property
    def is_needed(self) -> bool:
        """Whether this node has stages or engines that another node could take."""
        left = self._left()
        return bool(self._others() and (left.stages or left.engines))

    async def run(self) -> AsyncGenerator[DrainEvent]:
        """Yield the stages and engines still here after each change, until none is left. Accept no work until ``undo``.

        Raises NoFeasiblePlacement, and undoes the drain, when no other node stays or a model fits nowhere else.
        """
        try:
            async for event in self._run():
                yield event
        except NoFeasiblePlacement:
            self.undo()
            raise

    async def run_within(self, seconds: float) -> None:
        """Drain for at most ``seconds``, as the machine will not wait longer. Accept no work afterwards."""
        try:
            async with asyncio.timeout(seconds):
                async for event in self._run():
                    logger.info("moving away: stages of %s, engines of %s", event.stages, event.engines)
        except TimeoutError:
            logger.warning("not everything was moved away within %.0f s", seconds)
        except EdgepipeError as error:
            if self._others():
                logger.warning("nothing is moved away: %s", error)
            else:
                logger.info("nothing is moved away: %s", error.what)  # all nodes are stopping

    async def outlook(self) -> str:
        """Accept no more work, and return why a model cannot continue without this node; empty if all can."""
        self.active = True
        self.local.refresh()
        try:
            lack = await self._lack()
        except EdgepipeError as error:
            lack = error
        if lack is None:
            return ""
        if coming := self._coming():
            return f"waits for the devices of {', '.join(coming)}, at most {DEVICE_S:.0f} s: {lack.what}"
        fact = f" ({lack.fact})" if lack.fact else ""
        return f"no other machine can hold its work, so it ends here: {lack.what}{fact}"

    def undo(self) -> None:
        """Take work again."""
        self.active = False
        self._ending.clear()
        self.local.refresh()

    async def _run(self) -> AsyncGenerator[DrainEvent]:
        self.active = True
        self.local.refresh()
        await self._check_room()
        async for event in self._progress():
            yield event

    async def _progress(self) -> AsyncGenerator[DrainEvent]:
        last_event: DrainEvent | None = None
        async for _ in self.local.watch():
            event = self._left()
            if event != last_event:
                last_event = event
                yield event
            if not event.stages and not event.engines:
                return
            if not self._others():
                raise NoFeasiblePlacement("the other nodes go away, too", next_step="start another node")
            if not event.stages:
                await self._hand_over()

    async def _check_room(self) -> None:
        """Return once every model can continue without this node; wait at most ``DEVICE_S`` for devices that start.

        Raises NoFeasiblePlacement, naming what is missing, if a model fits nowhere else.
        """
        lack = await self._lack()
        if lack is None:
            return
        coming = self._coming()
        if coming:
            logger.info("waits for the devices of %s: %s", ", ".join(coming), lack.what)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEVICE_S):
                    lack = await self._lack_of_devices()
        if lack is not None:
            if still := self._coming():
                waited = f"waited {DEVICE_S:.0f} s for the devices of {', '.join(still)}"
                lack.fact = f"{lack.fact}; {waited}" if lack.fact else waited
            raise lack

    async def _lack_of_devices(self) -> NoFeasiblePlacement | None:
        """Return what is still missing once no device is starting; None as soon as nothing is."""
        looked_at: tuple[object, ...] = ()
        lack: NoFeasiblePlacement | None = None
        async for _ in self.local.watch():
            rooms = self.replanner.room_changes()
            if rooms != looked_at:
                looked_at = rooms
                lack = await self._lack()
                if lack is None or not self._coming():
                    return lack
        raise AssertionError("changes end only with the node")

    async def _lack(self) -> NoFeasiblePlacement | None:
        """Return why a model cannot continue without this node; None if all can."""
        if not self._others():
            return NoFeasiblePlacement(
                "there is no other node to move to", next_step="stop the model, or start another node"
            )
        hosted = self.device.pipelines()
        for record in self.book.served():
            if record.pipeline_id in hosted:
                try:
                    await self.replanner.plan(record.pipeline_id, PlanWanted(spec=record.spec))
                except NoFeasiblePlacement as error:
                    if not self._goes_on(record, hosted):
                        return error
                    self._ending.add(record.pipeline_id)
        return None

    def _goes_on(self, record: ServeBody, hosted: Collection[str]) -> bool:
        """Return whether another replica of the model answers without this node; ``hosted``: pipelines with stages
        here. Gateways then continue this one's requests there."""
        staying = [node for node in self.peers.nodes() if not node.draining and not self.peers.is_self(node.node_id)]
        return any(
            engine.model == record.spec.model and engine.state == "ready" and engine.pipeline_id not in hosted
            for node in staying
            for engine in node.engines
        )

    def _coming(self) -> list[str]:
        """Return the names of the nodes whose device is starting."""
        return [
            node.name for node in self.peers.nodes() if device_is_coming(node) and not self.peers.is_self(node.node_id)
        ]

    async def _hand_over(self) -> None:
        """End the engines here once the node that starts them again is ready."""
        heir = min(self._others())
        try:
            await self.peers.stand_by(heir)
        except EdgepipeError as error:
            logger.info("node=%s has no engine process ready: %s", heir, error)  # the heir starts a process later
        self.engines.hand_over()

    def _left(self) -> DrainEvent:
        """Return the stages and engines still here; a stage whose engine runs nowhere, or whose replica ends, does not
        count."""
        stages = tuple(
            pipeline_id
            for pipeline_id in self.device.pipelines()
            if self.directory.has_engine(pipeline_id) and pipeline_id not in self._ending
        )
        return DrainEvent(stages=stages, engines=tuple(state.model for state in self.engines.states()))

    def _others(self) -> list[str]:
        """Return the ids of the nodes that stay."""
        return [
            node.node_id for node in self.peers.nodes() if not node.draining and not self.peers.is_self(node.node_id)
        ]
