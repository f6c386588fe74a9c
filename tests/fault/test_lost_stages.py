"""Stage processes killed in mid-sentence, on real nodes: the same streams go on, every token right."""

from __future__ import annotations

import asyncio
import signal

import pytest

from edgepipe.wire.nodes import ClusterStatus
from tests.support.processes.nodes import Nodes, kv_is_free
from tests.support.processes.streams import PROMPT, Stream, answers, expected, serving_stage, slow_cluster


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_streams_outlive_a_killed_stage(nodes: Nodes, victim: int) -> None:
    started = await slow_cluster(nodes, "a", "b")
    await started[0].serve("tiny", plan="a:0-2,b:3-5")
    await answers(started[0])
    await answers(started[1])
    streams = [Stream(PROMPT, 70), Stream((*PROMPT, 7, 7), 60), Stream(PROMPT[:2], 50)]
    async with asyncio.TaskGroup() as tasks:
        for stream, node in zip(streams, (started[0], started[1], started[0]), strict=True):
            tasks.create_task(stream.run(node.http_port))
        for stream in streams:
            await stream.has(10)
        serving_stage(await started[victim].status()).kill()
        late = Stream((1, 2, 3), 20)  # asked while the pipeline recovers
        tasks.create_task(late.run(started[0].http_port))
    for stream in (*streams, late):
        stream.assert_right()
    status = await started[0].until(recovered)
    assert [engine.state for engine in status.engines] == ["ready"]
    assert status.engines[0].epoch.counter == 2
    assert (status.engines[0].replayed_tokens > 0) == (victim == 0), "what the second stage holds is kept"


def recovered(status: ClusterStatus) -> bool:
    """All streams have ended, and the engine has told so since its new epoch took them up."""
    return kv_is_free(status) and all(engine.epoch.counter > 1 and engine.admitted_tokens for engine in status.engines)


@pytest.mark.long
async def test_a_request_whose_steps_crash_stages_is_refused_at_the_third_time(nodes: Nodes) -> None:
    """Each time before it gives another token: one that does is not to blame."""
    (node,) = await slow_cluster(nodes, "a", backend_options="time_factor=12000")  # about a second each step
    await node.serve("tiny", plan="a:0-5")
    await answers(node)
    stream = Stream(PROMPT, 60)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.run(node.http_port))
        await stream.has(2)
        for epoch in (1, 2, 3):
            status = await node.until(lambda status, epoch=epoch: computes(status, epoch))
            stage = serving_stage(status)
            stage.send_signal(signal.SIGSEGV)
            await node.until(lambda status, pid=stage.pid: pid not in [child.pid for child in status.children])
    assert stream.error is not None
    assert "crashed" in stream.error["message"]
    assert stream.ids == expected(PROMPT, len(stream.ids))
    later = Stream(PROMPT, 2)
    await later.run(node.http_port)
    later.assert_right()


def computes(status: ClusterStatus, epoch: int) -> bool:
    """Whether a step is under way in that epoch."""
    return [(engine.epoch.counter, bool(engine.in_flight)) for engine in status.engines] == [(epoch, True)]
