"""Keeps the node's gateway process: starts it, sends it views of the cluster, and restarts it when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from edgepipe.daemon.changes import Changes
from edgepipe.daemon.processes.children import Child, Children
from edgepipe.errors import EdgepipeError
from edgepipe.wire.children import LoadFailed, LoadWanted, Report, UnloadWanted
from edgepipe.wire.nodes import ClusterView
from edgepipe.wire.serving import ServeEvent
from edgepipe.workers.settings import ChildSettings

logger = logging.getLogger(__name__)

_HEALTHY_S = 60.0  # a gateway that ran for so long did not fail at its start
_RESTART_MIN_S, _RESTART_MAX_S = 0.5, 10.0
_MOST_LOADING = 4  # models loaded at the same time
_VIEW_INTERVAL_S = 0.1  # engines report several times a second; a gateway needs no more views than this


class GatewayKeeper:
    """Keeps exactly one gateway running."""

    def __init__(
        self,
        *,
        children: Children,
        new_settings: Callable[[int], ChildSettings],
        http_port: int,
        view: Callable[[], ClusterView],
        load: Callable[[str], AsyncGenerator[ServeEvent]],
        unload: Callable[[str], Awaitable[None]],
        changes: Callable[[], AsyncIterator[None]],
        tasks: asyncio.TaskGroup,
        on_change: Callable[[], None],
    ) -> None:
        """``load`` serves a model in its best placement; it ends when the model answers, or raises the reason why not.
        ``unload`` stops a model that ``load`` served."""
        self._load = load
        self._unload = unload
        self._unloading: set[str] = set()  # models; ``unload`` ignores names that no request loaded
        self._loading: set[str] = set()  # models that requests wait for
        self.http_port = 0  # of the running process
        self.certificate = b""  # of the running process
        self._sent_view = ClusterView()
        self._view_sent = Changes()
        self._children = children
        self._new_settings = new_settings
        self._wanted_port = http_port
        self._view = view
        self._changes = changes
        self._tasks = tasks
        self._on_change = on_change

    async def start(self) -> Child:
        """Start the gateway. Raises PortInUse and other errors that prevent the start."""
        child = await self._children.start(self._new_settings(self._wanted_port), self._tasks)
        started = await self._children.wait_started(child)
        child.on_report = lambda report: self._take(child, report)
        self.certificate = started.certificate
        self.http_port = self._wanted_port = started.port  # a restarted gateway keeps the port
        self._on_change()
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

    def _take(self, child: Child, report: Report) -> None:
        match report:
            case LoadWanted(model=model) if model not in self._loading and len(self._loading) < _MOST_LOADING:
                self._loading.add(model)
                self._tasks.create_task(self._serve(child, model), name=f"load:{model}")
            case UnloadWanted(model=model) if model not in self._unloading:
                self._unloading.add(model)
                self._tasks.create_task(self._stop(model), name=f"unload:{model}")
            case _:
                pass

    async def _stop(self, model: str) -> None:
        logger.info("model=%s is stopped: no request wanted it any longer", model)
        try:
            await self._unload(model)
        except EdgepipeError as error:
            logger.warning("not stopped model=%s: %s", model, error)
        finally:
            self._unloading.discard(model)

    async def _serve(self, child: Child, model: str) -> None:
        logger.info("model=%s is loaded, since a request asked for it", model)
        try:
            async with aclosing(self._load(model)) as events:
                async for _ in events:
                    pass
        except EdgepipeError as error:
            logger.warning("not loaded model=%s: %s", model, error)
            child.send(LoadFailed(model=model, error=error))
        finally:
            self._loading.discard(model)

    async def _feed(self, child: Child) -> None:
        self._sent_view = ClusterView()
        async for _ in self._changes():
            view = self._view()
            if view != self._sent_view:
                self._sent_view = view
                child.send(view)
                self._view_sent.notify()
                await asyncio.sleep(_VIEW_INTERVAL_S)
