"""A batch whose machine is lost goes on at the machine with its copy: every line is answered once, and right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fault.test_batches import lines_of, user_of
from tests.support.gateways.batch_files import BatchUser, jsonl, until_true
from tests.support.processes.nodes import Nodes, idle
from tests.support.processes.streams import answers, cut_power, expected, slow_cluster

SLOW = "time_factor=30"  # some 15 ms a step


async def _take_over(user: BatchUser, batch_id: str) -> tuple[int, dict[str, Any]]:
    answer = await user.http.post(f"/v1/batches/{batch_id}/take_over")
    return answer.status_code, answer.json()


@pytest.mark.parametrize("count", [80, pytest.param(600, marks=pytest.mark.long)])
async def test_the_machine_with_the_copy_takes_a_batch_over(nodes: Nodes, count: int) -> None:
    """In the long form the lost machine comes back, and gives the batch up."""
    a, b = await slow_cluster(nodes, "a", "b", backend_options=SLOW)
    await a.serve("tiny", plan="b:0-5")
    await answers(b)
    lines = lines_of(count)
    owner, keeper = user_of(a), user_of(b)
    batch_id = await owner.begin(jsonl(lines), edgepipe={"copies": 2})

    async def has_a_copy() -> bool:
        batch = await owner.show(batch_id)
        assert batch["status"] in ("validating", "in_progress"), json.dumps(batch)
        return batch["request_counts"]["completed"] >= count // 6 and "holds a copy" in batch["edgepipe"]["copy"]

    await until_true(has_a_copy)
    status, refused = await _take_over(keeper, batch_id)
    assert (status, refused["error"]["edgepipe"]["fact"]) == (400, "machine a answers")
    cut_power(a)
    await a.process.wait()
    await b.until(lambda status: len(status.members) == 1)
    await b.until(lambda status: [engine.state for engine in status.engines] == ["ready"])

    async def is_taken() -> bool:
        return (await _take_over(keeper, batch_id))[0] == 200

    await until_true(is_taken)
    assert (await keeper.show(batch_id))["request_counts"]["completed"] >= 1, "the copy has no answers"
    ended = await keeper.ended(batch_id)
    assert ended["status"] == "completed", json.dumps(ended)
    assert ended["request_counts"] == {"total": len(lines), "completed": len(lines), "failed": 0}
    found: dict[str, list[int]] = {}
    for entry in await keeper.entries(ended["output_file_id"]):
        assert entry["custom_id"] not in found, "a line was answered twice"
        found[entry["custom_id"]] = entry["response"]["body"]["choices"][0]["token_ids"]
    bodies = {line["custom_id"]: line["body"] for line in lines}
    assert found == {name: expected(body["prompt"], body["max_tokens"]) for name, body in bodies.items()}
    usage = ended["usage"]
    assert usage["output_tokens"] == sum(body["max_tokens"] for body in bodies.values())
    assert usage["input_tokens"] == sum(len(body["prompt"]) for body in bodies.values())
    await owner.http.aclose()
    await keeper.http.aclose()
    if count < 600:
        return

    again = await nodes.start("a", backend_options=SLOW)
    await again.until(lambda status: idle(status, 2) or bool(status.engines))
    returned = user_of(again)
    given_up = await returned.until(batch_id, "cancelled", "completed")
    assert given_up["status"] == "cancelled"
    assert "machine b took this batch over" in given_up["errors"]["data"][0]["message"]
    await returned.http.aclose()
