"""The stages of one device of this node, from the reservation of their memory to their release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from edgepipe.addresses import with_port
from edgepipe.backend.types import DeviceProfile
from edgepipe.config import Timeouts
from edgepipe.daemon.device.device_memory import DeviceMemory, as_loaded
from edgepipe.daemon.device.layer_measuring import LayerMeasuring
from edgepipe.daemon.device.layer_profiles import LayerProfiles
from edgepipe.daemon.device.memory import DiskLedger, Reservation
from edgepipe.daemon.device.spare import SETTLED_S, SpareStage
from edgepipe.daemon.machine.backends import NONE
from edgepipe.daemon.network.introductions import Introductions
from edgepipe.daemon.offers import ChildSetup, EngineDirectory, PublishedState
from edgepipe.daemon.processes.children import Child, Children
from edgepipe.errors import BackendUnavailable, EdgepipeError, RequestInvalid, SendTimeout, StaleEpoch
from edgepipe.ids import MAX_EPOCH_STEP, Epoch, StepId
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.security.mutual_tls import Peer
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.memory_classes import memory_classes
from edgepipe.system import num_memory_kills
from edgepipe.weights.weight_table import FLOATS, WeightTable
from edgepipe.wire.children import (
    LoadShard,
    PauseStage,
    Prepared,
    PrepareEvent,
    PrepareProgress,
    PrepareRequest,
    ProfileLayerRequest,
    Report,
    ShardLoaded,
)
from edgepipe.wire.nodes import DeviceState

logger = logging.getLogger(__name__)

# Shortest and longest pause between questions to an engine after sleep, doubling.
_MOST_HOST_BLOCKS = 1 << 20  # 16 million tokens in blocks of 16
_ASK_AGAIN_MIN_S, _ASK_AGAIN_MAX_S = 0.25, 5.0


@dataclass(slots=True, kw_only=True)
class _Hold:
    """A pipeline's stage on this device, from its reservation to its release."""

    epoch: Epoch
    engine_node: str  # id of the node whose engine asked
    child: Child | None = None
    ready: bool = False
    load: LoadShard | None = None  # the command that the stage got
    prepared: Prepared | None = None  # once ready
    before: _Hold | None = None  # the serving stage that this one replaces once it is loaded
    reports: asyncio.Queue[Report | None] = field(default_factory=asyncio.Queue[Report | None])

    @property
    def serves(self) -> bool:
        """Whether its stage is loaded and alive."""
        return self.ready and self.child is not None and not self.child.exited.is_set()


