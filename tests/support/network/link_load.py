"""A link that carries prompts' chunks back to back, and a decode now and then: how long are the decodes on their way?

Each end is a process of its own, on one machine or in two network namespaces::

    python -m tests.support.network.link_load receive HOST:PORT JSON   # prints "ready", later when each step came
    python -m tests.support.network.link_load send HOST:PORT JSON      # prints when each step was given to the link

``JSON`` has the fields of ``Load``. Both ends know which step is a chunk: the first of every eight.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgepipe.config import prepare_environment
from edgepipe.ids import StepId

CHUNK_BYTES = 16_000_000
DECODE_BYTES = 20_480
_STEPS_PER_CHUNK = 8
_LOAD = 0.95  # a round of eight steps takes this share of its upload: chunks always wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a link carries."""

    bytes_per_s: float  # rate of the link
    num_chunks: int
    link: str = ""  # an emulated network; empty: none
    in_order: bool = False  # chunks are sent like decodes, so nothing passes them

    @property
    def num_steps(self) -> int:
        """Chunks and decodes."""
        return self.num_chunks * _STEPS_PER_CHUNK

    def is_chunk(self, step: int) -> bool:
        """Whether the step, counted from 1, is a chunk."""
        return step % _STEPS_PER_CHUNK == 1

    def is_bulk(self, step: int) -> bool:
        """Whether the step is sent as a bulk step."""
        return self.is_chunk(step) and not self.in_order

    def num_bytes(self, step: int) -> int:
        """Size of the step's activations."""
        return CHUNK_BYTES if self.is_chunk(step) else DECODE_BYTES


@dataclass(frozen=True, slots=True)
class Ways:
    """Results: seconds of each decode from ``send`` until it arrived whole, the chunks' rate, and who passed."""

    decodes_s: list[float]
    chunk_bytes_per_s: float
    passing: int  # decodes that arrived before a chunk that was sent before them


def measure(load: Load, *, address: str, receiving: Sequence[str] = (), sending: Sequence[str] = ()) -> Ways:
    """Run both ends. ``receiving`` and ``sending`` go before their commands: they enter a network namespace."""
    command = [sys.executable, "-m", "tests.support.network.link_load"]
    ends: list[subprocess.Popen[str]] = []

    def start(before: Sequence[str], role: str) -> subprocess.Popen[str]:
        line = [*before, *command, role, address, json.dumps(asdict(load))]
        ends.append(subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=os.environ.copy()))
        return ends[-1]

    try:
        receiver = start(receiving, "receive")
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        sent = _times(start(sending, "send"))
        came = _times(receiver)
    finally:
        for end in ends:
            end.kill()
            end.communicate()
    chunks = [step for step in came if load.is_chunk(step)]
    decodes_s = [came[step] - sent[step] for step in came if not load.is_chunk(step) and step > _STEPS_PER_CHUNK]
    took_s = came[chunks[-1]] - came[chunks[0]]
    passing = sum(any(chunk < step and came[step] < came[chunk] for chunk in chunks) for step in came)
    return Ways(decodes_s, CHUNK_BYTES * (len(chunks) - 1) / took_s, passing)


def _times(end: subprocess.Popen[str]) -> dict[int, float]:
    assert end.stdout is not None
    line = end.stdout.readline()
    assert line, f"an end of the link failed with exit code {end.wait()}"
    return {int(step): time_s for step, time_s in sorted(json.loads(line).items(), key=lambda item: int(item[0]))}


async def _receive(load: Load, address: str) -> dict[int, float]:
    from edgepipe.link.channels import bind, make_server
    from edgepipe.link.receiver import RingReceiver
    from edgepipe.security.mutual_tls import Plaintext
    from edgepipe.stage.service import Frames
    from edgepipe.system import SystemClock
    from edgepipe.wire.v1.stage_pb2_grpc import add_StageServicer_to_server
    from tests.support.network.ring_ends import EPOCH

    clock, came, done = SystemClock(), dict[int, float](), asyncio.Event()

    def on_step(step: StepId, data: object, bulk: bool) -> None:
        came[step] = clock.wall_s()
        receiver.taken(bulk=bulk)
        if len(came) == load.num_steps:
            done.set()

    receiver = RingReceiver(epoch=EPOCH, window=16, clock=clock, on_step=on_step, on_held=lambda: None)
    for step in range(1, load.num_steps + 1):
        receiver.expect(StepId(step), load.num_bytes(step), bulk=load.is_bulk(step))
    network = _network(load)

    class Service:
        async def Control(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
            for reply in ():
                yield reply

        async def Ring(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
            await anext(aiter(request_iterator))
            await Frames(request_iterator, context).feed(receiver, network)
            for reply in ():
                yield reply

    server = make_server(Plaintext())
    add_StageServicer_to_server(Service(), server)  # pyright: ignore[reportArgumentType]
    host, _, port = address.rpartition(":")
    bind(server, Plaintext(), host=host, port=int(port))
    await server.start()
    _tell("ready")
    await done.wait()
    await asyncio.sleep(0.2)  # the last grants
    receiver.close()
    await server.stop(None)
    return came


async def _send(load: Load, address: str) -> dict[int, float]:
    from edgepipe.link.sender import RingSender
    from edgepipe.security.mutual_tls import Plaintext
    from edgepipe.system import SystemClock
    from edgepipe.wire.common import Hello
    from tests.support.network.ring_ends import target

    clock, sent = SystemClock(), dict[int, float]()
    arrived = asyncio.Event()
    sender = RingSender(
        target(address),
        hello=Hello(role="stage"),
        security=Plaintext(),
        clock=clock,
        on_sample=lambda _: arrived.set(),
        network=_network(load),
    )
    running = asyncio.ensure_future(sender.run())
    await sender.connected()
    pause_s = _LOAD * CHUNK_BYTES / load.bytes_per_s / _STEPS_PER_CHUNK
    activations = {step: np.zeros((1, load.num_bytes(step) // 2), np.uint16) for step in (1, 2)}
    for step in range(1, load.num_steps + 1):
        if load.is_chunk(step):
            await _until(lambda: _chunks_waiting(sender, load) < 2, arrived)
        sent[step] = clock.wall_s()
        sender.send(StepId(step), activations[1 if load.is_chunk(step) else 2], bulk=load.is_bulk(step))
        await asyncio.sleep(pause_s)
    await _until(lambda: not sum(map(len, sender._departures._outboxes)), arrived)
    running.cancel()
    return sent


async def _until(condition: Callable[[], bool], arrived: asyncio.Event) -> None:
    """Wait until something holds after an acknowledgement."""
    while not condition():
        arrived.clear()
        await arrived.wait()


def _chunks_waiting(sender: Any, load: Load) -> int:
    parcels = [parcel for outbox in sender._departures._outboxes for parcel in outbox._parcels]
    return sum(1 for parcel in parcels if load.is_chunk(parcel.step))


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _network(load: Load) -> Any:
    from edgepipe.link.shaped import make_network
    from edgepipe.system import SystemClock

    return make_network(load.link, SystemClock())


def main() -> None:
    """Run one end, and print a time for each step."""
    import uvloop

    prepare_environment()  # before gRPC is imported, which reads its settings then
    role, address, load = sys.argv[1], sys.argv[2], Load(**json.loads(sys.argv[3]))
    _tell(json.dumps(uvloop.run((_receive if role == "receive" else _send)(load, address))))


if __name__ == "__main__":
    main()
