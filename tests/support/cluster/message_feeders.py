"""For every method that a member may call: a real handler, or the pure part that takes its messages, and valid messages
to begin from. Processes are stood in for; what decides is the product's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from edgepipe_emulated import emulated_model_config
from google.protobuf.message import Message

from edgepipe.backend.types import ActivationType, DeviceProfile
from edgepipe.cluster.beats import BEATS_PER_S
from edgepipe.cluster.founding import TrustFolders, found_local_cluster, open_trust
from edgepipe.cluster.heartbeats import Heartbeats
from edgepipe.cluster.identity import load_identity
from edgepipe.cluster.membership import Membership
from edgepipe.cluster.trust import merge
from edgepipe.config import Timeouts
from edgepipe.daemon.device.device_memory import DeviceMemory
from edgepipe.daemon.device.layer_profiles import profile_key
from edgepipe.daemon.device.memory import DiskLedger
from edgepipe.daemon.files.batch_sources import BatchSources
from edgepipe.daemon.files.models import Models
from edgepipe.daemon.network.link_probes import LinkProbes, ProbesService
from edgepipe.daemon.services import NodeService, WeightsService, admit_to
from edgepipe.daemon.serving.alive_proof import AliveProofs
from edgepipe.daemon.serving.replication import Replication
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.engine.requests import GatewayStream
from edgepipe.engine.service import RequestIntake
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.table import RequestTable
from edgepipe.errors import EdgepipeError, NodeUnreachable
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId, StepId
from edgepipe.link.receiver import RingReceiver
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.sampling import SequenceSampler
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.security.mutual_tls import Plaintext
from edgepipe.spec.config_json import config_to_json
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.stage.sequences import SequenceTable
from edgepipe.store.store import ModelStore
from edgepipe.testing.clock import FakeClock
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.wire.batches import BatchFacts, BatchReport, BatchSource
from edgepipe.wire.children import PrepareEvent, PrepareProgress, PrepareRequest, ProfileLayerRequest
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, epoch_from_wire, epoch_to_wire, hello_to_wire
from edgepipe.wire.engines import EngineState, ServeSpec, StagePlacement
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.pipelines import OpenRing, PipelineSpec, spec_from_wire
from edgepipe.wire.plans import StepPlan, commands_from_wire
from edgepipe.wire.registrations import Registrations
from edgepipe.wire.serving import ProfileLinksReply, ServeRecord, StartEngineRequest
from edgepipe.wire.trust import TrustSet
from edgepipe.wire.v1 import common_pb2, engine_pb2, stage_pb2, trust_pb2
from edgepipe.wire.v1 import node_pb2 as pb
from tests.support.cluster.member_simulation import LIMITS
from tests.support.daemon.published_state import FakeState
from tests.support.daemon.serve_books import NoSigns

CONFIG = emulated_model_config(num_layers=4)
MODEL = ModelBounds(vocab_size=CONFIG.vocab_size, context_length=CONFIG.context_length)
WHOLE = (Slice(index=0, layers=LayerRange(0, 4), embedding=True, head=True),)
PIPELINE = PipelineId("p")
EPOCH = Epoch(3, EngineId("engine"))
NO_TENSOR = "model.norm.weight"  # emulated models have no tensors on disks
FEW = 200  # messages that one world takes before it is made anew, so that what it keeps does not hide what it leaks

M = TypeVar("M", bound=Message)
Feed = Callable[[Any], Awaitable[None]]


def batch_sources() -> BatchSources:
    """A node's batches: one, whose record its keeper lacks."""
    made = BatchSources(Path("batches"), local=FakeState(changes=lambda: stream_of()))
    source = BatchSource(batch_id="batch_1", keeper="", record=b"{}", files=("a", "b", "c"), num_bytes=(0, 0, 0))
    made.take(BatchReport(facts=BatchFacts(), sources=(source,)))
    return made


@dataclass(frozen=True, slots=True)
class Feeder:
    """Takes messages of one method."""

    feed: Feed
    samples: Sequence[Message]  # messages that the receiver accepts


async def stream_of(*messages: Any) -> AsyncIterator[Any]:
    """A stream of them."""
    for message in messages:
        yield message


async def drained(events: AsyncIterator[Any], *, most: int = 100) -> None:
    """Read an answer, or the beginning of a long one."""
    async for _ in events:
        most -= 1
        if not most:
            return


