"""A stage: one asyncio loop, and one compute thread that alone uses the backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio

from edgepipe.backend.protocol import Backend, DiskBackend, DraftingBackend, ExplainingBackend, HostMemoryBackend
from edgepipe.backend.types import DeviceProfile, LoadProgress, PackedProducts, SlowPath, StageSettings
from edgepipe.clock import Clock
from edgepipe.errors import (
    ConnectTimeout,
    NoFeasiblePlacement,
    PeerClosed,
    RemoteProtocolError,
    ShardMismatch,
    StageError,
    StageLost,
    StaleEpoch,
)
from edgepipe.ids import EngineId, Epoch, PipelineId
from edgepipe.link.receiver import RingReceiver
from edgepipe.link.serving import Replies
from edgepipe.link.shaped import Network, delayed_replies
from edgepipe.planner.profiles import slice_costs
from edgepipe.sampling import sample
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.security.access import ProcessKind
from edgepipe.security.certificates import read_certificate
from edgepipe.security.mutual_tls import Peer, Security
from edgepipe.spec.facts import Slice
from edgepipe.spec.memory_classes import MemoryClasses, WindowPool, memory_classes
from edgepipe.spec.tensors import WeightSource
from edgepipe.stage.compute import ComputeThread
from edgepipe.stage.dialling import grpc_dial
from edgepipe.stage.disk_tier import DiskTier
from edgepipe.stage.draft_child import DraftLaunch
from edgepipe.stage.draft_process import DraftProcess
from edgepipe.stage.grammar_builds import GrammarBuilds, Trial
from edgepipe.stage.grammar_trial import StageTrial
from edgepipe.stage.grammars import Grammars, OpenTokenizer
from edgepipe.stage.held_keys import HeldKeys
from edgepipe.stage.host_watch import HostWatch
from edgepipe.stage.sampler import Sampler, SamplerPool, default_threads
from edgepipe.stage.service import Commands, Frames, add_service
from edgepipe.stage.stage_epoch import StageEpoch
from edgepipe.stage.tools import Counters, MakeLink, Tools
from edgepipe.stage.trace import TraceEntry, new_trace
from edgepipe.weights.resident import dtype_of, resident_sizes
from edgepipe.weights.weight_table import table_of
from edgepipe.wire.common import Hello
from edgepipe.wire.pipelines import OpenRing, PipelineSpec

logger = logging.getLogger(__name__)

CLOSE_S = 2.0  # time for handlers of streams to end after the server has cut them
OPEN_S = 60.0  # time to allocate KV and for the next stage to do the same


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedShard:
    """Layers that a stage has loaded."""

    slices: tuple[Slice, ...]
    weight_bytes: int  # bytes in the device's memory
    kv_block_bytes: int  # one block in all its layers
    window_block_bytes: tuple[int, ...]  # one block of each windowed memory class, in its layers of the class
    classes: MemoryClasses  # the model's memory classes
    products: tuple[PackedProducts, ...]
    slow_paths: tuple[SlowPath, ...]
    hidden_size: int
    model: ModelBounds
    mtp_slice: int | None = None  # slice whose backend guesses by a layer that predicts one token more


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgress:
    """Step counts over all epochs. If ``started`` exceeds ``finished`` for long, the device hangs."""

    received: int
    started: int
    finished: int
    sent: int
    strays: int = 0  # messages of other epochs, dropped
    repeats: int = 0  # repeated plans, dropped
    limit_s: float = 0.0  # the device hangs if a started step makes no progress within this
    disk_bytes: int = 0  # what the file of KV takes
    kv_blocks: int = 0  # blocks of the context that are allocated
    host_blocks: int = 0  # the same in host memory
    disk_blocks: int = 0  # and on disk


class Stage:
    """A stage process's interface to its daemon. Its engine and predecessor reach it through ``add_to``.

    Without ``compute`` it makes its own thread. Pass one if the backend must be created on that thread:
    ``backend = await compute.call(lambda: create_backend(...))``. ``network`` emulates a network for data that leaves
    this node. ``open_tokenizer`` reads the served model's tokenizer, for grammars. ``grammar_trial`` replaces the trial
    in a child process. ``disk_folder`` takes the files of KV that leaves host memory; it is made when one is needed.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        clock: Clock,
        hello: Hello,
        security: Security,
        sampler: Sampler = sample,
        sampler_threads: int | None = None,
        open_tokenizer: OpenTokenizer | None = None,
        grammar_trial: Trial | None = None,
        compute: ComputeThread | None = None,
        dial: MakeLink | None = None,
        network: Network | None = None,
        open_s: float = OPEN_S,
        disk_folder: Path | None = None,
        name: str = "",
    ) -> None:
        self._compute = compute or ComputeThread(clock=clock)
        self._compute.use(backend)
        self._backend = backend
        self._network = network
        self._node_id = hello.node_id
        self._security = security
        self._trace = new_trace()
        self._counters = Counters()
        self._grammars = Grammars(open_tokenizer)
        self._tools = Tools(
            compute=self._compute,
            samplers=SamplerPool(sampler, num_threads=sampler_threads or default_threads(), clock=clock),
            grammars=GrammarBuilds(self._grammars.open, grammar_trial or StageTrial()),
            clock=clock,
            trace=self._trace,
            counters=self._counters,
            dial=dial or grpc_dial(hello=hello, security=security, clock=clock, network=network),
            connect_s=open_s,
            node=hello.node_name,
            stage=name,
        )
        self._profile: DeviceProfile | None = None  # the device's profile, measured before the first load
        self._shard: LoadedShard | None = None
        self._draft_model: DraftProcess | None = None  # beside the head
        self._kv: tuple[tuple[int, ...], ...] = ()  # what is allocated, see ``_sizes``
        self._kv_writer: tuple[PipelineId, EngineId] | None = None  # pipeline and engine that wrote the KV
        self._kv_since: Epoch | None = None  # the KV holds all that this engine wrote since then
        self._pipeline: PipelineId | None = None
        self._promised: Epoch | None = None  # highest epoch seen of that pipeline
        self._ended: Epoch | None = None  # the promised epoch, if it has ended
        self._current: StageEpoch | None = None
        self._disk_folder = disk_folder
        self._disk: DiskTier | None = None
        self._host: HostWatch | None = None
        self._held: HeldKeys | None = None  # what is on the device and below it
        self._held_writer = (b"", EngineId(""))  # the newest engine that may have written it, and its ``kv_digest``
        self._open_s = open_s
        self._handlers: set[asyncio.Task[Any]] = set()  # tasks that handle streams
        self._closed = False
        self._opening = asyncio.Lock()
        self._changed = asyncio.Event()  # set and replaced when the current or the promised epoch changes

    async def load(
        self,
        *,
        slices: Sequence[Slice],
        open_weights: Callable[[], WeightSource],
        progress: Callable[[LoadProgress], None],
        settings: StageSettings,
        draft: Callable[[ModelBounds], DraftLaunch] | None = None,
    ) -> LoadedShard:
        """Replace the loaded slices. Calls ``progress`` on the loop, once per tensor.

        settings  those of the backend
        draft     describes the draft model for a model with these bounds; None: without one

        A draft model loads in its own process, for which nothing waits. Raises StageError while a pipeline is open, and
        the errors of ``Backend.load``.
        """
        if self._current is not None:
            raise StageError("the stage serves a pipeline and cannot load other layers")
        loop = asyncio.get_running_loop()

        def tell(done: LoadProgress) -> None:
            loop.call_soon_threadsafe(progress, done)

        if settings.kv_disk and not isinstance(self._backend, DiskBackend):
            raise NoFeasiblePlacement(
                "this stage's backend keeps no KV on disk", fact=self._tools.stage, next_step="serve without --kv-disk"
            )
        self._shard, self._kv = None, ()
        await self._end_draft_model()
        shard = self._shard = await self._compute.call(lambda: self._load(tuple(slices), open_weights, tell, settings))
        if draft is not None and any(part.head for part in slices):
            whole = any(part.embedding for part in slices)
            self._draft_model = DraftProcess(replace(draft(shard.model), ahead=not whole))
            self._draft_model.start()
        return shard

    async def _end_draft_model(self) -> None:
        ending, self._draft_model = self._draft_model, None
        if ending is not None:
            await asyncio.to_thread(ending.close)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the Stage service on ``server``."""
        add_service(self, server)

    def pause(self) -> None:
        """Start no further step of the open epoch. A later epoch starts steps again, as its engine expects."""
        if self._current is not None:
            self._current.pause()

    def resume(self, epoch: Epoch) -> None:
        """Start steps again if ``epoch``, the engine's current one, is open on this stage."""
        if self._current is not None and self._current.spec.epoch == epoch:
            self._current.resume()

    def progress(self) -> StageProgress:
        """Return counters for the daemon, which ends a hanging stage."""
        counters = self._counters
        own, _, host, disk = self._kv or ((0,), (), (), ())
        return StageProgress(
            received=counters.received,
            started=self._compute.started,
            finished=self._compute.finished,
            sent=counters.sent,
            strays=counters.strays,
            repeats=counters.repeats,
            limit_s=self._compute.limit_s(),
            disk_bytes=self._disk.num_bytes if self._disk is not None else 0,
            kv_blocks=own[0],
            host_blocks=host[0] if host else 0,
            disk_blocks=disk[0] if disk else 0,
        )

    def trace(self) -> list[TraceEntry]:
        """Return the newest steps, oldest first."""
        return list(self._trace)

    async def close(self) -> None:
        """End the pipeline, free the device's memory and end all threads. Stop the server first.

        May be called twice.
        """
        if self._closed:
            return
        self._closed = True
        if self._current is not None:
            self._current.fault(PeerClosed("the stage is shutting down"), asked=True)
            self._current = None
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=CLOSE_S)
        await self._end_draft_model()
        if self._disk is not None:
            await self._disk.close()
        await self._compute.call(self._backend.close)
        await self._compute.close()
        self._tools.samplers.close()
        await self._tools.grammars.close()

    async def control(self, spec: PipelineSpec, commands: Commands, replies: Replies, *, peer: Hello) -> None:
        """Serve an engine's Control stream. Raises the error that prevents opening the pipeline."""
        with self._handled():
            current = await self._open(spec)
            try:
                async with delayed_replies(self._network_to(peer), replies) as delayed:
                    await current.run(commands, delayed)
            finally:
                self._leave(current)

    async def ring(self, opening: OpenRing, frames: Frames, *, peer: Hello) -> None:
        """Serve a predecessor's Ring stream. Raises StaleEpoch, StageLost, RemoteProtocolError; the stage goes on."""
        with self._handled():
            receiver = await self.find_receiver(opening)
            current = self._current
            try:
                await frames.feed(receiver, self._network_to(peer))
            except RemoteProtocolError as exc:
                error = exc.on_node(self._tools.node, stage=self._tools.stage)
                if current is not None:
                    current.fault(error)  # the sender may miss the reason if it is writing, and would dial again
                raise error from exc
            finally:
                self._counters.strays += frames.strays

    @contextmanager
    def _handled(self) -> Generator[None]:
        """Register the current task as a handler, so that ``close`` waits for it."""
        task = asyncio.current_task()
        assert task is not None, "handlers are coroutines"
        self._handlers.add(task)
        try:
            yield
        finally:
            self._handlers.discard(task)

    def _network_to(self, peer: Hello) -> Network | None:
        """Return the emulated network between this stage and a peer; None within a node."""
        return self._network if peer.node_id != self._node_id else None

    async def find_receiver(self, opening: OpenRing) -> RingReceiver:
        """Wait until the epoch of ``opening`` is open, then return the receiver of its link.

        Raises StaleEpoch, StageLost, ConnectTimeout, and RemoteProtocolError if the two ends disagree.
        """
        try:
            async with asyncio.timeout(self._open_s):
                while not self._stands(opening):
                    await self._changed.wait()
        except TimeoutError as exc:
            raise ConnectTimeout(
                f"epoch {opening.epoch} was not opened on this stage", fact=f"waited {self._open_s:g} s"
            ) from exc
        current = self._current
        receiver = current.receiver(opening.slice) if current is not None else None
        if current is None or receiver is None:
            raise RemoteProtocolError(f"no other stage feeds slice {opening.slice} of this stage")
        spec = current.spec
        if (opening.hidden_size, opening.activation_type) != (spec.hidden_size, spec.activation_type):
            raise RemoteProtocolError(
                "the two ends of the link disagree on activations",
                fact=f"{opening.activation_type.value} of {opening.hidden_size} against "
                f"{spec.activation_type.value} of {spec.hidden_size}",
            )
        return receiver

    def _stands(self, opening: OpenRing) -> bool:
        """Return whether the stream's epoch is open.

        Raises StaleEpoch if a later epoch has replaced it, and StageLost if it has ended without a successor.
        """
        if opening.pipeline_id != self._pipeline or self._promised is None or opening.epoch > self._promised:
            return False
        if opening.epoch < self._promised:
            raise _stale(opening.epoch, self._promised)
        if self._ended == opening.epoch:
            raise StageLost(
                f"epoch {opening.epoch} has ended on this stage", fact="its engine hung up or a step failed"
            )
        return self._current is not None and self._current.spec.epoch == opening.epoch

    async def _open(self, spec: PipelineSpec) -> StageEpoch:
        shard = self._check(spec)
        previous = _predecessor(spec)
        self._promise(spec)
        self._security.set_neighbours(previous)
        async with self._opening:
            self._still_promised(spec)
            if self._kv != _sizes(spec):
                self._host = self._held = None
                if self._disk is not None:
                    await self._disk.close()
                    self._disk = None
            kv_since = await self._compute.call(lambda: self._allocate(spec))
            self._still_promised(spec)
            self._open_tiers(spec)
            self._still_promised(spec)
            self._current = StageEpoch(
                spec,
                self._tools,
                model=shard.model,
                kv_since=kv_since,
                windows=_windows(shard, spec),
                rest_tokens=shard.classes.rest_tokens,
                mtp_slice=shard.mtp_slice,
                draft_model=self._draft_model,
                disk=self._disk,
                host=self._host,
                held=self._held,
            )
            self._tell_change()
        return self._current

    def _open_tiers(self, spec: PipelineSpec) -> None:
        """Have all tiers ready. Another engine gets what they hold, if it asks and its KV is the same."""
        if self._host is None:
            self._host = self._new_host(spec)
        if self._held is None:
            slots = (spec.state_slots,) if spec.state_slots else ()
            self._held = HeldKeys((spec.num_blocks, *spec.window_blocks, *slots))
        self._held.begin_epoch()
        if spec.disk_places and self._disk is None:
            self._disk = self._new_disk(spec)
        writer = (spec.kv_digest, spec.epoch.engine_id)
        before, self._held_writer = self._held_writer, writer
        if before != writer and not (spec.asks_held and before[0] == spec.kv_digest):
            self._held.forget_all()
            if self._disk is not None:
                self._disk.forget()

    def _new_host(self, spec: PipelineSpec) -> HostWatch | None:
        """Watch the host memory that is allocated, if the backend can give it back."""
        if not spec.host_places or not isinstance(self._backend, HostMemoryBackend):
            return None
        return HostWatch(self._backend, host_places=spec.host_places, clock=self._tools.clock)

    def _new_disk(self, spec: PipelineSpec) -> DiskTier:
        """Open a file below the host memory that is allocated. Raises StageError without what it needs."""
        if not isinstance(self._backend, DiskBackend) or self._disk_folder is None:
            raise StageError("this stage keeps no KV on disk", next_step="serve without --kv-disk")
        return DiskTier(
            self._backend,
            self._disk_folder,
            host_places=spec.host_places,
            disk_places=spec.disk_places,
            clock=self._tools.clock,
            held=self._held,
        )

    def _check(self, spec: PipelineSpec) -> LoadedShard:
        """Return the loaded shard if it matches the pipeline. Raises ShardMismatch, RemoteProtocolError."""
        shard = self._shard
        loaded = () if shard is None else shard.slices
        if shard is None or set(loaded) != set(spec.slices) or len(loaded) != len(spec.slices):
            raise ShardMismatch(
                "the stage has loaded other layers than the pipeline needs",
                fact=f"loaded: {_layers(loaded)}; needed: {_layers(spec.slices)}",
            )
        if shard.hidden_size != spec.hidden_size:
            raise ShardMismatch(
                "the pipeline is for another model", fact=f"hidden size {spec.hidden_size}, loaded {shard.hidden_size}"
            )
        if max(part.index for part in spec.slices) + 1 < spec.num_slices and not spec.next_address:
            raise RemoteProtocolError("the pipeline cannot be opened: the next stage has no address")
        if spec.window_blocks and (
            len(spec.window_blocks) != len(shard.classes.windows) or min(spec.window_blocks) < 1
        ):
            raise RemoteProtocolError(
                "the pipeline cannot be opened: it names blocks of other windows than the model has",
                fact=f"the model's windows are {shard.classes.windows}",
            )
        if bool(spec.state_slots) != bool(shard.classes.state_bytes):
            raise RemoteProtocolError(
                "the pipeline cannot be opened: only models with recurrent layers have slots of states",
                fact=f"it names {spec.state_slots} slots",
            )
        places = 1 + len(spec.window_blocks) + bool(spec.state_slots)
        if spec.host_places and len(spec.host_places) != places:
            raise RemoteProtocolError(
                "the pipeline cannot be opened: it names host memory of other memory classes than the model has",
                fact=f"it names {len(spec.host_places)}, the model has {places}",
            )
        if spec.disk_places and len(spec.disk_places) != len(spec.host_places):
            raise RemoteProtocolError(
                "the pipeline cannot be opened: it names other memory classes on disk than in host memory",
                fact=f"{len(spec.disk_places)}, not {len(spec.host_places)}",
            )
        return shard

    def _promise(self, spec: PipelineSpec) -> None:
        """Accept only ``spec.epoch`` and higher epochs from now on. Raises StaleEpoch, StageError."""
        if spec.pipeline_id != self._pipeline:
            if self._current is not None:
                raise StageError("the stage serves another pipeline", fact=f"pipeline {self._pipeline}")
        elif self._promised is not None and spec.epoch <= self._promised:
            raise _stale(spec.epoch, self._promised)
        self._pipeline, self._promised = spec.pipeline_id, spec.epoch
        current, self._current = self._current, None
        if current is not None:
            current.fault(_stale(current.spec.epoch, spec.epoch))
        self._tell_change()

    def _still_promised(self, spec: PipelineSpec) -> None:
        if self._promised is not None and self._promised != spec.epoch:
            raise _stale(spec.epoch, self._promised)

    def _leave(self, current: StageEpoch) -> None:
        if self._current is current:
            self._current, self._ended = None, current.spec.epoch
            self._tell_change()

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _allocate(self, spec: PipelineSpec) -> Epoch:
        """Allocate KV, on the compute thread after all steps of earlier epochs.

        Returns the epoch since which the KV holds all that the engine's steps wrote. Another engine's KV stays in
        place: no step reads it, since rows write before they attend.
        """
        needed = _sizes(spec)
        writer = (spec.pipeline_id, spec.epoch.engine_id)
        if self._kv != needed:
            self._kv, self._kv_since = (), None
            self._backend.allocate_kv(
                num_blocks=spec.num_blocks,
                block_size=spec.block_size,
                window_blocks=spec.window_blocks,
                state_slots=spec.state_slots,
                host_places=spec.host_places,
            )
            self._kv = needed
        if self._kv_since is None or self._kv_writer != writer:
            self._kv_since = spec.epoch
        self._kv_writer = writer
        return self._kv_since

    def _load(
        self,
        slices: tuple[Slice, ...],
        open_weights: Callable[[], WeightSource],
        tell: Callable[[LoadProgress], None],
        settings: StageSettings,
    ) -> LoadedShard:
        """Load layers, on the compute thread."""
        weights = open_weights()
        if self._profile is None:
            self._profile = self._backend.profile()  # takes memory that loaded layers may not leave
        profile = self._profile
        self._backend.load(slices, weights, tell)
        config = weights.config
        self._grammars.use(config)
        table = table_of(weight for part in slices for weight in weights.weights(part))
        self._compute.expect(slice_costs(profile, config, slices, weights=table, kv=settings.kv))
        dtype = dtype_of(4 if profile.compute_dtype == "float32" else 2)
        sizes = resident_sizes(config, table, kind=profile.packing, dtype=dtype)
        classes = memory_classes(config, settings.kv)
        drafts = config.has_mtp and isinstance(self._backend, DraftingBackend)
        return LoadedShard(
            slices=slices,
            weight_bytes=sum(sizes.of_slice(part) for part in slices),
            kv_block_bytes=self._backend.kv_block_bytes(config, slices, settings.block_size),
            window_block_bytes=tuple(
                self._backend.kv_block_bytes(config, classes.layers(number, slices), settings.block_size)
                for number in range(1, 1 + len(classes.windows))
            ),
            classes=classes,
            products=tuple(self._backend.packed_products()),
            slow_paths=self._slow_paths(settings.block_size),
            hidden_size=config.hidden_size,
            model=ModelBounds(vocab_size=config.vocab_size, context_length=config.context_length),
            mtp_slice=next((part.index for part in slices if part.head), None) if drafts else None,
        )

    def _slow_paths(self, block_size: int) -> tuple[SlowPath, ...]:
        """Return what makes steps slow, and log it."""
        if not isinstance(self._backend, ExplainingBackend):
            return ()
        found = tuple(self._backend.slow_paths(block_size))
        for path in found:
            logger.warning("%s: %s (%s)", path.what, path.reason, path.cost)
        return found


def _windows(shard: LoadedShard, spec: PipelineSpec) -> tuple[WindowPool, ...]:
    return shard.classes.opened(spec.window_blocks, block_size=spec.block_size)


def _sizes(spec: PipelineSpec) -> tuple[tuple[int, ...], ...]:
    """Return what a stage allocates: other numbers empty its KV."""
    own = (spec.num_blocks, spec.block_size, spec.state_slots)
    return own, spec.window_blocks, spec.host_places, spec.disk_places


def _stale(epoch: Epoch, promised: Epoch) -> StaleEpoch:
    return StaleEpoch(f"epoch {epoch} has been replaced", fact=f"the stage obeys {promised}")


def _layers(slices: Sequence[Slice]) -> str:
    return ", ".join(str(part.layers) for part in slices) or "none"


def _predecessor(spec: PipelineSpec) -> list[Peer]:
    """Return the stage whose activations this stage accepts. Raises CertificateInvalid."""
    if spec.previous is None or not spec.previous.certificate:
        return []
    certificate = read_certificate(spec.previous.certificate)
    return [Peer(node_id=spec.previous.node_id, kind=ProcessKind.STAGE, certificate=certificate)]
