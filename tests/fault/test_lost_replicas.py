"""Two pipelines of one model, each on a machine of its own: a lost one's requests go on at the other.

``tests/unit/gateway/test_replica_links.py`` is the short form, with fake engines.
"""

from __future__ import annotations

import asyncio

import httpx
import pytest

from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.nodes import ClusterStatus
from tests.support.processes.nodes import Node, Nodes
from tests.support.processes.streams import PROMPT, Stream, children, cut_power, slow_cluster


def titles(status: ClusterStatus, state: str = "ready") -> list[str]:
    return sorted(engine.title for engine in status.engines if engine.state == state)


BOTH = ["tiny replica 1/2", "tiny replica 2/2"]


async def two_replicas(nodes: Nodes) -> tuple[Node, Node]:
    a, b = await slow_cluster(nodes, "a", "b", backend_options="time_factor=6")
    events = await a.serve_events("tiny", options=ServeSpec(model="tiny", num_replicas=2, throughput=True))
    assert [engine.title for engine in events[-1].engines] == BOTH
    for node in (a, b):
        status = await node.until(lambda status: titles(status) == BOTH)
        assert sorted([stage.node_name for stage in engine.stages] for engine in status.engines) == [["a"], ["b"]]
    return a, b


@pytest.mark.long
async def test_requests_of_a_lost_replica_go_on_at_the_other_with_no_token_lost(nodes: Nodes) -> None:
    a, b = await two_replicas(nodes)
    streams = [Stream((*PROMPT, number), 160) for number in range(6)]
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(stream.run(a.http_port))
        for stream in streams:
            await stream.has(10)
        status = await a.until(lambda status: all(engine.running for engine in status.engines))
        assert [engine.running + engine.waiting for engine in status.engines] == [3, 3]
        cut_power(b)
    for stream in streams:
        stream.assert_right()
    status = await a.until(lambda status: titles(status) == BOTH[:1] or titles(status) == BOTH[1:])
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(f"http://127.0.0.1:{a.http_port}/metrics")).text
    assert 'edgepipe_kv_cache_blocks{model="tiny",replica="' in metrics
    b = await nodes.start("b", backend_options="time_factor=6")
    status = await b.until(lambda status: titles(status) == BOTH)
    assert sorted([stage.node_name for stage in engine.stages] for engine in status.engines) == [["a"], ["b"]]
    assert await a.stop_model("tiny") == ["tiny"]
    await a.until(lambda status: not status.engines)


@pytest.mark.long
async def test_after_a_power_cut_both_replicas_are_served_again(nodes: Nodes) -> None:
    a, b = await two_replicas(nodes)
    await b.until(lambda status: all(len(member.node.serves) == 2 for member in status.members))
    for node in (a, b):
        cut_power(node)
        await node.process.wait()
    a, b = await asyncio.gather(*(nodes.start(name, backend_options="time_factor=6") for name in ("a", "b")))
    for node in (a, b):
        status = await node.until(lambda status: titles(status) == BOTH)
        assert sorted([stage.node_name for stage in engine.stages] for engine in status.engines) == [["a"], ["b"]]
    streams = [Stream((*PROMPT, number), 30) for number in range(4)]
    await asyncio.gather(*(stream.run(b.http_port) for stream in streams))
    for stream in streams:
        stream.assert_right()


@pytest.mark.long
async def test_a_replica_whose_stage_dies_in_mid_answer_loses_no_token(nodes: Nodes) -> None:
    a, b = await two_replicas(nodes)
    streams = [Stream((*PROMPT, number), 160) for number in range(4)]
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(stream.run(a.http_port))
        for stream in streams:
            await stream.has(10)
        for stage in children(await b.status(), "stage"):
            stage.kill()
    for stream in streams:
        stream.assert_right()
    await a.until(lambda status: titles(status) == BOTH)


@pytest.mark.long
async def test_a_drained_node_ends_its_replica_and_takes_it_again(nodes: Nodes) -> None:
    a, b = await two_replicas(nodes)
    streams = [Stream((*PROMPT, number), 160) for number in range(4)]
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(stream.run(a.http_port))
        for stream in streams:
            await stream.has(10)
        await b.drain()
    for stream in streams:
        stream.assert_right()
    await b.drain(undo=True)
    await a.until(lambda status: titles(status) == BOTH)
