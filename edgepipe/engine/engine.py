"""The engine of one served model: runs its epochs, from placement to tokens, until stopped or failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio

from edgepipe.clock import Clock
from edgepipe.engine.engine_epoch import EngineContext, EngineEpoch
from edgepipe.engine.epoch_losses import EpochLosses
from edgepipe.engine.event_queue import EventQueue
from edgepipe.engine.kv_carryover import KeptKV
from edgepipe.engine.placing import EpochPlacement, Nodes, Planner, ReachableNodes, SamePlacement
from edgepipe.engine.preparation import Preparation
from edgepipe.engine.pump import StepNews
from edgepipe.engine.quarantine import Missed
from edgepipe.engine.recovery import Recovery
from edgepipe.engine.recovery_types import (
    Abandon,
    Accuse,
    Acquit,
    AskPlacement,
    ClusterChanged,
    Command,
    EndEpoch,
    EpochEnded,
    Event,
    Fail,
    MoveProposed,
    NotReleased,
    Open,
    Opened,
    OpeningFailed,
    Placement,
    Planned,
    PlanningFailed,
    PreparationFailed,
    Prepare,
    Refuse,
    RefuseOne,
    Release,
    Serve,
    StagesLoaded,
    State,
    Stopped,
    Suspect,
)
from edgepipe.engine.service import EngineService, RequestIntake
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.status import EngineStatus, stage_state
from edgepipe.engine.table import RequestTable
from edgepipe.errors import (
    ClusterError,
    EdgepipeError,
    LinkError,
    PlanInvalid,
    StageLost,
    StagesMove,
    StaleEpoch,
)
from edgepipe.ids import EngineId, Epoch, IdSource, NodeId, PipelineId
from edgepipe.link.shaped import Network
from edgepipe.scheduler import Policy, ThrottledPolicy, make_policy
from edgepipe.scheduler.pacing import parse_itl_goal
from edgepipe.security.mutual_tls import Security
from edgepipe.spec.drafting import draft_way
from edgepipe.spec.facts import ModelConfig
from edgepipe.weights.weight_table import FLOATS, WeightTable
from edgepipe.wire.common import Hello
from edgepipe.wire.engines import DraftState, EngineState, EngineTrace, ServeSpec

logger = logging.getLogger(__name__)

_WORDS = {
    State.STARTING: "loading",
    State.SERVING: "ready",
    State.PREPARING_BESIDE: "ready",
    State.RECOVERING: "recovering",
    State.WAITING: "waiting",
}


class Engine:
    """One engine: call ``start``, then ``run``, which returns when stopped or raises when the engine cannot go on.

    When ``run`` ends, the nodes have their memory back. An engine that replaces another is only run, not started: it
    accepts that engine's requests at once.

    When a stage is lost, requests wait for the next epoch and continue at their last token. Tokens already sent never
    change, because they are part of the continued prompt. ``Recovery`` decides on the next epoch; this class executes
    its commands and reports the results to it.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        spec: ServeSpec,
        nodes: Mapping[NodeId, str],
        pipeline_id: PipelineId,
        hello: Hello,
        security: Security,
        clock: Clock,
        ids: IdSource,
        on_state: Callable[[EngineState], None],
        address: str = "",
        node_names: Mapping[NodeId, str] | None = None,
        epoch_counter: int = 1,
        policy: Policy | None = None,
        limits: EngineLimits | None = None,
        timeouts: EngineTimeouts | None = None,
        network: Network | None = None,
        planner: Planner | None = None,
        weights: WeightTable = FLOATS,
    ) -> None:
        """Raises PlanInvalid if the spec has no stage or one without layers, ConfigInvalid for an unknown policy.

        nodes          HOST:PORT of every node in the spec
        hello          this process's introduction to nodes, stages and gateways
        security       credentials for calls, and permissions of callers
        on_state       called at every visible change, and a few times a second while numbers change
        address        HOST:PORT of the server passed to ``add_to``, for gateways
        epoch_counter  1 + the highest known counter of this pipeline
        network        emulated network to the stages of other nodes
        planner        finds a placement after a loss; None: the same placement
        weights        forms of the model's weights
        """
        if not spec.stages or not all(placement.slices for placement in spec.stages):
            raise PlanInvalid(f"the plan for '{spec.model}' has a stage without layers")
        known = Nodes(addresses=nodes, names=node_names or {})
        draft = draft_way(spec.draft)
        if draft == "auto" and config.has_mtp:
            draft = "mtp"  # the placement holds the model's own layer for drafts
        if draft == "model" and not spec.settings.draft_model:
            draft = "lookup"  # the draft model did not fit
        self._limits = limits or EngineLimits()
        self._timeouts = timeouts or EngineTimeouts()
        self._context = EngineContext(
            config=config,
            pipeline_id=pipeline_id,
            hello=hello,
            security=security,
            clock=clock,
            policy=policy or _policy(spec.policy, self._limits),
            itl_goal_s=parse_itl_goal(spec.itl_goal),
            draft="" if draft == "off" else draft,
            limits=self._limits,
            timeouts=self._timeouts,
            network=network,
            weights=weights,
        )
        self._planner = planner or SamePlacement(known)
        self._core = Recovery(
            EpochPlacement(spec=spec, nodes=known),
            epoch=Epoch(epoch_counter, EngineId(ids.new("engine"))),
            engine_node=hello.node_name or known.name(NodeId(hello.node_id)),
            limits=self._limits,
            timeouts=self._timeouts,
        )
        self._events = EventQueue(clock)
        self._work: asyncio.Task[None] | None = None  # the attempt's task: asks, prepares or opens
        self._driving: asyncio.Task[None] | None = None
        self._candidate: EngineEpoch | None = None  # open, not yet in use
        self._run: EngineEpoch | None = None
        self._kept: KeptKV | None = None  # KV of the last epoch that served
        self._table = RequestTable(
            config=config, limits=self._limits, timeouts=self._timeouts, draft=self._context.draft
        )
        self._losses = EpochLosses(self._table)
        self._intake: RequestIntake | None = None
        self._has_served = False  # a previous epoch has served
        self._stalled_since_s: float | None = None  # time since requests wait for a new epoch
        self._stopping = asyncio.Event()
        self._running = False
        self._over = asyncio.Event()
        self._given_back = False
        self._failure: EdgepipeError | None = None
        self._releasing: set[asyncio.Task[None]] = set()
        self._preparation = self._new_preparation(Placement(epoch=self._core.epoch, spec=spec))
        base = EngineState(
            model=spec.model,
            pipeline_id=pipeline_id,
            epoch=self._core.epoch,
            state="starting",
            micro_batches=spec.micro_batches or len(spec.stages),
            block_size=spec.settings.block_size,
            context_length=spec.settings.context_length or config.context_length,
            address=address,
            manifest_hash=spec.manifest_hash,
            template_keywords=spec.template_keywords,
            drafts=DraftState(source=self._context.draft),
        )
        self._status = EngineStatus(base, on_state)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the Engine service on a server."""
        service = EngineService(
            hello=self._context.hello,
            security=self._context.security,
            intake=lambda: self._intake,
            state=self.state,
            trace=self._trace,
        )
        service.add_to(server)

    def _trace(self, after_step: int) -> EngineTrace | None:
        return self._run.pump.trace(after_step=after_step) if self._run is not None else None

    def state(self) -> EngineState:
        """Return the current state."""
        return self._status.state(self._run)

    async def start(self) -> None:
        """Reserve memory, load the stages and open the pipeline. May take minutes; cancel it to give up.

        Raises the nodes' and stages' errors. By then all memory is released and the state is ``failed``.
        """
        try:
            await self._advance(self._core.begin(self._now_s()), going=lambda: self._core.state is State.STARTING)
            if self._failure is not None:
                raise self._failure
        except BaseException as exc:
            if isinstance(exc, EdgepipeError):
                self._tell(state="failed", error=exc, message="")
            await self._give_back()
            raise

    async def run(self) -> None:
        """Serve until ``stop``. Raises the reason if the engine cannot go on, after all requests have ended."""
        self._running = True
        try:
            async with asyncio.TaskGroup() as tasks:
                self._intake = RequestIntake(
                    self._table, tasks, pipeline_id=self._context.pipeline_id, epoch=lambda: self._core.epoch
                )
                reporter = tasks.create_task(self._report(), name="state")
                try:
                    await self._serve()
                except asyncio.CancelledError:  # the process ends, but the model stays served: another engine continues
                    await self._intake.close(flush_s=self._timeouts.flush_s)
                    raise
                await self._wind_up(self._intake)
                reporter.cancel()
        finally:
            self._intake = None
            await self._give_back()
            self._running = False
            self._over.set()
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """End all requests, release the nodes' memory and let ``run`` return. May be called twice."""
        self._stopping.set()
        self._events.post(Stopped())
        if self._running:
            await self._over.wait()
        else:
            await self._give_back()

    def note_reachable(self, reachable: ReachableNodes) -> None:
        """Report a cluster change. If a node of the pipeline is gone, the epoch or its preparation ends."""
        self._events.post(ClusterChanged(reachable=reachable))

    def move_to(self, plan: EpochPlacement) -> None:
        """Propose to move the stages to another placement."""
        self._events.post(MoveProposed(plan=plan))

    # Events in, commands out

    async def _serve(self) -> None:
        """Serve epoch after epoch, until stopped or until no further epoch is possible."""
        if self._core.state is State.STOPPED:
            return  # stopped while starting
        if self._run is None:
            commands = self._core.resume(self._now_s())
            self._show()
        else:
            commands = []
            self._drive(self._run)
        await self._advance(commands, going=lambda: self._core.state is not State.STOPPED)

    async def _advance(self, commands: Sequence[Command], *, going: Callable[[], bool]) -> None:
        """Execute commands and those that events lead to, while ``going``. Raises bugs only."""
        self._show()
        await self._carry_out_all(commands)
        while going():
            event = await self._events.next(wake_at_s=self._core.wake_at_s)
            if isinstance(event, EpochEnded):
                await self._leave_epoch(event)
            self._log_failure(event)
            commands = self._core.handle(event, self._now_s())
            self._show()
            await self._carry_out_all(commands)

    async def _carry_out_all(self, commands: Sequence[Command]) -> None:
        for command in commands:
            await self._carry_out(command)

    async def _carry_out(self, command: Command) -> None:
        match command:
            case AskPlacement():
                self._begin(self._ask(command))
            case Prepare():
                self._begin(self._prepare(command))
            case Open():
                self._begin(self._open(command))
            case Abandon():
                await self._abandon()
            case Serve():
                self._resume(command.placement)
            case EndEpoch():
                if self._run is not None:
                    self._run.pump.fail(command.error)
            case Release():
                self._release_left_nodes(command.node_ids)
            case Accuse():
                self._table.accuse(command.sequences, command.error)
            case Acquit():
                self._table.acquit(command.requests)
            case Suspect():
                self._table.suspect(command.requests)
            case RefuseOne():
                self._table.refuse_one(command.request, command.error)
            case Refuse():
                self._table.refuse_all(command.error)
            case Fail():
                self._failure = command.error

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = asyncio.create_task(self._guarded(work), name="attempt")

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the attempt's work; a bug in it ends the engine."""
        try:
            await work
        except Exception as exc:
            self._events.fail(exc)

    async def _abandon(self) -> None:
        """Cancel the attempt's work and close the epoch that it may have opened."""
        await _end(self._work)
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            await candidate.close()

    # Work of an attempt

    async def _ask(self, command: AskPlacement) -> None:
        try:
            plan = await self._planner.plan(
                command.spec, quarantined=command.quarantined, quarantined_links=command.quarantined_links
            )
        except EdgepipeError as error:
            self._events.post(PlanningFailed(attempt=command.attempt, error=error))
        else:
            self._events.post(Planned(attempt=command.attempt, plan=plan))

    async def _prepare(self, command: Prepare) -> None:
        preparation = self._preparation = self._new_preparation(command.placement, fresh=command.fresh)
        try:
            sites = await preparation.prepare()
        except EdgepipeError as error:
            self._events.post(PreparationFailed(attempt=command.attempt, error=error, node_id=preparation.failed))
        else:
            self._events.post(
                StagesLoaded(attempt=command.attempt, sites=tuple(sites), crashes=tuple(self._losses.crashes(sites)))
            )

    async def _open(self, command: Open) -> None:
        epoch, sites = command.placement.epoch, list(command.sites)
        self._tell(epoch=epoch, stages=tuple(stage_state(site) for site in sites))
        missed = Missed()
        try:
            run = EngineEpoch(self._context, spec=command.placement.spec, epoch=epoch, sites=sites, kept=self._kept)
            try:
                await run.open(registration=self._table.registration, on_news=self._note, on_over=self._table.pause)
            except BaseException as exc:
                missed = run.missed() if isinstance(exc, LinkError | StageLost) else missed
                await run.close()
                raise
        except EdgepipeError as error:
            self._events.post(OpeningFailed(attempt=command.attempt, error=error, missed=missed))
        else:
            self._candidate = run
            self._events.post(Opened(attempt=command.attempt))

    def _resume(self, placement: Placement) -> None:
        """Resume requests in the epoch that has opened."""
        run, self._candidate = self._candidate, None
        assert run is not None, "the epoch has opened"
        assert run.epoch == placement.epoch, "no other epoch can have opened"
        self._run = run
        self._status.opened(run)
        counts = self._status.base
        if self._has_served:
            self._status.note(
                recoveries=counts.recoveries + (not self._core.moved), moves=counts.moves + self._core.moved
            )
        drafts = counts.drafts
        if drafts is not None and drafts.source == "model" and not placement.spec.settings.draft_model:
            self._status.note(drafts=replace(drafts, source="lookup"))  # the draft model fits no more
        self._has_served = True
        self._show()
        self._table.attach(run.pump)
        if self._running:
            self._drive(run)

    def _drive(self, run: EngineEpoch) -> None:
        self._driving = asyncio.create_task(self._guarded(self._drive_to_its_end(run)), name="epoch")

    async def _drive_to_its_end(self, run: EngineEpoch) -> None:
        error = await run.drive(self._stopping)
        self._table.pause()
        if error is not None:
            self._events.post(self._losses.end(run, error))

    async def _leave_epoch(self, event: EpochEnded) -> None:
        """Close an ended epoch. Its stages keep their KV."""
        run = self._run
        assert run is not None, "the epoch has just ended"
        stats = run.pump.stats()
        if self._stalled_since_s is None and (stats.running or stats.waiting):
            self._stalled_since_s = self._now_s()
        self._log(
            "pipeline=%s epoch=%s ended: %s",
            self._context.pipeline_id,
            run.epoch,
            event.error,
            asked=isinstance(event.error, StagesMove),
        )
        await self._close_run()

    # Reports

    def _note(self, news: StepNews) -> None:
        self._table.note_step(news)
        if self._stalled_since_s is not None and news.events:
            stall_ms = round(1e3 * (self._now_s() - self._stalled_since_s))
            self._stalled_since_s = None
            counts = self._status.base
            if self._core.moved:
                self._status.note(move_pause_ms=counts.move_pause_ms + stall_ms)
            else:
                self._status.note(stall_ms=counts.stall_ms + stall_ms)
            self._log_going_on(stall_ms)

    def _log_going_on(self, stall_ms: int) -> None:
        assert self._run is not None, "the epoch has just computed a step"
        stats = self._run.pump.stats()
        logger.info(
            "pipeline=%s epoch=%s resumed after %.1f s: %d tokens kept, %d replayed so far",
            self._context.pipeline_id,
            self._run.epoch,
            stall_ms / 1e3,
            stats.kept_tokens,
            stats.replayed_tokens,
        )

    def _log_failure(self, event: Event) -> None:
        if isinstance(event, PlanningFailed | PreparationFailed | OpeningFailed):
            self._log("pipeline=%s epoch=%s failed: %s", self._context.pipeline_id, self._core.epoch, event.error)

    def _log(self, text: str, *values: object, asked: bool = False) -> None:
        """Log a failure: INFO if it was ``asked`` for or every node is leaving, else WARNING."""
        reachable = self._core.reachable
        asked = asked or (reachable is not None and reachable.leaving.issuperset(reachable.addresses))
        logger.log(logging.INFO if asked else logging.WARNING, text, *values)

    def _show(self) -> None:
        """Report the recovery core's state."""
        core = self._core
        if core.state is State.STOPPED:
            return  # ``start`` and ``run`` report the end
        serves = core.running is not None
        if serves and self._run is None:
            return  # ``_resume`` reports the epoch with its numbers
        self._tell(
            state=_WORDS[core.state],
            message=core.doing(self._now_s()),
            error=None if serves or core.state is State.STARTING else core.error,
            epoch=core.running.epoch if core.running is not None else core.epoch,
            progress=1.0 if serves else self._status.base.progress,
        )

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._timeouts.report_interval_s)
            if self._core.is_pausing:
                self._tell(message=self._core.doing(self._now_s()))
            else:
                self._tell()

    def _note_progress(self, message: str, progress: float) -> None:
        if round(progress, 2) != round(self._status.base.progress, 2):  # reported per tensor, shown in hundredths
            self._tell(message=message, progress=progress)

    def _tell(self, **changes: Any) -> None:
        self._status.tell(self._run, left_out=self._core.left_out(self._now_s()), **changes)

    def _now_s(self) -> float:
        return self._context.clock.monotonic_s()

    # Release

    def _release_left_nodes(self, left: frozenset[NodeId]) -> None:
        """Release the nodes that the placement has left, while steps continue."""
        releasing = asyncio.create_task(self._guarded(self._release(self._preparation, left)), name="release")
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)

    async def _release(self, preparation: Preparation, left: frozenset[NodeId]) -> None:
        """Release up to the epoch of ``preparation``. Stages prepared for a later epoch stay."""
        if silent := await preparation.release(sorted(left)):
            self._events.post(NotReleased(node_ids=silent))

    def _new_preparation(self, placement: Placement, *, fresh: frozenset[NodeId] = frozenset()) -> Preparation:
        return Preparation(
            config=self._context.config,
            weights=self._context.weights,
            spec=placement.spec,
            nodes=self._core.nodes,
            pipeline_id=self._context.pipeline_id,
            epoch=placement.epoch,
            fresh=fresh,
            hello=self._context.hello,
            security=self._context.security,
            limits=self._limits,
            timeouts=self._timeouts,
            on_progress=self._note_progress,
        )

    async def _wind_up(self, intake: RequestIntake) -> None:
        """End every request and notify every gateway."""
        error, model = self._failure, self._status.base.model
        if error is None:
            self._tell(state="stopping", message="ending requests")
        else:
            logger.error("pipeline=%s epoch=%s failed: %s", self._context.pipeline_id, self._core.epoch, error)
            self._tell(state="failed", error=error, message="")
        reason = error or ClusterError(f"'{model}' was stopped", next_step="serve it again with: edgepipe serve MODEL")
        if self._run is not None:
            self._run.pump.fail(reason)
        if not isinstance(error, StaleEpoch):  # the engine that took over has the requests, or will get them
            self._table.fail_all(reason)
        await intake.close(flush_s=self._timeouts.flush_s)

    async def _close_run(self) -> None:
        await _end(self._driving)
        if self._run is not None:
            self._status.closed(self._run)
            run, self._run = self._run, None
            self._kept = run.hand_over()
            self._losses.note(run)
            await run.close()

    async def _give_back(self) -> None:
        """Close the stages' streams and release their memory. Later calls do nothing."""
        if self._given_back:
            return
        self._given_back = True
        self._table.close()
        await self._abandon()
        await self._close_run()
        await self._preparation.release(sorted(self._core.held))
        if self._releasing:
            await asyncio.wait(self._releasing)


async def _end(task: asyncio.Task[None] | None) -> None:
    """Cancel a task that has not ended and wait for its end."""
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait((task,))


def _policy(name: str, limits: EngineLimits) -> Policy:
    return make_policy(name) if name else ThrottledPolicy(max_prefill_tokens=limits.max_prefill_tokens)
