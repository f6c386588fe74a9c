"""Calls to this machine's node over its Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from edgepipe.backend.types import StageSettings
from edgepipe.daemon.machine.data_dir import home_name, socket_path
from edgepipe.errors import ConnectTimeout, EdgepipeError, NodeUnreachable, PeerClosed
from edgepipe.link.channels import make_unix_channel, sent_error, translated
from edgepipe.safe_text import one_line
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.nodes import ClusterStatus, LogLine
from edgepipe.wire.serving import DrainEvent, LinkProfile, ReplicateEvent, ServeEvent, ServeRequest, SurveyReply
from edgepipe.wire.trust import InviteCommand, InviteEvent, JoinEvent, JoinRequest, ListPeersReply, RemovePeerReply
from edgepipe.wire.v1 import common_pb2, node_pb2_grpc, trust_pb2, trust_pb2_grpc
from edgepipe.wire.v1 import node_pb2 as pb

if TYPE_CHECKING:
    from edgepipe.security.mutual_tls import Security

_PEER = "this machine's node"
_RPC_S = 5.0
_SURVEY_S = 120.0  # measures a layer on every device, and every link
_SERVE_S = 3600.0  # a first load may fetch a model over the network
_COPY_S = 24 * 3600.0
_INVITE_S = 25 * 3600.0  # a join string is valid for a day at most
_JOIN_S = 240.0  # the person at the host has a minute to answer
_LOGS_S = 7 * 24 * 3600.0  # a followed log ends by ^C

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class _SafeChannel:
    """Channel whose replies are safe to print: they carry texts that other machines chose."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return ``unary_unary`` and the like, as stubs call them."""
        make_call = getattr(self._channel, name)

        def make(method: str, *, response_deserializer: Callable[[bytes], Message], **more: Any) -> Any:
            def read(data: bytes) -> Message:
                return safe(response_deserializer(data))

            return make_call(method, response_deserializer=read, **more)

        return make


