"""The daemon's gRPC services: thin handlers that call the node's parts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from edgepipe.backend.types import StageSettings
from edgepipe.cluster.admission import cluster_label
from edgepipe.cluster.heartbeats import Heartbeats
from edgepipe.daemon.device.device import DeviceHost
from edgepipe.daemon.files.batch_sources import BatchSources
from edgepipe.daemon.files.draft_files import DraftFiles
from edgepipe.daemon.files.models import Models
from edgepipe.daemon.machine.log_tail import LogTail
from edgepipe.daemon.network.guests import Guests
from edgepipe.daemon.network.link_probes import LinkProbes
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.offers import ClusterSummary, NodeLife, Spreading
from edgepipe.daemon.page_tickets import PageTickets
from edgepipe.daemon.processes.children import Children
from edgepipe.daemon.serving.alive_proof import AliveProofs
from edgepipe.daemon.serving.drain import Drain
from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.daemon.serving.replication import Replication
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.daemon.serving.serving import Serving
from edgepipe.daemon.tasks.runner import Tasks
from edgepipe.errors import AccessDenied, PairingRejected, QueueFull, VersionMismatch
from edgepipe.security.access import ProcessKind
from edgepipe.security.mutual_tls import Security
from edgepipe.wire.batches import ReadBatchRequest
from edgepipe.wire.bounds import check_numbers
from edgepipe.wire.children import ChildReport, PrepareRequest, ProfileLayerRequest
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, check_hello, epoch_from_wire, hello_from_wire
from edgepipe.wire.serving import (
    KeepCopyRequest,
    ProfileLinksReply,
    RebalanceRequest,
    ServeRecord,
    ServeRequest,
    StartEngineRequest,
    VouchReply,
)
from edgepipe.wire.tasks import ServeChoices, TaskList
from edgepipe.wire.v1 import common_pb2, node_pb2_grpc
from edgepipe.wire.v1 import node_pb2 as pb

MAX_READS_PER_NODE = 16  # reads at a time; a node fetches one tensor at a time, and the metadata of a few models
_MANIFEST_PART_BYTES = 1 << 20
_MAX_LOG_LINES = 2000


Admit = Callable[[Any], None]
"""Checks a request with a hello: its numbers, then who calls. Raises EdgepipeError."""


def admit_to(own: Hello) -> Admit:
    """Return a check of requests: numbers within their bounds, same protocol, same cluster.

    It raises RemoteProtocolError, VersionMismatch or PairingRejected.
    """

    def admit(request: Any) -> None:
        check_numbers(request)
        hello = hello_from_wire(request.hello)
        check_hello(hello, own_name=own.node_name)
        if hello.cluster_id != own.cluster_id:
            raise PairingRejected(
                f"{hello.node_name or hello.role} belongs to another cluster",
                fact=f"it is in {cluster_label(hello)}, this node in {cluster_label(own)}",
                next_step="to bring them together: edgepipe node invite on one, edgepipe node join on the other",
            )

    return admit


@dataclass(kw_only=True, eq=False)
class NodeService(node_pb2_grpc.NodeServicer):
    """Serves other daemons, and engines."""

    admit: Admit
    security: Security
    heartbeats: Heartbeats
    device: DeviceHost
    engines: EngineHost
    models: Models
    peers: Peers
    book: ServeBook
    proofs: AliveProofs
    links: LinkProbes
    replication: Replication
    batches: BatchSources
    record_s: float  # how long a stage's request waits until this node believes that its engine is the right one

    async def Heartbeat(self, request_iterator: Any, context: Any) -> AsyncGenerator[pb.Beat]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Answer each beat with one beat."""
        async for beat in self.heartbeats.answer(request_iterator, context):
            yield beat

    async def Prepare(self, request: pb.PrepareRequest, context: Any) -> AsyncGenerator[pb.PrepareEvent]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fetch missing tensors, reserve memory, load a stage."""
        self.admit(request)
        self.security.require_node(context, request.hello.node_id)
        engine_node, engine = request.hello.node_id, self.security.caller(context, ProcessKind.ENGINE)
        wanted = from_wire(request, PrepareRequest)
        await self.book.until_engine(wanted.pipeline_id, engine_node, wanted.manifest_hash, timeout_s=self.record_s)
        model = await self.models.adopt(
            wanted.model,
            manifest_hash=wanted.manifest_hash,
            first_source=wanted.weights_node,
            wanted_by=self._other(request.hello),
        )
        fetching = self.models.fetch(model, wanted.placement.slices, first_source=wanted.weights_node)
        async with aclosing(fetching):
            async for progress in fetching:
                yield pb.PrepareEvent(progress=to_wire(progress, pb.PrepareProgress))
        drafts = DraftFiles(self.models, wanted, wanted_by=self._other(request.hello))
        async with aclosing(drafts.fetch()) as fetching:
            async for progress in fetching:
                yield pb.PrepareEvent(progress=to_wire(progress, pb.PrepareProgress))
        preparing = self.device.prepare(
            wanted,
            engine_node=engine_node,
            path=str(model.path),
            config=model.as_placed([wanted.placement]).config,
            engine=engine,
            weights=model.drafted_by(drafts.model).weights,
            draft_path=drafts.path,
        )
        async for event in preparing:
            yield to_wire(event, pb.PrepareEvent)

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseReply:
        """End a pipeline's stage here, for the node of its present or recorded engine."""
        self.admit(request)
        self.security.require_node(context, request.hello.node_id)
        held = self.book.held(request.pipeline_id)
        if request.hello.node_id not in (self.device.engine_node(request.pipeline_id), held and held.engine_node):
            raise AccessDenied(
                "only the node of the stage's engine releases it", fact=f"node {request.hello.node_id} asked"
            )
        epoch = epoch_from_wire(request.epoch) if request.HasField("epoch") else None
        await self.device.release(request.pipeline_id, epoch=epoch)
        return pb.ReleaseReply()

    async def StartEngine(self, request: pb.StartEngineRequest, context: Any) -> pb.StartEngineReply:
        """Run a model's engine beside this daemon, once, for the node that had the model served.

        End the pause of an engine that has crashed, for the nodes that may place it.
        """
        self.admit(request)
        self.security.require_node(context, request.hello.node_id)
        wanted = from_wire(request, StartEngineRequest)
        self.book.merge(request.hello.node_id, [from_wire(request.record, ServeRecord)])
        if self.engines.is_paused(wanted.pipeline_id):
            self.book.require_director(request.hello.node_id, wanted.pipeline_id)
            self.engines.start_now(wanted.pipeline_id)
            return pb.StartEngineReply()
        held = self.book.held(wanted.pipeline_id)
        if (
            held is None
            or held.stopped
            or held.asker != request.hello.node_id
            or not self.peers.is_self(held.engine_node)
        ):
            raise AccessDenied("no record of the caller asks for this engine here", next_step="serve the model again")
        model = await self.models.adopt(
            held.spec.model,
            manifest_hash=held.spec.manifest_hash,
            first_source=request.hello.node_id,
            wanted_by=self._other(request.hello),
        )
        if self.engines.state_of(wanted.pipeline_id) is not None:
            raise AccessDenied("the pipeline has its engine here already", fact=wanted.pipeline_id)
        model = model.as_placed(held.spec.stages)
        await self.engines.start(
            replace(wanted, spec=held.spec), model_config=model.config_json, model_weights=model.weights_json
        )
        return pb.StartEngineReply()

    async def StopEngine(self, request: pb.StopEngineRequest, context: Any) -> pb.StopEngineReply:
        """End an engine that runs here."""
        self.admit(request)
        self.book.merge(request.hello.node_id, [from_wire(request.record, ServeRecord)])
        held = self.book.held(request.pipeline_id)
        if held is not None and not held.stopped and self.peers.is_self(held.engine_node):
            raise AccessDenied("no record says that this model is stopped")
        await self.engines.stop(request.pipeline_id)
        return pb.StopEngineReply()

    async def StandBy(self, request: pb.StandByRequest, context: Any) -> pb.StandByReply:
        """Start a process for an engine in advance."""
        self.admit(request)
        await self.engines.stand_by()
        return pb.StandByReply()

    async def Vouch(self, request: pb.VouchRequest, context: Any) -> pb.VouchReply:
        """Return whether this node hears another, with that node's proof, and the pipeline's highest epoch here."""
        self.admit(request)
        if request.challenge:
            self.security.require_node(context, request.hello.node_id)  # its calls are counted
        hears = self.peers.reaches(request.node_id)
        reply = VouchReply(
            hears=hears,
            draining=self.peers.own_drains,
            highest=self.device.epoch_of(request.pipeline_id),
            proof=await self._proof(request) if hears and request.challenge else b"",
        )
        return to_wire(reply, pb.VouchReply)

    async def _proof(self, request: pb.VouchRequest) -> bytes:
        """Return a node's proof that it runs the pipeline's engine: of this node, or passed on from another."""
        caller = request.hello.node_id
        if not self.peers.is_self(request.node_id):
            if not self.proofs.may_relay(caller):
                return b""
            return await self.peers.proof_of(request.node_id, request.pipeline_id, request.challenge)
        runs = self.book.is_here(request.pipeline_id) and self.engines.state_of(request.pipeline_id) is not None
        return self.proofs.prove(request.pipeline_id, request.challenge, caller=caller) if runs else b""

    async def Rebalance(self, request: pb.RebalanceRequest, context: Any) -> pb.RebalanceReply:
        """Place anew a pipeline whose engine runs here."""
        self.admit(request)
        self.security.require_node(context, request.hello.node_id)
        self.book.require_director(request.hello.node_id, request.pipeline_id)
        wanted = from_wire(request, RebalanceRequest)
        return pb.RebalanceReply(
            changed=await self.engines.rebalance(
                wanted.pipeline_id, num_nodes=wanted.num_nodes, moves=wanted.moves, stages=wanted.stages
            )
        )

    async def KeepCopy(self, request: pb.KeepCopyRequest, context: Any) -> AsyncGenerator[pb.PrepareProgress]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fetch parts of a model and keep them."""
        self.admit(request)
        self.security.require_node(context, request.hello.node_id)
        self.book.require_content(request.hello.node_id, request.manifest_hash)
        keeping = self.replication.keep(from_wire(request, KeepCopyRequest), asking=request.hello.node_id)
        async for progress in keeping:
            yield to_wire(progress, pb.PrepareProgress)

    async def ReadBatch(self, request: pb.ReadBatchRequest, context: Any) -> AsyncGenerator[pb.BatchPart]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield what the gateway of a batch's keeper lacks of it."""
        self.admit(request)
        caller = self.security.caller(context, ProcessKind.GATEWAY)
        keeper = caller.node_id if caller is not None else None
        async with aclosing(self.batches.read(from_wire(request, ReadBatchRequest), keeper=keeper)) as parts:
            async for part in parts:
                yield to_wire(part, pb.BatchPart)

    async def ProfileLayer(self, request: pb.ProfileLayerRequest, context: Any) -> pb.LayerProfile:
        """Measure a layer of a shape on this node's device."""
        self.admit(request)
        profile = await self.device.profile_layer(from_wire(request, ProfileLayerRequest))
        return to_wire(profile, pb.LayerProfile)

    async def ProfileLinks(self, request: pb.ProfileLinksRequest, context: Any) -> pb.ProfileLinksReply:
        """Measure the links from here to other nodes."""
        self.admit(request)
        wanted = list(request.node_ids)
        if request.known_only:
            return to_wire(ProfileLinksReply(links=tuple(self.links.known(wanted))), pb.ProfileLinksReply)
        return to_wire(await self.links.measure(wanted, fresh=request.fresh), pb.ProfileLinksReply)

    def _other(self, hello: common_pb2.Hello) -> str:
        """Return the caller's node for ``Models.adopt``: empty for this one."""
        return "" if self.peers.is_self(hello.node_id) else hello.node_id


