"""``keep_alive``: models that requests loaded are given back as the requests say, and no others."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.gateway.engine_link import LinkLimits
from edgepipe.gateway.engine_types import RoutedModel
from edgepipe.gateway.models import ModelTable
from edgepipe.gateway.unloading import GRACE_S, KeepAlives, keep_s
from edgepipe.ids import EngineId, Epoch, PipelineId
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.nodes import ClusterView
from tests.support.gateways.fake_engine import FakeEngine, view_of
from tests.support.gateways.server import FixedClock, Served, serving

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("300ms", 0.3),
        ("10", 10.0),
        (".5s", 0.5),
        ("0", 0.0),
        ("-0s", 0.0),
        ("-1", math.inf),
        ("-1m", math.inf),
    ],
)
def test_times_are_read_as_ollama_s_clients_write_them(text: str, seconds: float) -> None:
    assert keep_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-", "m", "5 m", "5m ", "5x", "m5", "--1", "1h-5m", "1e9s", "inf", "nan", "٣s٣"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a time"):
        keep_s(text)


class OneModel(ModelTable):
    """A table of one model that the test changes."""

    def __init__(self, *, on_request: bool = True) -> None:
        super().__init__()
        self.on_request, self.num_requests, self.there = on_request, 0, True

    @property
    def model(self) -> RoutedModel:
        return RoutedModel(
            name="big",
            pipeline_id=PipelineId("p"),
            epoch=Epoch(counter=1, engine_id=EngineId("e")),
            state="ready",
            address="",
            context_length=64,
            model_path="",
            on_request=self.on_request,
            num_requests=self.num_requests,
        )

    @property
    def served(self) -> list[RoutedModel]:
        """As it is now."""
        return [self.model] if self.there else []


STEPS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([None, 0.0, 5.0, 60.0, math.inf])),
    st.tuples(st.just("end"), st.none()),
    st.tuples(st.just("elsewhere"), st.integers(0, 2)),  # what the engine has of other gateways' requests
    st.tuples(st.just("wait"), st.sampled_from([0.5, 1.0, 3.0, 30.0, 100.0])),
)


@given(st.lists(STEPS, max_size=30))
def test_a_model_ends_when_it_was_idle_for_as_long_as_the_newest_wish_says(steps: list[tuple[str, Any]]) -> None:
    table, clock, ended = OneModel(), FakeClock(), list[str]()
    keep_alives = KeepAlives(table, clock=clock, unload=ended.append)
    running: list[Any] = []
    wish, idle_since_s = None, None
    for kind, value in steps:
        if kind == "ask":
            running.append(keep_alives.use(table.model, value))
            running[-1].__enter__()
            running[-1].wish = value
        elif kind == "end" and running:
            using = running.pop(0)
            using.__exit__(None, None, None)
            wish = using.wish if using.wish is not None else wish
            idle_since_s = None
        elif kind == "elsewhere":
            table.num_requests = value
        elif kind == "wait":
            clock.advance(value)
        busy = bool(running or table.num_requests)
        now_s = clock.monotonic_s()
        idle_since_s = None if busy else now_s if idle_since_s is None else idle_since_s
        due = wish is not None and idle_since_s is not None and now_s - idle_since_s >= max(wish, GRACE_S)
        left_s = keep_alives._look()
        assert ended == ["big"] * due, (kind, value)
        if due:
            return
        assert (left_s is None) == (busy or wish in (None, math.inf))


def test_what_a_person_wants_they_let_be() -> None:
    table, clock, ended = OneModel(), FakeClock(), list[str]()
    keep_alives = KeepAlives(table, clock=clock, unload=ended.append)
    keep_alives.want(table.model, 0.0)
    assert keep_alives._look() == GRACE_S
    table.on_request = False
    clock.advance(100)
    assert keep_alives._look() is None
    table.on_request = True
    assert keep_alives._look() is None
    assert ended == []


def test_a_model_whose_engine_was_away_for_a_while_is_still_unloaded_in_time() -> None:
    table, clock, ended = OneModel(), FakeClock(), list[str]()
    keep_alives = KeepAlives(table, clock=clock, unload=ended.append)
    keep_alives.want(table.model, 60.0)
    assert keep_alives._look() == 60.0
    table.there = False
    clock.advance(40)
    assert keep_alives._look() is None
    table.there = True
    assert keep_alives._look() == pytest.approx(20.0)
    clock.advance(20)
    assert keep_alives._look() is None
    assert ended == ["big"]


def _told(served: Served, *, on_request: bool = True) -> None:
    view = view_of(served.address, loadable=("big",))
    view = replace(view, served=(replace(view.served[0], on_request=on_request),))
    served.gateway.update(view)


class RunningClock(FixedClock):
    """Goes as the loop does, from which timeouts come; a hundred times as fast."""

    def monotonic_s(self) -> float:
        """Seconds."""
        return 100 * asyncio.get_running_loop().time()


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of other gateways are expected for 0.1 s only."""
    monkeypatch.setattr("edgepipe.gateway.unloading.GRACE_S", 0.1)


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/generate raw"])
async def test_the_last_answer_comes_whole_before_its_model_is_unloaded(path: str) -> None:
    ended = asyncio.Queue[str]()
    async with serving(FakeEngine(), unload_model=ended.put_nowait, clock=RunningClock()) as served:
        _told(served)
        body = {"model": "tiny", "messages": USER, "prompt": "hi", "keep_alive": 0, "raw": "raw" in path}
        response = await served.http.post(path.split(" ")[0], json=body)
        assert json.loads(response.text.splitlines()[-1])["done_reason"] == "stop"
        async with asyncio.timeout(10):
            assert await ended.get() == "tiny"