class Folders:
    """What is made once: identities of a cluster of two, and a model on the first one's disk."""

    def __init__(self, folder: Path) -> None:
        self.dirs = [folder / "a", folder / "b"]
        found_local_cluster(self.dirs, name="home")
        write_model_folder(folder / "tiny", CONFIG)
        store = ModelStore(folder / "a" / "models")
        store.pull(str(folder / "tiny"))
        self.model = store.resolve("tiny")
        self.other = load_identity(TrustFolders(self.dirs[1]).identity).fingerprint


class World:
    """The parts of one node, most of them real."""

    def __init__(self, folders: Folders) -> None:
        self.clock, self.timeouts = FakeClock(), Timeouts.loopback()
        self.trust = open_trust(folders.dirs[0], cluster="home", node_name="a", clock=self.clock)
        self.own = NodeState(node_id=self.trust.node_id, name="a", address="127.0.0.1:1", incarnation=1)
        own_hello = Hello(role="node", node_id=self.trust.node_id, node_name="a", cluster_id=self.trust.cluster_id)
        self.hello = hello_to_wire(own_hello)
        self.said = hello_to_wire(
            Hello(role="node", node_id=folders.other, node_name="b", cluster_id=self.trust.cluster_id)
        )
        self.other = NodeId(folders.other)
        membership = Membership(node_id=self.own.node_id, incarnation=1, address="", limits=LIMITS)
        self.heartbeats = Heartbeats(
            membership=membership,
            hello=own_hello,
            trust=self.trust,
            security=Plaintext(),
            state=lambda: self.own,
            clock=self.clock,
            timeouts=self.timeouts,
            on_change=lambda _: None,
            on_identity_taken=lambda _: None,
        )
        self.book = ServeBook(
            folders.dirs[0] / "served.bin",
            trust=self.trust,
            signs=NoSigns(state="ready"),
            clock=self.clock,
            local=FakeState(),
        )
        self.peers: Any = SimpleNamespace(
            hello=own_hello,
            own_id=self.own.node_id,
            own_drains=False,
            nodes=lambda: [self.own],
            node=self._node,
            is_self=lambda node_id: node_id == self.own.node_id,
            reaches=lambda node_id: node_id == self.own.node_id,
            proof_of=self._nothing,
            profile_links=self._no_links,
            security=Plaintext(),
        )
        self.models = Models(
            models_dir=folders.dirs[0] / "models", peers=self.peers, timeouts=self.timeouts, local=FakeState()
        )
        self.manifest_hash = folders.model.manifest_hash
        self.spec = ServeSpec(
            model=folders.model.id,
            manifest_hash=self.manifest_hash,
            stages=(StagePlacement(node_id=self.own.node_id, slices=WHOLE),),
        )
        self.record = self.book.record(PIPELINE) or self.book.ask(PIPELINE, self.spec, engine_node=self.own.node_id)
        self.book.note_served(PIPELINE, self.spec)
        engines: Any = SimpleNamespace(
            start=self._nothing,
            stop=self._nothing,
            stand_by=self._nothing,
            rebalance=self._nothing,
            state_of=lambda _: None,
            is_paused=lambda _: False,
            ready=list,
        )
        self.links = LinkProbes(peers=self.peers, clock=self.clock, timeouts=self.timeouts, network=None)
        device: Any = Device()
        self.node = NodeService(
            admit=admit_to(own_hello),
            security=Plaintext(),
            heartbeats=self.heartbeats,
            device=device,
            engines=engines,
            models=self.models,
            peers=self.peers,
            book=self.book,
            proofs=AliveProofs(self.trust, self.clock),
            links=self.links,
            replication=Replication(
                peers=self.peers,
                models=self.models,
                engines=engines,
                copies=1,
                local=FakeState(changes=lambda: stream_of()),
            ),
            batches=batch_sources(),
            record_s=0.0,
        )
        self.weights = WeightsService(admit=admit_to(own_hello), security=Plaintext(), models=self.models)
        self.table = RequestTable(config=CONFIG, limits=EngineLimits(), timeouts=EngineTimeouts())
        self.table.attach(Queued())
        self.stream = GatewayStream(self.other)
        self.sequences, self.receiver = self.new_sequences(), self.new_receiver()

    def new_sequences(self) -> SequenceTable:
        """Of a stage with the head."""
        return SequenceTable(
            num_blocks=64,
            block_size=16,
            model=MODEL,
            new_sampler=lambda registration, fault: SequenceSampler(
                registration.sampling,
                prompt=registration.seen,
                generated=registration.generated,
                end_ids=registration.end_ids,
                fault=fault,
            ),
        )

    def new_receiver(self) -> RingReceiver:
        """Of a link that expects one step of 1 KB."""
        receiver = RingReceiver(epoch=EPOCH, window=4, clock=self.clock, on_step=lambda *_: None, on_held=lambda: None)
        receiver.expect(StepId(1), 1024, bulk=False)
        return receiver

    def _node(self, node_id: str) -> NodeState:
        if node_id != self.own.node_id:
            raise NodeUnreachable(f"node {node_id} is not in the cluster now")
        return self.own

    async def _no_links(self, *_: Any, **__: Any) -> ProfileLinksReply:
        """As a node answers that measures nothing."""
        return ProfileLinksReply()

    async def _nothing(self, *_: Any, **__: Any) -> bool:
        return False


