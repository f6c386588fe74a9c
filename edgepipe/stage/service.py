"""The gRPC service of a stage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeVar

import grpc.aio

from edgepipe.errors import RemoteProtocolError
from edgepipe.link.receiver import RingReceiver
from edgepipe.link.serving import Replies, RingStream
from edgepipe.link.shaped import Network, arriving, delayed_replies
from edgepipe.wire.codec import from_wire
from edgepipe.wire.common import Hello, check_hello, hello_from_wire
from edgepipe.wire.pipelines import OpenRing, PipelineSpec, spec_from_wire
from edgepipe.wire.plans import ControlCommand, commands_from_wire
from edgepipe.wire.v1 import common_pb2, stage_pb2
from edgepipe.wire.v1.stage_pb2_grpc import add_StageServicer_to_server

M = TypeVar("M")

FIRST_MESSAGE_S = 10.0  # a connected peer sends its first message at once


class Commands:
    """An engine's commands over an opened Control stream."""

    def __init__(self, messages: AsyncIterator[stage_pb2.ControlMessage]) -> None:
        self._messages = messages

    async def feed(
        self,
        take: Callable[[Sequence[ControlCommand]], None],
        *,
        refuse: Callable[[Exception], None],
    ) -> None:
        """Pass each message's commands to ``take``, and the error of one that cannot be read to ``refuse``."""
        async for message in self._messages:
            try:
                commands = commands_from_wire(message)
            except Exception as exc:
                refuse(exc)
            else:
                take(commands)


class Frames:
    """A predecessor's activations over an opened Ring stream."""

    def __init__(self, messages: AsyncIterator[stage_pb2.RingMessage], replies: Replies) -> None:
        self._messages = messages
        self._replies = replies
        self.strays = 0  # frames of other epochs, dropped

    async def feed(self, receiver: RingReceiver, network: Network | None) -> None:
        """Pass the frames to ``receiver`` and its grants back, over ``network`` (None: directly), until the end.

        Raises RemoteProtocolError.
        """
        async with delayed_replies(network, self._replies) as delayed, arriving(network, self._messages) as arrived:
            stream = RingStream(receiver, delayed)
            try:
                await stream.serve(arrived)
            finally:
                self.strays = stream.strays


class Streams(Protocol):
    """Handlers of the two kinds of streams."""

    async def control(self, spec: PipelineSpec, commands: Commands, replies: Replies, *, peer: Hello) -> None:
        """Serve an engine's Control stream."""
        ...

    async def ring(self, opening: OpenRing, frames: Frames, *, peer: Hello) -> None:
        """Serve a predecessor's Ring stream."""
        ...


def add_service(streams: Streams, server: grpc.aio.Server) -> None:
    """Register handlers of both kinds of streams on ``server``."""
    add_StageServicer_to_server(_Service(streams), server)  # pyright: ignore[reportArgumentType]


async def serve_control(streams: Streams, messages: AsyncIterator[stage_pb2.ControlMessage], replies: Replies) -> None:
    """Serve a Control stream from its first message. Raises RemoteProtocolError, VersionMismatch."""
    message = await _first_message(messages)
    if not message.HasField("open"):
        raise RemoteProtocolError("a Control stream begins with OpenPipeline")
    peer = _checked(message.open.hello)
    await streams.control(spec_from_wire(message.open), Commands(messages), replies, peer=peer)


async def serve_ring(streams: Streams, messages: AsyncIterator[stage_pb2.RingMessage], replies: Replies) -> None:
    """Serve a Ring stream from its first message. Raises RemoteProtocolError, VersionMismatch."""
    message = await _first_message(messages)
    if not message.HasField("open"):
        raise RemoteProtocolError("a Ring stream begins with OpenRing")
    peer = _checked(message.open.hello)
    await streams.ring(from_wire(message.open, OpenRing), Frames(messages, replies), peer=peer)


class _Service:
    """gRPC handlers that write through the context, since replies come from several tasks.

    They yield nothing. They are generators only because the error interceptor expects stream handlers to be.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    async def Control(
        self, request_iterator: AsyncIterator[stage_pb2.ControlMessage], context: Replies
    ) -> AsyncIterator[stage_pb2.StageReport]:
        await serve_control(self._streams, request_iterator, context)
        for reply in ():
            yield reply

    async def Ring(
        self, request_iterator: AsyncIterator[stage_pb2.RingMessage], context: Replies
    ) -> AsyncIterator[stage_pb2.Credit]:
        await serve_ring(self._streams, request_iterator, context)
        for reply in ():
            yield reply


def _checked(message: common_pb2.Hello) -> Hello:
    hello = hello_from_wire(message)
    check_hello(hello)
    return hello


async def _first_message(messages: AsyncIterator[M]) -> M:
    """Return a stream's first message. Raises RemoteProtocolError if none arrives in time."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            async for message in messages:
                return message
    except TimeoutError as exc:
        raise RemoteProtocolError(
            "a peer opened a stream but sent nothing", fact=f"waited {FIRST_MESSAGE_S:g} s"
        ) from exc
    raise RemoteProtocolError("a stream ended before its first message")
