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
from tests.support.gateways.fake_engine import FakeEngine, view_of
from tests.support.gateways.server import serving
from tests.support.processes.waiting import until

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
        for name in ("bigger", "gpt-4"):
            assert (await served.chat(model=name)).status_code == 404
        assert (await served.http.get("/v1/models/big")).status_code == 404, "a look loads nothing"
        assert asked == []


async def test_a_wanted_model_whose_engine_is_away_is_not_unknown() -> None:
    spec = ServeSpec(model="big", manifest_hash="", stages=())
    body = ServeBody(pipeline_id=PipelineId("pipeline-9"), spec=spec, begun=True)
    async with serving(FakeEngine()) as served:
        view = view_of(served.address, names=("tiny",))
        engines = [model.engine for model in view.served]
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
    with pytest.raises(CapacityError) as raised:
        await loads.entry("big")
    assert raised.value.http_status == 503
    assert raised.value.next_step == "try again in a moment"
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


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        ("tiny:latest", "tiny"),
        ("TINY", "tiny"),
        ("qwen3:8b", "Qwen/Qwen3-8B-GGUF:q4_k_m"),
        ("hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M", "Qwen/Qwen3-8B-GGUF:q4_k_m"),
        ("home", "tiny"),
        ("Home:latest", "tiny"),
    ],
)
async def test_a_request_names_a_model_as_people_type_it(path: str, asked: str, answers: str) -> None:
    async with serving(FakeEngine()) as served:
        view = view_of(served.address, served.address, names=("tiny", "Qwen/Qwen3-8B-GGUF:q4_k_m"))
        named = tuple(
            replace(model, engine=replace(model.engine, names=("home",) if model.engine.model == "tiny" else ()))
            for model in view.served
        )
        served.gateway.update(replace(view, served=named))
        body = {"model": asked, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "stream": False}
        del body["prompt" if "chat" in path else "messages"]
        response = await served.http.post(path, json=body)
        assert (response.status_code, response.json()["model"]) == (200, answers)


async def test_a_further_name_is_listed_and_hides_no_model() -> None:
    async with serving(FakeEngine()) as served:
        view = view_of(served.address, served.address, names=("tiny", "org/big"))
        named = tuple(replace(model, engine=replace(model.engine, names=("home", "big"))) for model in view.served[:1])
        served.gateway.update(replace(view, served=named + view.served[1:]))
        listed = (await served.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["org/big", "tiny", "home", "big"]
        tags = (await served.http.get("/api/tags")).json()["models"]
        assert [model["name"] for model in tags] == ["org/big", "tiny", "home", "big"]
        assert (await served.http.get("/v1/models/home")).json()["id"] == "tiny"
        assert (await served.chat(model="big")).json()["model"] == "org/big"
        two = tuple(replace(model, engine=replace(model.engine, names=("home",))) for model in view.served)
        served.gateway.update(replace(view, served=two))
        assert (await served.chat(model="home")).status_code == 404, "the name of two models means neither"


async def test_a_name_as_typed_loads_the_model_on_a_disk() -> None:
    asked: list[str] = []
    async with serving(FakeEngine(), load_model=lambda model, _: asked.append(model)) as served:
        served.gateway.update(view_of(served.address, names=("tiny",), loadable=("Qwen/Qwen3-8B-GGUF:q4_k_m",)))
        asking = asyncio.create_task(served.chat(model="qwen3:8b"))
        await until(lambda: asked)
        names = ("tiny", "Qwen/Qwen3-8B-GGUF:q4_k_m")
        served.gateway.update(view_of(served.address, served.address, names=names))
        assert (await asking).json()["model"] == names[1]
        assert asked == [names[1]]
