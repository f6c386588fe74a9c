"""One Ring stream at the receiving stage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio

from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import StepId
from edgepipe.link.receiver import Grant, RingReceiver
from edgepipe.wire.codec import to_wire
from edgepipe.wire.common import epoch_from_wire, epoch_to_wire
from edgepipe.wire.v1 import stage_pb2

logger = logging.getLogger(__name__)

GRANTS_WITHIN_S = 0.2  # delay after the first step that a grant covers; the sender keeps that step until then


class Replies(Protocol):
    """The replies of a handler: ``grpc.aio.ServicerContext``."""

    async def write(self, message: Any, /) -> None:
        """Send one reply."""
        ...


class _StreamEnded(Exception):
    """The receiver no longer needs this stream."""


class RingStream:
    """Feeds a receiver from one stream's frames and writes its grants back, until one side ends the stream."""

    def __init__(self, receiver: RingReceiver, replies: Replies) -> None:
        self._receiver = receiver
        self._replies = replies
        self._epoch = epoch_to_wire(receiver.epoch)
        self._due = asyncio.Event()  # a grant must be written
        self._timer: asyncio.TimerHandle | None = None  # set while a grant waits for others
        self._over = False
        self._received = 0  # bytes of activations that came
        self.strays = 0  # frames of other epochs, dropped

    async def serve(self, messages: AsyncIterator[stage_pb2.RingMessage]) -> None:
        """Run the stream, its opening message already read. Raises RemoteProtocolError; the stage lives on."""
        self._receiver.attach(self)  # the first grant says that this end is open, and what came over another stream
        failure: RemoteProtocolError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write_grants(), name="ring-grants")
                try:
                    await self._read_frames(messages)
                except RemoteProtocolError as exc:
                    failure = exc
                self.ended()  # no cancellation: a write that is cut short keeps gRPC from sending the status
        except* _StreamEnded:
            logger.debug("ring stream ended: the receiver is closed, has a newer one, or the sender is done")
        finally:
            self._forget_timer()
            self._receiver.detach(self)
        if failure is not None:
            raise failure

    def granted(self, *, soon: bool = False) -> None:
        """See ``Feed.granted``."""
        if not soon:
            self._due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GRANTS_WITHIN_S, self._due.set)

    def ended(self) -> None:
        """See ``Feed.ended``."""
        self._over = True
        self._due.set()

    async def _read_frames(self, messages: AsyncIterator[stage_pb2.RingMessage]) -> None:
        async for message in messages:
            frame = message.frame
            if not message.HasField("frame"):
                raise RemoteProtocolError("the link carried a message without a frame")
            data = frame.data  # a copy
            self._received += len(data)
            if frame.receipt:
                self.granted()
            if frame.epoch != self._epoch:
                self.strays += 1
                logger.debug("frame of epoch %s dropped", epoch_from_wire(frame.epoch))
                continue
            self._receiver.frame(StepId(frame.step), frame.chunk, data, frame.sent_us, bulk=frame.bulk)
            await self._receiver.room()

    async def _write_grants(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            self._forget_timer()
            if self._over:
                raise _StreamEnded
            try:
                await self._replies.write(self._credit(self._receiver.grant()))
            except (grpc.aio.AioRpcError, grpc.aio.BaseError):
                return  # the stream is gone; the reader sees its end

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _credit(self, grant: Grant) -> stage_pb2.Credit:
        credit = stage_pb2.Credit(
            epoch=self._epoch,
            step=grant.step,
            credits=grant.credits,
            bulk_step=grant.bulk_step,
            bulk_credits=grant.bulk_credits,
            received=self._received,
        )
        if grant.sample is not None:
            credit.sample.CopyFrom(to_wire(grant.sample, stage_pb2.LinkSample))
        return credit