def safe(message: M) -> M:
    """Make every string in the message, at any depth, safe to show on one line."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                safe(part)
        elif field.type == FieldDescriptor.TYPE_STRING and field.is_repeated:
            value[:] = map(one_line, value)
        elif field.type == FieldDescriptor.TYPE_STRING:
            setattr(message, field.name, one_line(value))
    return message


class Admin:
    """Connection to the node of a data directory; ``connect`` opens it. Its replies are safe to print."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        safe_channel = cast("grpc.aio.Channel", _SafeChannel(channel))
        self._stub = node_pb2_grpc.AdminStub(safe_channel)
        self._trust = trust_pb2_grpc.TrustAdminStub(safe_channel)
        self._hello = hello_to_wire(Hello(role="cli"))

    async def status(self) -> ClusterStatus:
        """Return the cluster as the node sees it."""
        with translated(_PEER):
            reply = await self._stub.Status(pb.StatusRequest(hello=self._hello), timeout=_RPC_S)
        return from_wire(reply, ClusterStatus)

    async def serve(self, request: ServeRequest) -> AsyncIterator[ServeEvent]:
        """Yield progress until the model is ready; the last event holds its engine. Raises the node's error."""
        message = to_wire(request, pb.ServeRequest)
        message.hello.CopyFrom(self._hello)
        with translated(_PEER):
            async for event in self._stub.Serve(message, timeout=_SERVE_S):
                yield from_wire(event, ServeEvent)

    async def survey(self, model: str, settings: StageSettings, *, fresh: bool = False) -> SurveyReply:
        """Return a model's shape, devices and links for a plan. The nodes measure what they have not measured yet.

        Raises ModelUnknown.
        """
        wanted = to_wire(settings, common_pb2.StageSettings)
        request = pb.SurveyRequest(hello=self._hello, model=model, settings=wanted, fresh=fresh)
        with translated(_PEER):
            reply = await self._stub.Survey(request, timeout=_SURVEY_S)
        return from_wire(reply, SurveyReply)

    async def measure_links(self) -> list[LinkProfile]:
        """Measure every directed link between nodes; takes some seconds."""
        with translated(_PEER):
            reply = await self._stub.MeasureLinks(pb.MeasureLinksRequest(hello=self._hello), timeout=_SURVEY_S)
        return [from_wire(link, LinkProfile) for link in reply.links]

    async def stop_model(self, model: str) -> list[str]:
        """Stop a model (empty: all). Return the names of the stopped models. Raises ModelUnknown."""
        with translated(_PEER):
            reply = await self._stub.StopModel(pb.StopModelRequest(hello=self._hello, model=model), timeout=30.0)
        return list(reply.stopped)

    async def rescan_models(self) -> None:
        """Make the node read its disk again and report the models on it to the other nodes."""
        with translated(_PEER):
            await self._stub.RescanModels(pb.RescanModelsRequest(hello=self._hello), timeout=_RPC_S)

    async def drain(self, *, undo: bool) -> AsyncIterator[DrainEvent]:
        """Yield the node's remaining work, until no work is left. Raises NoFeasiblePlacement."""
        request = pb.DrainRequest(hello=self._hello, undo=undo)
        with translated(_PEER):
            async for event in self._stub.Drain(request, timeout=_SERVE_S):
                yield from_wire(event, DrainEvent)

    async def replicate(self, model: str, *, copies: int) -> AsyncIterator[ReplicateEvent]:
        """Yield the progress of each node's copy. Raises ModelUnknown, PlanInvalid, NoFeasiblePlacement."""
        request = pb.ReplicateRequest(hello=self._hello, model=model, copies=copies)
        with translated(_PEER):
            async for event in self._stub.Replicate(request, timeout=_COPY_S):
                yield from_wire(event, ReplicateEvent)

    async def shut_down(self) -> str:
        """Ask the node to stop; the node answers first. Return what becomes of its work; empty if it has none."""
        with translated(_PEER):
            return (await self._stub.Shutdown(pb.ShutdownRequest(hello=self._hello), timeout=_RPC_S)).note

    async def invite(self, commands: AsyncIterator[InviteCommand]) -> AsyncIterator[InviteEvent]:
        """Open a pairing window; it lasts until the caller stops reading. Raises the error that ends it early."""
        messages = (to_wire(command, trust_pb2.InviteCommand) async for command in commands)
        with translated(_PEER):
            async for event in self._trust.Invite(messages, timeout=_INVITE_S):
                yield from_wire(event, InviteEvent)

    async def join(self, request: JoinRequest) -> AsyncIterator[JoinEvent]:
        """Let the node join another cluster. Raises the node's error."""
        message = to_wire(request, trust_pb2.JoinRequest)
        message.hello.CopyFrom(self._hello)
        with translated(_PEER):
            async for event in self._trust.Join(message, timeout=_JOIN_S):
                yield from_wire(event, JoinEvent)

    async def peers(self) -> ListPeersReply:
        """Return the members of the cluster."""
        with translated(_PEER):
            reply = await self._trust.ListPeers(trust_pb2.ListPeersRequest(hello=self._hello), timeout=_RPC_S)
        return from_wire(reply, ListPeersReply)

    async def remove_peer(self, peer: str, *, others: str) -> RemovePeerReply:
        """Remove a peer; ``others`` as in the .proto. Raises ConfigInvalid for an unknown name, TrustInvalid."""
        request = trust_pb2.RemovePeerRequest(hello=self._hello, peer=peer, others=others)
        with translated(_PEER):
            reply = await self._trust.RemovePeer(request, timeout=_RPC_S)
        return from_wire(reply, RemovePeerReply)

    async def promote_peer(self, peer: str) -> str:
        """Make a peer an owner. Return its name. Raises ConfigInvalid for an unknown name, TrustInvalid."""
        request = trust_pb2.PromotePeerRequest(hello=self._hello, peer=peer)
        with translated(_PEER):
            return (await self._trust.PromotePeer(request, timeout=_RPC_S)).name

    @asynccontextmanager
    async def act_as_gateway(self) -> AsyncGenerator[Security]:
        """Register this process as a gateway of the node inside the block. Yield the security for calls to engines.

        Raises LinkError.
        """
        from edgepipe.security.certificates import make_key_pair
        from edgepipe.security.mutual_tls import MutualTls

        pair = make_key_pair()
        request = pb.GatewayRequest(hello=self._hello, certificate=pair.certificate.pem)
        with translated(_PEER):
            call = self._stub.ActAsGateway(request)
            await anext(aiter(call))
        try:
            yield MutualTls(pair, callers=())
        finally:
            call.cancel()

    async def logs(self, *, lines: int, follow: bool) -> AsyncIterator[LogLine]:
        """Yield the newest lines of the node's log; with ``follow`` also new lines as they come."""
        request = pb.LogsRequest(hello=self._hello, lines=lines, follow=follow)
        with translated(_PEER):
            async for line in self._stub.Logs(request, timeout=_LOGS_S):
                yield from_wire(line, LogLine)


@asynccontextmanager
async def connect(data_dir: Path) -> AsyncGenerator[Admin]:
    """Connect to the node of ``data_dir``. Raises NodeUnreachable, also inside the block, when no node answers."""
    socket = socket_path(data_dir)
    if not socket.exists():
        raise no_node(data_dir)
    try:
        async with make_unix_channel(str(socket)) as channel:
            yield Admin(channel)
    except (ConnectTimeout, PeerClosed) as exc:
        cause = exc.__cause__
        if isinstance(cause, grpc.aio.AioRpcError) and sent_error(cause) is None:
            raise no_node(data_dir) from exc
        raise  # the node answered: another machine is unreachable


async def status_if_running(data_dir: Path) -> ClusterStatus | None:
    """Return the cluster as the node of ``data_dir`` sees it, None if no node answers."""
    try:
        async with connect(data_dir) as admin:
            return await admin.status()
    except EdgepipeError:
        return None


def no_node(data_dir: Path) -> NodeUnreachable:
    """Build the error for a data directory without a running node."""
    fact = f"no answer at {socket_path(data_dir)}"
    if name := home_name(data_dir):
        problem = f"this machine belongs to '{name}', but its node does not run"
        return NodeUnreachable(problem, fact=fact, next_step="edgepipe node start")
    return NodeUnreachable(
        "no edgepipe node runs on this machine",
        fact=fact,
        next_step="edgepipe node start    (to try edgepipe first: edgepipe demo)",
    )


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a verb's asynchronous part."""
    return asyncio.run(work)
