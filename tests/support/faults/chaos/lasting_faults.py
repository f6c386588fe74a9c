"""Faults that once lasted until a cluster was restarted by hand. After each of them a new client must be served soon.

Each function strikes a cluster of one of the kinds below, checks every token of the clients beside it, leaves the
cluster whole, and returns the seconds that a client which knows nothing of the fault waited for its 20th token: from
the fault's end, or from its beginning where it lasts and another machine takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from edgepipe_emulated import emulated_model_config  # pyright: ignore[reportMissingTypeStubs] - typed, but no room

from edgepipe.cluster.absence import missed
from edgepipe.errors import EdgepipeError
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.spec.layout import slice_parameters
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.nodes import ClusterStatus
from tests.support.faults.chaos.clients import HEAL_S, Clients
from tests.support.faults.chaos.cluster import MODEL, WHOLE_S, ChaosCluster, chaos_cluster
from tests.support.faults.chaos.nemesis import LOOK_S
from tests.support.network.lan import LanLab

CONFIG = emulated_model_config(num_layers=6, hidden_size=512, context_length=4096)
"""A model whose layers take most of a node's memory, so that one node cannot hold all of them."""
_KV_TOKENS = 16384
OPTIONS = ServeSpec(model=MODEL, kv_tokens=_KV_TOKENS)
_LONG = 3000  # tokens: more than any of these clients waits for
_BROKEN_S = 6.0  # longer than any machine takes to notice
_SLEPT_S = 60.0
_LATE_S = 5.0  # from a machine's waking to its first packet, where Wi-Fi has to find its network again


def _memory_bytes(*, kv_tokens: int) -> int:
    """Memory for half of the model's layers and so much KV."""
    _, part = make_slices([LayerRange(0, 3), LayerRange(3, 6)], 6)
    kv_bytes = CONFIG.kv_bytes_per_token(part.layers, form="bfloat16") * kv_tokens
    return 2 * slice_parameters(CONFIG, part) + int(kv_bytes / 0.9)  # a node keeps a tenth for other things


