"""The sending end of one hop over gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc.aio

from edgepipe.backend.types import Activations, TokenIds
from edgepipe.clock import Clock
from edgepipe.errors import ConnectTimeout, EdgepipeError, PeerClosed, Retry, SendTimeout
from edgepipe.ids import StepId
from edgepipe.link.channels import from_rpc_error, make_channel
from edgepipe.link.deadline import Deadline
from edgepipe.link.departures import Departures, Piece
from edgepipe.link.pacing import MOST_PIECE_BYTES
from edgepipe.link.protocol import OnSample, RingTarget, SendStats
from edgepipe.link.shaped import Network, PlainLine, ShapedStream
from edgepipe.plain_words import plain_call
from edgepipe.security.mutual_tls import Security
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, epoch_to_wire, hello_to_wire
from edgepipe.wire.reports import LinkSample
from edgepipe.wire.v1 import stage_pb2
from edgepipe.wire.v1.stage_pb2_grpc import StageStub

logger = logging.getLogger(__name__)

RingCall = Any  # grpc.aio.StreamStreamCall[RingMessage, Credit], which grpc's stubs cannot make
Credits = AsyncIterator[stage_pb2.Credit]
Dial = Callable[..., RingCall]

# Pause after an attempt that moved no step: the first one, doubling, and the longest.
_REDIAL_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


def redial_pause_s(in_vain: int) -> float:
    """Return the pause after ``in_vain`` attempts in a row that moved no step."""
    return min(_REDIAL_PAUSE_S * 2 ** min(in_vain, 10), _LONGEST_PAUSE_S)


class RingSender:
    """Sends one stage's activations to the next over a channel of its own."""

    def __init__(
        self,
        target: RingTarget,
        *,
        hello: Hello,
        security: Security,
        clock: Clock,
        on_sample: OnSample,
        most_piece_bytes: int = MOST_PIECE_BYTES,
        network: Network | None = None,
    ) -> None:
        """``network`` emulates a network; None sends as fast as the real one takes."""
        self.stats = SendStats()
        self._target = target
        self._hello = hello_to_wire(hello)
        self._credentials = security.to_process(target.certificate)
        self._clock = clock
        self._on_sample = on_sample
        self._network = network
        self._wire = network.wire() if network is not None else None
        self._epoch, self._slice = epoch_to_wire(target.opening.epoch), target.opening.slice
        self._departures = Departures(max_queued=target.max_queued, most_piece_bytes=most_piece_bytes)
        self._begun_s = [0.0, 0.0]  # when the newest express and the newest bulk step began to leave (monotonic)
        self._wake = asyncio.Event()  # something may be written
        self._connected = asyncio.Event()
        self._progress = False  # the stream in use has moved a step
        limit_s = target.deadline_s
        self._deadlines = [Deadline(limit_s=limit_s, on_expired=self._expire) for _ in range(2)]  # express, bulk
        self._expired = asyncio.Event()

    async def connected(self) -> None:
        """See ``Outgoing.connected``."""
        await self._connected.wait()

    def send(self, step: StepId, activations: Activations | TokenIds, *, bulk: bool) -> None:
        """See ``Outgoing.send``."""
        self._departures.put(step, activations, self._clock.monotonic_s(), bulk=bulk)
        if not self._deadlines[bulk].running:
            self._deadlines[bulk].restart()
        self._wake.set()

    async def run(self) -> None:
        """See ``Outgoing.run``."""
        channel = make_channel(self._target.address, self._credentials)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(), name=f"ring-deadline:{self._target.address}")
                await self._reach(channel)
                await self._dial_for_ever(StageStub(channel).Ring)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            for deadline in self._deadlines:
                deadline.close()
            await channel.close()

    async def _reach(self, channel: grpc.aio.Channel) -> None:
        """Wait for a connection. Raises ConnectTimeout: the other side already listens, so the obstacle is in
        between."""
        try:
            async with asyncio.timeout(self._target.reach_s):
                await channel.channel_ready()
        except TimeoutError as exc:
            raise ConnectTimeout(
                f"the stage at {self._target.address} cannot be reached",
                fact=f"there was no connection within {self._target.reach_s:g} s",
                next_step="let its port through the firewall of its machine",
            ) from exc

    async def _dial_for_ever(self, ring: Dial) -> None:
        in_vain = 0
        while True:
            self._progress = False
            self._departures.rewind()
            try:
                await self._stream(ring)
            except EdgepipeError as exc:
                if _is_cancelled():  # a group of tasks reports a break of the same moment instead
                    raise asyncio.CancelledError from exc
                if exc.retry is not Retry.SAFE or isinstance(exc, ConnectTimeout):
                    raise
                level = (
                    logging.WARNING if in_vain else logging.INFO
                )  # one break is no fault: a stage that ends hangs up
                logger.log(level, "link to %s broke, dialling again: %s", self._target.address, exc)
            in_vain = 0 if self._progress else in_vain + 1
            self.stats.redials += 1
            if in_vain > 1:
                await asyncio.sleep(redial_pause_s(in_vain))

    async def _stream(self, ring: Dial) -> None:
        """Run one stream until it breaks. Raises the reason."""
        call = ring(wait_for_ready=True)
        try:
            credits = aiter(call)
            await self._open(call, credits)
            async with asyncio.TaskGroup() as tasks:
                line = self._line(call)
                tasks.create_task(self._write(line), name=f"ring-write:{self._target.address}")
                tasks.create_task(line.run(), name=f"ring-line:{self._target.address}")
                await self._read_credits(credits)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, peer=f"the stage at {self._target.address}") from exc
        except asyncio.InvalidStateError as exc:
            raise await self._why_ended(call) from exc
        except BaseExceptionGroup as group:
            failure = group.exceptions[0]
            if isinstance(failure, grpc.aio.AioRpcError):
                raise from_rpc_error(failure, peer=f"the stage at {self._target.address}") from failure
            raise failure from None
        finally:
            call.cancel()

    async def _open(self, call: RingCall, credits: Credits) -> None:
        """Send OpenRing and wait for the first grant, which says that the other side's epoch is open."""
        target = self._target
        limit_s = target.deadline_s if self._connected.is_set() else target.connect_s
        try:
            async with asyncio.timeout(limit_s):
                message = stage_pb2.RingMessage(open=to_wire(target.opening, stage_pb2.OpenRing))
                message.open.hello.CopyFrom(self._hello)
                await call.write(message)
                self._take_credit(await anext(credits, None))
        except TimeoutError as exc:
            raise ConnectTimeout(
                f"the stage at {target.address} did not open its end of the link",
                fact=f"waited {limit_s:g} s",
                next_step="check that its node is up",
            ) from exc
        self._connected.set()

    async def _read_credits(self, credits: Credits) -> None:
        while True:
            self._take_credit(await anext(credits, None))

    def _take_credit(self, credit: stage_pb2.Credit | None) -> None:
        if credit is None:
            raise PeerClosed(f"the stage at {self._target.address} ended the link")
        self._grant(credit.step, credit.credits, bulk=False)
        self._grant(credit.bulk_step, credit.bulk_credits, bulk=True)
        self._departures.pacing.received(credit.received, self._clock.monotonic_s())
        self._wake.set()
        if credit.HasField("sample"):
            sample = from_wire(credit.sample, LinkSample)
            self._on_sample(replace(sample, acknowledged_us=int(self._clock.wall_s() * 1e6)))

    def _grant(self, step: int, credits: int, *, bulk: bool) -> None:
        news = self._departures.grant(StepId(step), credits, bulk=bulk)
        if not self._departures.waiting(bulk=bulk):
            self._deadlines[bulk].stop()
        elif news:
            self._deadlines[bulk].restart()
        self._progress |= news

    def _line(self, call: RingCall) -> ShapedStream:
        if self._network is None or self._wire is None:
            return PlainLine(call.write, self._clock)
        return self._network.frames_line(call.write, self._wire)

    async def _write(self, line: ShapedStream) -> None:
        """Write all that may be written; return when the stream ends, whose reader knows the reason."""
        try:
            while True:
                while (piece := self._departures.next(self._clock.monotonic_s())) is not None:
                    await self._write_piece(line, piece)
                self._wake.clear()
                await self._wake.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def _write_piece(self, line: ShapedStream, piece: Piece) -> None:
        begins_s, num_bytes = line.begins_s(), len(piece.data)
        if piece.chunk == 0:
            self._begun_s[piece.bulk] = begins_s
        ahead_s = begins_s - self._clock.monotonic_s()
        ended_s = await line.write(self._frame(piece, sent_s=self._clock.wall_s() + ahead_s), num_bytes)
        if piece.last:
            begun_s, parcel = self._begun_s[piece.bulk], piece.parcel
            self.stats.steps += 1
            self.stats.queue_us = int((begun_s - parcel.queued_s) * 1e6)
            self.stats.upload_us = int((ended_s - begun_s) * 1e6)
            self.stats.upload_bytes = len(parcel.data)

    def _frame(self, piece: Piece, *, sent_s: float) -> stage_pb2.RingMessage:
        message = stage_pb2.RingMessage()
        frame = message.frame  # filled in place: handing a Frame to RingMessage(frame=...) would copy it twice
        frame.epoch.CopyFrom(self._epoch)
        frame.step = piece.parcel.step
        frame.chunk = piece.chunk
        frame.data = bytes(piece.data)
        frame.sent_us = int(sent_s * 1e6)
        frame.bulk = piece.bulk
        frame.receipt = piece.receipt
        return message

    async def _why_ended(self, call: RingCall) -> EdgepipeError:
        """Return the reason of a stream's end, which a failed write does not give."""
        code, details = await call.code(), await call.details()
        return PeerClosed(
            f"the stage at {self._target.address} ended the link", fact=plain_call(code.name, details or "")
        )

    async def _watch(self) -> None:
        await self._expired.wait()
        raise SendTimeout(
            f"the stage at {self._target.address} did not take a step's activations in time",
            fact=f"waited {self._target.deadline_s:g} s, {self._num_waiting} steps wait",
        )

    @property
    def _num_waiting(self) -> int:
        return self._departures.waiting(bulk=False) + self._departures.waiting(bulk=True)

    def _expire(self) -> None:
        self._expired.set()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