class WeightsService(node_pb2_grpc.WeightsServicer):
    """Serves nodes that lack tensors or files; each may read a few at a time."""

    def __init__(self, *, admit: Admit, security: Security, models: Models) -> None:
        self._admit = admit
        self._security = security
        self._models = models
        self._reads: Counter[str] = Counter()  # reads under way, by node

    async def GetManifest(self, request: pb.ManifestRequest, context: Any) -> AsyncGenerator[pb.ManifestReply]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield the manifest of a model on this node in parts."""
        self._admit(request)
        with self._reading(context):
            manifest = await self._models.manifest_json(request.model)
            for start in range(0, len(manifest), _MANIFEST_PART_BYTES):
                yield pb.ManifestReply(manifest=manifest[start : start + _MANIFEST_PART_BYTES])

    async def ReadTensor(self, request: pb.ReadTensorRequest, context: Any) -> AsyncGenerator[pb.DataChunk]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield a tensor's bytes from an offset on."""
        self._admit(request)
        with self._reading(context):
            offset = request.offset
            async for data in self._models.read_tensor(
                request.model, request.manifest_hash, request.name, offset=offset, bytes_per_s=request.bytes_per_s
            ):
                yield pb.DataChunk(offset=offset, data=data)
                offset += len(data)

    async def ReadFile(self, request: pb.ReadFileRequest, context: Any) -> AsyncGenerator[pb.DataChunk]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield a metadata file's bytes from an offset on."""
        self._admit(request)
        with self._reading(context):
            offset = request.offset
            async for data in self._models.read_file(request.model, request.manifest_hash, request.name, offset=offset):
                yield pb.DataChunk(offset=offset, data=data)
                offset += len(data)

    @contextmanager
    def _reading(self, context: Any) -> Generator[None]:
        """Count a read. Raises QueueFull to a node with too many reads."""
        peer = self._security.caller(context, ProcessKind.NODE)
        node_id = peer.node_id if peer is not None else ""
        if self._reads[node_id] >= MAX_READS_PER_NODE:
            raise QueueFull("this node already reads from here", fact=f"{MAX_READS_PER_NODE} reads are under way")
        self._reads[node_id] += 1
        try:
            yield
        finally:
            self._reads[node_id] -= 1
            if not self._reads[node_id]:
                del self._reads[node_id]