HALF: dict[str, Any] = {"memory_limit_bytes": _memory_bytes(kv_tokens=_KV_TOKENS)}
_SMALL: dict[str, Any] = {"memory_limit_bytes": _memory_bytes(kv_tokens=_KV_TOKENS // 10)}


@asynccontextmanager
async def home(folder: Path) -> AsyncGenerator[Clients]:
    """Three nodes, of which the model needs two: ``a`` has the engine and the clients, ``c`` nothing yet."""
    async with chaos_cluster(folder, plan="a:0-2,b:3-5", config=CONFIG, options=OPTIONS, **HALF) as cluster:
        yield await Clients.first(cluster)


@asynccontextmanager
async def pair(folder: Path) -> AsyncGenerator[Clients]:
    """Two nodes on a LAN, and the model needs both."""
    async with LanLab(hosts=2) as lab:
        lab.shape(delay_s=0.0005, bytes_per_s=125e6)
        async with chaos_cluster(
            folder, names=("a", "b"), plan="a:0-2,b:3-5", config=CONFIG, options=OPTIONS, lab=lab, **HALF
        ) as cluster:
            yield await Clients.first(cluster)


@asynccontextmanager
async def growing(folder: Path) -> AsyncGenerator[Clients]:
    """Two nodes that the model needs, and ``c``, not started yet, with room for a tenth of their KV."""
    own = {"a": HALF, "b": HALF, "c": _SMALL}
    async with chaos_cluster(
        folder, plan="a:0-2,b:3-5", config=CONFIG, options=OPTIONS, own_flags=own, late=("c",)
    ) as cluster:
        yield await Clients.first(cluster)


async def broken_for_good(clients: Clients) -> float:
    """A device fails every step while its process lives, and another machine has room."""
    cluster = clients.cluster
    name = (await cluster.stage_nodes())[-1]
    async with clients.streams(3, max_tokens=_LONG) as streams:
        await clients.go_on(*streams)
        since_s = clients.strike(f"the device of {name} breaks")
        cluster.break_device(name)
        try:
            healed_s = await clients.until_served(since_s=since_s)
            await clients.go_on(*streams)
        finally:
            cluster.mend_device(name)
    assert name not in await cluster.stage_nodes()
    return healed_s


async def broken_for_a_while(clients: Clients) -> float:
    """A device fails every step, so do those that could take over, and then all are repaired."""
    cluster = clients.cluster
    names = {(await cluster.stage_nodes())[-1], *await _idle_nodes(cluster)}
    clients.strike(f"the devices of {', '.join(names)} break")
    try:
        for name in names:
            cluster.break_device(name)
        async with clients.streams(1):
            await asyncio.sleep(_BROKEN_S)
    finally:
        for name in names:
            cluster.mend_device(name)
    return await clients.until_served(since_s=clients.strike("they are repaired"))


async def slept_too_long(clients: Clients) -> float:
    """A machine wakes after others have taken over for it; then these are lost, and its stage is wanted again."""
    cluster = clients.cluster
    name, (heir,) = (await cluster.stage_nodes())[-1], await _idle_nodes(cluster)
    async with clients.streams(2, max_tokens=_LONG) as streams:
        await clients.go_on(*streams)
        clients.strike(f"{name} sleeps")
        cluster.fall_asleep(name)
        await cluster.first.until(lambda status: any(absent.name == name for absent in missed(status.absent)))
        await clients.go_on(*streams)
        assert heir in await cluster.stage_nodes()
    clients.strike(f"{name} wakes")
    cluster.wake_up(name, slept_s=_SLEPT_S)
    await cluster.until_ready()
    await asyncio.sleep(1.0)  # it has noticed that it slept
    since_s = clients.strike(f"power cut at {heir}")
    await cluster.kill_node(heir)
    try:
        return await clients.until_served(since_s=since_s)
    finally:
        await _bring_back(cluster, heir)


async def woke_without_network(clients: Clients) -> float:
    """A machine that the model needs wakes, and its network comes back only later."""
    cluster = clients.cluster
    lab, name = cluster.lab, cluster.names[-1]
    assert lab is not None, "faults of links need the LAN lab"
    async with clients.streams(1, max_tokens=_LONG) as streams:
        await clients.go_on(*streams)
        clients.strike(f"{name} sleeps")
        cluster.fall_asleep(name)
        lab.cut(name)
        await cluster.first.until(lambda status: any(absent.name == name for absent in missed(status.absent)))
    clients.strike(f"{name} wakes without network")
    cluster.wake_up(name, slept_s=_SLEPT_S)
    await asyncio.sleep(_LATE_S)
    since_s = clients.strike(f"{name} has its network again")
    lab.heal(name)
    return await clients.until_served(since_s=since_s)


async def refused_move(clients: Clients) -> float:
    """A drain moves a stage to a machine that has no memory for it now, and later has."""
    cluster = clients.cluster
    name, (heir,) = (await cluster.stage_nodes())[-1], await _idle_nodes(cluster)
    async with clients.streams(2, max_tokens=_LONG) as streams:
        await clients.go_on(*streams)
        async with _refusing(clients, name, heir) as draining:
            await clients.go_on(*streams)
            since_s = clients.strike(f"{heir} has memory again")
            cluster.mend_device(heir)
            await asyncio.wait((draining,), timeout=WHOLE_S)
            assert draining.done(), f"{name} is not drained within {WHOLE_S:.0f} s"
        await clients.until_served(since_s=clients.now_s())
        healed_s = clients.now_s() - since_s
        await clients.go_on(*streams)
        places = await cluster.stage_nodes()
        assert heir in places
        assert name not in places
    return healed_s


async def refused_move_then_lost(clients: Clients) -> float:
    """A machine that refused a stage leaves. It holds nothing, so no answer may wait for that."""
    cluster = clients.cluster
    name, (heir,) = (await cluster.stage_nodes())[-1], await _idle_nodes(cluster)
    before = (await cluster.first.status()).engines[0].epoch.counter
    async with clients.streams(2, max_tokens=_LONG) as streams:
        await clients.go_on(*streams)
        async with _refusing(clients, name, heir):
            pass
        since_s = clients.strike(f"power cut at {heir}")
        await cluster.kill_node(heir)
        try:
            healed_s = await clients.until_served(since_s=since_s)
            await cluster.first.until(lambda status: any(absent.name == heir for absent in missed(status.absent)))
            await clients.go_on(*streams)
            (engine,) = (await cluster.first.status()).engines
            assert engine.recoveries == 0 or engine.epoch.counter == before, "the epoch has ended"
        finally:
            await _bring_back(cluster, heir)
    return healed_s


async def small_node(clients: Clients) -> float:
    """A machine with a tenth of the memory joins, takes over for a lost one, and leaves again."""
    cluster = clients.cluster
    name, small = (await cluster.stage_nodes())[-1], cluster.names[-1]
    before = await _num_blocks(cluster)
    long_prompt = [index % 251 for index in range(before * 16 // 5)]  # twice what fits where the small one serves
    await _bring_back(cluster, small)
    async with clients.streams(1, max_tokens=_LONG) as streams:
        await clients.go_on(*streams)
        since_s = clients.strike(f"power cut at {name}")
        await cluster.kill_node(name)
        await clients.until_served(since_s=since_s)
        await clients.go_on(*streams)
        assert await _num_blocks(cluster) < before / 2, "the small node serves"
        await _bring_back(cluster, name)
        await _drain(cluster, small)
        since_s = clients.strike(f"{small} leaves")
        await cluster.running.pop(small).stop()
        healed_s = await clients.until_served(since_s=since_s, prompt=long_prompt)
        await clients.go_on(*streams)
    assert await _num_blocks(cluster) == before
    return healed_s


async def _idle_nodes(cluster: ChaosCluster) -> list[str]:
    """Names of running nodes without a stage."""
    busy = await cluster.stage_nodes()
    return [name for name in cluster.running if name not in busy]


async def _num_blocks(cluster: ChaosCluster) -> int:
    """KV blocks of the one model that is served."""
    (engine,) = (await cluster.first.status()).engines
    return engine.num_blocks


async def _bring_back(cluster: ChaosCluster, name: str) -> None:
    """Start a node; its device is ready to load when this returns."""
    await cluster.start(name)
    await cluster.until_ready()
    await cluster.running[name].until(_own_device_is_idle)


def _own_device_is_idle(status: ClusterStatus) -> bool:
    own = [member.node for member in status.members if member.node.node_id == status.node_id]
    return [[device.state for device in node.devices] for node in own] == [["idle"]]


@asynccontextmanager
async def _refusing(clients: Clients, name: str, heir: str) -> AsyncGenerator[asyncio.Task[None]]:
    """Drain ``name`` while ``heir`` has no memory; the drain, once it was refused. It is undone at the end."""
    cluster = clients.cluster
    processes = await _stage_pids(cluster, heir)
    clients.strike(f"{name} is drained, {heir} has no memory")
    cluster.fill_device(heir)
    draining = asyncio.create_task(_drain(cluster, name), name=f"drain:{name}")
    try:
        async with asyncio.timeout(HEAL_S):
            # The process that was to load ends, and another one takes its place.
            while processes & (now := await _stage_pids(cluster, heir)) or not now:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
        yield draining
    finally:
        draining.cancel()
        await asyncio.wait((draining,))
        cluster.mend_device(heir)
        await _drain(cluster, name, undo=True)


async def _stage_pids(cluster: ChaosCluster, name: str) -> set[int]:
    return {child.pid for child in (await cluster.running[name].status()).children if child.kind == "stage"}


async def _drain(cluster: ChaosCluster, name: str, *, undo: bool = False) -> None:
    """Ask until nothing runs there any more; a drain that is refused is asked for again."""
    while True:
        with contextlib.suppress(EdgepipeError, TimeoutError):
            await cluster.running[name].drain(undo=undo, timeout_s=WHOLE_S)
            return
        await asyncio.sleep(1.0)
