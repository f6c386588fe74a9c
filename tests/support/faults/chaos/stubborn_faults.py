"""Faults that come back as soon as they are healed: one process dies, or hangs, again and again.

Nothing may be given up for ever by them, and nothing tried again for ever: a free machine takes over, or the request
that is in every one of them is refused alone. See ``lasting_faults`` for what is returned. Each function leaves a
machine or the engine with a pause before its next try, so a cluster is good for one strike of each.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from edgepipe_emulated import emulated_model_config  # pyright: ignore[reportMissingTypeStubs] - typed, but no room

from edgepipe.wire.engines import EngineState, ServeSpec
from tests.support.faults.chaos import lasting_faults
from tests.support.faults.chaos.clients import HEAL_S, Clients
from tests.support.faults.chaos.cluster import MODEL, ChaosCluster, chaos_cluster
from tests.support.faults.chaos.nemesis import LOOK_S
from tests.support.faults.history import Ended

_KILLS = 4  # kills of the engine within a minute; they once ended it for ever
_CONTEXT = 40_960
_PROMPT_TOKENS = 36_000
_CHUNKS_S = 0.3  # some chunks of the long prompt
_LONG = 3000  # tokens: more than any of these clients waits for


@asynccontextmanager
async def home(folder: Path) -> AsyncGenerator[Clients]:
    """As ``lasting_faults.home``: ``a`` has the engine and half of the layers, ``b`` the others, ``c`` nothing."""
    async with lasting_faults.home(folder) as clients:
        yield clients


@asynccontextmanager
async def guests(folder: Path) -> AsyncGenerator[Clients]:
    """Three nodes: the clients' has nothing else, the next one the engine; each could hold half."""
    async with chaos_cluster(
        folder, config=lasting_faults.CONFIG, options=lasting_faults.OPTIONS, **lasting_faults.HALF
    ) as cluster:
        yield await Clients.first(cluster)


@asynccontextmanager
async def slow_prompts(folder: Path) -> AsyncGenerator[Clients]:
    """Two nodes, each of which could hold all; a prompt as long as the context takes some seconds."""
    async with chaos_cluster(
        folder,
        names=("a", "b"),
        plan="a:0-2,b:3-5",
        config=emulated_model_config(num_layers=6, context_length=_CONTEXT),
        options=ServeSpec(model=MODEL, kv_tokens=4 * _CONTEXT),
        link="1gbit,20ms",
    ) as cluster:
        yield await Clients.first(cluster)


async def dying_engine(clients: Clients) -> float:
    """The engine's process is killed each time that it is ready, then no more."""
    cluster = clients.cluster
    killed: list[int] = []
    since_s = clients.now_s()
    while len(killed) < _KILLS:
        await _until_ready(cluster, f"the engine was killed {len(killed)} times")
        for name, pid in await cluster.children("engine"):
            if pid not in killed:
                killed.append(pid)
                since_s = clients.strike(f"SIGKILL engine {pid} on {name}, number {len(killed)}")
                psutil.Process(pid).kill()
        await asyncio.sleep(LOOK_S)
    return await clients.until_served(since_s=since_s)


async def idle_death(clients: Clients) -> float:
    """A stage's process is killed each time that it is ready, without any request, beside a free machine."""
    cluster = clients.cluster
    name = (await cluster.stage_nodes())[-1]
    since_s = clients.strike(f"stages of {name} die when they are ready")
    async with _struck_when_ready(cluster, name, psutil.Process.kill):
        await _until_left_out(cluster, name)
        return await clients.until_served(since_s=since_s)


async def late_stage(clients: Clients) -> float:
    """A stage's process hangs each time that it is ready, beside a free machine."""
    cluster = clients.cluster
    name = (await cluster.stage_nodes())[-1]
    since_s = clients.strike(f"stages of {name} hang when they are ready")
    async with clients.streams(1, max_tokens=_LONG) as streams:
        async with _struck_when_ready(cluster, name, psutil.Process.suspend):
            await _until_left_out(cluster, name)
            healed_s = await clients.until_served(since_s=since_s)
            await clients.go_on(*streams)
    return healed_s


