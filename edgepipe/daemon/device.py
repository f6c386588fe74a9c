"""One device of this node: a spare stage process that is ready to load, the stages that serve, their memory."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

from edgepipe.config import Timeouts
from edgepipe.daemon.backends import NONE
from edgepipe.daemon.children import Child, Children
from edgepipe.daemon.layer_profiles import LayerProfiles, machine_busy, profile_key
from edgepipe.daemon.memory import PRESSURE_CUT, MemoryLedger, MemoryPressure, uses_host_memory
from edgepipe.daemon.settings import ChildSettings
from edgepipe.daemon.system import num_memory_kills
from edgepipe.errors import BackendUnavailable, EdgepipeError, SendTimeout, StaleEpoch
from edgepipe.ids import Epoch, StepId
from edgepipe.link.security import Peer
from edgepipe.model.facts import ModelConfig
from edgepipe.wire.common import epoch_from_wire, error_from_wire, error_to_wire, slices_from_wire
from edgepipe.wire.profiles import device_profile_from_wire
from edgepipe.wire.v1 import common_pb2
from edgepipe.wire.v1 import node_pb2 as pb

logger = logging.getLogger(__name__)

_PROFILE_S = 30.0  # a large layer is made up, copied to the device and run
_RESTART_MIN_S, _RESTART_MAX_S = 0.5, 30.0  # a spare that crashes at its start is tried again at this pace
_SETTLED_S = 3.0  # a pipeline's first steps, or a recovery's, come before the start of another spare
_SPARE_BYTES = 1 << 30  # an imported torch takes 0.3 GB of the host, a CUDA context 0.5 GB of the device


@dataclass(slots=True, kw_only=True)
class _Hold:
    """A pipeline's stage on this device, from its reservation to its release."""

    epoch: Epoch
    engine_node: str  # node id of the engine that asked
    child: Child | None = None
    ready: bool = False
    loaded: bytes = b""  # what the stage was told to load, epoch left out
    prepared: pb.Prepared | None = None  # once ready
    reports: asyncio.Queue[pb.ChildReport | None] = field(default_factory=asyncio.Queue[pb.ChildReport | None])


