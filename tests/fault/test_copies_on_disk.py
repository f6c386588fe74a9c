"""Copies of a model's parts on other disks: who has them goes on when the only node with the whole model is lost."""

from __future__ import annotations

import asyncio

import pytest

from edgepipe.cluster.model_copies import copies_of
from edgepipe.errors import PlanInvalid
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.store.pull import Puller
from edgepipe.store.store import tensor_names
from edgepipe.wire.serving import ReplicateEvent
from tests.support.models.fake_hub import FakeHub, running
from tests.support.models.for_nodes import CONFIG, pull_with_weights, write_with_weights
from tests.support.processes.nodes import Node, Nodes, idle
from tests.support.processes.streams import PROMPT, Stream, answers, cut_power


async def replicate(node: Node, *, copies: int) -> ReplicateEvent:
    """As ``edgepipe models replicate`` does; the last that it told."""
    async with asyncio.timeout(30), node.admin() as admin:
        events = [event async for event in admin.replicate("tiny", copies=copies)]
    return events[-1] if events else ReplicateEvent()


async def test_a_survivor_with_copies_serves_alone_what_it_never_served(nodes: Nodes) -> None:
    pull_with_weights(nodes.folder / "a" / "models", nodes.folder / "tiny")
    a, b = await asyncio.gather(*(nodes.start(name, backend_options="time_factor=20", copies=1) for name in ("a", "b")))
    await asyncio.gather(*(node.until(lambda status: idle(status, 2)) for node in (a, b)))
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await answers(b)
    assert [copies.fewest for copies in copies_of((await a.status()).members).values()] == [1]
    stream = Stream(PROMPT, 3000)
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(stream.run(b.http_port))
        await stream.has(20)
        made = await replicate(b, copies=2)
        assert [(copy.node_name, copy.bytes_done == copy.bytes_total > 0) for copy in made.copies] == [("b", True)]
        assert [copies.fewest for copies in copies_of((await b.status()).members).values()] == [2]
        assert (await replicate(b, copies=2)).copies == ()
        with pytest.raises(PlanInvalid, match="3 copies need 3 nodes"):
            await replicate(b, copies=3)
        cut_power(a)
        await stream.goes_on()
        asking.cancel()
    status = await b.until(lambda status: [engine.state for engine in status.engines] == ["ready"])
    assert [stage.node_name for stage in status.engines[0].stages] == ["b"]


@pytest.mark.long
async def test_what_no_living_machine_has_comes_from_the_hub_and_the_answer_goes_on(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = nodes.folder / "uploaded"
    write_with_weights(source)
    hub = FakeHub(repo="org/tiny", files={path.name: path.read_bytes() for path in source.iterdir()})
    with running(hub):
        puller = Puller(nodes.folder / "a" / "models", endpoint=hub.endpoint)
        await asyncio.to_thread(puller.pull, hub.repo, lambda _: None, dry_run=False)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        flags = {"backend_options": "time_factor=20", "copies": 1}
        a, b = await asyncio.gather(*(nodes.start(name, **flags) for name in ("a", "b")))
        await asyncio.gather(*(node.until(lambda status: idle(status, 2)) for node in (a, b)))
        await a.serve("tiny", plan="a:0-2,b:3-5")
        await answers(b)
        stream = Stream(PROMPT, 3000, hub.repo)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(stream.run(b.http_port))
            await stream.has(20)
            hub.asked.clear()
            cut_power(a)
            await stream.goes_on()
            asking.cancel()
    status = await b.until(lambda status: [engine.state for engine in status.engines] == ["ready"])
    assert [stage.node_name for stage in status.engines[0].stages] == ["b"]
    assert {name for name, _ in hub.asked} == {"model.safetensors"}
    lost = tensor_names(CONFIG, make_slices([LayerRange(0, 3), LayerRange(3, 6)], 6)[:1])
    assert sum(bool(part) for _, part in hub.asked) == len(lost), "beside the header, a range for each lost tensor"
