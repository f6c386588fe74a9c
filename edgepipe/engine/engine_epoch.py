"""One epoch of a pipeline: opens its stages and drives its steps until it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from edgepipe.backend.cost import StepWork
from edgepipe.clock import Clock
from edgepipe.engine.batch_ways import BatchWays
from edgepipe.engine.control import StageControl
from edgepipe.engine.groups import first_error
from edgepipe.engine.kv_carryover import HeldNumbers, KeptKV, KVSince
from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.engine.pump import Pump, Registrar, StepNews
from edgepipe.engine.quarantine import Missed
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.sites import StageSite
from edgepipe.errors import EdgepipeError, NoFeasiblePlacement
from edgepipe.ids import Epoch, NodeId, PipelineId, SequenceId
from edgepipe.link.shaped import Network
from edgepipe.scheduler import HostRates, Policy, Scheduler, SchedulerLimits, SequenceEnded, StageHolds, takeover
from edgepipe.scheduler.drafting import Drafting
from edgepipe.security.mutual_tls import Security
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.memory_classes import memory_classes
from edgepipe.weights.weight_table import FLOATS, WeightTable
from edgepipe.wire.common import Hello
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.pipelines import PipelineSpec, RingNeighbour

logger = logging.getLogger(__name__)

_COPY_BYTES_PER_S = 10e9  # between a device and host memory: a careful figure for PCIe 4 x16
_BESIDE = 0.9  # part of the shortest step in which copies may run, so that they end before it
_CHUNK_TOKENS = 512  # a chunk of a prompt: its time says what a token takes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Constants over all epochs of an engine."""

    config: ModelConfig
    pipeline_id: PipelineId
    hello: Hello
    security: Security
    clock: Clock
    policy: Policy
    limits: EngineLimits
    timeouts: EngineTimeouts
    network: Network | None  # emulated to the stages of other nodes
    weights: WeightTable = FLOATS
    itl_goal_s: float | None = None  # time that prompts may add to a decode's turn; None: no bound
    draft: str = ""  # what drafts tokens, see ``Registration``; empty: nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenStep:
    """A step that a stage failed to compute."""

    site: StageSite
    sequences: tuple[SequenceId, ...]
    device_failed: bool  # the stage's own test step failed, too


