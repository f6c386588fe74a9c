"""The member that has turned: its identity, what it announces, its heartbeat streams and what it answers to calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from edgepipe.cluster.founding import TrustFolders
from edgepipe.cluster.identity import load_identity
from edgepipe.cluster.trust_file import TrustFile
from edgepipe.errors import EdgepipeError, ModelUnknown, RequestInvalid
from edgepipe.link.channels import bind, make_channel, make_server, translated
from edgepipe.security.certificates import KeyPair
from edgepipe.security.mutual_tls import Credentials, Plaintext
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.v1 import engine_pb2, engine_pb2_grpc, node_pb2_grpc, trust_pb2
from edgepipe.wire.v1 import node_pb2 as pb
from tests.support.cluster.members import member_of

BEAT_S = 0.25
_TRUST_CONTEXT = b"edgepipe-trust-1"
_AGAIN_S = 0.1  # until a stream that was ended is opened again
_CALL_S = 20.0  # a node waits some seconds for a record before it denies a stage
_WRITE_S = 5.0  # a node that reads no more may take so long before the rogue gives the message up


@dataclass(frozen=True, slots=True, kw_only=True)
class RogueSettings:
    """What the rogue is started with. All data directories hold genuine identities of the cluster."""

    data_dir: str  # folder of the rogue
    former_owner: str  # name of an owner that was removed; the rogue has its key
    owner: str  # name of an owner; the rogue has its key, too
    honest: Mapping[str, str]  # address by node id


def signed(body: trust_pb2.TrustBody, signer: KeyPair) -> trust_pb2.TrustStatement:
    """A statement with a genuine signature, of a body with whatever fields."""
    data = body.SerializeToString(deterministic=True)
    return trust_pb2.TrustStatement(body=data, signature=signer.sign(_TRUST_CONTEXT + data))


class AnyCaller(Plaintext):
    """Shows the rogue's certificate and asks nobody for one: whoever connects is served, and so is caught."""

    def __init__(self, pair: KeyPair) -> None:
        self._pair = pair

    def server_credentials(self) -> grpc.ServerCredentials:
        """See ``Security.server_credentials``."""
        return grpc.ssl_server_credentials([(self._pair.key_pem, self._pair.certificate.pem)])


@dataclass(eq=False)
class Line:
    """A heartbeat stream to one honest node, opened again whenever it ends."""

    rogue: Rogue
    node_id: str
    address: str
    state: pb.NodeState = field(default_factory=pb.NodeState)  # the newest that the node told
    _call: Any = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with make_channel(self.address, self.rogue.tls.to_node(self.node_id)) as channel:
                    call = node_pb2_grpc.NodeStub(channel).Heartbeat()
                    await call.write(self.rogue.beat(first=True))
                    self._call = call
                    async for answer in call:
                        if answer.HasField("state"):
                            self.state = answer.state
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            self._call = None
            await asyncio.sleep(_AGAIN_S)

    async def say(self, beat: pb.Beat) -> None:
        """Send a beat, if the stream stands."""
        try:
            async with asyncio.timeout(_WRITE_S):
                if self._call is not None:
                    await self._call.write(beat)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            pass  # the node ended the stream; ``run`` opens another

    def stub(self, channel: grpc.aio.Channel) -> node_pb2_grpc.NodeAsyncStub:
        """The node's ``Node`` service."""
        return node_pb2_grpc.NodeStub(channel)


