"""Emulates a network inside the transport: a node's data leaves at a rate and arrives after a delay. Needs no root.

Rate and delay are separate, as on a wire: messages queue for the rate, and any number may be in the delay.
Activations take both; small messages (plans, reports, credits) take only the delay.

The sender hands activations to the real transport when their first byte leaves. The receiving end holds them until
their last byte would arrive: hosts copy and encrypt while a wire transmits, not afterwards. Both ends share a clock,
since one machine emulates them. With two clocks, a frame is held too long by at most its own passage.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple, Protocol

import grpc.aio

from edgepipe.clock import Clock
from edgepipe.link.alarm import Alarm, ThreadAlarm
from edgepipe.link.serving import Replies
from edgepipe.units import LinkShape, parse_link
from edgepipe.wire.v1 import stage_pb2

Write = Callable[[Any], Awaitable[None]]

_JITTER_SEED = 1


class MessageTimes(NamedTuple):
    """The times of one message on the wire; monotonic seconds."""

    begins_s: float  # time when the first byte leaves
    departs_s: float  # time when the last byte has left
    arrives_s: float  # time when the last byte arrives


class Wire:
    """The outgoing half of an emulated cable: a rate, then a delay. Messages stay in order. Knows no clock."""

    def __init__(self, shape: LinkShape) -> None:
        self._shape = shape
        self._free_s = self._last_arrival_s = 0.0
        self._draws = random.Random(_JITTER_SEED)

    def begins_s(self, now_s: float) -> float:
        """Return when a message given now would begin to leave."""
        return max(now_s, self._free_s)

    def carry(self, now_s: float, num_bytes: int) -> MessageTimes:
        """Take a message; return its times."""
        shape = self._shape
        begins_s = self.begins_s(now_s)
        departs_s = self._free_s = begins_s + shape.upload_s(num_bytes)
        delay_s = shape.one_way_s + (shape.jitter_s * self._draws.random() if shape.jitter_s else 0.0)
        self._last_arrival_s = max(self._last_arrival_s, departs_s + delay_s)
        return MessageTimes(begins_s, departs_s, self._last_arrival_s)


class ShapedStream(Protocol):
    """A stream to write to."""

    def begins_s(self) -> float:
        """Return when data written now begins to leave (monotonic)."""
        ...

    async def write(self, message: Any, num_bytes: int = 0, /) -> float:
        """Send a message; return when its last byte leaves (monotonic)."""
        ...

    async def run(self) -> None:
        """Carry written messages; return after ``finish`` when all are delivered."""
        ...

    def finish(self) -> None:
        """Note that no message follows."""
        ...


class PlainLine:
    """No emulation: the stream itself."""

    def __init__(self, write: Write, clock: Clock) -> None:
        self._write = write
        self._clock = clock

    def begins_s(self) -> float:
        """See ``ShapedStream.begins_s``."""
        return self._clock.monotonic_s()

    async def write(self, message: Any, num_bytes: int = 0, /) -> float:
        """See ``ShapedStream.write``: returns when the stream has taken the message."""
        await self._write(message)
        return self._clock.monotonic_s()

    async def run(self) -> None:
        """See ``ShapedStream.run``: nothing to do."""

    def finish(self) -> None:
        """See ``ShapedStream.finish``."""


class ShapedLine:
    """A stream behind an emulated wire. Its writer bounds the messages under way: by credits, or by steps in flight."""

    def __init__(self, write: Write, *, wire: Wire, alarm: Alarm, clock: Clock, receiver_holds: bool = False) -> None:
        """``receiver_holds``: messages are ``RingMessage``s, and the other end reads them by ``arriving``."""
        self._write = write
        self._receiver_holds = receiver_holds
        self._wire = wire
        self._alarm = alarm
        self._clock = clock
        self._under_way: deque[tuple[float, Any]] = deque()
        self._changed = asyncio.Event()
        self._finished = False
        self._broken = False

    def begins_s(self) -> float:
        """See ``ShapedStream.begins_s``."""
        return self._wire.begins_s(self._clock.monotonic_s())

    async def write(self, message: Any, num_bytes: int = 0, /) -> float:
        """See ``ShapedStream.write``. Returns at once; a broken stream drops messages, and its reader knows why."""
        passage = self._wire.carry(self._clock.monotonic_s(), num_bytes)
        if self._receiver_holds:
            message.frame.passage_us = round(1e6 * (passage.arrives_s - passage.begins_s))
        if not self._broken:
            due_s = passage.begins_s if self._receiver_holds else passage.arrives_s
            self._under_way.append((due_s, message))
            self._changed.set()
        return passage.departs_s

    async def run(self) -> None:
        """See ``ShapedStream.run``. Ends early when the stream breaks."""
        try:
            while self._under_way or not self._finished:
                while self._under_way:
                    due_s, message = self._under_way.popleft()
                    await self._alarm.until(due_s)
                    await self._write(message)
                if not self._finished:
                    self._changed.clear()
                    await self._changed.wait()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError):
            self._broken = True
            self._under_way.clear()

    def finish(self) -> None:
        """See ``ShapedStream.finish``."""
        self._finished = True
        self._changed.set()


class Network:
    """The emulated network of one process. ``close`` it after the last message."""

    def __init__(self, shape: LinkShape, clock: Clock, *, alarm: ThreadAlarm | None = None) -> None:
        """``alarm``: the timer of its messages; ``close`` ends it."""
        self._shape = shape
        self._clock = clock
        self._alarm = alarm or ThreadAlarm(clock)

    def wire(self) -> Wire:
        """Return a separate cable for activations; it may outlive its streams."""
        return Wire(self._shape)

    def line(self, write: Write, wire: Wire | None = None) -> ShapedLine:
        """Return a stream over ``wire``; without a wire its messages are small, so only the delay counts."""
        wire = wire or Wire(replace(self._shape, bytes_per_s=inf))
        return ShapedLine(write, wire=wire, alarm=self._alarm, clock=self._clock)

    def frames_line(self, write: Write, wire: Wire) -> ShapedLine:
        """Return a stream of activations over ``wire``; its other end reads it by ``arriving``."""
        return ShapedLine(write, wire=wire, alarm=self._alarm, clock=self._clock, receiver_holds=True)

    async def held(self, frame: stage_pb2.Frame) -> None:
        """Wait until the frame's last byte has arrived."""
        passage_s = frame.passage_us / 1e6
        rest_s = frame.sent_us / 1e6 + passage_s - self._clock.wall_s()
        await self._alarm.until(self._clock.monotonic_s() + max(0.0, min(rest_s, passage_s)))

    def close(self) -> None:
        """End the alarm's thread."""
        self._alarm.close()


