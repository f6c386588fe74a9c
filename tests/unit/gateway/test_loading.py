"""A request for a model that is pulled and not served loads it."""

from __future__ import annotations

import asyncio

import pytest

from edgepipe.errors import CapacityError, ModelUnknown, NoFeasiblePlacement
from edgepipe.gateway.loading import ModelLoads
from edgepipe.gateway.models import ModelTable
from tests.support.fake_engine import FakeEngine, view_of
from tests.support.gateway import serving
from tests.support.waiting import until

PATHS = ["/v1/chat/completions", "/v1/completions", "/api/chat", "/api/generate"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_model_that_can_be_loaded_is_waited_for(path: str) -> None:
    asked: list[str] = []
    async with serving(FakeEngine(), load_model=asked.append) as served:
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

    async with serving(FakeEngine(), load_model=asked.append) as served:
        served.gateway.update(view_of(served.address, names=("tiny",), loadable=("big",)))
        asking = [asyncio.create_task(served.chat(model="big")) for _ in range(2)]
        await until(lambda: len(asked) >= 2)
        served.gateway.not_loaded("big", NoFeasiblePlacement("the model needs about 64 GB, 20 GB are free"))
        for response in await asyncio.gather(*asking):
            assert response.status_code == NoFeasiblePlacement.http_status
            assert "needs about 64 GB" in response.json()["error"]["message"]


async def test_what_is_on_no_disk_is_unknown_and_asks_nobody() -> None:
    asked: list[str] = []
    async with serving(FakeEngine(), load_model=asked.append) as served:
        served.gateway.update(view_of(served.address, names=("tiny",), loadable=("big",)))
        for name in ("bigger", "BIG", "gpt-4"):
            assert (await served.chat(model=name)).status_code == 404
        assert (await served.http.get("/v1/models/big")).status_code == 404, "a look loads nothing"
        assert asked == []


async def test_who_has_waited_long_is_told_to_come_again() -> None:
    loads = ModelLoads(ModelTable(), load=lambda _: None, wait_s=0.01)
    loads.update(["big"])
    with pytest.raises(CapacityError) as told:
        await loads.entry("big")
    assert told.value.http_status == 503
    assert told.value.next_step == "try again in a moment"
    with pytest.raises(ModelUnknown):
        await loads.entry("other")


async def test_an_earlier_failure_is_not_that_of_a_model_which_a_user_serves() -> None:
    asked: list[str] = []
    async with serving(FakeEngine(), load_model=asked.append) as served:
        served.gateway.update(view_of(served.address, names=("tiny",), loadable=("big",)))
        asking = asyncio.create_task(served.chat(model="big"))
        await until(lambda: asked)
        served.gateway.not_loaded("big", NoFeasiblePlacement("the model needs about 64 GB, 20 GB are free"))
        assert (await asking).status_code == NoFeasiblePlacement.http_status
        served.gateway.update(view_of(served.address, names=("big",), state="loading", loadable=("big",)))
        response = await served.chat(model="big")
        assert "not ready yet" in response.json()["error"]["message"]
        assert response.headers["retry-after"]