class Queued:
    """A queue that takes everything and computes nothing."""

    def submit(self, specs: Any, *, accepted: bool = False) -> list[Any]:
        return []

    def cancel(self, sequence: Any, *, at_position: int) -> list[Any]:
        return []


class Device:
    """In place of ``DeviceHost``: checks and reserves as it does, and starts no process."""

    def __init__(self) -> None:
        self._memory = DeviceMemory(
            node_name="a", limit_bytes=0, kills=lambda: 0, disk=DiskLedger(free=lambda: 0, written=dict[str, int])
        )
        profile = DeviceProfile(
            backend="emulated",
            device="",
            name="",
            memory_total_bytes=1 << 34,
            memory_free_bytes=1 << 34,
            compute_dtype="",
            bandwidth_bytes_per_s=0.0,
            flops=0.0,
        )
        self._memory.measured(profile)

    async def prepare(self, request: PrepareRequest, **_: Any) -> AsyncIterator[PrepareEvent]:
        self._memory.reserve(request, CONFIG)
        self._memory.release(request.pipeline_id)
        yield PrepareEvent(event=PrepareProgress())

    async def release(self, *_: Any, **__: Any) -> None:
        return

    def engine_node(self, _: str) -> str:
        return ""

    def epoch_of(self, _: str) -> Epoch | None:
        return None

    async def profile_layer(self, request: ProfileLayerRequest) -> LayerProfile:
        profile_key("x", model_config=request.model_config)
        return LayerProfile(base_s=0.0, decode=(), prefill=(), head=(), kv_token_s=0.0, decode_context=0)


def greeted(value: object, kind: type[M], hello: common_pb2.Hello) -> M:
    """A request with its caller's hello."""
    message: Any = to_wire(value, kind)
    message.hello.CopyFrom(hello)
    return message


