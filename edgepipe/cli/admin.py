"""Calls to this machine's node over its Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from edgepipe.daemon.machine.data_dir import socket_path
from edgepipe.errors import ConfigInvalid, ConnectTimeout, EdgepipeError, NodeUnreachable, PeerClosed
from edgepipe.link.channels import make_unix_channel, told_error, translated
from edgepipe.safe_text import one_line
from edgepipe.security.certificates import make_key_pair
from edgepipe.security.mutual_tls import MutualTls, Security
from edgepipe.wire.common import make_hello
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1 import node_pb2_grpc, trust_pb2, trust_pb2_grpc

_PEER = "this machine's node"
_RPC_S = 5.0
_SURVEY_S = 120.0  # a layer on every device, every link
_SERVE_S = 3600.0  # a first load may fetch a model over the network
_COPY_S = 24 * 3600.0
_INVITE_S = 25 * 3600.0  # a long string is valid for a day at most
_JOIN_S = 240.0  # the host's person has a minute
_LOGS_S = 7 * 24 * 3600.0  # following the log ends by ^C

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class _SafeChannel:
    """A channel whose replies are safe to print: what other members say of themselves passes through their node."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """``unary_unary`` and its kin, as stubs call them."""
        make_call = getattr(self._channel, name)

        def make(method: str, *, response_deserializer: Callable[[bytes], Message], **more: Any) -> Any:
            def read(data: bytes) -> Message:
                return safe(response_deserializer(data))

            return make_call(method, response_deserializer=read, **more)

        return make


def safe(message: M) -> M:
    """The message with every string in it, at any depth, made safe to show on one line."""
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
    """One connection to the node of a data directory. Use ``connect``. What it returns is safe to print."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        safe_channel = cast("grpc.aio.Channel", _SafeChannel(channel))
        self._stub = node_pb2_grpc.AdminStub(safe_channel)
        self._trust = trust_pb2_grpc.TrustAdminStub(safe_channel)
        self._hello = make_hello(role="cli")

    async def status(self) -> pb.ClusterStatus:
        """The cluster as the node sees it."""
        with translated(_PEER):
            return await self._stub.Status(pb.StatusRequest(hello=self._hello), timeout=_RPC_S)

    async def serve(self, request: pb.ServeRequest) -> AsyncIterator[pb.ServeEvent]:
        """Progress until the model is ready; the last event holds its engine. Raises what hinders it."""
        request.hello.CopyFrom(self._hello)
        with translated(_PEER):
            async for event in self._stub.Serve(request, timeout=_SERVE_S):
                yield event

    async def survey(self, model: str, *, dtype: str, fresh: bool = False) -> pb.SurveyReply:
        """What a plan for a model is made of; measures what is not known yet. Raises ModelUnknown, LinkNotMeasured."""
        request = pb.SurveyRequest(hello=self._hello, model=model, dtype=dtype, fresh=fresh)
        with translated(_PEER):
            return await self._stub.Survey(request, timeout=_SURVEY_S)

    async def measure_links(self) -> list[pb.LinkProfile]:
        """Every directed link between nodes; takes some seconds. Raises LinkNotMeasured."""
        with translated(_PEER):
            reply = await self._stub.MeasureLinks(pb.MeasureLinksRequest(hello=self._hello), timeout=_SURVEY_S)
        return list(reply.links)

    async def stop_model(self, model: str) -> list[str]:
        """Stop a model (empty: all); the names of those stopped. Raises ModelUnknown."""
        with translated(_PEER):
            reply = await self._stub.StopModel(pb.StopModelRequest(hello=self._hello, model=model), timeout=30.0)
        return list(reply.stopped)

    async def rescan_models(self) -> None:
        """Let the node look at its disk and tell the others what models are there."""
        with translated(_PEER):
            await self._stub.RescanModels(pb.RescanModelsRequest(hello=self._hello), timeout=_RPC_S)

    async def drain(self, *, undo: bool) -> AsyncIterator[pb.DrainEvent]:
        """What is still on the node, until nothing is. Raises NoFeasiblePlacement."""
        request = pb.DrainRequest(hello=self._hello, undo=undo)
        with translated(_PEER):
            async for event in self._stub.Drain(request, timeout=_SERVE_S):
                yield event

    async def replicate(self, model: str, *, copies: int) -> AsyncIterator[pb.ReplicateEvent]:
        """How far each node's copying is. Raises ModelUnknown, PlanInvalid, NoFeasiblePlacement."""
        request = pb.ReplicateRequest(hello=self._hello, model=model, copies=copies)
        with translated(_PEER):
            async for event in self._stub.Replicate(request, timeout=_COPY_S):
                yield event

    async def shut_down(self) -> None:
        """Ask the node to stop; it answers before it does."""
        with translated(_PEER):
            await self._stub.Shutdown(pb.ShutdownRequest(hello=self._hello), timeout=_RPC_S)

    async def invite(self, commands: AsyncIterator[trust_pb2.InviteCommand]) -> AsyncIterator[trust_pb2.InviteEvent]:
        """Open a pairing window; it lasts as long as this is listened to. Raises what ends it without a new peer."""
        with translated(_PEER):
            async for event in self._trust.Invite(commands, timeout=_INVITE_S):
                yield event

    async def join(self, request: trust_pb2.JoinRequest) -> AsyncIterator[trust_pb2.JoinEvent]:
        """Let the node join another cluster. Raises what hinders it."""
        request.hello.CopyFrom(self._hello)
        with translated(_PEER):
            async for event in self._trust.Join(request, timeout=_JOIN_S):
                yield event

    async def peers(self) -> trust_pb2.ListPeersReply:
        """Who belongs to the cluster."""
        with translated(_PEER):
            return await self._trust.ListPeers(trust_pb2.ListPeersRequest(hello=self._hello), timeout=_RPC_S)

    async def remove_peer(self, peer: str, *, others: str) -> trust_pb2.RemovePeerReply:
        """Remove a peer; ``others`` as in the .proto. Raises TrustInvalid."""
        request = trust_pb2.RemovePeerRequest(hello=self._hello, peer=peer, others=others)
        with translated(_PEER):
            return await self._trust.RemovePeer(request, timeout=_RPC_S)

    async def promote_peer(self, peer: str) -> str:
        """Make a peer an owner; its name. Raises TrustInvalid."""
        request = trust_pb2.PromotePeerRequest(hello=self._hello, peer=peer)
        with translated(_PEER):
            return (await self._trust.PromotePeer(request, timeout=_RPC_S)).name

    @asynccontextmanager
    async def act_as_gateway(self) -> AsyncGenerator[Security]:
        """Inside the block engines let this process in as a gateway of the node; the security to reach them with.

        Raises LinkError.
        """
        pair = make_key_pair()
        request = pb.GatewayRequest(hello=self._hello, certificate=pair.certificate.pem)
        with translated(_PEER):
            call = self._stub.ActAsGateway(request)
            await anext(aiter(call))
        try:
            yield MutualTls(pair, callers=())
        finally:
            call.cancel()

    async def logs(self, *, lines: int, follow: bool) -> AsyncIterator[pb.LogLine]:
        """The newest lines of the node's log, and with ``follow`` those that come."""
        request = pb.LogsRequest(hello=self._hello, lines=lines, follow=follow)
        with translated(_PEER):
            async for line in self._stub.Logs(request, timeout=_LOGS_S):
                yield line


