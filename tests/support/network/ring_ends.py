"""Both ends of a hop for tests, over gRPC on 127.0.0.1 or in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from edgepipe.backend.types import Activations, ActivationType
from edgepipe.errors import EdgepipeError
from edgepipe.ids import EngineId, Epoch, PipelineId, StepId
from edgepipe.link.channels import bind, make_server
from edgepipe.link.protocol import Outgoing, RingTarget, StepBytes
from edgepipe.link.receiver import RingReceiver
from edgepipe.link.sender import RingSender
from edgepipe.link.serving import RingStream
from edgepipe.link.shaped import Network, arriving
from edgepipe.security.mutual_tls import Plaintext
from edgepipe.system import SystemClock
from edgepipe.units import parse_link
from edgepipe.wire.common import Hello
from edgepipe.wire.pipelines import OpenRing
from edgepipe.wire.reports import LinkSample
from edgepipe.wire.v1 import stage_pb2
from edgepipe.wire.v1.stage_pb2_grpc import add_StageServicer_to_server
from tests.support.network.memory_link import MemorySender

EPOCH = Epoch(3, EngineId("engine"))
HIDDEN = 8


def activations(step: int, tokens: int = 4) -> Activations:
    """[tokens, HIDDEN], different for every step."""
    return (np.arange(tokens * HIDDEN, dtype=np.uint16) + np.uint16(step * 1000)).reshape(tokens, HIDDEN)


class Hop:
    """One hop; ``take`` plays the stage that computes what arrives."""

    def __init__(self, *, window: int, network: Network | None = None) -> None:
        self.network = network
        self.arrived: asyncio.Queue[tuple[int, StepBytes, bool]] = asyncio.Queue()
        self.samples: list[LinkSample] = []
        self.held = 0
        self._changed = asyncio.Event()
        self.streams: list[RingStream] = []
        self.stream_errors: list[EdgepipeError] = []
        self.sender: Outgoing
        self.running: asyncio.Task[None]
        self.receiver = RingReceiver(
            epoch=EPOCH, window=window, clock=SystemClock(), on_step=self._arrive, on_held=self._hold
        )

    def expect(self, step: int, tokens: int = 4, *, bulk: bool = False) -> None:
        self.receiver.expect(StepId(step), tokens * HIDDEN * 2, bulk=bulk)

    def send(self, step: int, tokens: int = 4, *, bulk: bool = False) -> None:
        self.sender.send(StepId(step), activations(step, tokens), bulk=bulk)

    async def take(self) -> int:
        """Wait for the next step, check its content, give its credit back."""
        step, data, bulk = await self.arrived.get()
        values = data.view(np.uint16)
        assert (values == activations(step, len(values) // HIDDEN).ravel()).all()
        self.receiver.taken(bulk=bulk)
        return step

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds of what has arrived, was held or was measured."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def serve(self, messages: AsyncIterator[stage_pb2.RingMessage], context: Any) -> None:
        """A Ring stream at the receiving stage."""
        async for message in messages:
            assert message.open.slice == 1
            break
        stream = RingStream(self.receiver, context)
        self.streams.append(stream)
        try:
            async with arriving(self.network, messages) as arrived:
                await stream.serve(arrived)
        except EdgepipeError as exc:
            self.stream_errors.append(exc)
            self._changed.set()
            raise

    def _arrive(self, step: StepId, data: StepBytes, bulk: bool) -> None:
        self.arrived.put_nowait((step, data, bulk))
        self._changed.set()

    def _hold(self) -> None:
        self.held += 1
        self._changed.set()

    def sample(self, sample: LinkSample) -> None:
        self.samples.append(sample)
        self._changed.set()


class RingService:
    """Only the Ring half of a stage."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop

    async def Control(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        for reply in ():
            yield reply

    async def Ring(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        await self._hop.serve(request_iterator, context)
        for reply in ():
            yield reply


def target(address: str, *, deadline_s: float = 20.0, max_queued: int = 64) -> RingTarget:
    return RingTarget(
        address=address,
        opening=OpenRing(
            pipeline_id=PipelineId("pipeline"),
            epoch=EPOCH,
            slice=1,
            hidden_size=HIDDEN,
            activation_type=ActivationType.BF16,
        ),
        max_queued=max_queued,
        reach_s=20.0,
        connect_s=20.0,
        deadline_s=deadline_s,
    )


@asynccontextmanager
async def grpc_service(hop: Hop) -> AsyncGenerator[str]:
    """The receiving end on a port of its own."""
    server = make_server(Plaintext())
    add_StageServicer_to_server(RingService(hop), server)  # pyright: ignore[reportArgumentType]
    port = bind(server, Plaintext(), host="127.0.0.1", port=0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def grpc_sender(
    hop: Hop, address: str, *, most_piece_bytes: int = 16, network: Network | None = None, **options: Any
) -> RingSender:
    return RingSender(
        target(address, **options),
        hello=Hello(role="stage"),
        security=Plaintext(),
        clock=SystemClock(),
        on_sample=hop.sample,
        most_piece_bytes=most_piece_bytes,
        network=network,
    )


@asynccontextmanager
async def running(hop: Hop, sender: Outgoing) -> AsyncGenerator[Hop]:
    """Keep the sender running; ends it."""
    hop.sender = sender
    async with asyncio.TaskGroup() as tasks:
        hop.running = tasks.create_task(sender.run(), name="sender")
        await sender.connected()
        yield hop
        hop.running.cancel()


async def send_and_fail(hop: Hop, sender: Outgoing, *, tokens: int = 4) -> None:
    """Send one step; returns when the sender has given up, by raising what it raised."""
    async with running(hop, sender):
        hop.send(1, tokens=tokens)
        await hop.running


@asynccontextmanager
async def open_hop(over: str, *, window: int = 4) -> AsyncGenerator[Hop]:
    if over == "memory":
        hop = Hop(window=window)
        sender = memory_sender(hop)
        async with running(hop, sender):
            yield hop
        return
    network = Network(parse_link("1gbit,1ms,0.2ms"), SystemClock()) if over == "shaped" else None
    hop = Hop(window=window, network=network)
    try:
        async with grpc_service(hop) as address, running(hop, grpc_sender(hop, address, network=network)):
            yield hop
    finally:
        if network is not None:
            network.close()


def memory_sender(hop: Hop) -> MemorySender:
    async def find(_: OpenRing) -> RingReceiver:
        return hop.receiver

    return MemorySender(
        target("memory"), find_receiver=find, clock=SystemClock(), on_sample=hop.sample, most_piece_bytes=16
    )
