"""UserTurns of tasks: cancelled and late tasks pass their turn on; a warm child serves its users in turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edgepipe.children import warm_child
from edgepipe.children.user_turns import UserTurns
from edgepipe.children.warm_child import WarmChild
from edgepipe.errors import QueueFull


async def _settle() -> None:
    """Let all tasks run until each waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class _Work:
    """Tasks that hold their turn until the test ends it, and the order in which they began."""

    def __init__(self, turns: UserTurns) -> None:
        self.turns = turns
        self.order: list[str] = []
        self.over: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def _run(self, owner: str, name: str) -> None:
        async with self.turns.turn(owner):
            self.order.append(name)
            await self.over[name].wait()

    async def add(self, name: str) -> None:
        self.over[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name[0], name))
        await _settle()

    async def end(self, name: str) -> None:
        self.over[name].set()
        await asyncio.wait({self.tasks[name]})
        await _settle()


async def test_tasks_of_two_users_work_in_turns() -> None:
    work = _Work(UserTurns())
    for name in ("a1", "a2", "a3", "b1", "b2"):
        await work.add(name)
    for name in ("a1", "b1", "a2", "b2", "a3"):
        assert work.order[-1] == name
        await work.end(name)


@pytest.mark.parametrize("cancelled", ["a1", "a2", "b1"])
async def test_a_cancelled_task_passes_its_turn_on(cancelled: str) -> None:
    work = _Work(UserTurns())
    for name in ("a1", "a2", "b1"):
        await work.add(name)
    work.tasks[cancelled].cancel()
    await _settle()
    for name in ("a1", "b1", "a2"):
        if name != cancelled:
            assert work.order[-1] == name
            await work.end(name)
    assert work.turns.num_waiting == 0
    await work.add("c1")
    assert work.order[-1] == "c1"
    await work.end("c1")


async def test_a_task_that_is_cancelled_as_its_turn_comes_passes_it_on() -> None:
    work = _Work(UserTurns())
    for name in ("a1", "b1", "c1"):
        await work.add(name)
    work.over["a1"].set()
    await asyncio.wait({work.tasks["a1"]})  # b1 has its turn, and has not run yet
    work.tasks["b1"].cancel()
    await _settle()
    assert work.order[-1] == "c1"
    await work.end("c1")


async def test_a_wait_without_end_is_given_up_and_its_place_with_it() -> None:
    work = _Work(UserTurns(max_waiting=1, wait_s=0.01))
    await work.add("a1")
    with pytest.raises(QueueFull, match="did not get its turn") as caught:
        async with work.turns.turn("b"):
            pass
    assert "it waited 0.01 s" in caught.value.fact
    assert work.turns.num_waiting == 0
    await work.end("a1")


async def test_a_child_answers_a_user_beside_another_s_flood_and_refuses_what_is_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[bytes] = []
    go_on = asyncio.Event()

    async def exchange(child: Any, parts: tuple[bytes, ...], most_bytes: int) -> bytes:
        order.append(parts[0])
        if parts[0].startswith(b"a"):
            await go_on.wait()
        return parts[0]

    monkeypatch.setattr(warm_child, "_exchange", exchange)
    child = WarmChild("edgepipe.gateway.body_child", start_s=20, max_waiting=15)

    async def ask(owner: str, number: int) -> bytes:
        return await child.ask(f"{owner}{number}".encode(), owner=owner, within_s=20, most_bytes=10)

    await child.start()
    tasks = [asyncio.create_task(ask("a", number)) for number in range(16)]
    await _settle()
    with pytest.raises(QueueFull) as caught:
        await ask("a", 16)
    assert "at most 15" in caught.value.fact
    assert await ask("b", 0) == b"b0"
    assert not any(task.done() for task in tasks)
    assert len(order) <= 2
    go_on.set()
    assert {*await asyncio.gather(*tasks), b"b0"} == set(order)
    await child.end()