def feeders(folders: Folders) -> Mapping[str, Feeder]:
    """By method. Must be called on an event loop, and now and then again (``FEW``)."""
    world = World(folders)
    about: dict[str, Any] = {"hello": world.hello, "pipeline_id": PIPELINE}
    prepare = PrepareRequest(
        pipeline_id=PIPELINE,
        epoch=EPOCH,
        model=world.spec.model,
        manifest_hash=world.manifest_hash,
        placement=world.spec.stages[0],
        settings=world.spec.settings,
        kv_tokens=100,
    )
    measure = ProfileLayerRequest(model_config=json.dumps(config_to_json(CONFIG)))
    start = StartEngineRequest(pipeline_id=PIPELINE, spec=world.spec, record=world.record)
    record = to_wire(world.record, pb.ServeRecord)
    weights: dict[str, Any] = {"hello": world.hello, "model": world.spec.model, "manifest_hash": world.manifest_hash}
    context: Any = SimpleNamespace(write=world._nothing)
    node, weigh = world.node, world.weights

    def call(method: Callable[..., Awaitable[Any]]) -> Feed:
        async def feed(message: Any) -> None:
            await method(message, context)

        return feed

    def streamed(method: Callable[..., AsyncIterator[Any]]) -> Feed:
        async def feed(message: Any) -> None:
            await drained(method(message, context))

        return feed

    return {
        "Node/Heartbeat": Feeder(lambda beat: _heartbeat(world, beat), _beats(world)),
        "Node/Prepare": Feeder(streamed(node.Prepare), [greeted(prepare, pb.PrepareRequest, world.hello)]),
        "Node/Release": Feeder(call(node.Release), [pb.ReleaseRequest(**about, epoch=epoch_to_wire(EPOCH))]),
        "Node/StartEngine": Feeder(call(node.StartEngine), [greeted(start, pb.StartEngineRequest, world.hello)]),
        "Node/StopEngine": Feeder(
            call(node.StopEngine), [pb.StopEngineRequest(hello=world.hello, pipeline_id="other", record=record)]
        ),
        "Node/StandBy": Feeder(call(node.StandBy), [pb.StandByRequest(hello=world.said)]),
        "Node/Vouch": Feeder(
            call(node.Vouch), [pb.VouchRequest(**about, node_id=world.own.node_id, challenge=bytes(32))]
        ),
        "Node/ProfileLayer": Feeder(
            call(node.ProfileLayer),
            [greeted(measure, pb.ProfileLayerRequest, world.said)],
        ),
        "Node/ProfileLinks": Feeder(
            call(node.ProfileLinks), [pb.ProfileLinksRequest(hello=world.said, node_ids=[world.own.node_id])]
        ),
        "Node/Rebalance": Feeder(call(node.Rebalance), [pb.RebalanceRequest(**about, num_nodes=1)]),
        "Node/KeepCopy": Feeder(
            streamed(node.KeepCopy), [pb.KeepCopyRequest(**weights, parts=[0, 1], source=world.own.node_id)]
        ),
        "Node/ReadBatch": Feeder(
            streamed(node.ReadBatch), [pb.ReadBatchRequest(hello=world.said, batch_id="batch_1", input_at=1)]
        ),
        "Probes/Echo": Feeder(
            lambda frame: drained(ProbesService(None).Echo(stream_of(frame), context)), [pb.EchoFrame()]
        ),
        "Weights/GetManifest": Feeder(
            streamed(weigh.GetManifest), [pb.ManifestRequest(hello=world.said, model=world.spec.model)]
        ),
        "Weights/ReadTensor": Feeder(streamed(weigh.ReadTensor), [pb.ReadTensorRequest(**weights, name=NO_TENSOR)]),
        "Weights/ReadFile": Feeder(streamed(weigh.ReadFile), [pb.ReadFileRequest(**weights, name="tokenizer.json")]),
        "Engine/Generate": Feeder(lambda message: _generate(world, message), _gateway_messages(world)),
        "Engine/Describe": Feeder(_nothing, [engine_pb2.DescribeEngine()]),
        "Engine/Trace": Feeder(_nothing, [engine_pb2.TraceEngine(after_step=1)]),
        "Stage/Control": Feeder(lambda message: _control(world, message), _control_messages(world)),
        "Stage/Ring": Feeder(lambda message: _ring(world, message), _ring_messages(world)),
    }


async def _nothing(_: Any) -> None:
    """The handler reads one number of it, or none."""


def _beats(world: World) -> list[pb.Beat]:
    state = NodeState(
        node_id=world.other,
        name="b",
        address="127.0.0.1:2",
        incarnation=1,
        version=1,
        serves=(world.record,),
        engines=(EngineState(model="tiny", pipeline_id=PIPELINE, epoch=EPOCH, state="ready"),),
    )
    beat = pb.Beat(hello=world.said, sequence=1, state=to_wire(state, pb.NodeState), wall_ms=1)
    beat.known.add(node_id=world.own.node_id, address="127.0.0.1:3")
    trust = to_wire(TrustSet(statements=world.trust.store.signed()), trust_pb2.TrustSet)
    second = pb.Beat(hello=world.said, sequence=2, trust_digest=bytes(32), trust=trust)
    second.trust_keys.append(bytes(32))
    return [beat, second]


