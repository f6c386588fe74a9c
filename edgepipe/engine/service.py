"""The Engine service, which gateways call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc.aio

from edgepipe.engine.requests import GatewayStream
from edgepipe.engine.table import RequestTable
from edgepipe.errors import EdgepipeError, PairingRejected, PeerClosed, RemoteProtocolError, RequestInvalid
from edgepipe.ids import Epoch, NodeId, PipelineId, RequestId
from edgepipe.sampling.bounds import Text
from edgepipe.security.mutual_tls import Security
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, check_hello
from edgepipe.wire.engines import EngineState, EngineTrace
from edgepipe.wire.intake import MAX_ID_BYTES
from edgepipe.wire.requests import (
    Cancellation,
    Resumption,
    opening_hello,
    submission_from_wire,
    welcome_to_wire,
)
from edgepipe.wire.v1 import engine_pb2, engine_pb2_grpc

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class RequestIntake:
    """Streams of all gateways while the engine accepts requests."""

    def __init__(
        self, table: RequestTable, tasks: asyncio.TaskGroup, *, pipeline_id: PipelineId, epoch: Callable[[], Epoch]
    ) -> None:
        self._table = table
        self._tasks = tasks
        self._pipeline_id = pipeline_id
        self._epoch = epoch
        self._readers: dict[GatewayStream, asyncio.Task[None]] = {}

    async def serve(
        self, messages: AsyncIterator[engine_pb2.GatewayMessage], *, gateway: Hello, own: Hello
    ) -> AsyncGenerator[engine_pb2.EngineEvent]:
        """Serve one gateway's stream, until the gateway leaves or ``close``."""
        stream = GatewayStream(NodeId(gateway.node_id))
        reader = self._tasks.create_task(self._read(stream, messages), name=f"gateway:{gateway.node_id}")
        self._readers[stream] = reader
        try:
            yield welcome_to_wire(own, pipeline_id=self._pipeline_id, epoch=self._epoch())
            async for news in stream.events():
                yield news.message
        finally:  # may run in another task, if the garbage collector ends the generator: do not await
            reader.cancel()
            self._readers.pop(stream, None)
            self._table.detach(stream)

    async def close(self, *, flush_s: float) -> None:
        """Send all unsent results to the gateways, then end their streams."""
        try:
            async with asyncio.timeout(flush_s):
                for stream in list(self._readers):
                    await stream.flush()
        except TimeoutError:
            logger.warning("a gateway did not read its results within %.1f s", flush_s)
        for stream, reader in self._readers.items():
            stream.close()
            reader.cancel()

    async def _read(self, stream: GatewayStream, messages: AsyncIterator[engine_pb2.GatewayMessage]) -> None:
        try:
            async for message in messages:
                self._take(stream, message)
                if stream.abandoned:
                    return
        except EdgepipeError as exc:
            logger.warning("gateway %s: %s", stream.node_id, exc)
            stream.abandon()
        except (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError) as exc:
            logger.debug("a gateway's stream broke: %s", exc)
        stream.close()

    def _take(self, stream: GatewayStream, message: engine_pb2.GatewayMessage) -> None:
        """Handle a gateway's message. Raises RequestInvalid for an invalid request id."""
        kind = message.WhichOneof("message")
        if kind not in ("submit", "cancel", "resume"):
            return
        if fact := Text(MAX_ID_BYTES).fault(getattr(message, kind).request_id, None):
            raise RequestInvalid("request_id cannot be used", fact=fact)
        if kind == "submit":
            self._submit(stream, message.submit)
        elif kind == "cancel":
            self._table.cancel(stream, from_wire(message.cancel, Cancellation))
        else:
            self._table.resume(stream, from_wire(message.resume, Resumption))

    def _submit(self, stream: GatewayStream, message: engine_pb2.Submit) -> None:
        try:
            submission = submission_from_wire(message)
        except EdgepipeError as error:
            request_id = RequestId(message.request_id)
            self._table.refuse(stream, request_id, message.attempt, message.num_choices, error)
        else:
            self._table.submit(stream, submission)


class EngineService(engine_pb2_grpc.EngineServicer):
    """Translates calls; ``RequestTable`` handles them."""

    def __init__(
        self,
        *,
        hello: Hello,
        security: Security,
        intake: Callable[[], RequestIntake | None],
        state: Callable[[], EngineState],
        trace: Callable[[int], EngineTrace | None],
    ) -> None:
        """``trace``: returns what ran after a step; None while no pipeline is open."""
        self._hello = hello
        self._security = security
        self._intake = intake
        self._state = state
        self._trace = trace

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service on a server."""
        engine_pb2_grpc.add_EngineServicer_to_server(self, server)

    async def Generate(
        self, request_iterator: AsyncIterator[engine_pb2.GatewayMessage], context: Context
    ) -> AsyncGenerator[engine_pb2.EngineEvent]:
        """Serve a gateway's stream with all its requests. Raises VersionMismatch, PairingRejected, PeerClosed."""
        first = await anext(request_iterator, None)
        if first is None:
            raise RemoteProtocolError("the gateway closed its stream before its hello")
        gateway = opening_hello(first)
        check_hello(gateway)
        self._security.require_node(context, gateway.node_id)
        if gateway.cluster_id and self._hello.cluster_id and gateway.cluster_id != self._hello.cluster_id:
            raise PairingRejected(
                "the gateway belongs to another cluster",
                fact=f"it is in '{gateway.cluster_id}', this engine in '{self._hello.cluster_id}'",
            )
        intake = self._intake()
        if intake is None:
            raise self._not_ready()
        async for event in intake.serve(request_iterator, gateway=gateway, own=self._hello):
            yield event

    async def Describe(self, request: engine_pb2.DescribeEngine, context: Context) -> engine_pb2.EngineState:
        """Return the engine's state."""
        return to_wire(self._state(), engine_pb2.EngineState)

    async def Trace(self, request: engine_pb2.TraceEngine, context: Context) -> engine_pb2.EngineTrace:
        """Return a trace of recent steps. Raises PeerClosed while no pipeline is open."""
        trace = self._trace(request.after_step)
        if trace is None:
            raise self._not_ready()
        return to_wire(trace, engine_pb2.EngineTrace)

    def _not_ready(self) -> EdgepipeError:
        state = self._state()
        return state.error or PeerClosed(
            f"the engine of '{state.model}' takes no requests", fact=f"it is {state.state}", next_step="try again soon"
        )
