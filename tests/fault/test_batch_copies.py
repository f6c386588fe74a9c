"""A batch whose machine is lost goes on at the machine with its copy: every line is answered once, and right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgepipe.store.store import ModelStore
from tests.fault.test_batches import lines_of, user_of
from tests.support.gateways.batch_files import BatchUser, jsonl, until_true
from tests.support.processes.nodes import Nodes, idle
from tests.support.processes.streams import answers, cut_power, expected, slow_cluster

SLOW = "time_factor=30"  # some 15 ms a step


async def _take_over(user: BatchUser, batch_id: str) -> tuple[int, dict[str, Any]]:
    answer = await user.http.post(f"/v1/batches/{batch_id}/take_over")
    return answer.status_code, answer.json()


async def _has_all_answers(user: BatchUser, batch_id: str, lines: list[dict[str, Any]]) -> None:
    """Wait for the end; each line has one answer, and its tokens are those of the oracle."""
    ended = await user.ended(batch_id)
    assert ended["status"] == "completed", json.dumps(ended)
    assert ended["request_counts"] == {"total": len(lines), "completed": len(lines), "failed": 0}
    found: dict[str, list[int]] = {}
    for entry in await user.entries(ended["output_file_id"]):
        assert entry["custom_id"] not in found, "a line was answered twice"
        found[entry["custom_id"]] = entry["response"]["body"]["choices"][0]["token_ids"]
    bodies = {line["custom_id"]: line["body"] for line in lines}
    assert found == {name: expected(body["prompt"], body["max_tokens"]) for name, body in bodies.items()}
    usage = ended["usage"]
    assert usage["output_tokens"] == sum(body["max_tokens"] for body in bodies.values())
    assert usage["input_tokens"] == sum(len(body["prompt"]) for body in bodies.values())


@pytest.mark.parametrize("count", [80, pytest.param(600, marks=pytest.mark.long)])
async def test_the_machine_with_the_copy_takes_a_batch_over(nodes: Nodes, count: int) -> None:
    """In the long form the lost machine comes back, and gives the batch up."""
    a, b = await slow_cluster(nodes, "a", "b", backend_options=SLOW)
    await a.serve("tiny", plan="b:0-5")
    await answers(b)
    lines = lines_of(count)
    owner, keeper = user_of(a), user_of(b)
    batch_id = await owner.begin(jsonl(lines), edgepipe={"copies": 2})

    await until_true(lambda: _is_copied(owner, batch_id, keeper="b", completed=count // 6))
    status, refused = await _take_over(keeper, batch_id)
    assert (status, refused["error"]["edgepipe"]["fact"]) == (400, "machine a answers")
    cut_power(a)
    await a.process.wait()
    await b.until(lambda status: len(status.members) == 1)
    await b.until(lambda status: [engine.state for engine in status.engines] == ["ready"])
    await until_true(lambda: _is_taken(keeper, batch_id))
    assert (await keeper.show(batch_id))["request_counts"]["completed"] >= 1, "the copy has no answers"
    await _has_all_answers(keeper, batch_id, lines)
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


@pytest.mark.long
async def test_a_batch_outlives_two_machines_one_after_the_other(nodes: Nodes) -> None:
    """Its owner is lost, then the machine that took it over and computed. A third one starts the model and ends it."""
    a, b = await slow_cluster(nodes, "a", "b", backend_options=SLOW)
    await a.serve("tiny", plan="b:0-5")
    await answers(b)
    lines = lines_of(600)
    users = [user_of(a), user_of(b)]
    batch_id = await users[0].begin(jsonl(lines), edgepipe={"copies": 2})
    await until_true(lambda: _is_copied(users[0], batch_id, keeper="b", completed=20))
    ModelStore(nodes.folder / "c" / "models").pull(str(nodes.folder / "tiny"))
    c = await nodes.start("c", backend_options=SLOW)
    users.append(user_of(c))
    await c.until(lambda status: len(status.members) == 3)
    cut_power(a)
    await a.process.wait()
    await until_true(lambda: _is_taken(users[1], batch_id))
    done = (await users[1].show(batch_id))["request_counts"]["completed"]
    await until_true(lambda: _is_copied(users[1], batch_id, keeper="c", completed=done + 20))
    cut_power(b)
    await b.process.wait()
    await until_true(lambda: _is_taken(users[2], batch_id))
    await _has_all_answers(users[2], batch_id, lines)
    for user in users:
        await user.http.aclose()


async def _is_copied(owner: BatchUser, batch_id: str, *, keeper: str, completed: int) -> bool:
    batch = await owner.show(batch_id)
    assert batch["status"] in ("validating", "in_progress"), json.dumps(batch)
    copy = batch["edgepipe"]["copy"]
    return batch["request_counts"]["completed"] >= completed and f"machine {keeper} holds a copy" in copy


async def _is_taken(keeper: BatchUser, batch_id: str) -> bool:
    return (await _take_over(keeper, batch_id))[0] == 200