async def _heartbeat(world: World, beat: pb.Beat) -> None:
    """After a proper one; at the beginning of a stream; and what it tells of trust and of what is served, believed."""
    await drained(world.heartbeats.answer(stream_of(_beats(world)[0], beat), SimpleNamespace()))  # pyright: ignore[reportArgumentType]
    await drained(world.heartbeats.answer(stream_of(beat), SimpleNamespace()))  # pyright: ignore[reportArgumentType]
    world.clock.advance(3 / BEATS_PER_S)  # for three beats at the full rate; a faster member is made to wait
    merge(world.trust.store, from_wire(beat.trust, TrustSet).statements)
    world.book.merge(world.other, [from_wire(record, ServeRecord) for record in beat.state.serves])


def _gateway_messages(world: World) -> list[engine_pb2.GatewayMessage]:
    submit = engine_pb2.Submit(request_id="r", attempt=1, prompt=[1, 2, 3], num_choices=2, max_tokens=5)
    submit.sampling.SetInParent()
    return [
        engine_pb2.GatewayMessage(submit=submit),
        engine_pb2.GatewayMessage(cancel=engine_pb2.Cancel(request_id="r", attempt=1)),
        engine_pb2.GatewayMessage(resume=engine_pb2.Resume(request_id="r", attempt=1, have=[0, 0])),
        engine_pb2.GatewayMessage(hello=world.said),
    ]


async def _generate(world: World, message: engine_pb2.GatewayMessage) -> None:
    tasks: Any = SimpleNamespace()
    intake = RequestIntake(world.table, tasks, pipeline_id=PIPELINE, epoch=lambda: EPOCH)
    stream = world.stream
    intake._take(stream, message)


def _control_messages(world: World) -> list[stage_pb2.ControlMessage]:
    spec = PipelineSpec(
        pipeline_id=PIPELINE,
        epoch=EPOCH,
        slices=WHOLE,
        num_slices=1,
        hidden_size=CONFIG.hidden_size,
        activation_type=ActivationType.BF16,
        num_blocks=64,
        block_size=16,
        next_address="",
        max_in_flight=2,
        step_deadline_ms=1000,
    )
    opening = greeted(spec, stage_pb2.OpenPipeline, world.said)
    plan = stage_pb2.Plan(
        epoch=epoch_to_wire(EPOCH),
        step=1,
        sequence=[1],
        position=[0],
        num_tokens=[3],
        sample=[1],
        block_row=[0],
        block_start=[0],
        block_count=[1],
        token_ids=[1, 2, 3],
        registers=[1],
    )
    registrations = stage_pb2.Registrations(epoch=epoch_to_wire(EPOCH))
    registrations.sequences.add(sequence=1, prompt_tokens=3).sampling.SetInParent()
    return [
        stage_pb2.ControlMessage(open=opening),
        stage_pb2.ControlMessage(register=registrations),
        stage_pb2.ControlMessage(plan=plan),
    ]


async def _control(world: World, message: stage_pb2.ControlMessage) -> None:
    """As ``Stage`` and ``Session`` take it. A table that refused a message is of no use afterwards."""
    try:
        if message.HasField("open"):
            spec_from_wire(message.open)
            return
        for command in commands_from_wire(message):
            if isinstance(command, Registrations):
                for registration in command.sequences:
                    world.sequences.tell(registration)
            elif isinstance(command, StepPlan):
                world.sequences.apply(command)
    except EdgepipeError:
        world.sequences = world.new_sequences()
        raise


def _ring_messages(world: World) -> list[stage_pb2.RingMessage]:
    ring = OpenRing(
        pipeline_id=PIPELINE,
        epoch=EPOCH,
        slice=1,
        hidden_size=CONFIG.hidden_size,
        activation_type=ActivationType.BF16,
    )
    opening = greeted(ring, stage_pb2.OpenRing, world.said)
    frame = stage_pb2.Frame(epoch=epoch_to_wire(EPOCH), step=1, data=bytes(256), sent_us=1)
    return [stage_pb2.RingMessage(open=opening), stage_pb2.RingMessage(frame=frame)]


async def _ring(world: World, message: stage_pb2.RingMessage) -> None:
    try:
        if message.HasField("open"):
            from_wire(message.open, OpenRing)
        elif epoch_from_wire(message.frame.epoch) == EPOCH:
            frame = message.frame
            world.receiver.frame(StepId(frame.step), frame.chunk, frame.data, frame.sent_us, bulk=frame.bulk)
    except EdgepipeError:
        world.receiver = world.new_receiver()
        raise
