"""Batches on real nodes that break: the final files are those of the oracle, line by line."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.support.gateways.batch_files import BatchUser, jsonl
from tests.support.processes.nodes import Node, Nodes, idle
from tests.support.processes.streams import answers, children, cut_power, expected, serving_stage, slow_cluster

SLOW = "time_factor=60"  # some 30 ms a step


def lines_of(count: int) -> list[dict[str, Any]]:
    """Lines whose answers the oracle knows."""
    rng = random.Random(count)
    fields = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    lines: list[dict[str, Any]] = []
    for number in range(count):
        prompt = [rng.randrange(1, 250) for _ in range(rng.randrange(4, 40))]
        body = fields | {"prompt": prompt, "max_tokens": rng.randrange(10, 80)}
        lines.append({"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body})
    return lines


def user_of(node: Node) -> BatchUser:
    return BatchUser(
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{node.http_port}", timeout=20, trust_env=False, verify=False)
    )


async def _until_ended(user: BatchUser, batch_id: str) -> dict[str, Any]:
    """The batch once it has ended; the gateway may be away for a while."""
    while True:
        try:
            return await user.ended(batch_id)
        except httpx.HTTPError:
            continue


async def _has_done(user: BatchUser, batch_id: str, count: int) -> None:
    """So many lines are done, and others are not."""
    while True:
        try:
            batch = await user.until(batch_id, "in_progress", "completed", "failed", num_done=count)
        except httpx.HTTPError:
            continue
        assert batch["status"] == "in_progress", "it ended before it could be broken"
        return


async def _assert_right(user: BatchUser, batch_id: str, lines: Sequence[dict[str, Any]]) -> None:
    ended = await _until_ended(user, batch_id)
    assert ended["status"] == "completed", json.dumps(ended)
    assert ended["request_counts"] == {"total": len(lines), "completed": len(lines), "failed": 0}
    found: dict[str, list[int]] = {}
    for entry in await user.entries(ended["output_file_id"]):
        assert entry["custom_id"] not in found, "a line was answered twice"
        found[entry["custom_id"]] = entry["response"]["body"]["choices"][0]["token_ids"]
    bodies = {line["custom_id"]: line["body"] for line in lines}
    assert found == {name: expected(body["prompt"], body["max_tokens"]) for name, body in bodies.items()}


@pytest.mark.parametrize("count", [100, pytest.param(600, marks=pytest.mark.long)])
async def test_a_batch_outlives_its_gateway_its_engine_and_a_stage(nodes: Nodes, count: int) -> None:
    """The short form keeps its stages."""
    a, b = await slow_cluster(nodes, "a", "b", backend_options=SLOW)
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await answers(a)
    lines = lines_of(count)
    user = user_of(a)
    batch_id = await user.begin(jsonl(lines))
    await _has_done(user, batch_id, 20)
    children(await a.status(), "gateway")[0].kill()
    await _has_done(user, batch_id, count // 4)
    children(await a.status(), "engine")[0].kill()
    if count > 100:
        await _has_done(user, batch_id, count // 2)
        serving_stage(await b.status()).kill()
    await _assert_right(user, batch_id, lines)
    await user.http.aclose()


@pytest.mark.long
@pytest.mark.parametrize("count", [240, 1000])
async def test_a_batch_outlives_its_node(nodes: Nodes, count: int) -> None:
    (a,) = await slow_cluster(nodes, "a", backend_options=SLOW)
    await a.serve("tiny")
    await answers(a)
    lines = lines_of(count)
    user = user_of(a)
    batch_id = await user.begin(jsonl(lines))
    await _has_done(user, batch_id, count // 10)
    cut_power(a)
    await a.process.wait()
    await user.http.aclose()
    again = await nodes.start("a", backend_options=SLOW)
    await again.until(lambda status: idle(status, 1) or bool(status.engines))
    user = user_of(again)
    await _assert_right(user, batch_id, lines)
    await user.http.aclose()
