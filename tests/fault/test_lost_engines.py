"""Engines and their nodes lost in mid-sentence: others go on with what the gateways have."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from edgepipe.backend.types import StageSettings
from edgepipe.wire.engines import ServeSpec
from tests.support.processes.nodes import Node, Nodes, idle, kv_is_free
from tests.support.processes.streams import PROMPT, Stream, answers, children, cut_power, expected, slow_cluster


@pytest.mark.long
async def test_an_engine_that_crashed_is_started_again_and_streams_go_on(nodes: Nodes) -> None:
    """Its short form is the killed engine in ``test_chaos.py``."""
    a, b = await slow_cluster(nodes, "a", "b")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await answers(a)
    await answers(b)
    streams = [Stream(PROMPT, 70), Stream((*PROMPT, 7, 7), 60)]
    async with asyncio.TaskGroup() as tasks:
        for stream, node in zip(streams, (a, b), strict=True):
            tasks.create_task(stream.run(node.http_port))
        for stream in streams:
            await stream.has(10)
        children(await a.status(), "engine")[0].kill()
        late = Stream((1, 2, 3), 20)
        tasks.create_task(late.run(b.http_port))
    for stream in (*streams, late):
        stream.assert_right()
    await a.until(kv_is_free)


async def test_another_node_starts_the_engine_of_one_that_is_gone(nodes: Nodes) -> None:
    a, b, c = await slow_cluster(nodes, "a", "b", "c")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    for node in (b, c):
        await answers(node)
    streams = [Stream(PROMPT, 60), Stream((*PROMPT, 7, 7), 60)]
    async with asyncio.TaskGroup() as tasks:
        for stream, node in zip(streams, (b, c), strict=True):
            tasks.create_task(stream.run(node.http_port))
        for stream in streams:
            await stream.has(10)
        cut_power(a)
    for stream in streams:
        stream.assert_right()
    for node in (b, c):
        status = await node.until(lambda status: [engine.state for engine in status.engines] == ["ready"])
        assert sorted(stage.node_name for stage in status.engines[0].stages) == ["b", "c"]


async def kill_engine(*nodes: Node) -> None:
    """Kill the engine once it serves, wherever it is, and wait until its node has noticed."""
    while True:
        statuses = [await node.until(lambda status: bool(status.engines)) for node in nodes]
        engines = [process for status in statuses for process in children(status, "engine")]
        if engines and [engine.state for engine in statuses[0].engines] == ["ready"]:
            break
        await asyncio.sleep(0.1)
    engines[0].kill()
    await asyncio.gather(
        *(node.until(lambda status: all(engine.state != "ready" for engine in status.engines)) for node in nodes)
    )


@pytest.mark.long
async def test_an_engine_that_was_killed_leaves_its_chats_in_the_ram_of_its_stages(nodes: Nodes) -> None:
    a, b = await slow_cluster(nodes, "a", "b", backend_options="time_factor=0")
    below = StageSettings(kv_ram="10000000")
    await a.serve("tiny", plan="a:0-2,b:3-5", options=ServeSpec(model="tiny", kv_tokens=512, settings=below))
    await answers(b)
    assert [await turn_of(chat, b) for chat in range(3)] == [0, 0, 0]
    await kill_engine(a, b)
    status = await a.until(lambda status: [engine.state for engine in status.engines] == ["ready"])
    assert status.engines[0].used_host_blocks > 0
    await answers(b)
    assert await turn_of(0, b) >= 256


async def turn_of(chat: int, node: Node) -> int:
    """Ask with a chat's long prompt, of which the device holds one. Return how many of its tokens were known."""
    prompt = [(chat * 37 + 7 * place) % 241 for place in range(300)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=30, verify=False) as client:
        url = f"http://127.0.0.1:{node.http_port}/v1/completions"
        response = await client.post(url, json={**body, "return_token_ids": True})
    assert response.status_code == 200, response.text
    found = response.json()
    assert found["choices"][0]["token_ids"] == expected(prompt, 4)
    return found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("kills", [4, pytest.param(6, marks=pytest.mark.long)])
async def test_an_engine_that_was_killed_again_and_again_in_a_minute_serves_again(nodes: Nodes, kills: int) -> None:
    """As by the system when memory runs out. The second node has it after the fourth time."""
    a, b = await slow_cluster(nodes, "a", "b", backend_options="time_factor=0")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    for _ in range(kills):
        await kill_engine(a, b)
    for node in (a, b):
        await answers(node)
        stream = Stream(PROMPT, 20)
        await stream.run(node.http_port)
        stream.assert_right()
    assert children(await b.status(), "engine")


@pytest.mark.long
async def test_while_a_crashed_engine_pauses_clients_learn_until_when_and_a_person_ends_the_pause(nodes: Nodes) -> None:
    (a,) = await slow_cluster(nodes, "a", backend_options="time_factor=0")
    await a.serve("tiny", plan="a:0-5")
    for _ in range(5):
        await kill_engine(a)
    (engine,) = (await a.until(lambda status: status.engines[0].state == "waiting")).engines
    assert engine.error is not None
    assert "SIGKILL" in engine.error.fact
    async with httpx.AsyncClient(verify=False) as client:
        response = await client.post(
            f"http://127.0.0.1:{a.http_port}/v1/completions", json={"model": "tiny", "prompt": "hi"}
        )
    assert response.status_code == 503
    assert 2 <= int(response.headers["retry-after"]) <= 8
    assert (await a.serve("tiny")).state == "ready"
    await answers(a)
    stream = Stream(PROMPT, 20)
    await stream.run(a.http_port)
    stream.assert_right()


@pytest.mark.long
async def test_of_two_nodes_the_survivor_serves_alone(nodes: Nodes) -> None:
    a, b = await slow_cluster(nodes, "a", "b")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await answers(b)
    stream = Stream(PROMPT, 60)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.run(b.http_port))
        await stream.has(10)
        cut_power(a)
    stream.assert_right()
    status = await b.until(kv_is_free)
    assert [stage.node_name for stage in status.engines[0].stages] == ["b"]


async def test_after_a_power_cut_the_model_is_served_again(nodes: Nodes) -> None:
    a, b = await slow_cluster(nodes, "a", "b")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await b.until(lambda status: any(peer.serves for member in status.members for peer in [member.node]))
    for node in (a, b):
        cut_power(node)
        await node.process.wait()
    a, b = await asyncio.gather(*(nodes.start(name, backend_options="time_factor=0") for name in ("a", "b")))
    await answers(b)
    stream = Stream(PROMPT, 20)
    await stream.run(b.http_port)
    stream.assert_right()


@pytest.mark.long
async def test_what_was_stopped_is_not_served_again(nodes: Nodes) -> None:
    (a,) = await slow_cluster(nodes, "a")
    await a.serve("tiny", plan="a:0-5")
    assert await a.stop_model("tiny") == ["tiny"]
    await a.stop()
    a = await nodes.start("a", backend_options="time_factor=0")
    status = await a.until(lambda status: idle(status, 1))
    assert not status.engines