class Rogue:
    """The rogue's identity, what it announces, and its streams."""

    def __init__(self, settings: RogueSettings) -> None:
        self.pair = load_identity(TrustFolders(Path(settings.data_dir)).identity)
        self.former_owner = load_identity(TrustFolders(Path(settings.former_owner)).identity)
        self.owner = load_identity(TrustFolders(Path(settings.owner)).identity)
        self.tls = member_of(Path(settings.data_dir))
        loaded = TrustFile(TrustFolders(Path(settings.data_dir)).trust).load()
        assert loaded is not None, "the rogue is paired"
        self.store = loaded.store
        self.node_id = self.pair.fingerprint
        self.greeting = Hello(role="node", node_id=self.node_id, node_name="rogue", cluster_id=self.store.cluster_id)
        self.hello = hello_to_wire(self.greeting)
        self.lines = [Line(self, node_id, address) for node_id, address in settings.honest.items()]
        self.prompts = 0  # prompts that others sent here
        self.manifest = b""  # manifest that its Weights service hands out
        self.files: dict[str, bytes] = {}  # files of that manifest; others are endless
        self.error = EdgepipeError("no")  # what it answers to calls of no use to it
        self.template = pb.Beat()  # the beat that each of its beats begins as
        self._address = ""
        self._sequence = 0
        self._version = 0
        self._incarnation = int(time.time() * 1000)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Listen and hold the streams while the block runs."""
        server = make_server(AnyCaller(self.pair))
        node_pb2_grpc.add_NodeServicer_to_server(_Node(self), server)  # pyright: ignore[reportAbstractUsage] - the rest is not there
        node_pb2_grpc.add_WeightsServicer_to_server(_Weights(self), server)
        engine_pb2_grpc.add_EngineServicer_to_server(_Engine(self), server)  # pyright: ignore[reportAbstractUsage] - the rest is not there
        port = bind(server, AnyCaller(self.pair), host="127.0.0.1", port=0)
        self._address = f"127.0.0.1:{port}"
        self.behave()
        await server.start()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(line.run()) for line in self.lines]
            running.append(tasks.create_task(self._beat_on()))
            yield
            for task in running:
                task.cancel()
        await server.stop(grace=0)

    def behave(self) -> None:
        """Announce no more than any node does; a later life than what an attack announced."""
        self._incarnation += 1
        self.template = pb.Beat(state=self.state())
        self.manifest, self.files = b"", {}

    def state(self) -> pb.NodeState:
        """An honest state of this node."""
        return pb.NodeState(node_id=self.node_id, name="rogue", address=self._address, incarnation=self._incarnation)

    def beat(self, *, first: bool = False) -> pb.Beat:
        """The next beat: what is announced now, as news."""
        beat = pb.Beat()
        beat.CopyFrom(self.template)
        self._sequence += 1
        self._version += 1
        beat.sequence = self._sequence
        beat.state.version = beat.state.version or self._version
        if first and not beat.HasField("hello"):
            beat.hello.CopyFrom(self.hello)
        return beat

    def beat_with(self, state: pb.NodeState, **fields: Any) -> pb.Beat:
        """The next beat with another state, of this node's next life, and other fields."""
        self._incarnation += 1
        beat = self.beat()
        beat.MergeFrom(pb.Beat(**fields))
        beat.state.CopyFrom(state)
        if state.node_id == self.node_id:
            beat.state.incarnation = state.incarnation or self._incarnation
        return beat

    async def converse(self, line: Line, beats: list[pb.Beat]) -> None:
        """Say some beats on a stream of their own, as far as the node listens."""
        with suppress(EdgepipeError, TimeoutError):
            async with make_channel(line.address, self.tls.to_node(line.node_id)) as channel, asyncio.timeout(2.0):
                with translated(line.address):
                    async for _ in line.stub(channel).Heartbeat(iter(beats)):
                        pass

    async def say_all(self, beat: pb.Beat) -> None:
        """Send a beat to every honest node."""
        await asyncio.gather(*(line.say(beat) for line in self.lines))

    async def tell_statements(self, statements: list[trust_pb2.TrustStatement], *, piece: int) -> None:
        """Tell them in beats, so many in each."""
        for start in range(0, len(statements), piece):
            beat = self.beat()
            beat.trust_digest = bytes(32)
            beat.trust.statements.extend(statements[start : start + piece])
            await self.say_all(beat)

    def statement(self, signer: KeyPair, *, number: int, **said: Any) -> trust_pb2.TrustStatement:
        """A statement about the cluster, properly signed."""
        body = trust_pb2.TrustBody(
            cluster_id=self.store.cluster_id,
            signer=signer.fingerprint,
            made_ms=int(time.time() * 1000),
            number=number,
            **said,
        )
        return signed(body, signer)

    def heard(self) -> tuple[pb.NodeState, engine_pb2.EngineState, pb.ServeRecord]:
        """An honest engine: its node, itself, and the record that binds it."""
        for line in self.lines:
            for engine in line.state.engines:
                for record in line.state.serves:
                    if pb.ServeBody.FromString(record.body).pipeline_id == engine.pipeline_id:
                        return line.state, engine, record
        raise AssertionError("no honest engine was told")

    async def refused(self, line: Line, method: str, request: Any, *, credentials: Credentials | None = None) -> str:
        """The code of the error that a call to an honest node ends with; empty if it was let through."""
        try:
            async with make_channel(line.address, credentials or self.tls.to_node(line.node_id)) as channel:
                with translated(line.address):
                    call: Any = getattr(line.stub(channel), method)(request, timeout=_CALL_S)
                    if isinstance(call, grpc.aio.UnaryStreamCall):
                        while await call.read() is not grpc.aio.EOF:
                            pass
                    else:
                        await call
        except EdgepipeError as error:
            return error.code
        return ""

    async def _beat_on(self) -> None:
        while True:
            await self.say_all(self.beat())
            await asyncio.sleep(BEAT_S)


