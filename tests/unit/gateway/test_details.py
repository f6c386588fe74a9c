"""The machines that computed an answer, for clients that ask for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from edgepipe.ids import EngineId, Epoch, NodeId
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.wire.engines import StageState
from edgepipe.wire.nodes import ClusterView
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, events_of, serving

ASKED = {"X-Edgepipe-Details": "1"}


def _on(view: ClusterView, *names: str, epoch: int = 1) -> ClusterView:
    """The view with stages on these machines."""
    stages = tuple(
        StageState(
            node_id=NodeId(name),
            node_name=name,
            slices=(Slice(index=index, layers=LayerRange(3 * index, 3 * index + 3), embedding=False, head=False),),
        )
        for index, name in enumerate(names)
    )
    served = view.served[0]
    return replace(
        view,
        served=(
            replace(served, engine=replace(served.engine, stages=stages, epoch=Epoch(epoch, EngineId("engine-1")))),
        ),
    )


def _ring(*machines: str, epoch: int = 1) -> dict[str, Any]:
    stages = [{"machine": name, "layers": f"{3 * at}-{3 * at + 2}"} for at, name in enumerate(machines)]
    return {"epoch": epoch, "stages": stages}


async def _until_ready(served: Served) -> None:
    async with asyncio.timeout(10):
        while (await served.http.get("/ready")).status_code != 200:  # noqa: ASYNC110 - no notification over HTTP
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("usage", [True, False])
async def test_the_last_part_names_the_machines_if_the_client_asks(usage: bool) -> None:
    async with serving(FakeEngine(), change=lambda view: _on(view, "pc", "mac")) as served:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        body |= {"stream_options": {"include_usage": True}} if usage else {}
        await _until_ready(served)
        asked = events_of((await served.http.post("/v1/chat/completions", json=body, headers=ASKED)).text)
        assert asked[-1] == "[DONE]"
        assert asked[-2]["edgepipe"] == {"rings": [_ring("pc", "mac")]}
        assert (asked[-2]["choices"], "usage" in asked[-2]) == ([], usage)
        plain = (await served.http.post("/v1/chat/completions", json=body)).text
        assert "edgepipe" not in plain
        whole = await served.http.post("/v1/chat/completions", json=body | {"stream": False}, headers=ASKED)
        if not usage:
            assert whole.json()["edgepipe"] == {"rings": [_ring("pc", "mac")]}


async def test_an_answer_that_outlives_a_machine_names_both_rings() -> None:
    engine = FakeEngine(hold_after=3)
    first: list[ClusterView] = []

    def change(view: ClusterView) -> ClusterView:
        first.append(view)
        return _on(view, "pc", "mac")

    async with serving(engine, change=change) as served:
        await _until_ready(served)
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        asking = asyncio.create_task(served.http.post("/v1/chat/completions", json=body, headers=ASKED))
        await engine.submitted.wait()
        served.gateway.update(_on(first[0], "pc", epoch=2))
        async with asyncio.timeout(10), served.http.stream("GET", "/ui/events") as stream:
            async for line in stream.aiter_lines():  # once the page has the view, the gateway has applied it
                if '"epoch":2' in line:
                    break
        engine.release.set()
        events = events_of((await asking).text)
    assert events[-2]["edgepipe"] == {"rings": [_ring("pc", "mac"), _ring("pc", epoch=2)]}
