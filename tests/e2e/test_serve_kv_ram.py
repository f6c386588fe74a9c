"""The demo model served with little KV and host memory below it: what a user gets of ``edgepipe serve --kv-ram``."""

from __future__ import annotations

import asyncio
import secrets
from importlib.util import find_spec

import httpx
import pytest

from edgepipe.cli.admin import connect
from edgepipe.cli.local_cluster import LocalCluster, NodeToStart, local_cluster, wait_until_joined
from edgepipe.cli.serve import serve_request, serve_with_progress
from edgepipe.store.store import StoredModel
from tests.support.processes.nodes import until_answers
from tests.support.processes.streams import children

pytestmark = [
    pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed"),
    pytest.mark.timeout(180),
    pytest.mark.long,
]
STORY = "Chapter {}. " + "The ship sailed on over the dark sea, and nobody on board spoke. " * 18
TOKENS = 512  # KV for one conversation, and not for two


async def test_a_chat_that_left_the_device_goes_on_with_the_same_answer(demo_model: StoredModel) -> None:
    nodes = [NodeToStart(name=name, backend="torch") for name in "ab"]
    plan = LocalCluster(
        cluster=f"kv-ram-{secrets.token_hex(4)}", nodes=nodes, models_dir=demo_model.path.parent, threads=1
    )
    async with local_cluster(plan) as started, connect(started[0].data_dir) as admin:
        assert await wait_until_joined(admin, num_nodes=2, timeout_s=60.0)
        request = serve_request("demo", plan="a:0-14,b:15-29", kv_tokens=TOKENS, kv_ram="200MB", draft="off")
        (engine,) = await serve_with_progress(admin, request)
        assert engine.num_blocks * engine.block_size == TOKENS
        assert engine.host_blocks > 4 * engine.num_blocks
        port = started[1].http_port
        await until_answers(port)
        answers: list[tuple[str, int]] = []
        async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client:
            for number in (1, 2, 1):
                body = {"model": "demo", "prompt": STORY.format(number), "temperature": 0, "max_tokens": 8}
                response = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
                assert response.status_code == 200, response.text
                found = response.json()
                answers.append((found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]))
            metrics = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    first, other, again = answers
    assert (first[1], other[1]) == (0, 0)
    assert again[1] > 200
    assert again[0] == first[0]
    assert "edgepipe_kv_host_blocks" in metrics


@pytest.mark.parametrize(
    ("kv_ram", "kv_disk", "room", "chats", "again"),
    [("20MB", "400MB", 1, 5, 2), ("off", "off", 8, 3, 3)],
    ids=["in RAM and on disk", "on the device"],
)
async def test_chats_outlive_the_engine(
    demo_model: StoredModel, kv_ram: str, kv_disk: str, room: int, chats: int, again: int
) -> None:
    """The device has room for ``room`` chats; ``again``: so many of them are asked again."""
    nodes = [NodeToStart(name=name, backend="torch") for name in "ab"]
    plan = LocalCluster(
        cluster=f"kv-kill-{secrets.token_hex(4)}", nodes=nodes, models_dir=demo_model.path.parent, threads=1
    )
    async with local_cluster(plan) as started, connect(started[0].data_dir) as admin:
        assert await wait_until_joined(admin, num_nodes=2, timeout_s=60.0)
        request = serve_request(
            "demo", plan="a:0-14,b:15-29", kv_tokens=room * TOKENS, kv_ram=kv_ram, kv_disk=kv_disk, draft="off"
        )
        await serve_with_progress(admin, request)
        port = started[1].http_port
        await until_answers(port)
        first = [await told(port, number) for number in range(chats)]
        (child,) = children(await admin.status(), "engine")
        child.kill()
        found = [await told(port, number) for number in range(again)]  # the gateway waits for the next engine
        assert [process.pid for process in children(await admin.status(), "engine")] != [child.pid]
    assert [known for _, known in first] == [0] * chats
    assert all(known > 200 for _, known in found), found
    assert [answer for answer, _ in found] == [answer for answer, _ in first[:again]]


async def told(port: int, number: int) -> tuple[str, int]:
    """Ask for a chapter. Return the answer, and how many tokens of the prompt were known."""
    body = {"model": "demo", "prompt": STORY.format(number), "temperature": 0, "max_tokens": 8}
    async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client:
        response = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_chat_that_left_ram_for_the_disk_goes_on_with_the_same_answer(demo_model: StoredModel) -> None:
    nodes = [NodeToStart(name=name, backend="torch") for name in "ab"]
    plan = LocalCluster(
        cluster=f"kv-disk-{secrets.token_hex(4)}", nodes=nodes, models_dir=demo_model.path.parent, threads=1
    )
    async with local_cluster(plan) as started, connect(started[0].data_dir) as admin:
        assert await wait_until_joined(admin, num_nodes=2, timeout_s=60.0)
        request = serve_request(
            "demo", plan="a:0-14,b:15-29", kv_tokens=TOKENS, kv_ram="20MB", kv_disk="400MB", draft="off"
        )
        (engine,) = await serve_with_progress(admin, request)
        assert engine.disk_blocks > 10 * engine.host_blocks
        port = started[1].http_port
        await until_answers(port)
        answers: list[tuple[str, int]] = []
        async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as client:
            for number in (1, 2, 3, 4, 5, 6, 1):
                body = {"model": "demo", "prompt": STORY.format(number), "temperature": 0, "max_tokens": 8}
                response = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
                assert response.status_code == 200, response.text
                found = response.json()
                answers.append((found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]))
            async with asyncio.timeout(30.0):  # the gateway hears of it a little later
                while True:
                    if await fetched_tokens(client, port) > 200:
                        break
                    await asyncio.sleep(0.2)
        folders = [node.data_dir / "kv" for node in started]
        assert [(folder.stat().st_mode & 0o777, list(folder.iterdir())) for folder in folders] == [(0o700, [])] * 2
    assert [known for _, known in answers[:-1]] == [0] * 6
    assert answers[-1][1] > 200
    assert answers[-1][0] == answers[0][0]


async def fetched_tokens(client: httpx.AsyncClient, port: int) -> float:
    metrics = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    (count,) = [line for line in metrics.splitlines() if line.startswith("edgepipe_kv_disk_fetched_tokens")]
    return float(count.split()[-1])
