"""Whole nodes lost in mid-sentence: their layers move to others, and the same streams go on, every token right.

Short forms: the power cut in ``test_chaos.py``, and ``test_removed_nodes.py``.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.support.processes.nodes import Nodes, kv_is_free
from tests.support.processes.streams import PROMPT, Stream, answers, cut_power, slow_cluster

pytestmark = pytest.mark.long


async def test_layers_of_a_lost_node_move_to_an_idle_one(nodes: Nodes) -> None:
    a, b, c = await slow_cluster(nodes, "a", "b", "c")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await answers(a)
    await answers(c)
    streams = [Stream(PROMPT, 70), Stream((*PROMPT, 7, 7), 60), Stream(PROMPT[:2], 50)]
    async with asyncio.TaskGroup() as tasks:
        for stream, node in zip(streams, (a, c, a), strict=True):
            tasks.create_task(stream.run(node.http_port))
        for stream in streams:
            await stream.has(10)
        cut_power(b)
    for stream in streams:
        stream.assert_right()
    status = await a.until(kv_is_free)
    assert [stage.node_name for stage in status.engines[0].stages] == ["a", "c"]


async def test_a_survivor_takes_all_layers_if_they_fit(nodes: Nodes) -> None:
    a, b = await slow_cluster(nodes, "a", "b")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await answers(a)
    stream = Stream(PROMPT, 60)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.run(a.http_port))
        await stream.has(10)
        cut_power(b)
    stream.assert_right()
    status = await a.until(kv_is_free)
    assert [stage.node_name for stage in status.engines[0].stages] == ["a"]
