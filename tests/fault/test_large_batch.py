"""A batch of very many lines on a real node: its memory and descriptors stay bounded, and no line is lost."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.gateways.batch_files import BatchUser
from tests.support.processes.nodes import Node, Nodes
from tests.support.processes.streams import answers, children, expected, slow_cluster

MOST_GROWTH_BYTES = 100 << 20
MOST_DESCRIPTORS = 80
PROMPTS = 50  # different ones: the oracle takes a while for each


def write_lines(path: Path, count: int) -> None:
    """Lines that get one or two tokens each."""
    with path.open("w") as out:
        for number in range(count):
            body = {"prompt": [number % PROMPTS + 1, 5], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            body |= {"model": "tiny", "return_token_ids": True}
            line = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            out.write(json.dumps(line) + "\n")


async def run(node: Node, path: Path, *, timeout_s: float) -> tuple[int, int, str]:
    """Most memory (bytes) of the gateway and its children, and most descriptors, while the batch runs; the answers."""
    gateway = children(await node.status(), "gateway")[0]
    url = f"http://127.0.0.1:{node.http_port}"
    most, descriptors = 0, 0
    async with (
        asyncio.timeout(timeout_s),
        httpx.AsyncClient(base_url=url, timeout=300, trust_env=False, verify=False) as http,
    ):
        user = BatchUser(http)
        with path.open("rb") as source:
            file = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", source)})
        batch_id = (await user.create(file.json()["id"])).json()["id"]
        while True:
            batch = await user.show(batch_id)
            most = max(most, sum(_rss(process) for process in (gateway, *gateway.children())))
            descriptors = max(descriptors, gateway.num_fds())
            if batch["status"] in ("completed", "failed"):
                break
            await asyncio.sleep(0.1)
        assert batch["status"] == "completed", batch
        return most, descriptors, (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("count", [5_000, 200_000])
async def test_memory_and_descriptors_of_many_lines(nodes: Nodes, count: int) -> None:
    (node,) = await slow_cluster(nodes, "a", backend_options="time_factor=0")
    await node.serve("tiny")
    await answers(node)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        write_lines(path, 500)
        before, _, _ = await run(node, path, timeout_s=600)
        write_lines(path, count)
        most, descriptors, text = await run(node, path, timeout_s=4500)
    found: dict[str, list[int]] = {}
    for each in map(json.loads, text.splitlines()):
        assert each["custom_id"] not in found
        found[each["custom_id"]] = each["response"]["body"]["choices"][0]["token_ids"]
    wanted = [expected([number + 1, 5], 2) for number in range(PROMPTS)]
    assert found == {f"id-{number}": wanted[number % PROMPTS] for number in range(count)}
    figures = f"{(most - before) / 1e6:.0f} MB beyond a batch of 500 lines, {descriptors} descriptors"
    print(figures)  # noqa: T201 - shown with -s, and beside a failure
    assert most - before < MOST_GROWTH_BYTES, figures
    assert descriptors < MOST_DESCRIPTORS, figures