def make_network(link: str, clock: Clock) -> Network | None:
    """Return the network that a node's ``link`` setting asks for; None without emulation. Raises ConfigInvalid."""
    shape = parse_link(link) if link else LinkShape()
    return None if shape.ideal else Network(shape, clock)


class _DelayedReplies:
    def __init__(self, line: ShapedStream) -> None:
        self._line = line

    async def write(self, message: Any, /) -> None:
        await self._line.write(message)


@asynccontextmanager
async def delayed_replies(network: Network | None, replies: Replies) -> AsyncGenerator[Replies]:
    """Send a handler's replies, all small, over ``network`` (None: directly); on leaving, deliver those under way."""
    if network is None:
        yield replies
        return
    line = network.line(replies.write)
    carrier = asyncio.ensure_future(line.run())
    try:
        yield _DelayedReplies(line)
        line.finish()
        await carrier
    finally:
        carrier.cancel()


@asynccontextmanager
async def arriving(
    network: Network | None, messages: AsyncIterator[stage_pb2.RingMessage]
) -> AsyncGenerator[AsyncIterator[stage_pb2.RingMessage]]:
    """Yield the messages of a ``Network.frames_line``, each when it has arrived over ``network`` (None: at once)."""
    if network is None:
        yield messages
        return
    came: asyncio.Queue[stage_pb2.RingMessage | None] = asyncio.Queue()  # credits bound it
    reader = asyncio.ensure_future(_read_ahead(messages, came))
    try:
        yield _delivered(network, came, reader)
    finally:
        reader.cancel()
        await asyncio.wait((reader,))
        if not reader.cancelled():
            reader.exception()  # reported already, or the stream was left before


async def _read_ahead(
    messages: AsyncIterator[stage_pb2.RingMessage], came: asyncio.Queue[stage_pb2.RingMessage | None]
) -> None:
    try:
        async for message in messages:
            came.put_nowait(message)
    finally:
        came.put_nowait(None)


async def _delivered(
    network: Network, came: asyncio.Queue[stage_pb2.RingMessage | None], reader: asyncio.Future[None]
) -> AsyncGenerator[stage_pb2.RingMessage]:
    while (message := await came.get()) is not None:
        await network.held(message.frame)
        yield message
    await reader  # raises what ended the stream
