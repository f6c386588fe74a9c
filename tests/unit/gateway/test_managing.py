"""Who may act on the page: every row of the table of attacks, and what a person with a session may do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from edgepipe.daemon.machine.data_dir import socket_path
from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.key_tries import MOST_TRIES, WINDOW_S, KeyTries
from edgepipe.gateway.ui.sessions import SESSION_S, Sessions
from edgepipe.link.admin_client import admin_at
from edgepipe.testing.clock import START_S
from tests.support.daemon.admin_server import answering
from tests.support.daemon.managed_node import ManagedNode
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, serving

KEY = "ep-a-long-enough-key"
ACTIONS: dict[str, dict[str, Any]] = {
    "/ui/tasks": {"kind": "pull", "model": "qwen3:8b"},
    "/ui/tasks/cancel": {"id": "task-1"},
    "/ui/stop": {"model": "tiny"},
    "/ui/undrain": {},
    "/ui/peers/remove": {"peer": "studio"},
    "/ui/peers/promote": {"peer": "studio"},
    "/ui/links": {},
    "/ui/requests/cancel": {"id": "request-1"},
    "/ui/invite": {},
    "/ui/invite/answer": {"accept": True},
}


class Steps:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = START_S

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return 1_700_000_000.0


@asynccontextmanager
async def managed(folder: Path, **more: Any) -> AsyncIterator[tuple[Served, ManagedNode]]:
    """A gateway with a node behind it."""
    node = ManagedNode()
    with answering(folder, node):
        async with (
            admin_at(str(socket_path(folder)), role="gateway") as admin,
            serving(FakeEngine(), admin=admin, **more) as served,
        ):
            yield served, node
        node.ended.set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Served, ManagedNode]]:
    async with managed(tmp_path_factory.mktemp("node")) as value:
        yield value


async def session_of(served: Served, node: ManagedNode) -> dict[str, str]:
    """Open a session as ``edgepipe open`` and the page do. Return its header."""
    answer = await served.http.post("/ui/session", json={"ticket": node.tickets.issue()})
    assert answer.status_code == 200, answer.text
    return {"authorization": f"Bearer {answer.json()['token']}"}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", ACTIONS)
async def test_neither_this_machine_nor_a_key_may_act(page: tuple[Served, ManagedNode], path: str) -> None:
    served, node = page
    before = list(node.asked)
    for headers in ({}, {"authorization": f"Bearer {KEY}"}, {"authorization": "Bearer of-another-node"}):
        answer = await served.http.post(path, json=ACTIONS[path], headers=headers)
        assert answer.status_code == 401
        assert "edgepipe open" in answer.json()["error"]["message"]
    assert (await served.http.get("/ui/log")).status_code == 401
    assert node.asked == before


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"host": "evil.example"}, 421),
    ],
    ids=str,
)
async def test_other_sites_and_forms_may_not_act_even_with_a_token(
    page: tuple[Served, ManagedNode], headers: dict[str, str], status: int
) -> None:
    served, node = page
    before = list(node.asked)
    session = await session_of(served, node)
    content = json.dumps({"kind": "pull", "model": "qwen3:8b"}).encode()
    sent = {"content-type": "application/json", **session, **headers}
    answer = await served.http.post("/ui/tasks", content=content, headers=sent)
    assert answer.status_code == status
    ticket = await served.http.post("/ui/session", content=b'{"ticket":"ticket-0"}', headers=sent)
    assert ticket.status_code == status
    assert node.asked == before


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "body",
    [
        {"kind": "rm -rf", "model": "x"},
        {"kind": "pull", "model": "--yes"},
        {"kind": "pull", "model": "../../etc"},
        {"kind": "pull", "model": "a", "shell": True},
        {"kind": ["pull"], "model": "a"},
        {"kind": "doctor", "model": "a"},
    ],
    ids=str,
)
async def test_unknown_tasks_and_unsafe_names_get_400(page: tuple[Served, ManagedNode], body: dict[str, Any]) -> None:
    served, node = page
    session, before = await session_of(served, node), list(node.asked)
    answer = await served.http.post("/ui/tasks", json=body, headers=session)
    assert answer.status_code == 400
    assert node.asked == before


@pytest.mark.asyncio(loop_scope="module")
async def test_a_person_with_a_session_acts(page: tuple[Served, ManagedNode]) -> None:
    served, node = page
    session = await session_of(served, node)
    node.asked.clear()
    task = (await served.http.post("/ui/tasks", json=ACTIONS["/ui/tasks"], headers=session)).json()
    assert (task["kind"], task["model"], task["state"]) == ("pull", "qwen3:8b", "running")
    for path, body in (
        ("/ui/tasks/cancel", {"id": task["id"]}),
        ("/ui/peers/remove", {"peer": "studio", "others": "keep"}),
        ("/ui/peers/promote", {"peer": "studio"}),
        ("/ui/undrain", {}),
        ("/ui/stop", {"model": "tiny"}),
        ("/ui/links", {}),
    ):
        answer = await served.http.post(path, json=body, headers=session)
        assert answer.status_code == 200, (path, answer.text)
    assert node.asked == [
        "pull qwen3:8b",
        f"cancel {task['id']}",
        "remove peer studio keep",
        "promote studio",
        "undrain",
        "measure",
    ]
    assert node.stopped == ["tiny"]
    assert (await served.http.post("/ui/stop", json={"model": ""}, headers=session)).status_code == 400
    assert [peer["name"] for peer in (await served.http.get("/ui/peers")).json()["peers"]] == [
        "gamer",
        "studio",
        "attic",
    ]
    async with served.http.stream("GET", "/ui/events") as answer, aclosing(_events(answer)) as events:
        found = {}
        async with asyncio.timeout(10):
            async for name, data in events:
                found[name] = data
                if {"tasks", "links", "disks"} <= found.keys() and found["tasks"]:
                    break
    assert found["tasks"][0]["state"] == "cancelled"
    assert len(found["links"]["links"]) == 6


async def test_measured_links_survive_a_restart_of_the_gateway(tmp_path: Path) -> None:
    node = ManagedNode()
    with answering(tmp_path, node):
        found: list[tuple[int, int]] = []
        for restarted in (False, True):
            async with (
                admin_at(str(socket_path(tmp_path)), role="gateway") as admin,
                serving(FakeEngine(), admin=admin) as served,
            ):
                if not restarted:
                    session = await session_of(served, node)
                    assert (await served.http.post("/ui/links", json={}, headers=session)).json() == {"links": 6}
                async with served.http.stream("GET", "/ui/events") as answer, aclosing(_events(answer)) as events:
                    async with asyncio.timeout(10):
                        async for name, data in events:
                            if name == "links" and data["links"]:
                                found.append((data["at_s"], len(data["links"])))
                                break
        assert found == [(10**9, 6)] * 2
        assert node.asked.count("measure") == 1
        node.ended.set()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_result_comes_with_its_task(page: tuple[Served, ManagedNode]) -> None:
    served, node = page
    node.results["doctor"] = b'{"level": "ok", "findings": []}'
    session = await session_of(served, node)
    task = (await served.http.post("/ui/tasks", json={"kind": "doctor"}, headers=session)).json()
    found = (await served.http.get(f"/ui/tasks/{task['id']}")).json()
    assert (found["state"], found["result"]) == ("done", {"level": "ok", "findings": []})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_pairing_window_is_a_stream_and_a_click_lets_the_machine_in(page: tuple[Served, ManagedNode]) -> None:
    served, node = page
    session = await session_of(served, node)
    node.asked.clear()
    nobody = await served.http.post("/ui/invite/answer", json={"accept": True}, headers=session)
    assert nobody.status_code == 400
    kinds: list[str] = []
    async with (
        served.http.stream("POST", "/ui/invite", json={"role": "member"}, headers=session) as answer,
        aclosing(_events(answer)) as events,
    ):
        async for _, event in events:
            kinds.append(event["kind"])
            if event["kind"] == "asks":
                answered = await served.http.post("/ui/invite/answer", json={"accept": True}, headers=session)
                assert answered.status_code == 200
    assert kinds == ["opened", "asks", "joined"]
    assert node.asked == ["invite member", "answer True"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_log_is_streamed(page: tuple[Served, ManagedNode]) -> None:
    served, node = page
    session = await session_of(served, node)
    async with served.http.stream("GET", "/ui/log", headers=session) as answer, aclosing(_events(answer)) as events:
        assert await anext(events) == ("line", "line 0 <b>bold</b>")


async def test_a_ticket_is_used_once_and_late_ones_are_refused(tmp_path: Path) -> None:
    async with managed(tmp_path) as (served, node):
        ticket = node.tickets.issue()
        assert (await served.http.post("/ui/session", json={"ticket": ticket})).status_code == 200
        late = node.tickets.issue()
        node.now_s += 60
        for text in (ticket, late, "of-another-node"):
            answer = await served.http.post("/ui/session", json={"ticket": text})
            assert answer.status_code == 401
            assert "edgepipe open" in answer.json()["error"]["message"]


async def test_tickets_cannot_be_guessed_quickly(tmp_path: Path) -> None:
    async with managed(tmp_path) as (served, node):
        for number in range(MOST_TRIES):
            answer = await served.http.post("/ui/session", json={"ticket": f"guess-{number}"})
            assert answer.status_code == 401
        refused = await served.http.post("/ui/session", json={"ticket": node.tickets.issue()})
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)


async def test_a_session_ends_after_twelve_hours_and_works_where_keys_are_needed(tmp_path: Path) -> None:
    clock = Steps()
    rules = AccessRules.of(keys=(KEY,), key_on_loopback=True)
    async with managed(tmp_path, clock=clock, rules=rules) as (served, node):
        session = await session_of(served, node)
        assert (await served.http.get("/ui/connect", headers=session)).json()["key_file"] == "edgepipe-key"
        assert (await served.http.get("/v1/models", headers=session)).status_code == 200
        assert (await served.http.get("/ui/session", headers=session)).json() == {"manages": True}
        clock.now_s += SESSION_S
        assert (await served.http.post("/ui/links", json={}, headers=session)).status_code == 401
        assert (await served.http.get("/v1/models", headers=session)).status_code == 401


async def test_keys_cannot_be_guessed_quickly(tmp_path: Path) -> None:
    clock = Steps()
    rules = AccessRules.of(keys=(KEY,), key_on_loopback=True)
    async with serving(FakeEngine(), clock=clock, rules=rules) as served:
        right = {"authorization": f"Bearer {KEY}"}
        for number in range(MOST_TRIES):
            answer = await served.http.get("/v1/models", headers={"authorization": f"Bearer guess-{number}"})
            assert answer.status_code == 401
        for headers in (right, {"authorization": "Bearer guess"}):
            answer = await served.http.get("/v1/models", headers=headers)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "60")
        assert (await served.http.get("/v1/models")).status_code == 401, "a request without a key is no guess"
        assert (await served.http.get("/health")).status_code == 200
        clock.now_s += WINDOW_S
        assert (await served.http.get("/v1/models", headers=right)).status_code == 200


async def test_a_request_can_be_cancelled_and_its_client_gets_an_error(tmp_path: Path) -> None:
    engine = FakeEngine(hold_after=3)
    node = ManagedNode()
    async with AsyncExitStack() as stack:
        stack.enter_context(answering(tmp_path, node))
        admin = await stack.enter_async_context(admin_at(str(socket_path(tmp_path)), role="gateway"))
        served = await stack.enter_async_context(serving(engine, admin=admin))
        session = await session_of(served, node)
        running = asyncio.create_task(served.chat("hi"))
        async with served.http.stream("GET", "/ui/events?requests=tiny") as answer, aclosing(_events(answer)) as events:
            async for name, rows in events:
                if name == "requests" and rows and rows[0]["state"] == "decode":
                    cancelled = await served.http.post(
                        "/ui/requests/cancel", json={"id": rows[0]["id"]}, headers=session
                    )
                    assert cancelled.status_code == 200
                if name == "requests" and rows and rows[0]["state"] == "failed":
                    assert (rows[0]["end"], rows[0]["output_tokens"] >= 1) == ("cluster_error", True)
                    break
        refused = await running
        assert refused.status_code == 503
        assert "cancelled" in refused.json()["error"]["message"]
        await engine.cancelled.wait()
        node.ended.set()


def test_tries_of_an_ipv6_network_count_together_and_memory_is_bounded() -> None:
    now = START_S
    tries = KeyTries(now_s=lambda: now)
    for number in range(MOST_TRIES):
        tries.failed(f"address:2001:db8::{number:x}")
    assert tries.wait_s("address:2001:db8::ffff") == WINDOW_S
    assert tries.wait_s("address:2001:db8:0:1::1") == 0
    for number in range(5000):
        tries.failed(f"10.0.{number >> 8}.{number & 255}")
    assert tries.wait_s("address:2001:db8::1") == 0
    now += WINDOW_S
    assert tries.wait_s("10.0.0.1") == 0


def test_sessions_are_bounded() -> None:
    numbers = iter(range(1000))
    sessions = Sessions(now_s=lambda: START_S, new_token=lambda: f"s{next(numbers)}")
    tokens = [sessions.open().encode() for _ in range(40)]
    assert [sessions.holds(token) for token in (tokens[0], tokens[-1], b"", b"s999")] == [False, True, False, False]


async def _events(answer: httpx.Response) -> AsyncGenerator[tuple[str, Any]]:
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