class DeviceHost:
    """Starts, loads and ends the stage processes of one device."""

    def __init__(
        self,
        *,
        node_name: str,
        backend: str,
        children: Children,
        new_settings: Callable[[], ChildSettings],
        introduce: Callable[[Child], None],
        memory_limit_bytes: int,
        timeouts: Timeouts,
        tasks: asyncio.TaskGroup,
        has_engine: Callable[[str], bool],
        on_change: Callable[[], None],
        layers: LayerProfiles,
        memory_kills: Callable[[], int | None] = num_memory_kills,
    ) -> None:
        """``has_engine``: whether a pipeline's engine runs on a node that can be reached.

        ``memory_kills``: processes that the system has ended so far for want of memory; None if it does not tell.
        """
        self._has_engine = has_engine
        self._memory_kills = memory_kills
        self._kills_known = memory_kills()
        self._pressure = MemoryPressure()
        self._layers = layers
        self._profiling = asyncio.Lock()  # one shape at a time
        self._node_name = node_name
        self._backend = backend
        self._children = children
        self._new_settings = new_settings
        self._introduce = introduce
        self._memory_limit_bytes = memory_limit_bytes
        self._timeouts = timeouts
        self._tasks = tasks
        self._on_change = on_change
        self._profile: common_pb2.DeviceProfile | None = None
        self._ledger: MemoryLedger | None = None
        self._spare: Child | None = None
        self._holds: dict[str, _Hold] = {}
        self._crashed_in: dict[str, tuple[int, StepId]] = {}  # by pipeline, until told: see ``Child.crashed_in``
        self._error: EdgepipeError | None = None
        self._spare_taken = asyncio.Event()
        self._vacant = asyncio.Event()  # nothing is held
        self._vacant.set()
        self._spare_wanted = asyncio.Event()  # nothing is held, or what is serves and leaves enough memory
        self._spare_wanted.set()
        self._closed = False

    def state(self) -> list[pb.DeviceState]:
        """The device as the node tells of it; nothing where there is no backend."""
        if self._backend == NONE:
            return []
        told = pb.DeviceState(profile=self._profile or common_pb2.DeviceProfile(backend=self._backend))
        told.state = self._word()
        if self._ledger is not None:
            told.reserved_bytes = self._ledger.reserved_bytes
            told.free_bytes = self._ledger.free_bytes
            for pipeline_id, held in self._ledger.held.items():
                told.reserved.add(pipeline_id=pipeline_id, num_bytes=held.num_bytes)
        told.fenced_messages = sum(hold.child.progress.fenced for hold in self._holds.values() if hold.child)
        if self._error is not None:
            told.error.CopyFrom(error_to_wire(self._error))
        return [told]

    async def keep_spare(self) -> None:
        """Have a spare while nothing is held, and beside stages that serve where memory allows.

        Ends when the backend cannot run here, or by cancellation.
        """
        wait_s = _RESTART_MIN_S
        while self._backend != NONE and not self._closed:
            await self._spare_wanted.wait()
            if self._holds:
                await asyncio.sleep(_SETTLED_S)
                if not self._spare_wanted.is_set():
                    continue
            try:
                await self._spare_life()
                wait_s = _RESTART_MIN_S
            except EdgepipeError as error:
                if self._closed:
                    return
                if self._holds:  # the device works, it is only short of something
                    logger.warning("no spare stage backend=%s: %s", self._backend, self._named(error))
                else:
                    self._fail(error)
                    if isinstance(error, BackendUnavailable):
                        return
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _RESTART_MAX_S)

    async def prepare(
        self, request: pb.PrepareRequest, *, path: str, config: ModelConfig, engine: Peer | None
    ) -> AsyncGenerator[pb.PrepareEvent]:
        """Reserve memory and load a stage; progress, then ``prepared``. Whatever goes wrong gives all back.

        A stage that lives and holds just that already stays as it is, with its weights and KV. It takes plans of
        ``engine`` alone (None: of anybody, where nothing is encrypted). Raises StaleEpoch, NoFeasiblePlacement,
        BackendUnavailable and what loading raises.
        """
        load = _load_command(request, path)
        if (kept := await self._keep(request, load)) is not None:
            await self._give_engine(self._holds[request.pipeline_id], engine)
            yield pb.PrepareEvent(prepared=kept)
            return
        hold = await self._admit(request)
        try:
            ledger = self._reserve(request, config)
            hold.loaded = _shard_key(load)
            child = hold.child = await self._take_stage()
            self._tasks.create_task(self._mourn(request.pipeline_id, hold, child), name=f"stage:{request.pipeline_id}")
            child.on_report = hold.reports.put_nowait
            await self._give_engine(hold, engine)
            child.send(pb.ChildCommand(load=load))
            self._on_change()
            async for report in self._reports(hold, child):
                if report.HasField("loading"):
                    yield pb.PrepareEvent(progress=report.loading)
                if report.HasField("loaded"):
                    hold.ready = True
                    held = ledger.loaded(request.pipeline_id, weight_bytes=report.loaded.weight_bytes)
                    hold.prepared = self._prepared(child, report.loaded, request, held.kv_bytes)
                    self._holds_changed()
                    yield pb.PrepareEvent(prepared=self._with_crash(request.pipeline_id, hold.prepared))
                    return
        finally:
            if not hold.ready:  # also when the engine goes away half-way
                self._release_soon(request.pipeline_id, hold)

    def pipelines(self) -> list[str]:
        """Those that hold something here."""
        return sorted(self._holds)

    def epoch_of(self, pipeline_id: str) -> Epoch | None:
        """The highest epoch of the pipeline that holds something here."""
        hold = self._holds.get(pipeline_id)
        return hold.epoch if hold is not None else None

    async def profile_layer(self, request: pb.ProfileLayerRequest) -> pb.LayerProfile:
        """What a layer of a shape takes here: as kept from an earlier time, else measured by the spare.

        What was measured while the machine was busy is measured again once it is not, and everything when asked to.
        Raises BackendUnavailable while no spare is there, and where the shape cannot be measured.
        """
        key = self._profile_key(request)
        known = self._layers.get(key) if key else None
        busy = machine_busy()
        again = request.fresh or (known is not None and known.busy and not busy)
        if known is not None and (request.known_only or not again or self._spare is None):
            return known
        if request.known_only:
            raise BackendUnavailable(f"node {self._node_name} has not measured this shape")
        async with self._profiling:
            spare = self._spare
            if spare is None or self._holds or not key:  # beside a stage's steps times would be false
                raise BackendUnavailable(
                    f"node {self._node_name} cannot measure now", fact=f"its device is {self._word()}"
                )
            answer: asyncio.Future[pb.LayerProfile] = asyncio.get_running_loop().create_future()
            spare.on_profiled = lambda told: None if answer.done() else answer.set_result(told)
            spare.send(pb.ChildCommand(profile=request))
            found = await self._profiled(answer, spare)
        if not found.decode:
            raise BackendUnavailable(f"node {self._node_name} cannot hold a layer of this shape")
        found.busy = busy
        self._layers.keep(key, found)
        return found

    async def _profiled(self, answer: asyncio.Future[pb.LayerProfile], spare: Child) -> pb.LayerProfile:
        """The spare's answer. Raises what ended the spare, SendTimeout if it is silent."""
        gone = asyncio.ensure_future(spare.exited.wait())
        try:
            await asyncio.wait({answer, gone}, timeout=_PROFILE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            spare.on_profiled = lambda _told: None
        if answer.done():
            return answer.result()
        if spare.exited.is_set():
            raise self._named(spare.error())
        raise SendTimeout(
            "the device does not get on with measuring", fact=f"waited {_PROFILE_S:.0f} s", node=self._node_name
        )

    def _profile_key(self, request: pb.ProfileLayerRequest) -> str:
        """What a layer's times depend on; empty while the device is not known."""
        told = self._profile
        if told is None or request.dtype not in ("", told.compute_dtype):
            return ""
        settings = self._new_settings()
        return profile_key(
            told.backend,
            told.device,
            told.name,
            request.dtype or told.compute_dtype,
            settings.threads,
            settings.backend_options,
            model_config=request.model_config,
        )

    async def release(self, pipeline_id: str, *, epoch: Epoch | None = None) -> None:
        """End the pipeline's stage and give its memory back; fine if there is none or a newer epoch holds it."""
        hold = self._holds.get(pipeline_id)
        if hold is not None and (epoch is None or epoch >= hold.epoch):
            await self._end(pipeline_id, hold)

    async def release_all(self) -> None:
        """End every stage, the spare too, and start no other."""
        self._closed = True
        for pipeline_id, hold in list(self._holds.items()):
            await self._end(pipeline_id, hold)
        await self._children.stop_all("stage")

    def pause(self) -> None:
        """Let no stage start another step."""
        for hold in self._holds.values():
            if hold.child is not None:
                hold.child.send(pb.ChildCommand(pause=pb.PauseStage(paused=True)))

    async def resume_unchanged(self, engine_epoch: Callable[[str, str], Awaitable[Epoch | None]]) -> None:
        """Let stages go on whose engine still works at their epoch; the others wait for their release or a new epoch.

        ``engine_epoch(node_id, pipeline_id)`` asks; None if nobody can say.
        """
        for pipeline_id, hold in list(self._holds.items()):
            epoch = await engine_epoch(hold.engine_node, pipeline_id)
            if epoch == hold.epoch and hold.child is not None and self._holds.get(pipeline_id) is hold:
                hold.child.send(pb.ChildCommand(pause=pb.PauseStage(paused=False)))
            else:
                logger.warning("stage waits pipeline=%s epoch=%s: its engine is at %s", pipeline_id, hold.epoch, epoch)

    def orphaned_by(self, node_id: str) -> None:
        """The node is gone, and so are its engines. Another may take their stages over as they are; what nobody claims
        is given back."""
        for pipeline_id, hold in list(self._holds.items()):
            if hold.engine_node == node_id:
                waiting = self._release_unclaimed(pipeline_id, hold, hold.epoch)
                self._tasks.create_task(waiting, name=f"orphan:{pipeline_id}")

    async def _release_unclaimed(self, pipeline_id: str, hold: _Hold, epoch: Epoch) -> None:
        await asyncio.sleep(self._timeouts.orphan_s)
        if self._holds.get(pipeline_id) is hold and hold.epoch == epoch and not self._has_engine(pipeline_id):
            logger.info("released pipeline=%s: no engine claims it", pipeline_id)
            await self._end(pipeline_id, hold)

    async def _spare_life(self) -> None:
        """From a spare's start until it is taken or replaced. Raises what ended its process before."""
        beside = bool(self._holds)
        spare = await self._start_stage()
        self._error = None
        if self._profile is not None and (self._ledger is None or not self._ledger.reserved_bytes):
            self._ledger = self._new_ledger(self._profile)
        self._spare_taken.clear()
        self._spare = spare
        self._on_change()
        while not spare.exited.is_set():
            await _first_of(spare.exited, self._spare_taken, *([self._vacant] if beside else ()))
            if self._spare is not spare:
                return
            await _first_of(spare.exited, self._spare_taken, timeout_s=_SETTLED_S)
            if self._spare is spare and self._vacant.is_set() and not spare.exited.is_set():
                self._spare = None  # what is free may have changed meanwhile: the next one measures it
                self._on_change()
                await self._children.stop(spare)
                return
        if self._spare is spare:
            self._spare = None
            raise spare.error()

    async def _start_stage(self) -> Child:
        """A process that measures the device; beside another stage it believes what is known, so as not to disturb."""
        settings = self._new_settings()
        if self._holds and self._profile is not None:
            settings = replace(settings, device_profile=device_profile_from_wire(self._profile))
        child = await self._children.start(settings, self._tasks)
        self._profile = (await self._children.wait_started(child)).profile
        return child

    async def _take_stage(self) -> Child:
        """The spare, or a new process where there is none."""
        spare, self._spare = self._spare, None
        self._spare_taken.set()
        return spare or await self._start_stage()

    def _holds_changed(self) -> None:
        """Something is held, serves, or is held no more: tell, and see whether a spare is wanted."""
        ready = all(hold.ready for hold in self._holds.values())
        roomy = not self._holds or (self._ledger is not None and self._ledger.free_bytes >= _SPARE_BYTES)
        for event, holds in ((self._vacant, not self._holds), (self._spare_wanted, ready and roomy)):
            if holds:
                event.set()
            else:
                event.clear()
        self._on_change()

    async def _give_engine(self, hold: _Hold, engine: Peer | None) -> None:
        """From now on the stage obeys this engine and no other."""
        if hold.child is not None and engine is not None:
            hold.child.engine = engine
            self._introduce(hold.child)
            await hold.child.knows_peers()

    async def _keep(self, request: pb.PrepareRequest, load: pb.LoadShard) -> pb.Prepared | None:
        """The pipeline's stage, if it can go on in the request's epoch as it is. Raises StaleEpoch."""
        hold = self._known(request)
        if hold is None or hold.child is None or hold.loaded != _shard_key(load) or not await hold.child.lives():
            return None
        if self._known(request) is not hold:  # meanwhile another request came, or the stage was released
            return None
        hold.epoch, hold.engine_node = epoch_from_wire(request.epoch), request.hello.node_id
        return hold.prepared

    def _known(self, request: pb.PrepareRequest) -> _Hold | None:
        """What the pipeline has here from an epoch before. Raises StaleEpoch."""
        epoch, known = epoch_from_wire(request.epoch), self._holds.get(request.pipeline_id)
        if known is not None and epoch <= known.epoch:
            raise StaleEpoch(
                fact=f"epoch {known.epoch} holds pipeline {request.pipeline_id}, epoch {epoch} asked for it",
                node=self._node_name,
            )
        return known

    async def _admit(self, request: pb.PrepareRequest) -> _Hold:
        epoch, known = epoch_from_wire(request.epoch), self._known(request)
        if known is not None:
            await self._end(request.pipeline_id, known)
        if self._ledger is None:
            raise self._error or BackendUnavailable(
                f"node {self._node_name} cannot compute",
                fact="its device is still starting" if self._backend != NONE else "it has no backend",
                next_step="see 'edgepipe status', then try again",
                node=self._node_name,
            )
        hold = self._holds[request.pipeline_id] = _Hold(epoch=epoch, engine_node=request.hello.node_id)
        self._holds_changed()
        return hold

    def _reserve(self, request: pb.PrepareRequest, config: ModelConfig) -> MemoryLedger:
        """Set memory aside for weights and KV; returns the ledger that has it. Raises NoFeasiblePlacement."""
        assert self._ledger is not None
        assert self._profile is not None
        dtype = self._profile.compute_dtype if request.dtype in ("", "auto") else request.dtype
        value_bytes = 4 if dtype == "float32" else 2
        slices = slices_from_wire(request.slices)
        num_layers = sum(len(part.layers) for part in slices)
        weight_bytes = value_bytes * sum(config.slice_parameters(part) for part in slices)
        self._ledger.reserve(
            request.pipeline_id,
            weight_bytes=max(request.weight_bytes, weight_bytes),
            kv_token_bytes=config.kv_bytes_per_token(num_layers=num_layers, bytes_per_value=value_bytes),
            kv_tokens=request.kv_tokens,
        )
        return self._ledger

    async def _reports(self, hold: _Hold, child: Child) -> AsyncIterator[pb.ChildReport]:
        """What the loading stage tells. Raises its fault, what ended it, or SendTimeout if it is silent."""
        while True:
            try:
                async with asyncio.timeout(self._timeouts.load_s):
                    report = await hold.reports.get()
            except TimeoutError as exc:
                raise SendTimeout(
                    "the stage does not get on with loading",
                    fact=f"silent for {self._timeouts.load_s:.0f} s",
                    node=self._node_name,
                ) from exc
            if report is None:
                raise self._named(child.error())
            if report.HasField("fault"):
                raise self._named(error_from_wire(report.fault))
            yield report

    async def _mourn(self, pipeline_id: str, hold: _Hold, child: Child) -> None:
        """Wait for the stage's end; if nobody asked for it, give its memory back and say so."""
        await child.exited.wait()
        hold.reports.put_nowait(None)
        if child.crashed_in is not None:
            self._crashed_in[pipeline_id] = child.crashed_in
        if not child.stopping:
            self._note_kill(child)
            logger.error("stage lost pipeline=%s: %s", pipeline_id, self._named(child.error()))
        if self._holds.get(pipeline_id) is hold:
            await self._end(pipeline_id, hold)

    def _note_kill(self, child: Child) -> None:
        """A stage ended that should not have: if the system does that for want of memory again, less is taken."""
        before, self._kills_known = self._kills_known, self._memory_kills()
        killed = child.process.returncode == -signal.SIGKILL and not child.hang
        by_system = killed and (before is None or before != self._kills_known)
        if by_system and self._pressure.killed(asyncio.get_running_loop().time()) and self._ledger is not None:
            self._ledger.cut(PRESSURE_CUT)
            logger.warning(
                "the system ended stages for want of memory: %.0f %% of it are used from now on",
                100 * self._pressure.share,
            )

    async def _end(self, pipeline_id: str, hold: _Hold) -> None:
        if self._holds.get(pipeline_id) is hold:
            del self._holds[pipeline_id]
        if hold.child is not None and not hold.child.exited.is_set():
            await self._children.stop(hold.child)
        if self._ledger is not None and pipeline_id not in self._holds:
            self._ledger.release(pipeline_id)
        self._holds_changed()

    def _release_soon(self, pipeline_id: str, hold: _Hold) -> None:
        self._tasks.create_task(self._end(pipeline_id, hold), name=f"release:{pipeline_id}")

    def _prepared(self, child: Child, loaded: pb.ShardLoaded, request: pb.PrepareRequest, kv_bytes: int) -> pb.Prepared:
        block_bytes = max(1, loaded.kv_block_bytes)
        wanted = -(-request.kv_tokens // max(1, request.block_size))
        return pb.Prepared(
            address=f"{child.settings.host}:{child.port}",
            max_blocks=min(wanted, kv_bytes // block_bytes) or 1,
            kv_block_bytes=loaded.kv_block_bytes,
            weight_bytes=loaded.weight_bytes,
            profile=self._profile,
            certificate=child.certificate,
        )

    def _with_crash(self, pipeline_id: str, prepared: pb.Prepared) -> pb.Prepared:
        """Told once: in which step the stage before it crashed."""
        crashed_in = self._crashed_in.pop(pipeline_id, None)
        if crashed_in is None:
            return prepared
        told = pb.Prepared(crashed_epoch=crashed_in[0], crashed_step=crashed_in[1])
        told.MergeFrom(prepared)
        return told

    def _new_ledger(self, profile: common_pb2.DeviceProfile) -> MemoryLedger:
        ledger = MemoryLedger(
            node=self._node_name,
            free_bytes=profile.memory_free_bytes,
            total_bytes=profile.memory_total_bytes,
            on_host=uses_host_memory(profile),
            limit_bytes=self._memory_limit_bytes,
        )
        ledger.cut(self._pressure.share)
        return ledger

    def _word(self) -> str:
        if any(hold.ready for hold in self._holds.values()):
            return "serving"
        if self._holds:
            return "loading"
        if self._spare is not None:
            return "idle"
        return "failed" if self._error is not None else "starting"

    def _fail(self, error: EdgepipeError) -> None:
        self._error = self._named(error)
        logger.error("device failed backend=%s: %s", self._backend, self._error)
        self._on_change()

    def _named(self, error: EdgepipeError) -> EdgepipeError:
        error.node = error.node or self._node_name
        return error


async def _first_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Until one of them is set, or so long."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()


def _shard_key(load: pb.LoadShard) -> bytes:
    """What is the same for two requests that one loaded stage can serve."""
    key = pb.LoadShard()
    key.CopyFrom(load)
    key.ClearField("epoch")
    return key.SerializeToString(deterministic=True)


def _load_command(request: pb.PrepareRequest, path: str) -> pb.LoadShard:
    return pb.LoadShard(
        pipeline_id=request.pipeline_id,
        epoch=request.epoch,
        path=path,
        slices=request.slices,
        block_size=request.block_size,
        dtype=request.dtype,
        activation_type=request.activation_type,
    )
