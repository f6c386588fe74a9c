"""Clients that hang up at every moment of a sequence's life, beside a request whose steps failed: queued, admitted, in
the prompt, at the first token, later, while the pipeline recovers. See ``lasting_faults`` for what is returned."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from edgepipe.wire.engines import ServeSpec
from tests.support.faults.chaos.clients import HEAL_S, Clients
from tests.support.faults.chaos.cluster import MODEL, chaos_cluster
from tests.support.processes.nodes import kv_is_free

_BLOCKS = 512
_PREFIX_TOKENS = 200  # tokens that prompts share: more than ten blocks, which later prompts copy from earlier ones
_MOMENTS = (None, None, 0, 1, 2, 5)  # tokens that a client takes; None: it leaves before it is answered at all
_SOON_S = 0.3  # within which a client leaves that waits for no token
_LATE_S = 1.5  # within which every other client leaves, whatever it has been given
_SUSPECTED = 2  # failed steps after which a request is computed alone
_LONG = 3800


@asynccontextmanager
async def contiguous(folder: Path) -> AsyncGenerator[Clients]:
    """One node whose block tables must be runs, as on CPUs and MLX, with one step in flight and few blocks."""
    async with chaos_cluster(
        folder,
        names=("a",),
        plan="a:0-5",
        options=ServeSpec(model=MODEL, kv_tokens=16 * _BLOCKS, micro_batches=1),
        backend_options="time_factor=50,contiguous_kv=1",
    ) as cluster:
        yield await Clients.first(cluster)


async def hang_ups(clients: Clients) -> float:
    """Clients leave at every moment, some while the pipeline recovers; all memory must be free when all have left."""
    draw = random.Random(5)
    prefix = [draw.randrange(256) for _ in range(_PREFIX_TOKENS)]
    async with clients.streams(1, prompt=[*prefix, 1], max_tokens=_LONG) as streams:
        await clients.go_on(*streams)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_leave(clients, draw, prefix))
            tasks.create_task(_kill_stage(clients))
        await _suspect(clients, *streams)
        await _leave(clients, draw, prefix)
        clients.judge(*streams)
    healed_s = await clients.until_served(since_s=clients.strike("the last client has left"))
    await clients.cluster.first.until(kv_is_free, timeout_s=HEAL_S)
    return healed_s


async def suspected_request(clients: Clients) -> float:
    """Two steps of a request fail, so it is computed alone from then on; that holds up nobody else."""
    async with clients.streams(1, max_tokens=_LONG) as streams:
        await _suspect(clients, *streams)
        healed_s = await clients.until_served(since_s=clients.strike("it is computed alone"))
        await clients.go_on(*streams)
    return healed_s


async def _suspect(clients: Clients, stream: str) -> None:
    """Let steps fail that hold nothing but one stream."""
    await clients.go_on(stream)
    for _ in range(_SUSPECTED):
        await _fail_one_step(clients)
        await clients.go_on(stream)


async def _kill_stage(clients: Clients) -> None:
    """In the middle of the clients' leaving."""
    await asyncio.sleep(_SOON_S)
    name, pid = (await clients.cluster.children("stage"))[-1]
    clients.strike(f"SIGKILL stage {pid} on {name}")
    psutil.Process(pid).kill()


async def _leave(clients: Clients, draw: random.Random, prefix: list[int]) -> None:
    """Twelve clients come at once; each leaves at another moment. Every third prompt takes several steps."""
    async with asyncio.TaskGroup() as tasks:
        for number in range(2 * len(_MOMENTS)):
            tail = [draw.randrange(256) for _ in range(_LONG if number % 3 == 2 else 40)]
            moment, after_s = _MOMENTS[number % len(_MOMENTS)], draw.uniform(0.0, _SOON_S)
            tasks.create_task(_come_and_leave(clients, [*prefix, *tail], moment, after_s))


async def _come_and_leave(clients: Clients, prompt: list[int], moment: int | None, after_s: float) -> None:
    async with clients.streams(1, prompt=prompt, max_tokens=400) as (stream,):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s if moment is None else _LATE_S):
                await clients.reached(stream, 1 + (moment or 0))


async def _fail_one_step(clients: Clients) -> None:
    """One step fails; returns when the next epoch stands."""
    cluster = clients.cluster
    (engine,) = (await cluster.until_ready()).engines
    clients.strike("a step fails")
    cluster.break_device(cluster.names[0], num_steps=1)
    await cluster.first.until(
        lambda status: [current.epoch.counter for current in status.engines] > [engine.epoch.counter]
    )
    await cluster.until_ready()