class ChildrenService(node_pb2_grpc.ChildrenServicer):
    """Serves this daemon's own children, over the Unix socket."""

    def __init__(self, children: Children) -> None:
        self._children = children

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncGenerator[pb.ChildCommand]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take reports, send commands."""
        reports = (from_wire(report, ChildReport) async for report in request_iterator)
        async for command in self._children.attach(reports):
            yield to_wire(command, pb.ChildCommand)


@dataclass(kw_only=True, eq=False)
class AdminService(node_pb2_grpc.AdminServicer):
    """Serves the command line of this machine, over the Unix socket, which only its owner can open."""

    serving: Serving
    views: ClusterSummary
    logs: LogTail
    node: NodeLife
    models: Models
    guests: Guests
    drain: Drain
    replication: Replication
    presence: Spreading
    tickets: PageTickets
    tasks: Tasks

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.ClusterStatus:
        """Return the cluster as this node sees it."""
        admit_command_line(request)
        return to_wire(self.views.status(), pb.ClusterStatus)

    async def Serve(self, request: pb.ServeRequest, context: Any) -> AsyncGenerator[pb.ServeEvent]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Serve a model; the last event holds its engine."""
        admit_command_line(request)
        await self.models.rescan()
        async for event in self.serving.serve(from_wire(request, ServeRequest)):
            yield to_wire(event, pb.ServeEvent)

    async def Survey(self, request: pb.SurveyRequest, context: Any) -> pb.SurveyReply:
        """Measure the inputs of a model's plan."""
        admit_command_line(request)
        await self.models.rescan()
        survey = await self.serving.survey(
            request.model, from_wire(request.settings, StageSettings), fresh=request.fresh
        )
        return to_wire(survey, pb.SurveyReply)

    async def MeasureLinks(self, request: pb.MeasureLinksRequest, context: Any) -> pb.MeasuredLinks:
        """Measure the latency and rate of every link between nodes, or return the last measurement."""
        admit_command_line(request)
        if not request.remembered:
            await self.serving.measure_links()
        return to_wire(self.serving.measured_links, pb.MeasuredLinks)

    async def StopModel(self, request: pb.StopModelRequest, context: Any) -> pb.StopModelReply:
        """Stop a model, or all models."""
        admit_command_line(request)
        return pb.StopModelReply(stopped=await self.serving.stop(request.model))

    async def RescanModels(self, request: pb.RescanModelsRequest, context: Any) -> pb.RescanModelsReply:
        """Scan the disk: a command pulled or removed a model."""
        admit_command_line(request)
        await self.models.rescan()
        return pb.RescanModelsReply()

    async def Shutdown(self, request: pb.ShutdownRequest, context: Any) -> pb.ShutdownReply:
        """Stop this node in order; the answer comes before. Accept any version: after an upgrade the new command line
        stops the old node."""
        return pb.ShutdownReply(note=await self.node.shut_down())

    async def Logs(self, request: pb.LogsRequest, context: Any) -> AsyncIterator[pb.LogLine]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield lines of the node's log."""
        last = min(request.lines or _MAX_LOG_LINES, _MAX_LOG_LINES)
        async for line in self.logs.lines(last=last, follow=request.follow):
            yield pb.LogLine(source="node", text=line)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> AsyncGenerator[pb.DrainEvent]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move all stages and engines away, or take work again."""
        admit_command_line(request)
        if request.undo:
            self.drain.undo()
            return
        async for event in self.drain.run():
            yield to_wire(event, pb.DrainEvent)

    async def Replicate(self, request: pb.ReplicateRequest, context: Any) -> AsyncGenerator[pb.ReplicateEvent]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Copy a model's parts to other disks."""
        admit_command_line(request)
        await self.models.rescan()
        async for event in self.replication.replicate(request.model, copies=request.copies):
            yield to_wire(event, pb.ReplicateEvent)

    async def ActAsGateway(self, request: pb.GatewayRequest, context: Any) -> AsyncIterator[pb.GatewayReply]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Let a command call engines until it ends the stream."""
        admit_command_line(request)
        with self.guests.admit(request.certificate):
            await self.presence.spread()
            yield pb.GatewayReply()
            await asyncio.Event().wait()  # the command's end cancels this wait

    async def IssueTicket(self, request: pb.TicketRequest, context: Any) -> pb.PageTicket:
        """Return a ticket that opens the page once."""
        admit_command_line(request)
        return pb.PageTicket(ticket=self.tickets.issue())

    async def RedeemTicket(self, request: pb.PageTicket, context: Any) -> pb.RedeemReply:
        """Use a ticket up, for this node's gateway."""
        admit_command_line(request)
        return pb.RedeemReply(valid=self.tickets.redeem(request.ticket))

    async def StartTask(self, request: pb.StartTaskRequest, context: Any) -> pb.TaskState:
        """Start a command of edgepipe as a child process."""
        admit_command_line(request)
        choices = from_wire(request.choices, ServeChoices)
        return to_wire(self.tasks.start(request.kind, request.model, choices), pb.TaskState)

    async def CancelTask(self, request: pb.TaskRequest, context: Any) -> pb.TaskState:
        """Interrupt a task."""
        admit_command_line(request)
        return to_wire(self.tasks.cancel(request.task_id), pb.TaskState)

    async def GetTask(self, request: pb.TaskRequest, context: Any) -> pb.TaskState:
        """Return a task with its result."""
        admit_command_line(request)
        return to_wire(self.tasks.get(request.task_id), pb.TaskState)

    async def WatchTasks(self, request: pb.WatchTasksRequest, context: Any) -> AsyncGenerator[pb.TaskList]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield all tasks, and again after each change."""
        admit_command_line(request)
        async for tasks in self.tasks.watch():
            yield to_wire(TaskList(tasks=tasks), pb.TaskList)


def admit_command_line(request: Any) -> None:
    """Check a command line's request. Raises RemoteProtocolError, and VersionMismatch if the node's version differs."""
    check_numbers(request)
    try:
        check_hello(hello_from_wire(request.hello), own_name="the running node")
    except VersionMismatch as error:
        raise error.changed(
            what="the command line and the running node speak different versions of the protocol",
            next_step="edgepipe node stop, then edgepipe node start",
        ) from error
