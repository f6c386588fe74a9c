"""Nodes that are drained, stopped in order, or join: the streams go on, and stages are where they should be."""

from __future__ import annotations

import asyncio

import pytest

from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.nodes import ClusterStatus
from edgepipe.wire.serving import Moves
from tests.support.processes.nodes import Nodes, idle
from tests.support.processes.streams import PROMPT, SLOW, Stream, answers, serving_stage, slow_cluster

LONG = 3000  # tokens: more than any of these tests waits for


def places(status: ClusterStatus) -> list[str]:
    """Names of the nodes in the order of a token's way."""
    return [stage.node_name for engine in status.engines for stage in engine.stages]


@pytest.mark.parametrize("leaving", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_a_drained_node_keeps_nothing_and_nobody_waits_in_vain(nodes: Nodes, leaving: int) -> None:
    """P17: also when the engine is there."""
    a, b, c = await slow_cluster(nodes, "a", "b", "c")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await answers(c)
    stream = Stream(PROMPT, LONG)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(stream.run(c.http_port))
        await stream.has(20)
        await (a, b)[leaving].drain()
        await stream.goes_on()
        asking.cancel()
    status = await c.until(lambda status: [engine.state for engine in status.engines] == ["ready"])
    assert sorted(places(status)) == sorted({"a", "b", "c"} - {"ab"[leaving]})


async def test_p14_a_stage_that_is_killed_while_stages_move_costs_no_token(nodes: Nodes) -> None:
    a, b, c = await slow_cluster(nodes, "a", "b", "c")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await answers(c)
    stream = Stream(PROMPT, LONG)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(stream.run(c.http_port))
        await stream.has(20)
        draining = tasks.create_task(b.drain())
        await c.until(lambda status: any(member.node.draining for member in status.members))
        serving_stage(await a.status()).kill()
        await draining
        await stream.goes_on()
        asking.cancel()
    status = await c.until(lambda status: [engine.state for engine in status.engines] == ["ready"])
    assert "b" not in places(status)


async def test_a_machine_that_joined_is_used_when_asked(nodes: Nodes) -> None:
    (a,) = await slow_cluster(nodes, "a")
    await a.serve("tiny")
    await answers(a)
    b = await nodes.start("b", backend_options=SLOW)
    await b.until(
        lambda status: (
            len(status.members) == 2
            and not any(device.state == "starting" for member in status.members for device in member.node.devices)
        )
    )
    await a.until(lambda status: len(status.members) == 2)
    stream = Stream(PROMPT, 120)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.run(a.http_port))
        await stream.has(20)
        assert (await a.serve("tiny", rebalance=True, options=ServeSpec(model="tiny", num_nodes=2))).state == "ready"
    stream.assert_right()
    status = await a.status()
    assert sorted(places(status)) == ["a", "b"]
    assert (status.engines[0].moves, status.engines[0].recoveries) == (1, 0), "nothing failed"


@pytest.mark.long
async def test_a_faster_machine_that_joins_is_used_by_itself_where_that_was_asked_for(nodes: Nodes) -> None:
    a, b = await slow_cluster(nodes, "a", "b", backend_options="time_factor=100")
    options = ServeSpec(model="tiny", num_nodes=2, throughput=True)
    await a.serve("tiny", options=options, moves=Moves.AUTO)
    await answers(b)
    stream = Stream(PROMPT, 10 * LONG)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(stream.run(b.http_port))
        await stream.has(20)
        c = await nodes.start("c", backend_options="time_factor=1")
        status = await b.until(lambda status: "c" in places(status))
        assert len(places(status)) == 2, "as many as were wished"
        await stream.goes_on()
        asking.cancel()
    log = (nodes.folder / "a" / "node.log").read_text() + (nodes.folder / "b" / "node.log").read_text()
    assert "c can be used now" in log
    assert c.node_id in {stage.node_id for engine in status.engines for stage in engine.stages}


@pytest.mark.long
async def test_streams_outlive_a_node_that_is_stopped(nodes: Nodes) -> None:
    """Short forms: the drained engine's node, and the node that leaves."""
    a, b = await slow_cluster(nodes, "a", "b")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await answers(b)
    stream = Stream(PROMPT, LONG)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(stream.run(b.http_port))
        await stream.has(20)
        assert await a.stop() == 0
        await stream.goes_on()
        asking.cancel()
    assert places(await b.status()) == ["b"]
    await b.stop_model("tiny")
    await b.until(lambda status: idle(status, 1))


async def test_a_node_that_leaves_ends_its_stage_after_its_layers_are_loaded_elsewhere(nodes: Nodes) -> None:
    """The machine that stays loads all layers beside its own, so a stream pauses for the change alone."""
    a, b = await slow_cluster(nodes, "a", "b")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await answers(a)
    stream = Stream(PROMPT, LONG)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(stream.run(a.http_port))
        await stream.has(20)
        async with b.admin() as admin:
            assert "moves to other machines first" in await admin.shut_down()
        await a.until(lambda status: places(status) == ["a"])
        await stream.goes_on()
        asking.cancel()
    log = (nodes.folder / "a" / "node.log").read_text()
    assert "ended: stages move to other nodes" in log
    assert "was lost" not in log
