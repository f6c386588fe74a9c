"""The page's actions on real nodes: a pull that is cancelled and resumed, and a machine that joins after a click."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgepipe.wire.trust import JoinRequest
from tests.support.models.fake_hub import FakeHub, running
from tests.support.models.files import write_hf_folder
from tests.support.processes.nodes import Node, Nodes

REPO, FILE = "org/tiny", "model.safetensors"
WAIT_S = 60.0


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    made = Nodes(folder=tmp_path, cluster="page")
    try:
        yield made
    finally:
        await made.end()


@asynccontextmanager
async def _page(node: Node) -> AsyncIterator[httpx.AsyncClient]:
    """Open the page of a node as ``edgepipe open`` does; the client may manage."""
    base = f"http://127.0.0.1:{node.http_port}"
    async with (
        httpx.AsyncClient(base_url=base, timeout=WAIT_S, trust_env=False, verify=False) as http,
        node.admin() as admin,
    ):
        session = await http.post("/ui/session", json={"ticket": await admin.issue_ticket()})
        assert session.status_code == 200, session.text
        http.headers["authorization"] = f"Bearer {session.json()['token']}"
        yield http


async def _ended(http: httpx.AsyncClient, task_id: str) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        while True:
            task = (await http.get(f"/ui/tasks/{task_id}")).json()
            if task["ended_s"]:
                return task
            await asyncio.sleep(0.05)


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


async def test_a_pull_is_cancelled_begun_again_and_removed(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_hf_folder(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    with running(FakeHub(repo=REPO, files=files, silent={FILE})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        node = await nodes.start("a", models_dir=str(tmp_path / "models"))
        async with _page(node) as http:
            pull = {"kind": "pull", "model": REPO}
            begun = (await http.post("/ui/tasks", json=pull)).json()
            assert await asyncio.to_thread(hub.held.wait, WAIT_S)
            assert (await http.post("/ui/tasks", json=pull)).json()["id"] == begun["id"], "it runs already"
            await http.post("/ui/tasks/cancel", json={"id": begun["id"]})
            cancelled = await _ended(http, begun["id"])
            assert cancelled["state"] == "cancelled"
            assert any("are kept" in line for line in cancelled["error"])
            hub.ended.set()
            hub.silent.clear()
            again = await _ended(http, (await http.post("/ui/tasks", json=pull)).json()["id"])
            assert (again["state"], again["result"]["model"]) == ("done", REPO), again["error"]
            held = [model.model for member in (await node.status()).members for model in member.node.models]
            assert held == [REPO]
            removed = await _ended(http, (await http.post("/ui/tasks", json={**pull, "kind": "remove"})).json()["id"])
            assert (removed["state"], removed["result"]["model"]) == ("done", REPO)


async def test_a_second_machine_joins_after_a_click(nodes: Nodes) -> None:
    host, guest = await asyncio.gather(nodes.start("a"), nodes.start("b", cluster="other"))
    async with (
        _page(host) as http,
        http.stream("POST", "/ui/invite", json={}) as answer,
    ):
        joining: asyncio.Task[None] | None = None
        async for event in _events(answer):
            if event["kind"] == "opened":
                joining = asyncio.create_task(_join(guest, event["code"], event["where"]))
            elif event["kind"] == "asks":
                assert event["name"] == "b"
                assert (await http.post("/ui/invite/answer", json={"accept": True})).status_code == 200
            elif event["kind"] == "joined":
                break
        assert joining is not None
        await joining
        peers = (await http.get("/ui/peers")).json()["peers"]
        assert ("b", "member") in {(peer["name"], peer["role"]) for peer in peers}


async def _join(guest: Node, code: str, address: str) -> None:
    name, _, port = address.rpartition(":")
    async with guest.admin() as admin:
        async for _ in admin.join(JoinRequest(code=code, host=name, port=int(port))):
            pass
