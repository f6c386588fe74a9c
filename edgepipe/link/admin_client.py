"""Calls to a node over its Unix socket: by the command line, and by the node's own gateway."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from edgepipe.backend.types import StageSettings
from edgepipe.link.channels import make_unix_channel, translated
from edgepipe.safe_text import one_line
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.nodes import ClusterStatus, LogLine
from edgepipe.wire.serving import DrainEvent, MeasuredLinks, ReplicateEvent, ServeEvent, ServeRequest, SurveyReply
from edgepipe.wire.tasks import NO_CHOICES, ServeChoices, TaskList, TaskState
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


@asynccontextmanager
async def admin_at(socket: str, *, role: str) -> AsyncGenerator[Admin]:
    """Open a channel to the node with a Unix socket. It connects with the first call. ``role``: of this process."""
    async with make_unix_channel(socket) as channel:
        yield Admin(channel, role=role)


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
    """Connection to the node of this machine; ``admin_at`` opens it. Its replies are safe to print."""

    def __init__(self, channel: grpc.aio.Channel, *, role: str) -> None:
        safe_channel = cast("grpc.aio.Channel", _SafeChannel(channel))
        self._stub = node_pb2_grpc.AdminStub(safe_channel)
        self._trust = trust_pb2_grpc.TrustAdminStub(safe_channel)
        self._hello = hello_to_wire(Hello(role=role))

    async def status(self) -> ClusterStatus:
        """Return the cluster as the node sees it."""
        reply = await self._ask(self._stub.Status, pb.StatusRequest(hello=self._hello))
        return from_wire(reply, ClusterStatus)

    def serve(self, request: ServeRequest) -> AsyncGenerator[ServeEvent]:
        """Yield progress until the model is ready; the last event holds its engine. Raises the node's error."""
        message = to_wire(request, pb.ServeRequest)
        message.hello.CopyFrom(self._hello)
        return self._follow(self._stub.Serve, message, ServeEvent, timeout_s=_SERVE_S)

    async def survey(self, model: str, settings: StageSettings, *, fresh: bool = False) -> SurveyReply:
        """Return a model's shape, devices and links for a plan. The nodes measure what they have not measured yet.

        Raises ModelUnknown.
        """
        wanted = to_wire(settings, common_pb2.StageSettings)
        request = pb.SurveyRequest(hello=self._hello, model=model, settings=wanted, fresh=fresh)
        return from_wire(await self._ask(self._stub.Survey, request, timeout_s=_SURVEY_S), SurveyReply)

    async def measure_links(self, *, remembered: bool = False) -> MeasuredLinks:
        """Measure every directed link between nodes; or return the last measurement (``remembered``)."""
        request = pb.MeasureLinksRequest(hello=self._hello, remembered=remembered)
        return from_wire(await self._ask(self._stub.MeasureLinks, request, timeout_s=_SURVEY_S), MeasuredLinks)

    async def stop_model(self, model: str) -> list[str]:
        """Stop a model (empty: all). Return the names of the stopped models. Raises ModelUnknown."""
        request = pb.StopModelRequest(hello=self._hello, model=model)
        return list((await self._ask(self._stub.StopModel, request, timeout_s=30.0)).stopped)

    async def rescan_models(self) -> None:
        """Make the node read its disk again and report the models on it to the other nodes."""
        await self._ask(self._stub.RescanModels, pb.RescanModelsRequest(hello=self._hello))

    def drain(self, *, undo: bool) -> AsyncGenerator[DrainEvent]:
        """Yield the node's remaining work, until no work is left. Raises NoFeasiblePlacement."""
        request = pb.DrainRequest(hello=self._hello, undo=undo)
        return self._follow(self._stub.Drain, request, DrainEvent, timeout_s=_SERVE_S)

    def replicate(self, model: str, *, copies: int) -> AsyncGenerator[ReplicateEvent]:
        """Yield the progress of each node's copy. Raises ModelUnknown, PlanInvalid, NoFeasiblePlacement."""
        request = pb.ReplicateRequest(hello=self._hello, model=model, copies=copies)
        return self._follow(self._stub.Replicate, request, ReplicateEvent, timeout_s=_COPY_S)

    async def shut_down(self) -> str:
        """Ask the node to stop; the node answers first. Return what becomes of its work; empty if it has none."""
        return (await self._ask(self._stub.Shutdown, pb.ShutdownRequest(hello=self._hello))).note

    def invite(self, commands: AsyncIterator[InviteCommand]) -> AsyncGenerator[InviteEvent]:
        """Open a pairing window; it lasts until the caller stops reading. Raises the error that ends it early."""
        messages = (to_wire(command, trust_pb2.InviteCommand) async for command in commands)
        return self._follow(self._trust.Invite, messages, InviteEvent, timeout_s=_INVITE_S)

    def join(self, request: JoinRequest) -> AsyncGenerator[JoinEvent]:
        """Let the node join another cluster. Raises the node's error."""
        message = to_wire(request, trust_pb2.JoinRequest)
        message.hello.CopyFrom(self._hello)
        return self._follow(self._trust.Join, message, JoinEvent, timeout_s=_JOIN_S)

    async def peers(self) -> ListPeersReply:
        """Return the members of the cluster."""
        reply = await self._ask(self._trust.ListPeers, trust_pb2.ListPeersRequest(hello=self._hello))
        return from_wire(reply, ListPeersReply)

    async def remove_peer(self, peer: str, *, others: str) -> RemovePeerReply:
        """Remove a peer; ``others`` as in the .proto. Raises ConfigInvalid for an unknown name, TrustInvalid."""
        request = trust_pb2.RemovePeerRequest(hello=self._hello, peer=peer, others=others)
        return from_wire(await self._ask(self._trust.RemovePeer, request), RemovePeerReply)

    async def promote_peer(self, peer: str) -> str:
        """Make a peer an owner. Return its name. Raises ConfigInvalid for an unknown name, TrustInvalid."""
        request = trust_pb2.PromotePeerRequest(hello=self._hello, peer=peer)
        return (await self._ask(self._trust.PromotePeer, request)).name

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

    async def issue_ticket(self) -> str:
        """Return a ticket that opens the page once, with the right to manage."""
        return (await self._ask(self._stub.IssueTicket, pb.TicketRequest(hello=self._hello))).ticket

    async def redeem_ticket(self, ticket: str) -> bool:
        """Use a ticket up. Return whether it was valid."""
        request = pb.PageTicket(hello=self._hello, ticket=ticket)
        return (await self._ask(self._stub.RedeemTicket, request)).valid

    async def start_task(self, kind: str, model: str, choices: ServeChoices = NO_CHOICES) -> TaskState:
        """Start a command of edgepipe in the node. Raises RequestInvalid, QueueFull."""
        chosen = to_wire(choices, pb.ServeChoices)
        request = pb.StartTaskRequest(hello=self._hello, kind=kind, model=model, choices=chosen)
        return from_wire(await self._ask(self._stub.StartTask, request), TaskState)

    async def cancel_task(self, task_id: str) -> TaskState:
        """Interrupt a task. Raises RequestInvalid."""
        request = pb.TaskRequest(hello=self._hello, task_id=task_id)
        return from_wire(await self._ask(self._stub.CancelTask, request), TaskState)

    async def task(self, task_id: str) -> TaskState:
        """Return a task with its result. Raises RequestInvalid."""
        request = pb.TaskRequest(hello=self._hello, task_id=task_id)
        return from_wire(await self._ask(self._stub.GetTask, request), TaskState)

    def tasks(self) -> AsyncGenerator[TaskList]:
        """Yield all tasks of the node, and again after each change."""
        return self._follow(self._stub.WatchTasks, pb.WatchTasksRequest(hello=self._hello), TaskList, timeout_s=None)

    def logs(self, *, lines: int, follow: bool) -> AsyncGenerator[LogLine]:
        """Yield the newest lines of the node's log; with ``follow`` also new lines as they come."""
        request = pb.LogsRequest(hello=self._hello, lines=lines, follow=follow)
        return self._follow(self._stub.Logs, request, LogLine, timeout_s=_LOGS_S)

    async def _ask(self, call: Callable[..., Any], request: Message, *, timeout_s: float = _RPC_S) -> Any:
        """Return the node's reply. Raises its error."""
        with translated(_PEER):
            return await call(request, timeout=timeout_s)

    async def _follow(
        self, call: Callable[..., Any], request: object, kind: type[T], *, timeout_s: float | None
    ) -> AsyncGenerator[T]:
        """Yield the node's messages as values. Raises its error. The call ends with the generator."""
        with translated(_PEER):
            running = call(request, timeout=timeout_s)
            try:
                async for message in running:
                    yield from_wire(message, kind)
            finally:
                running.cancel()
