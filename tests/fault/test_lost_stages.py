"""Stage processes killed in mid-sentence, on real nodes: the same streams go on, every token right."""

from __future__ import annotations

import asyncio

import pytest
from streams import PROMPT, Stream, answers, kv_is_free, serving_stage, slow_cluster

from edgepipe.testing.nodes import Nodes


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
async def test_streams_outlive_a_killed_stage(nodes: Nodes, victim: int) -> None:
    started = await slow_cluster(nodes, "a", "b")
    await started[0].serve("tiny", plan="a:0-2,b:3-5")
    await answers(started[0])
    await answers(started[1])
    streams = [Stream(PROMPT, 150), Stream((*PROMPT, 7, 7), 120), Stream(PROMPT[:2], 100)]
    async with asyncio.TaskGroup() as tasks:
        for stream, node in zip(streams, (started[0], started[1], started[0]), strict=True):
            tasks.create_task(stream.run(node.http_port))
        for stream in streams:
            await stream.has(20)
        serving_stage(await started[victim].status()).kill()
        late = Stream((1, 2, 3), 20)  # asked while the pipeline recovers
        tasks.create_task(late.run(started[0].http_port))
    for stream in (*streams, late):
        stream.assert_right()
    status = await started[0].until(kv_is_free)
    assert [engine.state for engine in status.engines] == ["ready"]
    assert status.engines[0].epoch.counter == 2