class _Node(node_pb2_grpc.NodeServicer):
    """Answers heartbeats with what is announced, everything else with an error."""

    def __init__(self, rogue: Rogue) -> None:
        self._rogue = rogue

    async def Heartbeat(self, request_iterator: Any, context: Any) -> AsyncGenerator[pb.Beat]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One beat for each."""
        first = True
        async for _ in request_iterator:
            yield self._rogue.beat(first=first)
            first = False

    async def Prepare(self, request: Any, context: Any) -> AsyncGenerator[pb.PrepareEvent]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Never prepares anything."""
        for event in ():
            yield event
        raise self._rogue.error

    async def Vouch(self, request: Any, context: Any) -> pb.VouchReply:
        """Says that it hears nobody."""
        return pb.VouchReply()

    async def ProfileLinks(self, request: Any, context: Any) -> pb.ProfileLinksReply:
        """Measures nothing."""
        raise self._rogue.error

    async def ProfileLayer(self, request: Any, context: Any) -> pb.LayerProfile:
        """Measures nothing."""
        raise self._rogue.error


class _Weights(node_pb2_grpc.WeightsServicer):
    """Hands out what an attack put there; a file that it did not name is zeros without end."""

    def __init__(self, rogue: Rogue) -> None:
        self._rogue = rogue

    async def GetManifest(self, request: pb.ManifestRequest, context: Any) -> AsyncGenerator[pb.ManifestReply]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The attack's."""
        if not self._rogue.manifest:
            raise ModelUnknown("no")
        yield pb.ManifestReply(manifest=self._rogue.manifest)

    async def ReadFile(self, request: pb.ReadFileRequest, context: Any) -> AsyncGenerator[pb.DataChunk]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The attack's, or zeros."""
        data = self._rogue.files.get(request.name)
        if data is not None:
            yield pb.DataChunk(data=data)
            return
        while True:
            yield pb.DataChunk(data=bytes(1 << 20))

    async def ReadTensor(self, request: pb.ReadTensorRequest, context: Any) -> AsyncGenerator[pb.DataChunk]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Zeros."""
        while True:
            yield pb.DataChunk(data=bytes(1 << 20))


class _Engine(engine_pb2_grpc.EngineServicer):
    """Looks like an engine, and counts what it is asked."""

    def __init__(self, rogue: Rogue) -> None:
        self._rogue = rogue

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncGenerator[engine_pb2.EngineEvent]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A prompt that comes here is the rogue's success."""
        async for message in request_iterator:
            if message.HasField("hello"):
                _, engine, _ = self._rogue.heard()
                welcome = engine_pb2.Welcome(pipeline_id=engine.pipeline_id)
                welcome.hello.CopyFrom(self._rogue.hello)
                welcome.epoch.CopyFrom(engine.epoch)
                yield engine_pb2.EngineEvent(welcome=welcome)
            self._rogue.prompts += message.HasField("submit")

    async def Describe(self, request: Any, context: Any) -> engine_pb2.EngineState:
        """As it announces."""
        if not self._rogue.template.state.engines:
            raise RequestInvalid("no")
        return self._rogue.template.state.engines[0]
