"""Engine processes of this node, and what each tells of its model. A model that failed stays listed until it is stopped
or served again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from edgepipe.daemon.children import Child, Children
from edgepipe.daemon.peers import Peers
from edgepipe.daemon.replanning import Replanner
from edgepipe.daemon.settings import ChildSettings
from edgepipe.errors import EdgepipeError
from edgepipe.wire.common import error_to_wire
from edgepipe.wire.v1 import engine_pb2
from edgepipe.wire.v1 import node_pb2 as pb

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Run:
    """One engine from its request to its stop."""

    spec: pb.ServeSpec
    state: engine_pb2.EngineState
    child: Child | None = None


class EngineHost:
    """Starts and ends the engines that run beside this node's daemon."""

    def __init__(
        self,
        *,
        children: Children,
        new_settings: Callable[[], ChildSettings],
        peers: Peers,
        replanner: Replanner,
        changes: Callable[[], AsyncIterator[None]],
        tasks: asyncio.TaskGroup,
        on_change: Callable[[bool], None],
    ) -> None:
        """``on_change(urgent)``: a state is another; urgent when others should hear at once."""
        self._replanner = replanner
        self._changes = changes
        self._children = children
        self._new_settings = new_settings
        self._peers = peers
        self._tasks = tasks
        self._on_change = on_change
        self._runs: dict[str, _Run] = {}

    def states(self) -> list[engine_pb2.EngineState]:
        """What the engines tell of themselves."""
        return [run.state for run in self._runs.values()]

    async def start(self, request: pb.StartEngineRequest, *, model_config: str) -> None:
        """Start an engine process and give it its task; returns once it has that. Raises what hinders its start."""
        for pipeline_id, run in list(self._runs.items()):
            if run.state.model == request.spec.model and run.state.state == "failed":
                del self._runs[pipeline_id]
        state = engine_pb2.EngineState(
            model=request.spec.model,
            pipeline_id=request.pipeline_id,
            manifest_hash=request.spec.manifest_hash,
            state="starting",
            message="starting the engine",
        )
        run = self._runs[request.pipeline_id] = _Run(spec=request.spec, state=state)
        self._on_change(True)
        try:
            child = run.child = await self._children.start(self._new_settings(), self._tasks)
            child.on_report = lambda report: self._take(run, child, report)
            self._tasks.create_task(self._mourn(run, child), name=f"engine:{request.pipeline_id}")
            await self._children.wait_started(child)
        except EdgepipeError as error:
            self._fail(run, error)
            raise
        command = pb.RunEngine(pipeline_id=request.pipeline_id, spec=request.spec, model_config=model_config)
        command.nodes.extend(request.nodes)
        child.send(pb.ChildCommand(run=command))
        telling = self._tasks.create_task(self._tell_reachable(child), name=f"reachable:{request.pipeline_id}")
        self._tasks.create_task(_end_with(child, telling), name=f"reachable-end:{request.pipeline_id}")

    async def stop(self, pipeline_id: str) -> None:
        """End an engine and its stages everywhere, and forget it; fine if there is none."""
        run = self._runs.get(pipeline_id)
        if run is None:
            return
        run.state.state = "stopping"
        self._on_change(True)
        if run.child is not None and not run.child.exited.is_set():
            await self._children.stop(run.child)
        await self._release(run)
        self._runs.pop(pipeline_id, None)
        self._on_change(True)

    async def stop_all(self) -> None:
        """End every engine, side by side."""
        await asyncio.gather(*(self.stop(pipeline_id) for pipeline_id in list(self._runs)))

    def _take(self, run: _Run, child: Child, report: pb.ChildReport) -> None:
        if report.HasField("plan_wanted"):
            self._tasks.create_task(self._plan(run, child, report.plan_wanted), name=f"plan:{run.state.pipeline_id}")
        if not report.HasField("engine") or run.state.state == "stopping":
            return
        before = (run.state.state, run.state.message)
        run.state.CopyFrom(report.engine)
        run.state.pipeline_id = run.state.pipeline_id or report.engine.pipeline_id
        run.state.manifest_hash = run.state.manifest_hash or run.spec.manifest_hash
        if not run.state.address and child.port:
            run.state.address = f"{child.settings.host}:{child.port}"
        run.state.certificate = child.certificate
        self._on_change(before != (run.state.state, run.state.message))

    async def _plan(self, run: _Run, child: Child, wanted: pb.PlanWanted) -> None:
        """Answer an engine that asks where its stages go."""
        try:
            made = await self._replanner.plan(run.state.pipeline_id, wanted)
            run.spec = made.spec
        except EdgepipeError as error:
            made = pb.PlanMade(error=error_to_wire(error))
        child.send(pb.ChildCommand(plan=made))

    async def _tell_reachable(self, child: Child) -> None:
        """Tell the engine of the cluster, whenever what it can use of it changes, until it ends."""
        told: tuple[object, ...] | None = None
        async for _ in self._changes():
            if child.exited.is_set():
                return
            if (news := self._replanner.room_changes()) != told:
                told = news
                child.send(pb.ChildCommand(reachable=self._replanner.reachable()))

    async def _mourn(self, run: _Run, child: Child) -> None:
        """Wait for the engine's end; if nobody asked for it, say why and give its stages back."""
        await child.exited.wait()
        if child.stopping:
            return
        self._fail(run, child.error())
        await self._release(run)

    def _fail(self, run: _Run, error: EdgepipeError) -> None:
        logger.error("engine failed model=%s pipeline=%s: %s", run.spec.model, run.state.pipeline_id, error)
        if run.state.state != "failed":  # what the engine itself said is closer to the cause
            run.state.state = "failed"
            run.state.error.CopyFrom(error_to_wire(error))
        run.state.message = ""
        self._on_change(True)

    async def _release(self, run: _Run) -> None:
        nodes = {stage.node_id for stage in run.spec.stages}
        await asyncio.gather(*(self._release_on(node_id, run.state.pipeline_id) for node_id in sorted(nodes)))

    async def _release_on(self, node_id: str, pipeline_id: str) -> None:
        try:
            await self._peers.release(node_id, pipeline_id)
        except EdgepipeError as error:  # a node that is gone has released by itself
            logger.info("not released node=%s pipeline=%s: %s", node_id, pipeline_id, error)


async def _end_with(child: Child, task: asyncio.Task[None]) -> None:
    """Cancel the task once the child is gone."""
    await child.exited.wait()
    task.cancel()
