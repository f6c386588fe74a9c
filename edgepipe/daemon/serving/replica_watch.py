"""Gives models that are served with ``--replicas auto`` further pipelines when machines join or come back.

The node that had the model served does this. ``free_machines`` says when; ``ReplicaChanges`` plans, and does it if it
pays.
"""

from __future__ import annotations

import asyncio
import logging

from edgepipe.clock import Clock
from edgepipe.daemon.alarm import TickAlarm
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.offers import PublishedState
from edgepipe.daemon.serving.capacity import rooms_of
from edgepipe.daemon.serving.engine_following import EngineFollower
from edgepipe.daemon.serving.free_machines import FreeMachines
from edgepipe.daemon.serving.replica_changing import ReplicaChanges
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.errors import EdgepipeError
from edgepipe.wire.engines import ServeSpec

logger = logging.getLogger(__name__)


class ReplicaWatch:
    """Watches for machines that a model of this node could use."""

    def __init__(
        self,
        *,
        peers: Peers,
        book: ServeBook,
        follower: EngineFollower,
        changes: ReplicaChanges,
        clock: Clock,
        local: PublishedState,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._peers = peers
        self._book = book
        self._follower = follower
        self._changes = changes
        self._clock = clock
        self._local = local
        self._tasks = tasks
        self._machines = FreeMachines()
        self._alarm = TickAlarm(tasks, clock, lambda at_s: self._look(least_s=at_s), name="replica-watch-alarm")

    async def run(self) -> None:
        """Look after each change, until cancelled."""
        async for _ in self._local.watch():
            self._look()

    def _look(self, *, least_s: float = 0.0) -> None:
        models = self._models()
        self._machines.forget(frozenset(models))
        free = {model: found for model, spec in models.items() if (found := self._free(model, spec)) is not None}
        for model in self._machines.look(free, max(least_s, self._clock.monotonic_s())):
            self._tasks.create_task(self._grow(model), name=f"grow:{model}")
        self._alarm.set(self._machines.wake_at_s)

    def _models(self) -> dict[str, ServeSpec]:
        """Return the models whose number of pipelines this node chooses."""
        return {
            body.spec.model: body.spec
            for body in self._book.served()
            if body.spec.auto_replicas and body.asker == self._peers.own_id
        }

    def _free(self, model: str, spec: ServeSpec) -> frozenset[str] | None:
        """Return the machines that hold nothing; None while a pipeline of the model is not ready, or they change."""
        bodies = self._book.replicas(model)
        ready = {engine.pipeline_id for _, engine in self._follower.running(model) if engine.state == "ready"}
        if self._changes.is_open(model) or any(body.pipeline_id not in ready for body in bodies):
            return None
        return frozenset(
            node.node_id
            for node in self._peers.nodes()
            if rooms_of(node, spec.settings) and not any(device.reserved for device in node.devices)
        )

    async def _grow(self, model: str) -> None:
        try:
            if not await self._changes.grow(model):
                logger.info("model=%s gets no further pipeline: the free machines would give too little", model)
        except EdgepipeError as error:
            logger.warning("model=%s gets no further pipeline: %s", model, error)
