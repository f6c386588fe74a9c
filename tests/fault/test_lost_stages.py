"""Stage processes killed in mid-sentence, on real nodes: the same streams go on, every token right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from streams import CONFIG, PROMPT, SLOW, Stream, answers, kv_is_free, serving_stage

from edgepipe.model.emulated_folder import write_model_folder
from edgepipe.model.store import ModelStore
from edgepipe.testing.nodes import Node, Nodes, idle


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    made = Nodes(folder=tmp_path, cluster=f"test-{tmp_path.name}-{id(tmp_path)}")
    yield made
    await made.end()


async def cluster(nodes: Nodes, *names: str) -> list[Node]:
    """Slow nodes with ``tiny`` on the first one's disk, ready to compute and known to each other."""
    write_model_folder(nodes.folder / "tiny", CONFIG)
    ModelStore(nodes.folder / names[0] / "models").pull(str(nodes.folder / "tiny"))
    started = await asyncio.gather(*(nodes.start(name, backend_options=SLOW) for name in names))
    await asyncio.gather(*(node.until(lambda status: idle(status, len(names))) for node in started))
    return list(started)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
async def test_streams_outlive_a_killed_stage(nodes: Nodes, victim: int) -> None:
    started = await cluster(nodes, "a", "b")
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
