"""This node's engine processes and the states they report.

``engine_life`` decides when an engine starts, pauses, moves to another node and ends. This module carries that out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgepipe.addresses import with_port
from edgepipe.clock import Clock
from edgepipe.daemon.alarm import TickAlarm
from edgepipe.daemon.device.device import DeviceHost
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.offers import ChildSetup, NodeLife, PublishedState, Spreading
from edgepipe.daemon.processes.children import Child, Children, Report
from edgepipe.daemon.serving.engine_life import EngineLives, LifePhase
from edgepipe.daemon.serving.engine_life_types import (
    Command,
    EngineStopped,
    Event,
    Forget,
    HandedOn,
    HandOn,
    Kill,
    Launch,
    Launched,
    LaunchFailed,
    LeaveWanted,
    NotHandedOn,
    PauseEnded,
    ProcessEnded,
    Serves,
    ShowFailure,
    ShowPause,
    StartNow,
    StartWanted,
    Stop,
    StopWanted,
    Superseded,
    Surroundings,
)
from edgepipe.daemon.serving.engine_run import EngineRun
from edgepipe.daemon.serving.replanning import Avoided, Replanner
from edgepipe.daemon.serving.replica_facts import with_facts_of
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.errors import AccessDenied, EdgepipeError, ModelUnknown, StaleEpoch
from edgepipe.ids import MAX_EPOCH_STEP, EngineId, Epoch
from edgepipe.wire.engines import Advice, EngineState, ServeSpec, StagePlacement
from edgepipe.wire.serving import Moves, PlanMade, PlanWanted, RunEngine, StartEngineRequest

logger = logging.getLogger(__name__)

_STAND_BY_S = 30.0  # how long a ready process waits for an engine of a draining node


@dataclass(kw_only=True, eq=False)
class EngineHost:
    """Starts and ends the engines that run beside this node's daemon."""

    children: Children
    setup: ChildSetup
    peers: Peers
    replanner: Replanner
    local: PublishedState
    heartbeats: Spreading
    tasks: asyncio.TaskGroup
    device: DeviceHost
    node: NodeLife
    book: ServeBook
    clock: Clock

    def __post_init__(self) -> None:
        self._lives = EngineLives()
        self._runs: dict[int, EngineRun] = {}  # keys are the runs' numbers
        self._num_runs = 0
        self._alarm = TickAlarm(
            self.tasks, self.clock, lambda at_s: self._happens(PauseEnded(), least_s=at_s), name="restart"
        )
        self._standing_by: Child | None = None

    def states(self) -> list[EngineState]:
        """Return the state of each engine here."""
        return [run.state for run in self._runs.values()]

    def ready(self) -> list[tuple[str, ServeSpec]]:
        """Return the pipelines whose engines are ready, with their present stages."""
        return [(run.pipeline_id, self._spec_of(run)) for run in self._runs.values() if run.state.state == "ready"]

    def state_of(self, pipeline_id: str) -> EngineState | None:
        """Return the state of one engine; None if it does not run here."""
        run = self._run_of(pipeline_id)
        return run.state if run is not None else None

    def is_paused(self, pipeline_id: str) -> bool:
        """Return whether a crashed engine waits here for its next start."""
        run = self._run_of(pipeline_id)
        return run is not None and run.paused

    def start_now(self, pipeline_id: str) -> None:
        """End the pause of a crashed engine."""
        self._happens(StartNow(pipeline_id))

    def avoided(self, pipeline_id: str) -> Avoided:
        """Return the nodes and links that an engine avoids now."""
        run = self._run_of(pipeline_id)
        now_s = asyncio.get_running_loop().time()
        return Avoided.of(left_out for until_s, left_out in (run.avoided if run is not None else ()) if now_s < until_s)

    def advise(self, pipeline_id: str, advice: Advice | None) -> None:
        """Publish a better placement with the engine's state; None withdraws it."""
        run = self._run_of(pipeline_id)
        if run is not None and run.advice != advice:
            run.set_advice(advice)
            self.local.refresh(urgent=False)

    async def start(
        self, request: StartEngineRequest, *, model_config: str, model_weights: str = "", resuming: bool = False
    ) -> None:
        """Start an engine process and send it its task. Return once it has the task, or was ended meanwhile.

        ``resuming``: another engine served the model; this one accepts its requests at once and finds its stages. It
        starts until it succeeds, with pauses. Else raises the error that prevented the start.
        """
        self._num_runs += 1
        run = EngineRun(
            number=self._num_runs,
            request=request,
            model_config=model_config,
            model_weights=model_weights,
            spec=request.spec,
            state=EngineState(
                model=request.spec.model,
                pipeline_id=request.pipeline_id,
                epoch=Epoch(0, EngineId("")),
                manifest_hash=request.spec.manifest_hash,
                template_keywords=request.spec.template_keywords,
                state="recovering" if resuming else "starting",
                message="starting the engine",
            ),
        )
        self._runs[run.number] = run
        self._happens(
            StartWanted(
                run=run.number,
                pipeline_id=request.pipeline_id,
                model=request.spec.model,
                replica=max(1, request.spec.replica),
                ring=_ring(request.spec),
                resuming=resuming,
            )
        )
        error = await asyncio.shield(run.launching) if run.launching is not None else None
        if error is not None and self._lives.phase(run.number) is LifePhase.FAILED:
            raise error

    async def stop(self, pipeline_id: str) -> None:
        """End an engine and its stages everywhere, and forget it. Do nothing if it does not run here."""
        run = self._run_of(pipeline_id)
        if run is not None:
            self._happens(StopWanted(pipeline_id))
            await run.gone.wait()

    def end_superseded(self, pipeline_id: str) -> None:
        """End an engine whose pipeline another engine drives. The other engine keeps the stages."""
        if self._run_of(pipeline_id) is not None:
            logger.warning("another engine drives pipeline=%s: the one here ends", pipeline_id)
            self._happens(Superseded(pipeline_id))

    def hand_over(self) -> None:
        """End every engine so that other nodes start them again."""
        for run in self._runs.values():
            logger.info(
                "engine ends here, another node continues model=%s pipeline=%s", run.spec.model, run.pipeline_id
            )
        self._happens(LeaveWanted())

    def _spec_of(self, run: EngineRun, spec: ServeSpec | None = None) -> ServeSpec:
        """Return an engine's spec, or an older one of it, with what its record says of the model's pipelines now."""
        held = self.book.held(run.pipeline_id)
        spec = spec or run.spec
        return with_facts_of(spec, held.spec) if held is not None else spec

    def _run_of(self, pipeline_id: str) -> EngineRun | None:
        return next((run for run in self._runs.values() if run.pipeline_id == pipeline_id), None)

    # Events and commands of the core

    def _happens(self, event: Event, *, least_s: float = 0.0) -> None:
        around = Surroundings(
            own_id=self.peers.own_id,
            usable=frozenset(node.node_id for node in self.peers.nodes() if not node.draining),
            owned=frozenset(run.pipeline_id for run in self._runs.values() if self.book.is_here(run.pipeline_id)),
            ends=self.node.ends(),
        )
        commands = self._lives.handle(event, around, max(least_s, self.clock.monotonic_s()))
        self._alarm.set(self._lives.wake_at_s)
        self._do(commands)
        if commands:
            self.local.refresh()

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            run = self._runs[command.run]
            match command:
                case Launch():
                    run.show_start()
                    launching = self._launch(run, command)
                    run.launching = self.tasks.create_task(launching, name=f"launch:{run.pipeline_id}")
                case ShowPause():
                    self._show_pause(run, command)
                case ShowFailure():
                    self._fail(run, command)
                case HandOn():
                    self._hand_on(run, command)
                case Stop():
                    run.state = replace(run.state, state="stopping")
                    self.tasks.create_task(self._stop(run), name=f"stop:{run.pipeline_id}")
                case Kill():
                    if run.child is not None:
                        run.child.stopping = True
                        run.child.kill()
                    self._forget(run)
                case Forget():
                    self._forget(run)

    def _forget(self, run: EngineRun) -> None:
        del self._runs[run.number]
        run.gone.set()

    async def _stop(self, run: EngineRun) -> None:
        if run.child is not None and not run.child.exited.is_set():
            await self.children.stop(run.child)
        await self._release(run)
        self._happens(EngineStopped(run=run.number))

    def _show_pause(self, run: EngineRun, pause: ShowPause) -> None:
        logger.warning(
            "engine ended model=%s, it starts again in %.0f s: %s", run.spec.model, pause.left_s, pause.error
        )
        run.show_pause(pause.error, left_s=pause.left_s, wall_s=self.clock.wall_s())

    def _fail(self, run: EngineRun, failure: ShowFailure) -> None:
        logger.error("engine failed model=%s pipeline=%s: %s", run.spec.model, run.pipeline_id, failure.error)
        if run.state.state != "failed":  # the engine's own error is closer to the cause
            run.state = replace(run.state, state="failed", error=failure.error)
        run.state = replace(run.state, message="")
        if failure.release:
            self.tasks.create_task(self._release(run), name=f"release:{run.pipeline_id}")

    def _hand_on(self, run: EngineRun, command: HandOn) -> None:
        """Hand an engine that keeps crashing here to another node of its ring, if the cluster's rules allow that."""
        try:
            self.book.move_engine(run.pipeline_id, command.heir)
        except AccessDenied as denied:
            logger.warning("engine not handed on model=%s: %s", run.spec.model, denied)
            self._happens(NotHandedOn(run=run.number))
            return
        logger.warning(
            "engine of model=%s crashes again and again here: node=%s has it: %s",
            run.spec.model,
            command.heir,
            command.error,
        )
        self._happens(HandedOn(run=run.number))

    async def _launch(self, run: EngineRun, command: Launch) -> EdgepipeError | None:
        """Start a process and send it its task. Return the error that prevented that."""
        try:
            await self._start_process(run, command)
        except EdgepipeError as error:
            self._happens(LaunchFailed(run=run.number, attempt=command.attempt, error=error))
            return error
        self._happens(Launched(run=run.number, attempt=command.attempt))
        return None

    async def stand_by(self) -> None:
        """Start a process for an engine that another node will hand over. Raises the error that prevented the start."""
        if self._standing_by is None:
            child = self._standing_by = await self.children.start(self.setup.child_settings("engine"), self.tasks)
            self.tasks.create_task(self._end_unused(child), name=f"standby:{child.pid}")
            await self.children.wait_started(child)

    async def _end_unused(self, child: Child) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STAND_BY_S):
                await child.exited.wait()
        if self._standing_by is child:
            self._standing_by = None
            await self.children.stop(child)

    async def _new_process(self) -> Child:
        """Return the standby process if it is alive, else a new one."""
        child, self._standing_by = self._standing_by, None
        if child is None or not child.alive:
            child = await self.children.start(self.setup.child_settings("engine"), self.tasks)
        return child

    async def _start_process(self, run: EngineRun, command: Launch) -> None:
        pipeline_id = run.pipeline_id
        replies = await self.peers.vouch_all(pipeline_id, self.peers.own_id) if command.resuming else {}
        child = await self._new_process()
        if not self._lives.expects(run.number, command.attempt):  # it ended before its process existed
            child.stopping = True
            child.kill()
            return
        run.child = child
        child.on_report = lambda report: self._take(run, child, command.attempt, report)
        await self.children.wait_started(child)
        self.tasks.create_task(self._until_end(run, child, command.attempt), name=f"engine:{pipeline_id}")
        run.state = replace(run.state, certificate=child.certificate)
        self.local.refresh()
        await self.heartbeats.spread()  # nodes let the engine in only when they know its certificate
        here = self.device.epoch_of(pipeline_id)
        known = [run.state.epoch.counter, here.counter if here is not None else 0]
        others = [reply.highest.counter for reply in replies.values() if reply.highest is not None]
        known += [counter for counter in others if counter < max(known) + MAX_EPOCH_STEP]
        task = RunEngine(
            pipeline_id=pipeline_id,
            spec=run.spec,
            nodes=run.request.nodes,
            model_config=run.model_config,
            model_weights=run.model_weights,
            epoch_counter=1 + max(known),
            resuming=command.resuming,
        )
        child.send(task)
        telling = self.tasks.create_task(self._tell_reachable(child), name=f"reachable:{pipeline_id}")
        self.tasks.create_task(_end_with(child, telling), name=f"reachable-end:{pipeline_id}")

    def _take(self, run: EngineRun, child: Child, attempt: int, report: Report) -> None:
        if isinstance(report, PlanWanted):
            self.tasks.create_task(self._plan(run, child, report), name=f"plan:{run.state.pipeline_id}")
        if not isinstance(report, EngineState) or not self._lives.expects(run.number, attempt):
            return
        if report.state == "failed" and isinstance(report.error, StaleEpoch):
            return  # its requests continue with another engine or with its own next process
        before, ring = (run.state.state, run.state.message), _ring(run.spec)
        own_address = with_port(child.settings.host, child.port) if child.port else ""
        run.state = replace(
            report,
            pipeline_id=report.pipeline_id or run.state.pipeline_id,
            address=report.address or own_address,
            manifest_hash=report.manifest_hash or run.spec.manifest_hash,
            certificate=child.certificate,
            advice=run.advice,
        )
        run.note_placement(now_s=asyncio.get_running_loop().time())
        if run.state.state == "ready" and (before[0], ring) != ("ready", _ring(run.spec)):
            self._happens(Serves(run=run.number, attempt=attempt, ring=_ring(run.spec)))
        self.local.refresh(urgent=before != (run.state.state, run.state.message))

    async def rebalance(
        self, pipeline_id: str, *, num_nodes: int, moves: Moves, stages: Sequence[StagePlacement] = ()
    ) -> bool:
        """Move a pipeline's stages to the best placement now; return whether that differs from the present one.

        ``moves``: whether stages continue to move automatically. ``stages``: where they go, instead of the best
        placement. Raises NoFeasiblePlacement, NodeUnreachable, and ModelUnknown if the engine does not serve here.
        """
        run = self._run_of(pipeline_id)
        if run is None or run.child is None or run.state.state != "ready":
            raise ModelUnknown("the model is not served by this node now", next_step="see 'edgepipe ps'")
        if moves is not Moves.UNCHANGED:
            run.spec = replace(run.spec, moves=moves is Moves.AUTO)
        if moves is Moves.OFF:
            return False
        if stages:
            return self.move(pipeline_id, self.replanner.made_of(self._spec_of(run), stages))
        avoided = self.avoided(pipeline_id)
        found = await self.replanner.place_anew(
            pipeline_id, self._spec_of(run), avoided, num_nodes=num_nodes, expert_shares=run.state.expert_shares
        )
        return self.move(pipeline_id, found)

    def move(self, pipeline_id: str, made: PlanMade) -> bool:
        """Send a pipeline's stages to a placement; return whether it differs from the present one."""
        run = self._run_of(pipeline_id)
        if run is None or run.child is None or made.spec is None:
            return False
        elsewhere = made.spec.stages != run.spec.stages
        run.spec = replace(run.spec, num_nodes=made.spec.num_nodes)
        if elsewhere:
            run.child.send(made)
        run.set_advice(None)
        self.local.refresh(urgent=False)
        return elsewhere

    async def _plan(self, run: EngineRun, child: Child, wanted: PlanWanted) -> None:
        """Answer an engine that asks for a placement."""
        # The engine has older settings.
        spec = replace(self._spec_of(run, wanted.spec), moves=run.spec.moves, num_nodes=run.spec.num_nodes)
        try:
            made = await self.replanner.plan(
                run.state.pipeline_id, replace(wanted, spec=spec), expert_shares=run.state.expert_shares
            )
        except EdgepipeError as error:
            made = PlanMade(error=error)
        child.send(replace(made, question=wanted.question))

    async def _tell_reachable(self, child: Child) -> None:
        """Send the engine the reachable nodes whenever their room changes, until the engine ends."""
        sent: tuple[object, ...] | None = None
        async for _ in self.local.watch():
            if child.exited.is_set():
                return
            if (news := self.replanner.room_changes()) != sent:
                sent = news
                child.send(self.replanner.reachable())

    async def _until_end(self, run: EngineRun, child: Child, attempt: int) -> None:
        await child.exited.wait()
        if not child.stopping:
            told = child.fault is not None
            self._happens(ProcessEnded(run=run.number, attempt=attempt, error=child.error(), told=told))

    async def _release(self, run: EngineRun) -> None:
        """Release the stages of this engine's epochs; stages of a newer engine stay."""
        nodes = {stage.node_id for stage in run.spec.stages}
        pipeline_id, epoch = run.pipeline_id, run.state.epoch
        await asyncio.gather(*(self._release_on(node_id, pipeline_id, epoch) for node_id in sorted(nodes)))

    async def _release_on(self, node_id: str, pipeline_id: str, epoch: Epoch) -> None:
        try:
            await self.peers.release(node_id, pipeline_id, epoch)
        except EdgepipeError as error:  # a node that is gone has released by itself
            logger.info("not released node=%s pipeline=%s: %s", node_id, pipeline_id, error)


def _ring(spec: ServeSpec) -> tuple[str, ...]:
    return tuple(stage.node_id for stage in spec.stages)


async def _end_with(child: Child, task: asyncio.Task[None]) -> None:
    """Cancel the task once the child is gone."""
    await child.exited.wait()
    task.cancel()
