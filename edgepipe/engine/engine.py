"""The engine of one served model: from placements to tokens, until it is stopped or a stage fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from edgepipe.clock import Clock
from edgepipe.engine.control import StageControl, StageSite
from edgepipe.engine.groups import first_error
from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.engine.preparation import Nodes, Preparation
from edgepipe.engine.pump import Pump
from edgepipe.engine.service import Door, EngineService
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.table import RequestTable
from edgepipe.errors import ClusterError, EdgepipeError, NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import EngineId, Epoch, IdSource, NodeId, PipelineId
from edgepipe.link.shaped import Network
from edgepipe.model.facts import ModelConfig
from edgepipe.scheduler import Policy, Scheduler, SchedulerLimits, ThrottledPolicy, make_policy
from edgepipe.wire.engines import EngineState, EngineTrace, ServeSpec, StageState
from edgepipe.wire.plans import PipelineSpec
from edgepipe.wire.v1 import common_pb2, engine_pb2_grpc

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """What stands while one epoch lasts."""

    limits: SchedulerLimits
    controls: list[StageControl]
    pump: Pump
    table: RequestTable


class Engine:
    """``start``, then ``run`` until it returns (stopped) or raises (the epoch failed). Then nodes have all back."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        spec: ServeSpec,
        nodes: Mapping[NodeId, str],
        pipeline_id: PipelineId,
        hello: common_pb2.Hello,
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
    ) -> None:
        """Raises PlanInvalid if the spec places nothing, ConfigInvalid if it names a policy that does not exist.

        nodes          HOST:PORT of every node that the spec names
        hello          this process, as it introduces itself to nodes, stages and gateways
        on_state       told at every change that people see, and a few times a second while numbers move
        address        HOST:PORT where gateways reach the server that ``add_to`` was given
        epoch_counter  1 + the highest that anybody has seen of this pipeline
        network        emulates one to the stages of other nodes
        """
        if not spec.stages or not all(placement.slices for placement in spec.stages):
            raise PlanInvalid(f"the plan for '{spec.model}' has a stage without layers")
        self._config = config
        self._spec = spec
        self._hello = hello
        self._network = network
        self._clock = clock
        self._on_state = on_state
        self._limits = limits or EngineLimits()
        self._timeouts = timeouts or EngineTimeouts()
        self._policy = policy or _policy(spec.policy, self._limits)
        self._epoch = Epoch(epoch_counter, EngineId(ids.new("engine")))
        self._pipeline_id = pipeline_id
        self._pipeline: _Pipeline | None = None
        self._controls: list[StageControl] = []
        self._door: Door | None = None
        self._stopping = asyncio.Event()
        self._running = False
        self._over = asyncio.Event()
        self._given_back = False
        self._preparation = Preparation(
            config=config,
            spec=spec,
            nodes=Nodes(addresses=nodes, names=node_names or {}),
            pipeline_id=pipeline_id,
            epoch=self._epoch,
            hello=hello,
            limits=self._limits,
            timeouts=self._timeouts,
            on_progress=self._note_progress,
        )
        self._base = EngineState(
            model=spec.model,
            pipeline_id=pipeline_id,
            epoch=self._epoch,
            state="starting",
            micro_batches=spec.micro_batches or len(spec.stages),
            block_size=self._limits.block_size,
            context_length=spec.context_length or config.context_length,
            address=address,
            manifest_hash=spec.manifest_hash,
        )
        self._told: EngineState | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve gateways there."""
        service = EngineService(hello=self._hello, door=lambda: self._door, state=self.state, trace=self._trace)
        engine_pb2_grpc.add_EngineServicer_to_server(service, server)

    def _trace(self, after_step: int) -> EngineTrace | None:
        return self._pipeline.pump.trace(after_step=after_step) if self._pipeline is not None else None

    def state(self) -> EngineState:
        """What it is and does at this moment."""
        if self._pipeline is None:
            return self._base
        pump, stats = self._pipeline.pump, self._pipeline.pump.stats()
        sizing = pump.micro_batches.sizing
        stages = tuple(
            replace(
                stage, busy=meter.busy, step_ms=meter.step_ms, upload_ms=meter.upload_ms, one_way_ms=meter.one_way_ms
            )
            for stage, meter in zip(self._base.stages, pump.meters, strict=True)
        )
        return replace(
            self._base,
            micro_batches=sizing.micro_batches,
            why=sizing.why,
            bottleneck=sizing.bottleneck,
            predicted_tokens_per_s=sizing.tokens_per_s,
            latency_ms=pump.micro_batches.latency_s * 1e3,
            in_flight=stats.in_flight,
            running=stats.running,
            waiting=stats.waiting,
            num_blocks=stats.num_blocks,
            free_blocks=stats.free_blocks,
            preemptions=stats.preemptions,
            admitted_tokens=stats.admitted_tokens,
            cached_tokens=stats.cached_tokens,
            tokens_per_s=pump.tokens.per_second(),
            stages=stages,
        )

    async def start(self) -> None:
        """Get memory and loaded stages from the nodes and open the pipeline. May take minutes; cancel it to give up.

        Raises what the nodes and stages raise; then nodes have got everything back and the state is ``failed``.
        """
        try:
            self._tell(state="loading", message="asking nodes for memory")
            sites = await self._preparation.prepare()
            self._tell(message="opening the pipeline", stages=tuple(_stage_state(site) for site in sites))
            self._pipeline = await self._open(sites)
        except BaseException as exc:
            if isinstance(exc, EdgepipeError):
                self._tell(state="failed", error=exc, message="")
            await self._give_back()
            raise

    async def run(self) -> None:
        """Serve until ``stop`` (returns) or until a stage fails (raises why, when all requests have been told)."""
        if self._pipeline is None:
            raise RuntimeError("start the engine first")
        self._running = True
        error: EdgepipeError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                self._door = Door(self._pipeline.table, tasks, pipeline_id=self._pipeline_id, epoch=self._epoch)
                reporter = tasks.create_task(self._report(), name="state")
                self._tell(state="ready", message="", progress=1.0)
                try:
                    error = await self._drive(self._pipeline)
                finally:  # cancelled, too: gateways are told
                    await self._wind_up(self._pipeline, self._door, error)
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

    async def _open(self, sites: list[StageSite]) -> _Pipeline:
        """Open every stage, the last one first: each is ready when it has reached the next."""
        limits = self._scheduler_limits(sites)
        micro_batches = MicroBatches(
            slices=[[part.index for part in site.slices] for site in sites],
            row_bytes=self._config.hidden_size * self._spec.activation_type.num_bytes,
            fixed=self._spec.micro_batches,
        )
        pump = Pump(
            scheduler=Scheduler(limits, self._policy),
            micro_batches=micro_batches,
            epoch=self._epoch,
            num_slices=sum(len(site.slices) for site in sites),
            vocab_size=self._config.vocab_size,
            clock=self._clock,
            timeouts=self._timeouts,
        )
        table = RequestTable(config=self._config, queue=pump, limits=self._limits, timeouts=self._timeouts)
        max_queued = micro_batches.most + self._limits.max_queued_messages
        for site in sites:
            self._controls.append(
                StageControl(
                    site,
                    on_report=pump.on_report,
                    max_queued=max_queued,
                    network=self._network if site.node_id != self._hello.node_id else None,
                )
            )
        await self._open_stages(sites, limits, max_in_flight=micro_batches.most)
        pump.connect(self._controls, registration=table.registration, on_events=table.note)
        self._base = replace(
            self._base,
            context_length=limits.max_tokens,
            stages=tuple(
                replace(stage, kv_bytes=limits.num_blocks * site.kv_block_bytes)
                for stage, site in zip(self._base.stages, sites, strict=True)
            ),
        )
        return _Pipeline(limits=limits, controls=self._controls, pump=pump, table=table)

    async def _open_stages(self, sites: list[StageSite], limits: SchedulerLimits, *, max_in_flight: int) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for control in reversed(self._controls):
                    spec = self._pipeline_spec(sites, control.site, limits, max_in_flight)
                    opening = control.open(spec, self._hello, timeout_s=self._timeouts.open_s)
                    tasks.create_task(opening, name=f"open:{control.site.index}")
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    def _scheduler_limits(self, sites: list[StageSite]) -> SchedulerLimits:
        """One number of blocks for all stages: what the smallest can hold. Raises NoFeasiblePlacement."""
        block_size = self._limits.block_size
        smallest = min(sites, key=lambda site: site.max_blocks)
        num_blocks = smallest.max_blocks
        if self._spec.kv_tokens:
            num_blocks = min(num_blocks, -(-self._spec.kv_tokens // block_size))
        if num_blocks < 1:
            raise NoFeasiblePlacement(
                f"node {smallest.node_name} has no room for a KV cache",
                fact=f"one block of {block_size} tokens takes {smallest.kv_block_bytes} bytes there",
                next_step="add a node or choose a smaller model",
                node=smallest.node_name,
            )
        return SchedulerLimits(
            num_blocks=num_blocks,
            block_size=block_size,
            context_length=self._base.context_length,
            micro_batches=self._base.micro_batches,
            max_running=self._limits.max_running,
            max_waiting=self._limits.max_waiting,
            contiguous_kv=any(site.contiguous_kv for site in sites),
        )

    def _pipeline_spec(
        self, sites: list[StageSite], site: StageSite, limits: SchedulerLimits, max_in_flight: int
    ) -> PipelineSpec:
        holder = {part.index: each for each in sites for part in each.slices}
        following = [holder[part.index + 1] for part in site.slices if holder.get(part.index + 1, site) is not site]
        return PipelineSpec(
            pipeline_id=self._pipeline_id,
            epoch=self._epoch,
            slices=site.slices,
            num_slices=sum(len(each.slices) for each in sites),
            hidden_size=self._config.hidden_size,
            activation_type=self._spec.activation_type,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            next_address=following[0].address if following else "",
            max_in_flight=max_in_flight,
            step_deadline_ms=round(self._timeouts.step_first_s * 1000),
        )

    async def _drive(self, pipeline: _Pipeline) -> EdgepipeError | None:
        """Until stopped (None) or until the epoch ends (why)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(control.run(), name=f"control:{control.site.index}")
                    for control in pipeline.controls
                ]
                running.append(tasks.create_task(pipeline.pump.run(), name="pump"))
                await self._stopping.wait()
                for task in running:
                    task.cancel()
        except BaseExceptionGroup as group:
            error = first_error(group)
            if isinstance(error, EdgepipeError):
                return error
            raise
        return None

    async def _wind_up(self, pipeline: _Pipeline, door: Door, error: EdgepipeError | None) -> None:
        """Every request ends, and every gateway is told."""
        if error is None:
            self._tell(state="stopping", message="ending requests")
        else:
            logger.error("pipeline=%s epoch=%s failed: %s", self._pipeline_id, self._epoch, error)
            self._tell(state="failed", error=error, message="")
        reason = error or ClusterError(
            f"'{self._spec.model}' was stopped", next_step="serve it again with: edgepipe serve MODEL"
        )
        pipeline.pump.fail(reason)
        pipeline.table.fail_all(reason)
        await door.close(flush_s=self._timeouts.flush_s)

    async def _give_back(self) -> None:
        """Close the stages' streams and release their memory, once."""
        if self._given_back:
            return
        self._given_back = True
        if self._pipeline is not None:
            self._pipeline.table.close()
        for control in self._controls:
            await control.close()
        await self._preparation.release()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._timeouts.report_interval_s)
            self._tell()

    def _note_progress(self, message: str, progress: float) -> None:
        if round(progress, 2) != round(self._base.progress, 2):  # told per tensor: people see hundredths
            self._tell(message=message, progress=progress)

    def _tell(self, **changes: Any) -> None:
        self._base = replace(self._base, **changes)
        state = self.state()
        if state != self._told:
            self._told = state
            self._on_state(state)


def _policy(name: str, limits: EngineLimits) -> Policy:
    return make_policy(name) if name else ThrottledPolicy(max_prefill_tokens=limits.max_prefill_tokens)


def _stage_state(site: StageSite) -> StageState:
    return StageState(
        node_id=site.node_id,
        node_name=site.node_name,
        backend=site.backend,
        device=site.device,
        slices=site.slices,
        address=site.address,
        weight_bytes=site.weight_bytes,
    )
