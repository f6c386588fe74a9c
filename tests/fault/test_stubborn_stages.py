"""Stage processes that are killed again and again, on real nodes: a free machine or a refusal ends the row."""

from __future__ import annotations

import asyncio

import pytest

from edgepipe.wire.engines import EngineState
from edgepipe.wire.nodes import ClusterStatus
from tests.support.processes.nodes import Node, Nodes
from tests.support.processes.streams import PROMPT, Stream, answers, serving_stage, slow_cluster

_LONG = tuple(1 + number % 200 for number in range(1500))
_MOST_KILLS = 12


def engine_in(status: ClusterStatus, *, after_epoch: int) -> EngineState | None:
    """The engine, if an epoch after that one serves."""
    return next(
        (engine for engine in status.engines if engine.state == "ready" and engine.epoch.counter > after_epoch), None
    )


async def kill_stage(node: Node, epoch: int) -> None:
    """Kill the node's stage process of that epoch."""
    status = await node.until(lambda status: engine_in(status, after_epoch=epoch - 1) is not None)
    serving_stage(status).kill()


async def test_a_stage_that_dies_idle_again_and_again_leaves_its_place_to_the_free_machine(nodes: Nodes) -> None:
    a, b, _ = await slow_cluster(nodes, "a", "b", "c")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await answers(a)
    engine = (await a.status()).engines[0]
    for _ in range(6):  # the third is the last that its node needs
        epoch = engine.epoch.counter
        await kill_stage(b, epoch)
        status = await a.until(lambda status, epoch=epoch: engine_in(status, after_epoch=epoch) is not None)
        engine = status.engines[0]
        if "b" not in [stage.node_name for stage in engine.stages]:
            break
    assert "b" not in [stage.node_name for stage in engine.stages]
    [left_out] = engine.left_out
    assert left_out.node_name == "b"
    assert "it keeps ending the pipeline: stage 1 on b was lost" in left_out.reason
    stream = Stream(PROMPT, 10)
    await stream.run(a.http_port)
    stream.assert_right()


@pytest.mark.long
async def test_a_prompt_whose_stage_is_killed_each_time_is_refused_and_other_answers_go_on(nodes: Nodes) -> None:
    """Its short form is in ``tests/cluster/test_engine_stalls.py``."""
    (node,) = await slow_cluster(nodes, "a", backend_options="time_factor=2500")
    await node.serve("tiny", plan="a:0-5")
    await answers(node)
    bystander, guilty = Stream(PROMPT, 12), Stream(_LONG, 2)
    epoch = 0
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bystander.run(node.http_port))
        await bystander.has(2)
        tasks.create_task(guilty.run(node.http_port))
        for _ in range(_MOST_KILLS):
            status = await node.until(lambda status, epoch=epoch: guilty.error is not None or reads(status, epoch))
            if guilty.error is not None:
                break
            epoch = status.engines[0].epoch.counter
            serving_stage(status).kill()
    bystander.assert_right()
    assert guilty.error is not None
    assert "4 attempts in a row ended before any more of it was computed" in guilty.error["message"]
    assert not guilty.ids
    later = Stream((1, 2, 3), 10)
    await later.run(node.http_port)
    later.assert_right()


def reads(status: ClusterStatus, epoch: int) -> bool:
    """Whether a later epoch computes both streams."""
    engine = engine_in(status, after_epoch=epoch)
    return engine is not None and engine.running == 2 and engine.in_flight > 0