@asynccontextmanager
async def connect(data_dir: Path) -> AsyncGenerator[Admin]:
    """A connection to the node of ``data_dir``. Raises NodeUnreachable, also later, when no node answers there."""
    socket = socket_path(data_dir)
    if not socket.exists():
        raise no_node(data_dir)
    try:
        async with make_unix_channel(str(socket)) as channel:
            yield Admin(channel)
    except (ConnectTimeout, PeerClosed) as exc:
        cause = exc.__cause__
        if isinstance(cause, grpc.aio.AioRpcError) and told_error(cause) is None:
            raise no_node(data_dir) from exc
        raise  # the node told of somebody else


async def status_if_running(data_dir: Path) -> pb.ClusterStatus | None:
    """The cluster as the node of ``data_dir`` sees it; None while none answers there."""
    try:
        async with connect(data_dir) as admin:
            return await admin.status()
    except EdgepipeError:
        return None


def no_node(data_dir: Path) -> NodeUnreachable:
    """What to say when the data directory has no running node."""
    from edgepipe.cluster.founding import home_of

    fact = f"nobody answers at {socket_path(data_dir)}"
    with suppress(ConfigInvalid):  # the node's start says what is wrong with its files
        if (home := home_of(data_dir)) is not None:
            problem = f"this machine belongs to '{home.cluster_name}', but its node does not run"
            return NodeUnreachable(problem, fact=fact, next_step="edgepipe node start")
    return NodeUnreachable(
        "no edgepipe node runs on this machine",
        fact=fact,
        next_step="edgepipe node start    (or, for a first look: edgepipe demo)",
    )


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a verb's asynchronous part."""
    return asyncio.run(work)
