"""The engine of one served model: from placements to tokens, over all epochs, until it is stopped or cannot go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import grpc.aio

from edgepipe.clock import Clock
from edgepipe.engine.bars import Bars, Missed, in_order
from edgepipe.engine.control import StageSite
from edgepipe.engine.epoch import EpochRun, Surroundings
from edgepipe.engine.kept import KeptKV
from edgepipe.engine.planning import Plan, Planner, Reachable, SamePlan
from edgepipe.engine.preparation import Nodes, Preparation
from edgepipe.engine.pump import StepNews
from edgepipe.engine.service import Door, EngineService
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.table import RequestTable
from edgepipe.engine.told import Told, stage_state
from edgepipe.errors import (
    ClusterError,
    EdgepipeError,
    LinkError,
    NodeUnreachable,
    NoFeasiblePlacement,
    PlanInvalid,
    StageLost,
    StagesMove,
    StaleEpoch,
    StepFailed,
)
from edgepipe.ids import EngineId, Epoch, IdSource, NodeId, PipelineId, SequenceId, StepId
from edgepipe.link.security import Security
from edgepipe.link.shaped import Network
from edgepipe.model.facts import ModelConfig
from edgepipe.scheduler import Policy, ThrottledPolicy, make_policy
from edgepipe.wire.engines import EngineState, EngineTrace, ServeSpec
from edgepipe.wire.v1 import common_pb2, engine_pb2_grpc

logger = logging.getLogger(__name__)


class Engine:
    """``start``, then ``run`` until it returns (stopped) or raises (it cannot go on). Then nodes have all back.

    An engine that goes on with what another one served is not started, only run: it takes that one's requests at once.

    When a stage is lost, requests wait while the next epoch is prepared, and go on where they were: what a request was
    given is never computed differently, since its tokens are the prompt of what follows.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        spec: ServeSpec,
        nodes: Mapping[NodeId, str],
        pipeline_id: PipelineId,
        hello: common_pb2.Hello,
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
    ) -> None:
        """Raises PlanInvalid if the spec places nothing, ConfigInvalid if it names a policy that does not exist.

        nodes          HOST:PORT of every node that the spec names
        hello          this process, as it introduces itself to nodes, stages and gateways
        security       whom it reaches, and who may call it
        on_state       told at every change that people see, and a few times a second while numbers move
        address        HOST:PORT where gateways reach the server that ``add_to`` was given
        epoch_counter  1 + the highest that anybody has seen of this pipeline
        network        emulates one to the stages of other nodes
        planner        asked where stages go when some are lost; None: where they were
        """
        if not spec.stages or not all(placement.slices for placement in spec.stages):
            raise PlanInvalid(f"the plan for '{spec.model}' has a stage without layers")
        self._spec: ServeSpec = spec
        self._nodes: Nodes = Nodes(addresses=nodes, names=node_names or {})
        self._limits = limits or EngineLimits()
        self._timeouts = timeouts or EngineTimeouts()
        self._around = Surroundings(
            config=config,
            pipeline_id=pipeline_id,
            hello=hello,
            security=security,
            clock=clock,
            policy=policy or _policy(spec.policy, self._limits),
            limits=self._limits,
            timeouts=self._timeouts,
            network=network,
        )
        self._planner = planner or SamePlan(self._nodes)
        self._bars = Bars(clock)
        self._missed = Missed()  # what kept the last epoch from being opened
        self._epoch = Epoch(epoch_counter, EngineId(ids.new("engine")))
        self._run: EpochRun | None = None
        self._kept: KeptKV | None = None  # by the last epoch that stood
        self._lost_steps: tuple[int, dict[StepId, tuple[SequenceId, ...]]] = (
            0,
            {},
        )  # its counter, what did not come back
        self._table = RequestTable(config=config, limits=self._limits, timeouts=self._timeouts)
        self._door: Door | None = None
        self._recoveries = 0
        self._stalled_since_s: float | None = None  # requests wait since an epoch failed
        self._stopping = asyncio.Event()
        self._running = False
        self._over = asyncio.Event()
        self._given_back = False
        self._reachable: Reachable | None = None  # None: nobody tells
        self._news = asyncio.Event()  # of the cluster
        self._lost: asyncio.Future[None] | None = None  # fails when a node is lost that is being prepared
        self._move_wanted = asyncio.Event()
        self._proposed: Plan | None = None  # where stages shall move
        self._moved: list[StageSite] | None = None  # prepared for the next epoch
        self._reloading: frozenset[str] = frozenset()  # names of nodes whose stages end because others are prepared
        self._held = {stage.node_id for stage in spec.stages}  # nodes that may hold a stage, of an engine before, too
        self._releasing: set[asyncio.Future[None]] = set()
        self._preparation = self._new_preparation()
        base = EngineState(
            model=spec.model,
            pipeline_id=pipeline_id,
            epoch=self._epoch,
            state="starting",
            micro_batches=spec.micro_batches or len(spec.stages),
            block_size=spec.block_size,
            context_length=spec.context_length or config.context_length,
            address=address,
            manifest_hash=spec.manifest_hash,
        )
        self._told = Told(base, on_state)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve gateways there."""
        service = EngineService(
            hello=self._around.hello,
            security=self._around.security,
            door=lambda: self._door,
            state=self.state,
            trace=self._trace,
        )
        engine_pb2_grpc.add_EngineServicer_to_server(service, server)

    def _trace(self, after_step: int) -> EngineTrace | None:
        return self._run.pump.trace(after_step=after_step) if self._run is not None else None

    @property
    def _own_name(self) -> str:
        """Of its node, for people."""
        hello = self._around.hello
        return hello.node_name or self._nodes.name(NodeId(hello.node_id))

    def state(self) -> EngineState:
        """What it is and does at this moment."""
        return self._told.state(self._run)

    async def start(self) -> None:
        """Get memory and loaded stages from the nodes and open the pipeline. May take minutes; cancel it to give up.

        Raises what the nodes and stages raise; then nodes have got everything back and the state is ``failed``.
        """
        try:
            self._tell(state="loading", message="asking nodes for memory")
            await self._first_epoch()
        except BaseException as exc:
            if isinstance(exc, EdgepipeError):
                self._tell(state="failed", error=exc, message="")
            await self._give_back()
            raise

    async def run(self) -> None:
        """Serve until ``stop`` (returns) or until it cannot go on (raises why, when all requests have been told)."""
        self._running = True
        error: EdgepipeError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                self._door = Door(self._table, tasks, pipeline_id=self._around.pipeline_id, epoch=lambda: self._epoch)
                reporter = tasks.create_task(self._report(), name="state")
                try:
                    error = await self._serve(self._table)
                except asyncio.CancelledError:  # the process ends, the model is still wanted: another engine goes on
                    await self._door.close(flush_s=self._timeouts.flush_s)
                    raise
                await self._wind_up(self._table, self._door, error)
                reporter.cancel()
        finally:
            self._door = None
            await self._give_back()
            self._running = False
            self._over.set()
        if error is not None:
            raise error

    async def stop(self) -> None:
        """End all requests, give memory back to the nodes, and let ``run`` return. May be called twice."""
        self._stopping.set()
        if self._running:
            await self._over.wait()
        else:
            await self._give_back()

    def note_reachable(self, reachable: Reachable) -> None:
        """The cluster changed. A node of the pipeline that is gone ends the epoch, or its preparation."""
        self._reachable = reachable
        self._news.set()
        if reachable.leaving.intersection(stage.node_id for stage in self._spec.stages):
            self._move_wanted.set()
        try:
            self._check_there()
        except NodeUnreachable as error:
            if self._run is not None:
                self._run.pump.fail(error)
            elif self._lost is not None and not self._lost.done():
                self._lost.set_exception(error)

    def _check_there(self) -> None:
        """Raises NodeUnreachable if a node of the plan is not there."""
        if (gone := self._gone()) is not None:
            name = self._nodes.name(gone)
            raise NodeUnreachable(f"node {name} is gone", fact="it has left, or does not answer heartbeats", node=name)

    def _gone(self) -> NodeId | None:
        """A node of the plan that is not there, or not where it was."""
        if self._reachable is None:
            return None
        for stage in self._spec.stages:
            if self._reachable.addresses.get(stage.node_id) != self._nodes.addresses.get(stage.node_id):
                return stage.node_id
        return None

    async def _serve(self, table: RequestTable) -> EdgepipeError | None:
        """Epoch after epoch, until stopped (None) or until there cannot be another (why)."""
        while not self._stopping.is_set():
            if self._run is None:
                if (error := await self._recover(table, None)) is not None:
                    return error
                continue
            run = self._run
            table.go_on(run.pump)
            self._tell(state="ready", message="", progress=1.0, error=None, recoveries=self._recoveries)
            self._recoveries += 1
            mover = asyncio.ensure_future(self._move(run))
            try:
                error = await run.drive(self._stopping)
            finally:
                mover.cancel()
                await asyncio.wait((mover,))
            if error is None:
                return None
            self._bars.note(run.missed())
            if isinstance(error, (StageLost, LinkError)) and error.node in self._reloading:
                error = StagesMove()
            self._reloading = frozenset()
            stats = run.pump.stats()
            if self._stalled_since_s is None and (stats.running or stats.waiting):
                self._stalled_since_s = self._around.clock.monotonic_s()
            table.pause()
            table.note_crash(run.crashed(), error)
            run.pump.fail(error)
            moves = isinstance(error, StagesMove)
            self._log("pipeline=%s epoch=%s ended: %s", self._around.pipeline_id, run.epoch, error, asked=moves)
            if isinstance(error, StaleEpoch):
                return error  # another engine has taken over; whoever outbids it does harm
            if (error := await self._recover(table, error)) is not None:
                return error
        return None

    def _note(self, news: StepNews) -> None:
        self._table.note_step(news)
        if self._stalled_since_s is not None and news.events:
            stall_ms = round(1e3 * (self._around.clock.monotonic_s() - self._stalled_since_s))
            self._stalled_since_s = None
            self._told.note(stall_ms=self._told.base.stall_ms + stall_ms)
            self._log_going_on(stall_ms)

    def _log_going_on(self, stall_ms: int) -> None:
        assert self._run is not None, "it has just computed a step"
        stats = self._run.pump.stats()
        logger.info(
            "pipeline=%s epoch=%s goes on after %.1f s: %d tokens kept, %d replayed so far",
            self._around.pipeline_id,
            self._epoch,
            stall_ms / 1e3,
            stats.kept_tokens,
            stats.replayed_tokens,
        )

    async def _recover(self, table: RequestTable, cause: EdgepipeError | None) -> EdgepipeError | None:
        """Prepare and open another epoch. None when it stands or the engine is to stop, else why there is none."""
        if (gone := self._gone()) is not None:
            self._bars.lost(gone)
        failures = 0
        while not self._stopping.is_set():
            self._tell(state="recovering", message="continuing without what was lost", error=cause)
            try:
                await self._close_run()
                if (moved := self._moved) is not None:
                    self._moved = None
                    await self._unless_stopped(self._open_epoch(moved), watch=True)
                else:
                    await self._unless_stopped(self._plan_again())
                    await self._unless_stopped(self._begin_epoch(), watch=True)
                return None
            except NoFeasiblePlacement as error:
                await self._wait_for_room(table, error)
            except EdgepipeError as error:
                failures += 1
                self._log("pipeline=%s epoch=%s failed: %s", self._around.pipeline_id, self._epoch, error)
                if isinstance(error, StaleEpoch) or failures >= self._limits.max_failed_epochs:
                    return error
                if self._preparation.failed is not None:
                    self._bars.failed(self._preparation.failed)
                await self._unless_stopped(asyncio.sleep(self._pause_s(failures)))
        return None

    def _pause_s(self, failures: int) -> float:
        """After so many epochs in a row that could not begin."""
        return min(self._timeouts.again_min_s * 2 ** (failures - 1), self._timeouts.again_max_s)

    async def _plan_again(self) -> None:
        """Where the stages of the next epoch go. Raises NoFeasiblePlacement."""
        self._news.clear()  # what is told from now on may change the answer
        plan = await self._plan()
        self._spec, self._nodes = plan.spec, self._nodes.updated(plan.nodes)
        self._epoch = replace(self._epoch, counter=self._epoch.counter + 1)
        self._told.note(epoch=self._epoch)

    async def _plan(self) -> Plan:
        return await self._planner.plan(self._spec, barred=self._bars.nodes(), barred_links=self._bars.links())

    async def _wait_for_room(self, table: RequestTable, error: EdgepipeError) -> None:
        """The model does not fit: tell everybody what is missing, until the cluster changes."""
        self._log("pipeline=%s waits: %s", self._around.pipeline_id, error)
        self._tell(state="waiting", message="waiting for memory", error=error)
        table.refuse_all(error)
        await self._unless_stopped(self._news_or(self._timeouts.room_s))

    async def _news_or(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None], *, watch: bool = False) -> None:
        """Do the work, or as much of it as there is time for until the engine is to stop. Raises what it raises.

        ``watch``: give up with NodeUnreachable when a node of the plan is lost meanwhile.
        """
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost = lost if watch else None
        try:
            await asyncio.wait((working, stopping, lost), return_when=asyncio.FIRST_COMPLETED)
            for ended in (lost, working):
                if ended.done():
                    ended.result()
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.wait((working, stopping))
            self._lost = None

    async def _move(self, run: EpochRun) -> None:
        """Stages shall be elsewhere: prepare them while steps go on, then end the epoch. Stages that stay go on too."""
        while True:
            await self._move_wanted.wait()
            self._move_wanted.clear()
            try:
                proposed: Plan | None = self._proposed
                self._proposed = None
                plan: Plan = proposed or await self._plan()
                if plan.spec.stages == self._spec.stages:
                    continue
                self._reloading = self._other_layers(plan.spec)
                self._spec, self._nodes = plan.spec, self._nodes.updated(plan.nodes)
                self._epoch = replace(self._epoch, counter=self._epoch.counter + 1)
                self._moved = await self._prepare_epoch()
            except EdgepipeError as error:
                self._reloading = frozenset()
                self._log("pipeline=%s: stages do not move: %s", self._around.pipeline_id, error)
                continue
            run.pump.fail(StagesMove())
            return

    def _other_layers(self, spec: ServeSpec) -> frozenset[str]:
        """Names of nodes whose stage ends when it is prepared, since it gets other layers than it has."""
        had = {stage.node_id: stage.slices for stage in self._spec.stages}
        others = (stage.node_id for stage in spec.stages if had.get(stage.node_id, stage.slices) != stage.slices)
        return frozenset(self._nodes.name(node_id) for node_id in others)

    def move_to(self, plan: Plan) -> None:
        """The stages shall be there from now on."""
        self._proposed = plan
        self._move_wanted.set()

    async def _begin_epoch(self) -> None:
        """From nodes' memory to an open pipeline. Raises what nodes and stages raise."""
        await self._open_epoch(await self._prepare_epoch())

    async def _first_epoch(self) -> None:
        """Where the spec says; where machines do not reach each other, another way that was not excluded by a wish.

        Raises what nodes and stages raise.
        """
        failures = 0
        while True:
            try:
                return await self._begin_epoch()
            except EdgepipeError as error:
                failures += 1
                if not self._missed or failures >= self._limits.max_failed_epochs:
                    raise
                logger.warning("pipeline=%s epoch=%s failed: %s", self._around.pipeline_id, self._epoch, error)
                self._tell(message=f"{error.what}: looking for another way")
                await asyncio.sleep(self._pause_s(failures))
                if not await self._another_way():
                    raise

    async def _another_way(self) -> bool:
        """Whether there is a placement as it was wished that does without what is barred; the spec is that one then."""
        wished = self._spec
        with contextlib.suppress(NoFeasiblePlacement):
            await self._plan_again()
            order = in_order(self._spec.stages)
            if wished.fixed:
                return self._bars.allow(self._spec) and self._spec.stages == wished.stages
            first = wished.first in ("", order[0], self._nodes.name(order[0]))
            return self._bars.allow(self._spec) and first and len(set(order)) >= wished.num_nodes
        return False

    async def _prepare_epoch(self) -> list[StageSite]:
        self._missed = Missed()
        self._preparation = self._new_preparation()
        self._check_there()
        self._held |= {stage.node_id for stage in self._spec.stages}
        sites = await self._preparation.prepare()
        self._note_crashes(sites)
        return sites

    def _note_crashes(self, sites: list[StageSite]) -> None:
        """A stage's process died inside a step: that counts against whoever was in it, as a fault told would."""
        counter, steps = self._lost_steps
        for site in sites:
            if site.crashed_in is not None and site.crashed_in[0] == counter:
                error = StepFailed(
                    f"{site.label} on {site.node_name} crashed",
                    fact=f"computing step {site.crashed_in[1]} ended its process",
                    next_step=f"see 'edgepipe logs' on {site.node_name}",
                    node=site.node_name,
                    stage=site.label,
                )
                self._table.note_crash(steps.get(site.crashed_in[1], ()), error)

    async def _open_epoch(self, sites: list[StageSite]) -> None:
        placed = {stage.node_id for stage in self._spec.stages}
        self._tell(epoch=self._epoch, message="opening the pipeline", stages=tuple(stage_state(site) for site in sites))
        run = EpochRun(self._around, spec=self._spec, epoch=self._epoch, sites=sites, kept=self._kept)
        try:
            await run.open(registration=self._table.registration, on_news=self._note)
            self._check_there()
        except BaseException as exc:
            missed = run.missed()
            await run.close()
            if isinstance(exc, (LinkError, StageLost)) and missed:
                self._missed = missed
                if self._bars.note(missed):
                    raise missed.error(self._nodes, engine=self._own_name) from exc
            raise
        self._bars.note(Missed())
        self._run = run
        self._let_go(self._held - placed)
        self._held = placed
        self._told.opened(run)

    def _let_go(self, left: set[NodeId]) -> None:
        """Give back what nodes hold that the plan has left, while steps go on; one that is gone needs no telling."""
        if self._reachable is not None:
            left = left & set(self._reachable.addresses)
        if left:
            releasing = asyncio.ensure_future(self._preparation.release(sorted(left)))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)

    def _new_preparation(self) -> Preparation:
        return Preparation(
            config=self._around.config,
            spec=self._spec,
            nodes=self._nodes,
            pipeline_id=self._around.pipeline_id,
            epoch=self._epoch,
            hello=self._around.hello,
            security=self._around.security,
            limits=self._limits,
            timeouts=self._timeouts,
            on_progress=self._note_progress,
        )

    async def _wind_up(self, table: RequestTable, door: Door, error: EdgepipeError | None) -> None:
        """Every request ends, and every gateway is told."""
        if error is None:
            self._tell(state="stopping", message="ending requests")
        else:
            logger.error("pipeline=%s epoch=%s failed: %s", self._around.pipeline_id, self._epoch, error)
            self._tell(state="failed", error=error, message="")
        reason = error or ClusterError(
            f"'{self._spec.model}' was stopped", next_step="serve it again with: edgepipe serve MODEL"
        )
        if self._run is not None:
            self._run.pump.fail(reason)
        if not isinstance(error, StaleEpoch):  # the engine that took over has the requests, or gets them
            table.fail_all(reason)
        await door.close(flush_s=self._timeouts.flush_s)

    async def _close_run(self) -> None:
        if self._run is not None:
            self._told.closed(self._run)
            run, self._run = self._run, None
            self._kept = run.hand_over()
            self._lost_steps = (run.epoch.counter, run.pump.in_flight())
            await run.close()

    async def _give_back(self) -> None:
        """Close the stages' streams and release their memory, once."""
        if self._given_back:
            return
        self._given_back = True
        self._table.close()
        await self._close_run()
        await self._preparation.release(sorted(self._held))
        if self._releasing:
            await asyncio.wait(self._releasing)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._timeouts.report_interval_s)
            self._tell()

    def _note_progress(self, message: str, progress: float) -> None:
        if round(progress, 2) != round(self._told.base.progress, 2):  # told per tensor: people see hundredths
            self._tell(message=message, progress=progress)

    def _log(self, text: str, *values: object, asked: bool = False) -> None:
        """What went wrong, unless somebody ``asked`` for it; where every node is about to go, somebody did."""
        told = self._reachable
        asked = asked or (told is not None and told.leaving.issuperset(told.addresses))
        logger.log(logging.INFO if asked else logging.WARNING, text, *values)

    def _tell(self, **changes: Any) -> None:
        self._told.tell(self._run, **changes)


def _policy(name: str, limits: EngineLimits) -> Policy:
    return make_policy(name) if name else ThrottledPolicy(max_prefill_tokens=limits.max_prefill_tokens)