@pytest.mark.usefixtures("short_grace")
async def test_an_empty_prompt_unloads_and_loads_nothing_to_do_so() -> None:
    ended, asked = asyncio.Queue[str](), list[str]()
    async with serving(
        FakeEngine(),
        unload_model=ended.put_nowait,
        load_model=lambda model, _: asked.append(model),
        clock=RunningClock(),
    ) as served:
        _told(served)
        for model in ("big", "tiny", "tiny:latest"):
            response = await served.http.post(
                "/api/generate", json={"model": model, "keep_alive": "0", "stream": False}
            )
            assert response.json()["done_reason"] == "unload"
        unknown = await served.http.post("/api/chat", json={"model": "none", "messages": [], "keep_alive": 0})
        assert unknown.status_code == 404
        async with asyncio.timeout(10):
            assert await ended.get() == "tiny"
        assert asked == []


async def test_ps_tells_how_long_a_model_stays() -> None:
    async with serving(FakeEngine()) as served:

        async def expiry() -> str:
            return (await served.http.get("/api/ps")).json()["models"][0]["expires_at"]

        async def keep(value: Any) -> None:
            await served.http.post("/api/generate", json={"model": "tiny", "keep_alive": value})

        _told(served)
        assert (await expiry()).startswith("2200")
        await keep("5m")
        assert await expiry() == "2023-11-14T22:18:20Z"  # the fixed clock's 22:13:20 and five minutes
        await keep(60)
        assert await expiry() == "2023-11-14T22:14:20Z"
        await keep(-1)
        assert (await expiry()).startswith("2200")
        await keep("1m")
        _told(served, on_request=False)
        assert (await expiry()).startswith("2200"), "what a person serves stays"


@pytest.mark.parametrize("value", ["soon", True, [], {}, "9" * 300])
async def test_a_time_that_is_none_is_named(served: Served, value: Any) -> None:
    response = await served.http.post("/api/generate", json={"model": "tiny", "prompt": "hi", "keep_alive": value})
    assert response.status_code == 400
    assert "keep_alive" in response.text


async def test_requests_of_a_model_that_was_stopped_elsewhere_end_though_nobody_saw_its_engine_stop() -> None:
    async with serving(FakeEngine(hold_after=0), limits=LinkLimits(resume_window_s=60)) as served:
        asking = asyncio.create_task(served.chat(model="tiny"))
        async with asyncio.timeout(10):
            await served.engine.submitted.wait()
            served.gateway.update(ClusterView(cluster_id="test", stopped=("pipeline-0",)))
            response = await asking
            assert "was stopped" in response.json()["error"]["message"]
            assert (await served.chat(model="tiny")).status_code == 404
