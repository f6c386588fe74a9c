"""This node's engine processes and the states they report.

An engine that has served starts again after every crash; ``restarts`` says when. A model whose first start failed
stays listed until it is stopped or served again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from edgepipe.addresses import with_port
from edgepipe.clock import Clock
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.processes.children import Child, Children, Report
from edgepipe.daemon.serving.engine_run import EngineRun
from edgepipe.daemon.serving.replanning import Avoided, Replanner
from edgepipe.daemon.serving.restarts import Restarts, next_host
from edgepipe.errors import AccessDenied, EdgepipeError, ModelUnknown, StaleEpoch
from edgepipe.ids import MAX_EPOCH_STEP, EngineId, Epoch
from edgepipe.wire.engines import Advice, EngineState, ServeSpec
from edgepipe.wire.serving import Moves, PlanMade, PlanWanted, RunEngine, StartEngineRequest
from edgepipe.workers.settings import ChildSettings

logger = logging.getLogger(__name__)

_STAND_BY_S = 30.0  # how long a ready process waits for an engine of a draining node
_MOST_REMEMBERED = 64  # pipelines whose crashes are known: as many as models have records


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
        spread: Callable[[], Awaitable[None]],
        tasks: asyncio.TaskGroup,
        own_highest: Callable[[str], int],
        ends: Callable[[], bool],
        counts: Callable[[str], bool],
        move_engine: Callable[[str, str], None],
        clock: Clock,
        on_change: Callable[[bool], None],
    ) -> None:
        """``spread`` returns when the other nodes know this node's newest state, or after a short limit.

        ``on_change(urgent)``: an engine's state changed; urgent: report it to the other nodes at once.
        ``ends``: whether this node is about to stop.
        ``counts``: whether a pipeline's recorded engine is the one here.
        ``move_engine(pipeline_id, node_id)`` records that another node has the engine; raises AccessDenied.
        ``own_highest``: the counter of a pipeline's highest epoch on this node's own device, 0 if it holds nothing.
        """
        self._own_highest = own_highest
        self._ends = ends
        self._counts = counts
        self._move_engine = move_engine
        self._clock = clock
        self._replanner = replanner
        self._spread = spread
        self._changes = changes
        self._children = children
        self._new_settings = new_settings
        self._peers = peers
        self._tasks = tasks
        self._on_change = on_change
        self._runs: dict[str, EngineRun] = {}
        self._restarts: dict[str, Restarts] = {}  # by pipeline; an engine that comes back still counts its crashes
        self._standing_by: Child | None = None

    def states(self) -> list[EngineState]:
        """Return the state of each engine here."""
        return [run.state for run in self._runs.values()]

    def ready(self) -> list[tuple[str, ServeSpec]]:
        """Return the pipelines whose engines are ready, with their present stages."""
        return [(pipeline_id, run.spec) for pipeline_id, run in self._runs.items() if run.state.state == "ready"]

    def state_of(self, pipeline_id: str) -> EngineState | None:
        """Return the state of one engine; None if it does not run here."""
        run = self._runs.get(pipeline_id)
        return run.state if run is not None else None

    def is_paused(self, pipeline_id: str) -> bool:
        """Return whether a crashed engine waits here for its next start."""
        run = self._runs.get(pipeline_id)
        return run is not None and run.paused

    def start_now(self, pipeline_id: str) -> None:
        """End the pause of a crashed engine."""
        if (run := self._runs.get(pipeline_id)) is not None:
            run.wake.set()

    def avoided(self, pipeline_id: str) -> Avoided:
        """Return the nodes and links that an engine avoids now."""
        run = self._runs.get(pipeline_id)
        now_s = asyncio.get_running_loop().time()
        return Avoided.of(left_out for until_s, left_out in (run.avoided if run is not None else ()) if now_s < until_s)

    def advise(self, pipeline_id: str, advice: Advice | None) -> None:
        """Publish a better placement with the engine's state; None withdraws it."""
        run = self._runs.get(pipeline_id)
        if run is not None and run.advice != advice:
            run.set_advice(advice)
            self._on_change(False)

    async def start(
        self, request: StartEngineRequest, *, model_config: str, model_weights: str = "", resuming: bool = False
    ) -> None:
        """Start an engine process and send it its task. Return once it has the task, or was ended meanwhile.

        ``resuming``: another engine served the model; this one accepts its requests at once and finds its stages. It
        starts until it succeeds, with pauses. Else raises the error that prevented the start.
        """
        for pipeline_id, run in list(self._runs.items()):
            if run.state.model == request.spec.model and run.state.state == "failed":
                del self._runs[pipeline_id]
        state = EngineState(
            model=request.spec.model,
            pipeline_id=request.pipeline_id,
            epoch=Epoch(0, EngineId("")),
            manifest_hash=request.spec.manifest_hash,
            template_keywords=request.spec.template_keywords,
            state="recovering" if resuming else "starting",
            message="starting the engine",
        )
        run = EngineRun(
            request=request,
            model_config=model_config,
            model_weights=model_weights,
            spec=request.spec,
            state=state,
            restartable=resuming,
            restarts=self._restarts_of(request.pipeline_id),
        )
        self._runs[request.pipeline_id] = run
        self._on_change(True)
        if resuming and run.restarts.left_s(self._clock.monotonic_s()):
            why = EdgepipeError(f"the engine of '{request.spec.model}' has crashed on this node before")
            self._tasks.create_task(self._start_later(run, why), name=f"restart:{request.pipeline_id}")
            return
        try:
            await self._launch(run, resuming=resuming)
        except EdgepipeError as error:
            if self._is_over(run):
                return
            if resuming:
                self._tasks.create_task(self._start_again(run, error), name=f"restart:{request.pipeline_id}")
                return
            self._fail(run, error)
            raise

    def _is_over(self, run: EngineRun) -> bool:
        """Return whether the engine was stopped, ended or replaced meanwhile."""
        return self._runs.get(run.request.pipeline_id) is not run or run.state.state == "stopping"

    def _restarts_of(self, pipeline_id: str) -> Restarts:
        known = self._restarts.pop(pipeline_id, None) or Restarts()
        while len(self._restarts) >= _MOST_REMEMBERED:
            del self._restarts[next(iter(self._restarts))]
        self._restarts[pipeline_id] = known
        return known

    async def stop(self, pipeline_id: str) -> None:
        """End an engine and its stages everywhere, and forget it. Do nothing if it does not run here."""
        run = self._runs.get(pipeline_id)
        if run is None:
            return
        run.state = replace(run.state, state="stopping")
        run.wake.set()
        self._restarts.pop(pipeline_id, None)
        self._on_change(True)
        if run.child is not None and not run.child.exited.is_set():
            await self._children.stop(run.child)
        await self._release(run)
        self._runs.pop(pipeline_id, None)
        self._on_change(True)

    def end_superseded(self, pipeline_id: str) -> None:
        """End an engine whose pipeline another engine drives. The other engine keeps the stages."""
        if pipeline_id in self._runs:
            logger.warning("another engine drives pipeline=%s: the one here ends", pipeline_id)
            self._abandon(pipeline_id)

    async def stand_by(self) -> None:
        """Start a process for an engine that another node will hand over. Raises the error that prevented the start."""
        if self._standing_by is None:
            child = self._standing_by = await self._children.start(self._new_settings(), self._tasks)
            self._tasks.create_task(self._end_unused(child), name=f"standby:{child.pid}")
            await self._children.wait_started(child)

    async def _end_unused(self, child: Child) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STAND_BY_S):
                await child.exited.wait()
        if self._standing_by is child:
            self._standing_by = None
            await self._children.stop(child)

    async def _new_process(self) -> Child:
        """Return the standby process if it is alive, else a new one."""
        child, self._standing_by = self._standing_by, None
        if child is None or not child.alive:
            child = await self._children.start(self._new_settings(), self._tasks)
        return child

    def hand_over(self) -> None:
        """End every engine so that other nodes start them again."""
        for pipeline_id, run in list(self._runs.items()):
            logger.info("engine ends here, another node continues model=%s pipeline=%s", run.spec.model, pipeline_id)
            self._abandon(pipeline_id)

    def _abandon(self, pipeline_id: str) -> None:
        """Kill the engine at once, without telling gateways that requests end."""
        run = self._runs.pop(pipeline_id)
        run.state = replace(run.state, state="stopping")
        run.restarts.stopped(self._clock.monotonic_s())
        run.wake.set()
        if run.child is not None:
            run.child.stopping = True
            run.child.kill()
        self._on_change(True)

    async def _launch(self, run: EngineRun, *, resuming: bool) -> None:
        """Start a process and send it its task. Raises the reason if that fails."""
        pipeline_id = run.request.pipeline_id
        replies = await self._peers.vouch_all(pipeline_id, self._peers.own_id) if resuming else {}
        child = await self._new_process()
        if self._is_over(run):  # before its process existed
            child.stopping = True
            child.kill()
            return
        run.child = child
        child.on_report = lambda report: self._take(run, child, report)
        await self._children.wait_started(child)
        self._tasks.create_task(self._mourn(run, child), name=f"engine:{pipeline_id}")
        run.state = replace(run.state, certificate=child.certificate)
        self._on_change(True)
        await self._spread()  # nodes let the engine in only when they know its certificate
        known = [run.state.epoch.counter, self._own_highest(pipeline_id)]
        others = [reply.highest.counter for reply in replies.values() if reply.highest is not None]
        known += [counter for counter in others if counter < max(known) + MAX_EPOCH_STEP]
        command = RunEngine(
            pipeline_id=pipeline_id,
            spec=run.spec,
            nodes=run.request.nodes,
            model_config=run.model_config,
            model_weights=run.model_weights,
            epoch_counter=1 + max(known),
            resuming=resuming,
        )
        child.send(command)
        telling = self._tasks.create_task(self._tell_reachable(child), name=f"reachable:{pipeline_id}")
        self._tasks.create_task(_end_with(child, telling), name=f"reachable-end:{pipeline_id}")

    def _take(self, run: EngineRun, child: Child, report: Report) -> None:
        if isinstance(report, PlanWanted):
            self._tasks.create_task(self._plan(run, child, report), name=f"plan:{run.state.pipeline_id}")
        if not isinstance(report, EngineState) or run.state.state == "stopping" or child is not run.child:
            return
        if report.state == "failed" and isinstance(report.error, StaleEpoch):
            return  # its requests continue with another engine or with its own next process
        before = (run.state.state, run.state.message)
        own_address = with_port(child.settings.host, child.port) if child.port else ""
        run.state = replace(
            report,
            pipeline_id=report.pipeline_id or run.state.pipeline_id,
            address=report.address or own_address,
            manifest_hash=report.manifest_hash or run.spec.manifest_hash,
            certificate=child.certificate,
            advice=run.advice,
        )
        if run.state.state == "ready":
            run.restartable = True
            run.restarts.serves(self._clock.monotonic_s())
        run.note_placement(now_s=asyncio.get_running_loop().time())
        self._on_change(before != (run.state.state, run.state.message))

    async def rebalance(self, pipeline_id: str, *, num_nodes: int, moves: Moves) -> bool:
        """Move a pipeline's stages to the best placement now; return whether that differs from the present one.

        ``moves``: whether stages continue to move automatically. Raises NoFeasiblePlacement, and ModelUnknown if the
        engine does not serve here.
        """
        run = self._runs.get(pipeline_id)
        if run is None or run.child is None or run.state.state != "ready":
            raise ModelUnknown("the model is not served by this node now", next_step="see 'edgepipe ps'")
        if moves is not Moves.UNCHANGED:
            run.spec = replace(run.spec, moves=moves is Moves.AUTO)
        if moves is Moves.OFF:
            return False
        avoided = self.avoided(pipeline_id)
        found = await self._replanner.place_anew(
            pipeline_id, run.spec, avoided, num_nodes=num_nodes, expert_shares=run.state.expert_shares
        )
        return self.move(pipeline_id, found)

    def move(self, pipeline_id: str, made: PlanMade) -> bool:
        """Send a pipeline's stages to a placement; return whether it differs from the present one."""
        run = self._runs.get(pipeline_id)
        if run is None or run.child is None or made.spec is None:
            return False
        elsewhere = made.spec.stages != run.spec.stages
        run.spec = replace(run.spec, num_nodes=made.spec.num_nodes)
        if elsewhere:
            run.child.send(made)
        run.set_advice(None)
        self._on_change(False)
        return elsewhere

    async def _plan(self, run: EngineRun, child: Child, wanted: PlanWanted) -> None:
        """Answer an engine that asks for a placement."""
        # The engine has older settings.
        spec = replace(wanted.spec, moves=run.spec.moves, num_nodes=run.spec.num_nodes)
        try:
            made = await self._replanner.plan(
                run.state.pipeline_id, replace(wanted, spec=spec), expert_shares=run.state.expert_shares
            )
        except EdgepipeError as error:
            made = PlanMade(error=error)
        child.send(replace(made, question=wanted.question))

    async def _tell_reachable(self, child: Child) -> None:
        """Send the engine the reachable nodes whenever their room changes, until the engine ends."""
        sent: tuple[object, ...] | None = None
        async for _ in self._changes():
            if child.exited.is_set():
                return
            if (news := self._replanner.room_changes()) != sent:
                sent = news
                child.send(self._replanner.reachable())

    async def _mourn(self, run: EngineRun, child: Child) -> None:
        """Wait for the engine's end. Start it again after a crash; mark it as failed if it has never served."""
        await child.exited.wait()
        pipeline_id = run.request.pipeline_id
        if child.stopping or self._is_over(run):
            return
        if isinstance(child.fault, StaleEpoch) and not self._counts(pipeline_id):
            self.end_superseded(pipeline_id)
        elif self._ends() and (child.fault is None or run.restartable):
            self._abandon(pipeline_id)  # the signal that ended it also reached this node
        elif run.restartable or isinstance(child.fault, StaleEpoch):  # a stale engine's stages are free again
            await self._start_again(run, child.error())
        else:
            self._fail(run, child.error())
            await self._release(run)

    async def _start_again(self, run: EngineRun, error: EdgepipeError) -> None:
        """Start a crashed engine again when its pause is over, here or on another node of the ring."""
        run.restarts.ended(self._clock.monotonic_s())
        if not self._moved_on(run, error):
            await self._start_later(run, error)

    async def _start_later(self, run: EngineRun, error: EdgepipeError) -> None:
        """Start the engine when its pause is over or a person wants it now, until that succeeds."""
        while True:
            await self._pause(run, error)
            if self._is_over(run):
                return
            run.resume()
            self._on_change(True)
            try:
                await self._launch(run, resuming=True)
                return
            except EdgepipeError as failure:
                if self._is_over(run):
                    return
                error = failure
                run.restarts.ended(self._clock.monotonic_s())
                if self._moved_on(run, error):
                    return

    async def _pause(self, run: EngineRun, error: EdgepipeError) -> None:
        """Wait until the engine's next start. Requests wait, too, if that is soon; else they end with the reason."""
        left_s = run.restarts.left_s(self._clock.monotonic_s())
        logger.warning("engine ended model=%s, it starts again in %.0f s: %s", run.spec.model, left_s, error)
        run.pause(error, left_s=left_s, wall_s=self._clock.wall_s())
        self._on_change(True)
        try:
            async with asyncio.timeout(left_s):
                await run.wake.wait()
        except TimeoutError:
            return

    def _moved_on(self, run: EngineRun, error: EdgepipeError) -> bool:
        """Hand an engine that keeps crashing here to the next node of its ring; return whether there is one."""
        pipeline_id = run.request.pipeline_id
        usable = frozenset(node.node_id for node in self._peers.nodes() if not node.draining)
        ring = tuple(stage.node_id for stage in run.spec.stages)
        heir = next_host(self._peers.own_id, ring, usable) if run.restarts.should_move else None
        if heir is None or not self._counts(pipeline_id):
            return False
        try:
            self._move_engine(pipeline_id, heir)
        except AccessDenied as denied:
            logger.warning("engine not handed on model=%s: %s", run.spec.model, denied)
            return False
        logger.warning(
            "engine of model=%s crashes again and again here: node=%s has it: %s", run.spec.model, heir, error
        )
        if self._runs.get(pipeline_id) is run:
            self._abandon(pipeline_id)
        return True

    def _fail(self, run: EngineRun, error: EdgepipeError) -> None:
        logger.error("engine failed model=%s pipeline=%s: %s", run.spec.model, run.state.pipeline_id, error)
        if run.state.state != "failed":  # the engine's own error is closer to the cause
            run.state = replace(run.state, state="failed", error=error)
        run.state = replace(run.state, message="")
        self._on_change(True)

    async def _release(self, run: EngineRun) -> None:
        """Release the stages of this engine's epochs; stages of a newer engine stay."""
        nodes = {stage.node_id for stage in run.spec.stages}
        pipeline_id, epoch = run.request.pipeline_id, run.state.epoch
        await asyncio.gather(*(self._release_on(node_id, pipeline_id, epoch) for node_id in sorted(nodes)))

    async def _release_on(self, node_id: str, pipeline_id: str, epoch: Epoch) -> None:
        try:
            await self._peers.release(node_id, pipeline_id, epoch)
        except EdgepipeError as error:  # a node that is gone has released by itself
            logger.info("not released node=%s pipeline=%s: %s", node_id, pipeline_id, error)


async def _end_with(child: Child, task: asyncio.Task[None]) -> None:
    """Cancel the task once the child is gone."""
    await child.exited.wait()
    task.cancel()
