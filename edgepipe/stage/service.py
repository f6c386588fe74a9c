"""The gRPC service of a stage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

import grpc.aio

from edgepipe.errors import RemoteProtocolError
from edgepipe.link.serving import Replies
from edgepipe.wire.v1 import stage_pb2
from edgepipe.wire.v1.stage_pb2_grpc import add_StageServicer_to_server

M = TypeVar("M")

FIRST_MESSAGE_S = 10.0  # a connected peer sends its first message at once


class Streams(Protocol):
    """Handlers of the two kinds of streams."""

    async def control(self, messages: AsyncIterator[stage_pb2.ControlMessage], replies: Replies) -> None:
        """Serve an engine's Control stream."""
        ...

    async def ring(self, messages: AsyncIterator[stage_pb2.RingMessage], replies: Replies) -> None:
        """Serve a predecessor's Ring stream."""
        ...


def add_service(streams: Streams, server: grpc.aio.Server) -> None:
    """Register handlers of both kinds of streams on ``server``."""
    add_StageServicer_to_server(_Service(streams), server)  # pyright: ignore[reportArgumentType]


class _Service:
    """gRPC handlers that write through the context, since replies come from several tasks.

    They yield nothing. They are generators only because the error interceptor expects stream handlers to be.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    async def Control(
        self, request_iterator: AsyncIterator[stage_pb2.ControlMessage], context: Replies
    ) -> AsyncIterator[stage_pb2.StageReport]:
        await self._streams.control(request_iterator, context)
        for reply in ():
            yield reply

    async def Ring(
        self, request_iterator: AsyncIterator[stage_pb2.RingMessage], context: Replies
    ) -> AsyncIterator[stage_pb2.Credit]:
        await self._streams.ring(request_iterator, context)
        for reply in ():
            yield reply


async def first_message(messages: AsyncIterator[M]) -> M:
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
