"""The page: for browsers only, its files without a key, its events for its own origin only, and how many."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from edgepipe.errors import StageLost
from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.ui.history import SECONDS, History
from edgepipe.gateway.ui.page import MOST_STREAMS, MOST_STREAMS_OF_A_CLIENT
from edgepipe.gateway.ui.view import page_view
from edgepipe.ids import NodeId
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.wire.engines import Quarantined, StageState
from edgepipe.wire.nodes import ClusterView, DeviceState, MemberState, NodeState
from tests.support.gateways.fake_engine import FakeEngine, view_of
from tests.support.gateways.server import Served, serving

KEY = "ep-a-long-enough-key"
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def locked() -> AsyncIterator[Served]:
    rules = AccessRules.of(keys=(KEY,), key_on_loopback=True, origins=("http://localhost:*",))
    async with serving(FakeEngine(), rules=rules) as value:
        yield value


@pytest.mark.asyncio(loop_scope="module")
async def test_browsers_get_the_page_and_others_the_line_of_text(shared: Served) -> None:
    page = await shared.http.get("/", headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    assert "/ui/page/app.js" in page.text
    for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        answer = await shared.http.get("/", headers=headers)
        assert answer.text == "edgepipe is running. Its API: /docs\n"
    modules = re.findall(r'<link rel="modulepreload" href="([^"]+)"', page.text)
    assert {"/ui/page/app.js", "/ui/page/pages/home.js", "/ui/page/vendor/preact.js"} <= set(modules)
    assert not {"/ui/page/pages/others.js", "/ui/page/pages/chat.js", "/ui/page/data/types.js"} & set(modules)
    assert [(await shared.http.get(module)).status_code for module in modules] == [200] * len(modules)
    head = await shared.http.head("/", headers=BROWSER)
    assert head.headers["content-type"].startswith("text/plain")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_page_may_load_only_its_own_files_and_no_site_may_frame_it(shared: Served) -> None:
    for path in ("/", "/ui/page/app.js", "/ui/page/style.css"):
        headers = (await shared.http.get(path, headers=BROWSER)).headers
        policy = headers["content-security-policy"]
        for rule in ("default-src 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"):
            assert rule in policy, path
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.asyncio(loop_scope="module")
async def test_files_come_packed_and_only_when_they_changed(shared: Served) -> None:
    first = await shared.http.get("/ui/page/style.css", headers={"accept-encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    plain = await shared.http.get("/ui/page/style.css", headers={"accept-encoding": "identity"})
    assert plain.content == first.content
    again = await shared.http.get("/ui/page/style.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "path", ["nothing.js", "../__init__.py", "..%2f__init__.py", "%2e%2e/gateway/app.py", "vendor/preact.d.ts", ""]
)
async def test_nothing_but_the_pages_files_is_served(shared: Served, path: str) -> None:
    assert (await shared.raw(f"GET /ui/page/{path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())).startswith(
        b"HTTP/1.1 404"
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_only_the_files_need_no_key(locked: Served) -> None:
    assert (await locked.http.get("/", headers=BROWSER)).status_code == 200
    assert (await locked.http.get("/ui/page/app.js")).status_code == 200
    assert (await locked.http.get("/")).status_code == 401
    assert (await locked.http.get("/ui/events")).status_code == 401
    assert (await locked.http.post("/ui/page/app.js")).status_code == 401


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:3000"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
async def test_pages_of_other_origins_may_not_ask_below_ui(locked: Served, headers: dict[str, str]) -> None:
    answer = await locked.http.get("/ui/events", headers={"authorization": f"Bearer {KEY}", **headers})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    if "localhost:" in headers.get("origin", ""):  # the API itself is open to this origin
        models = await locked.http.get("/v1/models", headers={"authorization": f"Bearer {KEY}", **headers})
        assert models.status_code == 200


async def test_a_stream_brings_the_view_the_history_and_each_change(served: Served) -> None:
    headers = {"origin": f"http://127.0.0.1:{served.port}", "sec-fetch-site": "same-origin"}
    async with served.http.stream("GET", "/ui/events", headers=headers) as answer, aclosing(_events(answer)) as events:
        assert (await anext(events))[0] == "history"
        name, view = await anext(events)
        assert (name, view["models"][0]["name"]) == ("view", "tiny")
        name, sample = await _next(events, "sample")
        assert sample["models"] == {"tiny": [0, 0, 0, 0]}
        changed = view_of(served.address)
        engine = replace(changed.served[0].engine, state="recovering", message="preparing stage 1")
        served.gateway.update(replace(changed, served=(replace(changed.served[0], engine=engine),)))
        _, view = await _next(events, "view")
        assert (view["models"][0]["state"], view["models"][0]["message"]) == ("recovering", "preparing stage 1")


async def test_a_client_has_few_streams_and_gets_one_back_when_it_closes_one(served: Served) -> None:
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(served.http.stream("GET", "/ui/events"))
            for _ in range(MOST_STREAMS_OF_A_CLIENT)
        ]
        assert [stream.status_code for stream in streams] == [200] * MOST_STREAMS_OF_A_CLIENT
        refused = await served.http.get("/ui/events")
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert (await served.http.get("/v1/models")).status_code == 200
        await streams[0].aclose()
        async with asyncio.timeout(10):
            while True:
                async with served.http.stream("GET", "/ui/events") as again:
                    if again.status_code == 200:
                        break
    assert MOST_STREAMS_OF_A_CLIENT < MOST_STREAMS


async def _events(answer: httpx.Response) -> AsyncGenerator[tuple[str, Any]]:
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def _next(events: AsyncIterator[tuple[str, Any]], wanted: str) -> tuple[str, Any]:
    async with asyncio.timeout(10):
        async for name, data in events:
            if name == wanted:
                return name, data
    raise AssertionError(f"the stream ended without '{wanted}'")


def test_a_history_keeps_15_minutes_of_what_is_served() -> None:
    history = History()
    engine = view_of("127.0.0.1:1").served[0].engine
    for second in range(SECONDS + 3):
        history.sample([replace(engine, tokens_per_s=float(second), running=2)])
    rows = history.all()["tiny"]
    assert [rows[0], rows[-1]] == [[3, 0, 2, 0], [SECONDS + 2, 0, 2, 0]]
    assert (len(rows), history.newest()) == (SECONDS, {"tiny": rows[-1]})
    history.sample([replace(engine, model="other")])
    assert (history.all(), history.newest()) == ({"other": [[0, 0, 0, 0]]}, {"other": [0, 0, 0, 0]})


def _full_view(machines: int) -> ClusterView:
    """A cluster whose every text and list is as long as another node may make it."""
    text = "x\u202e<img src=x onerror=alert(1)>" * 200
    error = StageLost(text, fact=text, next_step=text)
    ids = [NodeId(f"node-{index}" + "y" * 60) for index in range(machines)]
    stages = tuple(
        StageState(
            node_id=node_id,
            node_name=text,
            device=text,
            weight_bytes=600,
            kv_bytes=200,
            slices=(Slice(index=index, layers=LayerRange(index * 7, index * 7 + 7), embedding=False, head=False),),
        )
        for index, node_id in enumerate(ids)
    )
    served = view_of("127.0.0.1:1").served[0]
    engine = replace(
        served.engine,
        state="failed",
        error=error,
        message=text,
        why=text,
        stages=stages,
        num_blocks=100,
        free_blocks=25,
        certificate=b"secret" * 100,
        left_out=(Quarantined(node_id=ids[0], seconds=9, reason=text, node_name=text),),
    )
    devices = (DeviceState(reserved_bytes=1000, free_bytes=500, error=error),)
    members = tuple(
        MemberState(node=NodeState(node_id=node_id, name=text, devices=devices, gateways=(b"secret",)), state="alive")
        for node_id in ids
    )
    return ClusterView(members=members, served=(replace(served, engine=engine),))


@pytest.mark.parametrize("machines", [1, 4, 16])
def test_a_view_is_small_safe_and_without_certificates(machines: int) -> None:
    view = page_view(_full_view(machines), node_name="a", edgepipe_version="1")
    text = json.dumps(view)
    assert len(text) <= 4096 * machines + 4096
    assert "secret" not in text
    assert "\\u202e" not in json.dumps(view, ensure_ascii=True).replace("\\\\u202e", "")
    assert view["machines"][0]["memory"] == {"weights": 600, "kv_used": 150, "kv_free": 50, "other": 200, "free": 500}
    assert view["models"][0]["stages"][0]["layers"] == "0-6"


def test_a_view_of_nothing_has_every_field() -> None:
    empty = page_view(ClusterView(), node_name="a", edgepipe_version="1")
    assert empty == {
        "node": {"name": "a", "version": "1"},
        "newest": "",
        "machines": [],
        "absent": [],
        "models": [],
        "loadable": [],
    }


@pytest.mark.asyncio(loop_scope="module")
async def test_programs_get_the_address_by_which_the_browser_came(shared: Served) -> None:
    found = (await shared.http.get("/ui/connect", params={"model": "tiny"})).json()
    address = f"http://127.0.0.1:{shared.port}"
    assert (found["base_url"], found["key_file"]) == (address, "")
    programs = {program["name"]: program["text"] for program in found["programs"]}
    assert f"OPENAI_BASE_URL={address}/v1" in programs["openai"]
    unknown = await shared.http.get("/ui/connect", params={"model": "--help"})
    assert unknown.status_code == 404


@pytest.mark.asyncio(loop_scope="module")
async def test_programs_of_a_client_with_a_key_read_it_from_a_file(locked: Served) -> None:
    assert (await locked.http.get("/ui/connect")).status_code == 401
    answer = await locked.http.get("/ui/connect", headers={"authorization": f"Bearer {KEY}"})
    assert answer.json()["key_file"] == "edgepipe-key"
    assert "$(cat edgepipe-key)" in answer.text
    assert KEY not in answer.text