async def dying_prompt(clients: Clients) -> float:
    """A stage's process is killed in the middle of a long prompt, each time; until that is answered or refused."""
    cluster = clients.cluster
    name = (await cluster.stage_nodes())[-1]
    prompt = [index % 251 for index in range(_PROMPT_TOKENS)]
    async with clients.streams(1, max_tokens=_LONG) as beside:
        await clients.go_on(*beside)
        async with clients.streams(1, prompt=prompt, max_tokens=4) as (long,):
            since_s = clients.strike(f"stages of {name} die after some chunks")
            async with _struck_when_ready(cluster, name, psutil.Process.kill, after_s=_CHUNKS_S):
                ended = await _ending(clients, long)
        assert ended.how in ("done", "error"), f"the long prompt: {ended}"
        await clients.go_on(*beside)
    return ended.at_s - since_s


async def lost_engine_node(clients: Clients) -> float:
    """A power cut at the machine with the engine and a stage."""
    cluster = clients.cluster
    ((name, _),) = await cluster.children("engine")
    since_s = clients.strike(f"power cut at {name}")
    await cluster.kill_node(name)
    try:
        return await clients.until_served(since_s=since_s)
    finally:
        await cluster.start(name)
        await cluster.until_ready()


async def killed_gateway(clients: Clients) -> float:
    """The clients' own gateway is killed in the middle of their streams."""
    own = await clients.cluster.first.status()
    (pid,) = [child.pid for child in own.children if child.kind == "gateway"]
    async with clients.streams(2, max_tokens=_LONG) as streams:
        await clients.go_on(*streams)
        since_s = clients.strike(f"SIGKILL gateway {pid}")
        psutil.Process(pid).kill()
        return await clients.until_served(since_s=since_s)


@asynccontextmanager
async def _struck_when_ready(
    cluster: ChaosCluster, name: str, blow: Callable[[psutil.Process], None], *, after_s: float = 0.0
) -> AsyncGenerator[None]:
    """Strike the stage of a node in every epoch while the block runs."""
    task = asyncio.create_task(_strike_on(cluster, name, blow, after_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _strike_on(cluster: ChaosCluster, name: str, blow: Callable[[psutil.Process], None], after_s: float) -> None:
    struck: set[int] = set()
    while True:
        engine = await _engine(cluster)
        if engine is not None and engine.state == "ready" and engine.epoch.counter not in struck:
            await asyncio.sleep(after_s)
            for node, pid in await cluster.children("stage"):
                if node == name:
                    struck.add(engine.epoch.counter)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        blow(psutil.Process(pid))
        await asyncio.sleep(LOOK_S)


async def _until_left_out(cluster: ChaosCluster, name: str) -> None:
    """Until the model is served without a node. Raises AssertionError after ``HEAL_S``."""

    def without(engine: EngineState | None) -> bool:
        names = [stage.node_name for stage in engine.stages] if engine is not None else []
        return engine is not None and engine.state == "ready" and bool(names) and name not in names

    try:
        async with asyncio.timeout(HEAL_S):
            while not without(await _engine(cluster)):  # noqa: ASYNC110 - the socket does not notify
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        engine = await _engine(cluster)
        epoch = engine.epoch.counter if engine is not None else None
        raise AssertionError(f"{name} is still used after {HEAL_S:.0f} s, in epoch {epoch}") from None


async def _until_ready(cluster: ChaosCluster, what: str) -> None:
    """Until the model is served. Raises AssertionError after ``HEAL_S``."""
    try:
        async with asyncio.timeout(HEAL_S):
            while (engine := await _engine(cluster)) is None or engine.state != "ready":  # noqa: ASYNC110 - as above
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        engine = await _engine(cluster)
        found = (engine.state, engine.error) if engine is not None else "no engine"
        raise AssertionError(f"{what}; {HEAL_S:.0f} s later: {found}") from None


async def _engine(cluster: ChaosCluster) -> EngineState | None:
    return next(iter((await cluster.first.status()).engines), None)


async def _ending(clients: Clients, stream: str) -> Ended:
    """How a stream ended. Raises AssertionError after ``HEAL_S``."""
    try:
        async with asyncio.timeout(HEAL_S):
            await clients.reached(stream, 1 << 30)
    except TimeoutError:
        raise AssertionError(f"the long prompt is neither answered nor refused after {HEAL_S:.0f} s") from None
    return next(event for event in clients.history.of(stream) if isinstance(event, Ended))