class EngineEpoch:
    """Epoch of a pipeline: call ``open``, then ``drive``, which returns why it ended; always call ``close``."""

    def __init__(
        self,
        context: EngineContext,
        *,
        spec: ServeSpec,
        epoch: Epoch,
        sites: list[StageSite],
        kept: KeptKV | None = None,
    ) -> None:
        """``kept``: KV of the previous epoch. Raises NoFeasiblePlacement if a stage has no room for KV."""
        self.sites = sites
        self._kept = kept
        self.epoch = epoch
        self._context = context
        self._spec = spec
        self.limits = self._scheduler_limits()
        micro_batches = MicroBatches(
            slices=[[part.index for part in site.slices] for site in sites],
            row_bytes=context.config.hidden_size * spec.settings.activation_type.num_bytes,
            fixed=spec.micro_batches,
            costs={index: cost for site in sites for index, cost in site.costs.items()},
            most_prefill_tokens=context.policy.most_prefill_tokens,
            itl_goal_s=context.itl_goal_s,
            slack_tokens=self.limits.slack_tokens if self.limits.windows else None,
        )
        self._most_in_flight = micro_batches.most
        scheduler = Scheduler(self.limits, context.policy)
        self._ways = BatchWays(spec.policy, scheduler, self.limits, micro_batches.pacer, context.clock)
        if context.draft:
            drafting = Drafting(micro_batches.period_s, lambda: micro_batches.draft_s, micro_batches.slowest_s)
            scheduler.set_drafting(drafting)
        self.pump = Pump(
            scheduler=scheduler,
            micro_batches=micro_batches,
            epoch=epoch,
            num_slices=self._num_slices,
            vocab_size=context.config.vocab_size,
            clock=context.clock,
            timeouts=context.timeouts,
        )
        if len(sites) == 1:
            self.pump.plan_ahead()  # the stage that samples is the one that embeds
        self._controls = [
            StageControl(
                site,
                on_report=self.pump.on_report,
                max_queued=2 * self._most_in_flight + context.limits.max_queued_messages,
                security=context.security,
                network=context.network if site.node_id != context.hello.node_id else None,
            )
            for site in sites
        ]

    async def open(
        self, *, registration: Registrar, on_news: Callable[[StepNews], None], on_over: Callable[[], None]
    ) -> None:
        """Open every stage; a stage is ready when it has reached the next. Raises the stages' errors, or StageLost.

        See ``Pump.connect`` for the arguments.
        """
        timeout_s = self._context.timeouts.open_s
        try:
            # Connect all stages before opening any: a stage accepts its predecessor only once it knows the
            # predecessor's certificate. An earlier connection is refused and has to be retried.
            async with asyncio.TaskGroup() as tasks:
                for control in self._controls:
                    tasks.create_task(control.connect(timeout_s=timeout_s), name=f"connect:{control.site.index}")
            all_open = asyncio.Barrier(len(self._controls))
            async with asyncio.TaskGroup() as tasks:
                for control in reversed(self._controls):
                    tasks.create_task(self._open_stage(control, all_open), name=f"open:{control.site.index}")
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        follow = partial(self._pass_on, on_news) if self._ways.chooses else on_news
        self.pump.connect(self._controls, registration=registration, on_news=follow, on_over=on_over)
        self._take_over()

    def _pass_on(self, on_news: Callable[[StepNews], None], news: StepNews) -> None:
        on_news(news)
        if any(isinstance(event, SequenceEnded) for event in news.events):
            self._ways.ended()

    async def _open_stage(self, control: StageControl, all_open: asyncio.Barrier) -> None:
        await control.open(
            self._pipeline_spec(control.site), self._context.hello, timeout_s=self._context.timeouts.open_s
        )
        await control.wait_until_all_open(all_open.wait())

    async def drive(self, stopping: asyncio.Event) -> EdgepipeError | None:
        """Drive steps until ``stopping`` is set (returns None) or the epoch ends (returns the reason)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(control.run(), name=f"control:{control.site.index}") for control in self._controls
                ]
                running.append(tasks.create_task(self.pump.run(), name="pump"))
                running.append(tasks.create_task(self._ways.run(), name="batch-ways"))
                await stopping.wait()
                for task in running:
                    task.cancel()
        except BaseExceptionGroup as group:
            error = first_error(group)
            if isinstance(error, EdgepipeError):
                return error
            raise
        return None

    def broken_step(self) -> BrokenStep | None:
        """Return the step that a stage failed to compute, if that ended the epoch."""
        for control in self._controls:
            if control.crashed_step is not None:
                return BrokenStep(
                    site=control.site,
                    sequences=self.pump.sequences_of(control.crashed_step),
                    device_failed=control.device_failed,
                )
        return None

    def ended_by(self, error: EdgepipeError) -> NodeId | None:
        """Return the node whose stage ended the epoch with ``error``; None if no stage did.

        A stage's report may name another node. Only the engine's own errors are taken at their word.
        """
        reported = [control.site.node_id for control in self._controls if control.raised is error]
        named = [site.node_id for site in self.sites if site.node_name == error.node]
        return next(iter(reported or named), None)

    def missed(self) -> Missed:
        """Return connections that could not be made, or that broke between stages."""
        reached = {control.site.index for control in self._controls if control.reached}
        links = [
            (control.site, following)
            for control in self._controls
            if control.next_unreached and (following := self._beside(control.site, 1)) is not None
        ]
        own = self._context.hello.node_id
        return Missed(
            links=tuple(
                (sender, other) for sender, other in links if sender.node_id != other.node_id and other.index in reached
            ),
            sites=tuple(
                each.site for each in self._controls if not each.met and (each.site.node_id != own or each.swallowed)
            ),
        )

    async def close(self) -> None:
        """End the stages' streams. The stages end the epoch and keep their weights and KV."""
        for control in self._controls:
            await control.close()

    def hand_over(self) -> KeptKV:
        """Return the state of the stages' KV for the next epoch."""
        return KeptKV(pools=self.pump.hand_over(), contiguous=self.limits.contiguous_kv, since=self._kv_since())

    def _take_over(self) -> None:
        if self._kept is None:
            self._adopt()
        elif (pools := self._kept.usable(self.limits, self._kv_since())) is not None:
            self.pump.take_over(pools)

    def _adopt(self) -> None:
        """Take over what all stages hold, as they did for an engine before this one."""
        stages: list[StageHolds] = []
        for control in self._controls:
            assert control.held is not None, "it is open"
            if control.held.problem:
                logger.warning(
                    "idle conversations in the memory of %s on %s are not used: %s",
                    control.site.label,
                    control.site.node_name,
                    control.held.problem,
                )
            stages.append(StageHolds(max(part.index for part in control.site.slices), control.held.held()))
        if (found := takeover(stages)) is not None:
            self.pump.adopt(found)
            logger.info(
                "epoch=%s found %d blocks of idle conversations in the memory of stages", self.epoch, found.num_blocks
            )

    def _kv_since(self) -> KVSince:
        return {control.site.slices: control.kv_since for control in self._controls}

    @property
    def _step_deadline_s(self) -> float:
        """Seconds that a stage waits for its predecessor: more than the ring's longest turn."""
        timeouts = self._context.timeouts
        turn_s = self.pump.micro_batches.longest_turn_s(context_length=self.limits.context_length)
        return max(timeouts.step_first_s, timeouts.step_factor * turn_s)

    @property
    def _num_slices(self) -> int:
        return sum(len(site.slices) for site in self.sites)

    def _scheduler_limits(self) -> SchedulerLimits:
        """Use the smallest stage's number of blocks of each memory class for all stages. Raises NoFeasiblePlacement."""
        limits, spec, settings = self._context.limits, self._spec, self._spec.settings
        smallest = min(self.sites, key=lambda site: site.max_blocks)
        num_blocks = smallest.max_blocks
        classes = memory_classes(self._context.config, settings.kv)
        if spec.kv_tokens:
            num_blocks = min(num_blocks, -(-(spec.kv_tokens + classes.rest_tokens) // settings.block_size))
        numbers = self._kept.numbers if self._kept is not None else HeldNumbers.of(self.sites)
        num_blocks = numbers.on_device(num_blocks)
        if num_blocks * settings.block_size <= classes.rest_tokens:
            raise NoFeasiblePlacement(
                f"node {smallest.node_name} has no room for a KV cache",
                fact=f"one block of {settings.block_size} tokens takes {smallest.kv_block_bytes} bytes there",
                next_step="add a node or choose a smaller model",
                node=smallest.node_name,
            )
        windows = classes.pools(num_blocks=num_blocks, block_size=settings.block_size)
        host_blocks, disk_blocks = numbers.below(
            host_room=min(site.max_host_blocks for site in self.sites),
            disk_room=min(site.max_disk_blocks for site in self.sites),
        )
        return SchedulerLimits(
            num_blocks=num_blocks,
            block_size=settings.block_size,
            context_length=settings.context_length or self._context.config.context_length,
            micro_batches=spec.micro_batches or len(self.sites),
            max_running=limits.max_running,
            max_waiting=limits.max_waiting,
            contiguous_kv=any(site.contiguous_kv for site in self.sites),
            windows=windows,
            host_places=classes.host_places(host_blocks, windows, block_size=settings.block_size),
            disk_places=classes.host_places(disk_blocks, windows, block_size=settings.block_size),
            host_rates=_host_rates(self.sites, self._context.itl_goal_s),
            states=classes.states(num_blocks=num_blocks, block_size=settings.block_size, most=settings.most_slots),
            rest_tokens=classes.rest_tokens,
        )

    @property
    def _kv_digest(self) -> bytes:
        """Digest of what the KV of the same tokens depends on, beside a stage's layers."""
        settings = self._spec.settings
        numbers = str(settings.block_size), str(settings.context_length)
        parts = (self._spec.manifest_hash, settings.kv, settings.activation_type.value, *numbers)
        return blake2b("\n".join(parts).encode(), digest_size=16).digest()

    def _pipeline_spec(self, site: StageSite) -> PipelineSpec:
        following = self._beside(site, 1)
        return PipelineSpec(
            pipeline_id=self._context.pipeline_id,
            epoch=self.epoch,
            slices=site.slices,
            num_slices=self._num_slices,
            hidden_size=self._context.config.hidden_size,
            activation_type=self._spec.settings.activation_type,
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            window_blocks=tuple(pool.num_blocks for pool in self.limits.windows),
            state_slots=self.limits.states.num_slots if self.limits.states else 0,
            host_places=self.limits.host_places,
            disk_places=self.limits.disk_places,
            kv_digest=self._kv_digest,
            asks_held=self._kept is None,
            next_address=following.address if following is not None else "",
            max_in_flight=self._most_in_flight,
            step_deadline_ms=round(1000 * self._step_deadline_s),
            next=_neighbour(following),
            previous=_neighbour(self._beside(site, -1)),
        )

    def _beside(self, site: StageSite, way: int) -> StageSite | None:
        """Return the stage whose slices follow (``way`` 1) or come before (-1); None if there is no other stage.

        The first slice follows the last one: the tokens go home.
        """
        holder = {part.index: each for each in self.sites for part in each.slices}
        others = (holder[(part.index + way) % len(holder)] for part in site.slices)
        return next((other for other in others if other is not site), None)


def _host_rates(sites: Sequence[StageSite], goal_s: float | None) -> HostRates | None:
    """Return the times of copies and of prompts; None if a device's times are not known."""
    if not all(site.costs for site in sites):
        return None
    chunk, decode = (StepWork.of_rows([0], [count], logit_rows=0) for count in (_CHUNK_TOKENS, 1))
    shortest_s = min(sum(cost.step_s(decode) for cost in site.costs.values()) for site in sites)
    return HostRates(
        block_s=max(site.kv_block_bytes for site in sites) / _COPY_BYTES_PER_S,
        slot_s=max(site.state_bytes for site in sites) / _COPY_BYTES_PER_S,
        token_s=max(sum(cost.step_s(chunk) for cost in site.costs.values()) for site in sites) / _CHUNK_TOKENS,
        beside_s=None if goal_s is None else min(goal_s, _BESIDE * shortest_s),
    )


def _neighbour(site: StageSite | None) -> RingNeighbour | None:
    return RingNeighbour(node_id=site.node_id, certificate=site.certificate) if site is not None else None
