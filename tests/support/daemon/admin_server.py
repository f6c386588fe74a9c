"""A node as commands see it: answers their calls at the socket of a data directory, on threads of this process."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import grpc

from edgepipe.daemon.machine.data_dir import socket_path
from edgepipe.errors import EdgepipeError, ModelUnknown
from edgepipe.ids import NodeId
from edgepipe.wire.codec import to_wire
from edgepipe.wire.errors import error_to_wire
from edgepipe.wire.nodes import ClusterStatus
from edgepipe.wire.trust import ListPeersReply
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1 import node_pb2_grpc, trust_pb2, trust_pb2_grpc

NodeT = TypeVar("NodeT")


class FakeNode:
    """Gives the same answers always, has no model to serve, and notes what it was asked to serve and to stop."""

    def __init__(
        self,
        *,
        status: ClusterStatus | None = None,
        peers: ListPeersReply | None = None,
        survey: EdgepipeError | None = None,
    ) -> None:
        """``survey``: the error of a survey."""
        self.status = status or ClusterStatus(node_id=NodeId("a"))
        self._peers = peers or ListPeersReply(node_id=NodeId("a"))
        self._survey = survey
        self.stopped: list[str] = []  # models; empty: all
        self.asked_to_serve: list[str] = []
        self.names: list[list[str]] = []  # further names of these models

    def __getattr__(self, name: str) -> None:
        """No test asks another method."""

    def Status(self, request: Any, context: Any) -> pb.ClusterStatus:
        return to_wire(self.status, pb.ClusterStatus)

    def ListPeers(self, request: Any, context: Any) -> trust_pb2.ListPeersReply:
        return to_wire(self._peers, trust_pb2.ListPeersReply)

    def Survey(self, request: Any, context: Any) -> NoReturn:
        assert self._survey is not None
        refuse(context, self._survey)

    def StopModel(self, request: pb.StopModelRequest, context: Any) -> pb.StopModelReply:
        self.stopped.append(request.model)
        return pb.StopModelReply(stopped=[request.model])

    def Serve(self, request: pb.ServeRequest, context: Any) -> Iterator[pb.ServeEvent]:
        self.asked_to_serve.append(request.options.model)
        self.names.append(list(request.options.names))
        yield from ()
        refuse(context, ModelUnknown("no node has this model"))

    def MeasureLinks(self, request: Any, context: Any) -> pb.MeasuredLinks:
        return pb.MeasuredLinks()

    def RescanModels(self, request: Any, context: Any) -> pb.RescanModelsReply:
        return pb.RescanModelsReply()

    def Drain(self, request: Any, context: Any) -> Iterator[pb.DrainEvent]:
        yield from ()

    def WatchTasks(self, request: Any, context: Any) -> Iterator[pb.TaskList]:
        yield pb.TaskList()

    def Shutdown(self, request: Any, context: Any) -> pb.ShutdownReply:
        return pb.ShutdownReply()


def refuse(context: Any, error: EdgepipeError) -> NoReturn:
    """End a call with an error of ours."""
    context.set_trailing_metadata((("edgepipe-error-bin", error_to_wire(error).SerializeToString()),))
    context.abort(grpc.StatusCode.INTERNAL, str(error))
    raise AssertionError


@contextmanager
def answering(data_dir: Path, node: NodeT) -> Generator[NodeT]:
    """Let ``node`` answer at the socket of ``data_dir``. It has the methods of the services that are asked."""
    socket = socket_path(data_dir)
    socket.parent.mkdir(parents=True, exist_ok=True)
    server = grpc.server(ThreadPoolExecutor(8))
    node_pb2_grpc.add_AdminServicer_to_server(cast("Any", node), server)
    trust_pb2_grpc.add_TrustAdminServicer_to_server(cast("Any", node), server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield node
    finally:
        server.stop(None).wait()