class DeviceHost:
    """Starts, loads and ends the stage processes of one device."""

    def __init__(
        self,
        *,
        node_name: str,
        backend: str,
        children: Children,
        setup: ChildSetup,
        introductions: Introductions,
        memory_limit_bytes: int,
        timeouts: Timeouts,
        tasks: asyncio.TaskGroup,
        directory: EngineDirectory,
        local: PublishedState,
        layers: LayerProfiles,
        memory_kills: Callable[[], int | None] = num_memory_kills,
        disk_free: Callable[[], int] = lambda: 0,
        settled_s: float = SETTLED_S,
        ask_again_s: float = _ASK_AGAIN_MIN_S,
    ) -> None:
        """``memory_kills``: how many processes the system has killed for lack of memory; None if it does not say.
        ``disk_free``: bytes that are free where stages keep KV that leaves host memory.
        ``settled_s``: pause before another spare starts. ``ask_again_s``: first pause between questions to an engine.
        """
        self._ask_again_s = ask_again_s
        self._settled_s = settled_s
        self._node_name = node_name
        self._backend = backend
        self._children = children
        self._introductions = introductions
        self._timeouts = timeouts
        self._tasks = tasks
        self._directory = directory
        self._local = local
        self._memory = DeviceMemory(
            node_name=node_name,
            limit_bytes=memory_limit_bytes,
            kills=memory_kills,
            disk=DiskLedger(free=disk_free, written=self._disk_written),
        )
        self._spare = SpareStage(
            node_name=node_name,
            backend=backend,
            children=children,
            setup=setup,
            tasks=tasks,
            on_measured=self._memory.measured,
            local=local,
            settled_s=settled_s,
        )
        self._layers = LayerMeasuring(
            node_name=node_name,
            profiles=layers,
            spare=self._spare,
            setup=setup,
            device_state=self._word,
        )
        self._holds: dict[str, _Hold] = {}
        # One per pipeline, until reported: see ``Child.crashed_in``.
        self._crashed_in: dict[str, tuple[int, StepId]] = {}

    def state(self) -> tuple[DeviceState, ...]:
        """Return the state of the device; empty without a backend."""
        if self._backend == NONE:
            return ()
        state = DeviceState(
            profile=self._spare.profile or _unmeasured(self._backend),
            state=self._word(),
            error=self._spare.error,
            fenced_messages=sum(hold.child.progress.fenced for hold in self._holds.values() if hold.child),
        )
        return (self._memory.in_state(state),)

    def _disk_written(self) -> dict[str, int]:
        return {name: hold.child.progress.disk_bytes for name, hold in self._holds.items() if hold.child is not None}

    async def keep_spare(self) -> None:
        """Have a process ready for the next stage; see ``SpareStage.keep``."""
        await self._spare.keep()

    async def profile_layer(self, request: ProfileLayerRequest) -> LayerProfile:
        """Return a layer's times on this device; see ``LayerMeasuring.measure``."""
        return await self._layers.measure(request)

    async def prepare(
        self,
        request: PrepareRequest,
        *,
        engine_node: str,
        path: str,
        config: ModelConfig,
        engine: Peer | None,
        weights: WeightTable = FLOATS,
        draft_path: str = "",
    ) -> AsyncGenerator[PrepareEvent]:
        """Reserve memory and load a stage; yield progress, then ``Prepared``. On failure release everything.

        ``draft_path``: of the draft model, whose memory ``weights`` names; empty: none.

        A living stage that holds the same shard stays as it is, with its weights and KV. One that holds another shard
        goes on serving until the new stage is loaded, if memory holds both. The stage takes plans only
        from ``engine`` (None: from any engine, where nothing is encrypted), which runs on ``engine_node``. Raises
        StaleEpoch, NoFeasiblePlacement, BackendUnavailable and the errors of loading.
        """
        load = _load_command(request, path, draft_path)
        if (kept := await self._keep(request, engine_node, load)) is not None:
            await self._give_engine(self._holds[request.pipeline_id], engine)
            yield PrepareEvent(event=kept)
            return
        hold = await self._admit(request, engine_node, config, weights)
        try:
            if hold.before is None:
                self._memory.reserve(request, config, weights)
            hold.load = load
            child = hold.child = await self._spare.take()
            self._tasks.create_task(self._mourn(request.pipeline_id, hold, child), name=f"stage:{request.pipeline_id}")
            child.on_report = hold.reports.put_nowait
            await self._give_engine(hold, engine)
            child.send(load)
            self._local.refresh()
            async for report in self._reports(hold, child):
                if isinstance(report, PrepareProgress):
                    yield PrepareEvent(event=report)
                if isinstance(report, ShardLoaded):
                    hold.ready = True
                    held = self._memory.loaded(request.pipeline_id, weight_bytes=report.weight_bytes)
                    hold.prepared = self._prepared(child, report, request, config, held)
                    self._retire_soon(request.pipeline_id, hold)
                    self._holds_changed()
                    yield PrepareEvent(event=self._with_crash(request.pipeline_id, hold.prepared))
                    return
        finally:
            if not hold.ready:  # the engine may leave half-way
                self._release_soon(request.pipeline_id, hold)

    def pipelines(self) -> list[str]:
        """Return the pipelines that hold something here."""
        return sorted(self._holds)

    def engine_node(self, pipeline_id: str) -> str:
        """Return the node whose engine has the pipeline's stage here; empty without a stage."""
        hold = self._holds.get(pipeline_id)
        return hold.engine_node if hold is not None else ""

    def epoch_of(self, pipeline_id: str) -> Epoch | None:
        """Return the highest epoch of the pipeline that holds something here."""
        hold = self._holds.get(pipeline_id)
        return hold.epoch if hold is not None else None

    async def release(self, pipeline_id: str, *, epoch: Epoch | None = None) -> None:
        """End the pipeline's stage and release its memory. Do nothing without a stage, or if a newer epoch holds it."""
        hold = self._holds.get(pipeline_id)
        if hold is not None and (epoch is None or epoch >= hold.epoch):
            await self._end(pipeline_id, hold)

    async def release_all(self) -> None:
        """End every stage and the spare, and start no other."""
        self._spare.close()
        for pipeline_id, hold in list(self._holds.items()):
            await self._end(pipeline_id, hold)
        await self._children.stop_all("stage")

    def pause(self) -> None:
        """Let no stage start another step of its present epoch."""
        for hold in self._holds.values():
            if hold.child is not None:
                hold.child.send(PauseStage(paused=True))

    def resume(self, engine_epoch: Callable[[str, str], Awaitable[Epoch | None]]) -> None:
        """Resume the stages whose engine still works at their epoch. Any other stage stays paused until its engine
        opens another epoch on it, or releases it.

        ``engine_epoch(node_id, pipeline_id)`` asks an engine; None: it cannot be reached and is asked again.
        """
        for pipeline_id, hold in self._holds.items():
            self._tasks.create_task(self._resume(pipeline_id, hold, engine_epoch), name=f"resume:{pipeline_id}")

    async def _resume(
        self, pipeline_id: str, hold: _Hold, engine_epoch: Callable[[str, str], Awaitable[Epoch | None]]
    ) -> None:
        pause_s = self._ask_again_s
        while self._holds.get(pipeline_id) is hold and hold.child is not None and not hold.child.exited.is_set():
            epoch = await engine_epoch(hold.engine_node, pipeline_id)
            if epoch is not None:
                hold.child.send(PauseStage(paused=False, epoch=epoch))
                return
            logger.info("stage waits pipeline=%s epoch=%s: its engine does not answer", pipeline_id, hold.epoch)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _ASK_AGAIN_MAX_S)

    def orphaned_by(self, node_id: str) -> None:
        """Release the stages of a lost node's engines, unless another engine takes them over within ``orphan_s``."""
        for pipeline_id, hold in list(self._holds.items()):
            if hold.engine_node == node_id:
                waiting = self._release_unclaimed(pipeline_id, hold, hold.epoch)
                self._tasks.create_task(waiting, name=f"orphan:{pipeline_id}")

    async def _release_unclaimed(self, pipeline_id: str, hold: _Hold, epoch: Epoch) -> None:
        await asyncio.sleep(self._timeouts.orphan_s)
        if self._holds.get(pipeline_id) is hold and hold.epoch == epoch and not self._directory.has_engine(pipeline_id):
            logger.info("released pipeline=%s: no engine claims it", pipeline_id)
            await self._end(pipeline_id, hold)

    def _holds_changed(self) -> None:
        """Report a change of the held stages, and decide whether a spare is wanted."""
        ready = all(hold.ready for hold in self._holds.values())
        roomy = not self._holds or self._memory.has_room_for_spare
        self._spare.holding(anything=bool(self._holds), spare_wanted=ready and roomy)
        self._local.refresh()

    async def _give_engine(self, hold: _Hold, engine: Peer | None) -> None:
        """Let the stage obey this engine and no other."""
        if hold.child is not None and engine is not None:
            hold.child.engine = engine
            self._introductions.greet(hold.child)
            await hold.child.knows_peers()

    async def _keep(self, request: PrepareRequest, engine_node: str, load: LoadShard) -> Prepared | None:
        """Return the pipeline's stage if it can continue in the request's epoch as it is. Raises StaleEpoch."""
        hold = self._known(request, engine_node)
        if (
            request.fresh
            or hold is None
            or hold.child is None
            or request.epoch <= hold.epoch
            or hold.load is None
            or replace(hold.load, epoch=load.epoch) != load
            or not await hold.child.lives()
        ):
            return None
        if self._known(request, engine_node) is not hold:  # meanwhile another request came, or the stage was released
            return None
        hold.epoch, hold.engine_node = request.epoch, engine_node
        if hold.prepared is None:
            return None
        progress = hold.child.progress
        return replace(
            hold.prepared,
            held_blocks=progress.kv_blocks,
            held_host_blocks=progress.host_blocks,
            held_disk_blocks=progress.disk_blocks,
        )

    def _known(self, request: PrepareRequest, engine_node: str) -> _Hold | None:
        """Return the pipeline's stage of an earlier epoch, or of another node's engine that no longer counts, whatever
        its epoch. Raises StaleEpoch."""
        epoch, known = request.epoch, self._holds.get(request.pipeline_id)
        if known is not None and known.engine_node == engine_node and epoch <= known.epoch:
            raise StaleEpoch(
                fact=f"epoch {known.epoch} holds pipeline {request.pipeline_id}, epoch {epoch} asked for it",
                node=self._node_name,
            )
        if epoch.counter > (known.epoch.counter if known is not None else 0) + MAX_EPOCH_STEP:
            raise RequestInvalid(
                "an epoch is too far ahead: no later one could replace it",
                fact=f"it is {epoch}",
                node=self._node_name,
            )
        return known

    async def _admit(
        self, request: PrepareRequest, engine_node: str, config: ModelConfig, weights: WeightTable
    ) -> _Hold:
        known = self._known(request, engine_node)
        if known is not None and not known.ready:
            await self._give_up(request.pipeline_id, known)
            known = self._known(request, engine_node)
        if known is not None and known.serves and not request.fresh and known.before is None:
            if self._memory.reserve_beside(request, config, weights):
                hold = _Hold(epoch=request.epoch, engine_node=engine_node, before=known)
                self._holds[request.pipeline_id] = hold
                self._holds_changed()
                return hold
        if known is not None:
            await self._end(request.pipeline_id, known)
        if not self._memory.is_known:
            raise self._spare.error or BackendUnavailable(
                f"node {self._node_name} cannot compute",
                fact="its device is still starting" if self._backend != NONE else "it has no backend",
                next_step="see 'edgepipe status', then try again",
                node=self._node_name,
            )
        hold = self._holds[request.pipeline_id] = _Hold(epoch=request.epoch, engine_node=engine_node)
        self._holds_changed()
        return hold

    async def _reports(self, hold: _Hold, child: Child) -> AsyncIterator[Report]:
        """Yield the loading stage's reports. Raises its fault, the reason of its end, or SendTimeout if silent."""
        while True:
            try:
                async with asyncio.timeout(self._timeouts.load_s):
                    report = await hold.reports.get()
            except TimeoutError as exc:
                raise SendTimeout(
                    "the stage makes no progress with loading",
                    fact=f"silent for {self._timeouts.load_s:.0f} s",
                    node=self._node_name,
                ) from exc
            if report is None:
                raise child.error().on_node(self._node_name)
            if isinstance(report, EdgepipeError):
                raise report.on_node(self._node_name)
            yield report

    async def _mourn(self, pipeline_id: str, hold: _Hold, child: Child) -> None:
        """Wait for the stage's end; after an unexpected end release its memory and report the loss."""
        await child.exited.wait()
        hold.reports.put_nowait(None)
        if child.crashed_in is not None:
            self._crashed_in[pipeline_id] = child.crashed_in
        if not child.stopping:
            self._memory.note_death(child)
            logger.error("stage lost pipeline=%s: %s", pipeline_id, child.error().on_node(self._node_name))
        if self._holds.get(pipeline_id) is hold:
            await self._give_up(pipeline_id, hold)

    async def _end(self, pipeline_id: str, hold: _Hold) -> None:
        if self._holds.get(pipeline_id) is hold:
            del self._holds[pipeline_id]
        await self._retire(pipeline_id, hold)
        if hold.child is not None and not hold.child.exited.is_set():
            await self._children.stop(hold.child)
        if pipeline_id not in self._holds:
            self._memory.release(pipeline_id)
        self._holds_changed()

    def _retire_soon(self, pipeline_id: str, hold: _Hold) -> None:
        """End the replaced stage a little later: its epoch goes on until all new stages of the pipeline are loaded."""
        if hold.before is not None:
            self._tasks.create_task(self._retire_later(pipeline_id, hold), name=f"retire:{pipeline_id}")

    async def _retire_later(self, pipeline_id: str, hold: _Hold) -> None:
        await asyncio.sleep(self._settled_s)
        await self._retire(pipeline_id, hold)
        self._holds_changed()

    async def _retire(self, pipeline_id: str, hold: _Hold) -> None:
        """End the stage that ``hold`` has replaced."""
        before, hold.before = hold.before, None
        if before is None:
            return
        if before.child is not None and not before.child.exited.is_set():
            await self._children.stop(before.child)
        self._memory.release_before(pipeline_id)

    async def _give_up(self, pipeline_id: str, hold: _Hold) -> None:
        """End a stage that was not loaded. The running stage that it should have replaced stays."""
        before, hold.before = hold.before, None
        if before is None or not before.serves or self._holds.get(pipeline_id) is not hold:
            hold.before = before
            await self._end(pipeline_id, hold)
            return
        before.epoch = hold.epoch
        self._holds[pipeline_id] = before
        self._memory.keep_before(pipeline_id)
        if hold.child is not None and not hold.child.exited.is_set():
            await self._children.stop(hold.child)
        self._holds_changed()

    def _release_soon(self, pipeline_id: str, hold: _Hold) -> None:
        self._tasks.create_task(self._give_up(pipeline_id, hold), name=f"release:{pipeline_id}")

    def _prepared(
        self, child: Child, loaded: ShardLoaded, request: PrepareRequest, config: ModelConfig, held: Reservation
    ) -> Prepared:
        assert self._spare.profile is not None  # each stage reports one at its start
        block_size = request.settings.block_size
        classes = memory_classes(config, request.settings.kv)
        most_blocks = partial(
            classes.most_blocks,
            max(1, loaded.kv_block_bytes),
            loaded.window_block_bytes,
            state_bytes=config.state_bytes(layer for part in request.placement.slices for layer in part.layers),
            block_size=block_size,
        )
        tier_bytes = self._memory.tier_bytes(request.pipeline_id)
        disk_bytes = int(request.settings.kv_disk or 0)
        wanted = -(-(request.kv_tokens + classes.rest_tokens) // block_size)
        most_slots = request.settings.most_slots
        return Prepared(
            address=with_port(child.settings.host, child.port),
            max_blocks=most_blocks(room_bytes=held.kv_bytes, wanted=wanted, most_slots=most_slots) or 1,
            max_host_blocks=most_blocks(room_bytes=tier_bytes, wanted=_MOST_HOST_BLOCKS),
            max_disk_blocks=most_blocks(room_bytes=disk_bytes, wanted=_MOST_HOST_BLOCKS),
            kv_block_bytes=loaded.kv_block_bytes,
            window_block_bytes=loaded.window_block_bytes,
            weight_bytes=loaded.weight_bytes,
            products=loaded.products,
            slow_paths=loaded.slow_paths,
            settings=loaded.settings,
            profile=as_loaded(self._spare.profile, request.placement.ram_percent),
            certificate=child.certificate,
        )

    def _with_crash(self, pipeline_id: str, prepared: Prepared) -> Prepared:
        """Add the step in which the previous process of the stage crashed; report it once."""
        crashed_in = self._crashed_in.pop(pipeline_id, None)
        if crashed_in is None:
            return prepared
        return replace(prepared, crashed_epoch=crashed_in[0], crashed_step=crashed_in[1])

    def _word(self) -> str:
        if any(hold.ready for hold in self._holds.values()):
            return "serving"
        if self._holds:
            return "loading"
        if self._spare.child is not None:
            return "idle"
        return "failed" if self._spare.error is not None else "starting"


def _unmeasured(backend: str) -> DeviceProfile:
    """Return the profile of a device of which only the backend is known."""
    return DeviceProfile(
        backend=backend,
        device="",
        name="",
        compute_dtype="",
        memory_total_bytes=0,
        memory_free_bytes=0,
        bandwidth_bytes_per_s=0.0,
        flops=0.0,
        block_sizes=(),
        contiguous_kv=False,
    )


def _load_command(request: PrepareRequest, path: str, draft_path: str) -> LoadShard:
    return LoadShard(
        pipeline_id=request.pipeline_id,
        epoch=request.epoch,
        path=path,
        placement=request.placement,
        settings=request.settings,
        draft_path=draft_path,
    )
