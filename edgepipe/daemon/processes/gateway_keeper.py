"""Keeps the node's gateway process: starts it, sends it views of the cluster, and restarts it when it dies."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from edgepipe.cluster.changes import Changes
from edgepipe.daemon.offers import BatchReports, ChildSetup, ClusterSummary, PublishedState, RequestedModels
from edgepipe.daemon.processes.children import Child, Children
from edgepipe.daemon.processes.kept_models import KeptModelsFile
from edgepipe.daemon.processes.load_turns import MOST_WAITING, Decision, LoadTurns
from edgepipe.errors import CapacityError, EdgepipeError
from edgepipe.wire.batches import BatchReport
from edgepipe.wire.children import KeptModels, LoadFailed, LoadQueue, LoadWanted, Report, UnloadWanted
from edgepipe.wire.nodes import ClusterView

logger = logging.getLogger(__name__)

_HEALTHY_S = 60.0  # a gateway that ran for so long did not fail at its start
_RESTART_MIN_S, _RESTART_MAX_S = 0.5, 10.0
_VIEW_INTERVAL_S = 0.1  # engines report several times a second; a gateway needs no more views than this


class GatewayKeeper:
    """Keeps exactly one gateway running."""

    def __init__(
        self,
        *,
        children: Children,
        setup: ChildSetup,
        http_port: int,
        views: ClusterSummary,
        requested: RequestedModels,
        kept: KeptModelsFile,
        batches: BatchReports,
        tasks: asyncio.TaskGroup,
        local: PublishedState,
    ) -> None:
        self._requested = requested
        self._unloading: set[str] = set()  # models; ``unload`` ignores names that no request loaded
        self._turns = LoadTurns()  # turns of the models that requests wait for
        self._told_queue = LoadQueue()
        self._kept = kept
        self._batches = batches
        self._child: Child | None = None  # the newest
        self.http_port = 0  # port of the running process
        self.certificate = b""  # certificate of the running process
        self._sent_view = ClusterView()
        self._view_sent = Changes()
        self._children = children
        self._setup = setup
        self._wanted_port = http_port
        self._views = views
        self._tasks = tasks
        self._local = local

    async def start(self) -> Child:
        """Start the gateway. Raises PortInUse and other errors that prevent the start."""
        child = await self._children.start(
            self._setup.child_settings("gateway", http_port=self._wanted_port), self._tasks
        )
        started = await self._children.wait_started(child)
        child.on_report = self._take
        self._child = child
        child.send(self._kept.newest)
        self._told_queue = LoadQueue()
        self._tell_queue()
        self.certificate = started.certificate
        self.http_port = self._wanted_port = started.port  # a restarted gateway keeps the port
        self._local.refresh()
        return child

    async def knows(self, pipeline_id: str) -> None:
        """Wait until the gateway knows a ready engine, so that its next client finds the model."""
        async for _ in self._view_sent.watch():
            engines = [entry.engine for entry in self._sent_view.served]
            if any(engine.pipeline_id == pipeline_id and engine.state == "ready" for engine in engines):
                return

    async def keep(self, child: Child) -> None:
        """Send the gateway views of the cluster and restart it whenever it ends, until cancelled."""
        wait_s, now_s = _RESTART_MIN_S, asyncio.get_running_loop().time
        while True:
            began_s = now_s()
            feeder = self._tasks.create_task(self._feed(child), name="gateway:views")
            try:
                await child.exited.wait()
            finally:
                feeder.cancel()
            self._batches.forget()
            if child.stopping:
                return
            if now_s() - began_s > _HEALTHY_S:
                wait_s = _RESTART_MIN_S
            logger.error("gateway ended, started again in %.1f s: %s", wait_s, child.error())
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _RESTART_MAX_S)
            try:
                child = await self.start()
            except EdgepipeError as error:
                logger.error("gateway does not start: %s", error)

    def _take(self, report: Report) -> None:
        match report:
            case LoadWanted(model=model, owner=owner):
                self._apply(self._turns.want(model, owner, now_s=asyncio.get_running_loop().time()))
            case BatchReport():
                self._batches.take(report)
            case KeptModels():
                self._kept.keep(report)
            case UnloadWanted(model=model) if model not in self._unloading:
                self._unloading.add(model)
                self._tasks.create_task(self._stop(model), name=f"unload:{model}")
            case _:
                pass

    async def _stop(self, model: str) -> None:
        logger.info("model=%s is stopped: no request wanted it any longer", model)
        try:
            await self._requested.unload(model)
        except EdgepipeError as error:
            logger.warning("not stopped model=%s: %s", model, error)
        finally:
            self._unloading.discard(model)

    def _apply(self, decision: Decision) -> None:
        """Start loads, and tell the gateway which models load and which wait."""
        for model in decision.start:
            self._tasks.create_task(self._serve(model), name=f"load:{model}")
        if decision.refused:
            self._fail(decision.refused, _too_many())
        self._tell_queue()

    def _tell_queue(self) -> None:
        queue = LoadQueue(loading=self._turns.loading, waiting=self._turns.waiting)
        if self._child is not None and queue != self._told_queue:
            self._told_queue = queue
            self._child.send(queue)

    def _fail(self, model: str, error: EdgepipeError) -> None:
        if self._child is not None:
            self._child.send(LoadFailed(model=model, error=error))

    async def _serve(self, model: str) -> None:
        logger.info("model=%s is loaded, since a request asked for it", model)
        try:
            async with aclosing(self._requested.load(model)) as events:
                async for _ in events:
                    pass
        except EdgepipeError as error:
            logger.warning("not loaded model=%s: %s", model, error)
            self._fail(model, error)
        finally:
            self._apply(self._turns.ended(model, now_s=asyncio.get_running_loop().time()))

    async def _feed(self, child: Child) -> None:
        self._sent_view = ClusterView()
        async for _ in self._local.watch():
            view = self._views.for_gateway()
            if view != self._sent_view:
                self._sent_view = view
                child.send(view)
                self._view_sent.notify()
                await asyncio.sleep(_VIEW_INTERVAL_S)


def _too_many() -> CapacityError:
    return CapacityError(
        "the model's load cannot begin",
        fact=f"{MOST_WAITING} other models that requests want wait already",
        next_step="send the request again in a minute",
    )
