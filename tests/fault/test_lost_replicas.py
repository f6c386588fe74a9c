"""Two pipelines of one model, each on a machine of its own: one's requests go on at the other when it is lost, or ends.

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
    async with httpx.AsyncClient(verify=False) as client:
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


@pytest.mark.long
async def test_the_number_of_pipelines_changes_while_answers_come(nodes: Nodes) -> None:
    a, b = await slow_cluster(nodes, "a", "b", backend_options="time_factor=6")
    first = await a.serve("tiny", options=ServeSpec(model="tiny", num_nodes=1))
    (here, there) = ("a", "b") if first.stages[0].node_name == "a" else ("b", "a")
    early = [Stream((*PROMPT, number), 240) for number in range(2)]
    late = [Stream((*PROMPT, number), 240) for number in range(2, 6)]
    async with asyncio.TaskGroup() as tasks:
        for stream in early:
            tasks.create_task(stream.run(a.http_port))
            await stream.has(10)
        events = await a.serve_events("tiny", options=ServeSpec(model="tiny", num_replicas=2, throughput=True))
        assert [engine.title for engine in events[-1].engines] == BOTH
        assert any(f"the one on {here} stays, one starts on {there}" in event.note for event in events)
        kept = next(engine for engine in events[-1].engines if engine.pipeline_id == first.pipeline_id)
        assert kept.epoch == first.epoch, "it serves on without a pause"
        for stream in late:
            tasks.create_task(stream.run(b.http_port))
            await stream.has(10)
        await a.until(lambda status: all(engine.running for engine in status.engines))
        again = await a.serve_events("tiny", options=ServeSpec(model="tiny", num_replicas=2))
        assert any(event.note == "tiny has 2 replicas already" for event in again)
        (alone,) = (await a.serve_events("tiny", options=ServeSpec(model="tiny", num_replicas=1)))[-1].engines
        assert (alone.title, alone.pipeline_id) == ("tiny", first.pipeline_id)
        for node in (a, b):
            await node.until(lambda status: titles(status) == ["tiny"] and len(status.engines) == 1)
    for stream in (*early, *late):
        stream.assert_right()
    ended = a if there == "a" else b
    status = await ended.until(lambda status: not any(device.reserved for device in status.members[0].node.devices))
    assert not children(status, "engine")


@pytest.mark.long
async def test_a_machine_that_joins_gets_a_pipeline_of_a_model_with_auto(nodes: Nodes) -> None:
    (a,) = await slow_cluster(nodes, "a", backend_options="time_factor=6")
    await a.serve("tiny", options=ServeSpec(model="tiny", auto_replicas=True, throughput=True, concurrency=16384))
    await nodes.start("b", backend_options="time_factor=6")
    await a.until(lambda status: titles(status) == BOTH, timeout_s=60)
    stream = Stream(PROMPT, 30)
    await stream.run(a.http_port)
    stream.assert_right()
