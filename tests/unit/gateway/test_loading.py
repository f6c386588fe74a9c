"""A request for a model that is pulled and not served loads it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from edgepipe.daemon.cluster_views import engines_away
from edgepipe.errors import CapacityError, ModelUnknown, NoFeasiblePlacement
from edgepipe.gateway.loading import ModelLoads
from edgepipe.gateway.models import ModelTable
from edgepipe.ids import PipelineId
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.nodes import ServedModel
from edgepipe.wire.serving import ServeBody
from tests.support.fake_engine import FakeEngine, view_of
from tests.support.gateway import serving
from tests.support.waiting import until

PATHS = ["/v1/chat/completions", "/v1/completions", "/api/chat", "/api/generate"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_model_that_can_be_loaded_is_waited_for(path: str) -> None:
    asked: list[str] = []
    async with serving(FakeEngine(), load_model=lambda model, _: asked.append(model)) as served:
        served.gateway.update(view_of(served.address, names=("tiny",), loadable=("big",)))
        body = {"model": "big", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "stream": False}
        del body["prompt" if "chat" in path else "messages"]
        asking = asyncio.create_task(served.http.post(path, json=body))
        await until(lambda: asked)
        served.gateway.update(view_of(served.address, served.address, names=("tiny", "big")))
        response = await asking
        assert response.status_code == 200
        assert response.json()["model"] == "big"
        assert asked == ["big"]


async def test_why_it_cannot_be_served_is_told_to_whoever_waits() -> None:
    asked: list[str] = []

    async with serving(FakeEngine(), load_model=lambda model, _: asked.append(model)) as served:
        served.gateway.update(view_of(served.address, names=("tiny",), loadable=("big",)))
        asking = [asyncio.create_task(served.chat(model="big")) for _ in range(2)]
        await until(lambda: len(asked) >= 2)
        served.gateway.not_loaded("big", NoFeasiblePlacement("the model needs about 64 GB, 20 GB are free"))
        for response in await asyncio.gather(*asking):
            assert response.status_code == NoFeasiblePlacement.http_status
            assert "needs about 64 GB" in response.json()["error"]["message"]


async def test_what_is_on_no_disk_is_unknown_and_asks_nobody() -> None:
    asked: list[str] = []
    async with serving(FakeEngine(), load_model=lambda model, _: asked.append(model)) as served:
        served.gateway.update(view_of(served.address, names=("tiny",), loadable=("big",)))
        for name in ("bigger", "BIG", "gpt-4"):
            assert (await served.chat(model=name)).status_code == 404
        assert (await served.http.get("/v1/models/big")).status_code == 404, "a look loads nothing"
        assert asked == []


async def test_a_wanted_model_whose_engine_is_away_is_not_unknown() -> None:
    spec = ServeSpec(model="big", manifest_hash="", stages=())
    body = ServeBody(pipeline_id=PipelineId("pipeline-9"), spec=spec, begun=True)
    async with serving(FakeEngine()) as served:
        view = view_of(served.address, names=("tiny",))
        engines = [one.engine for one in view.served]
        assert engines_away([replace(body, spec=replace(spec, model="tiny"))], engines) == []
        (away,) = engines_away([body], engines)
        served.gateway.update(replace(view, served=(*view.served, ServedModel(engine=away))))
        response = await served.chat(model="big")
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert "no reachable machine runs its engine" in response.json()["error"]["message"]
        assert (await served.chat(model="other")).status_code == 404
        assert (await served.chat(model="tiny")).status_code == 200


async def test_who_has_waited_long_is_told_to_come_again() -> None:
    loads = ModelLoads(ModelTable(), load=lambda *_: None, wait_s=0.01)
    loads.update(["big"])
    with pytest.raises(CapacityError) as told:
        await loads.entry("big")
    assert told.value.http_status == 503
    assert told.value.next_step == "try again in a moment"
    with pytest.raises(ModelUnknown):
        await loads.entry("other")


async def test_a_model_that_is_being_unloaded_is_loaded_again() -> None:
    asked: list[str] = []
    async with serving(FakeEngine(), load_model=lambda model, _: asked.append(model)) as served:
        served.gateway.update(view_of(served.address, names=("big",), state="stopping"))
        asking = asyncio.create_task(served.chat(model="big"))
        await asyncio.sleep(0.05)
        assert not asking.done()
        served.gateway.update(view_of(served.address, names=("tiny",), loadable=("big",)))
        await until(lambda: asked)
        served.gateway.update(view_of(served.address, served.address, names=("tiny", "big")))
        assert (await asking).status_code == 200
        assert asked == ["big"]


async def test_an_earlier_failure_is_not_that_of_a_model_which_a_user_serves() -> None:
    asked: list[str] = []
    async with serving(FakeEngine(), load_model=lambda model, _: asked.append(model)) as served:
        served.gateway.update(view_of(served.address, names=("tiny",), loadable=("big",)))
        asking = asyncio.create_task(served.chat(model="big"))
        await until(lambda: asked)
        served.gateway.not_loaded("big", NoFeasiblePlacement("the model needs about 64 GB, 20 GB are free"))
        assert (await asking).status_code == NoFeasiblePlacement.http_status
        served.gateway.update(view_of(served.address, names=("big",), state="loading", loadable=("big",)))
        response = await served.chat(model="big")
        assert "not ready yet" in response.json()["error"]["message"]
        assert response.headers["retry-after"]
