"""What happens before a node stops and before its machine sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from edgepipe.daemon.serving.leaving import Leaving
from tests.support.daemon.published_state import FakeState


class Work:
    """In place of the drain: work that moves away when somebody lets it."""

    def __init__(self, *, is_needed: bool) -> None:
        self.is_needed = is_needed
        self.may_go = asyncio.Event()
        self.limits: list[float] = []
        self.undone = 0
        self.lack = ""

    async def run_within(self, seconds: float) -> None:
        self.limits.append(seconds)
        await self.may_go.wait()

    async def outlook(self) -> str:
        return self.lack

    def undo(self) -> None:
        self.undone += 1


class Node:
    def __init__(self, tasks: asyncio.TaskGroup, *, is_needed: bool) -> None:
        self.work = Work(is_needed=is_needed)
        self.stopping = asyncio.Event()
        self.asleep = asyncio.Event()
        self.leaving = Leaving(
            drain=cast("Any", self.work),
            stopping=self.stopping,
            tasks=tasks,
            announce_sleep=self.asleep.set,
            local=FakeState(),
        )


@asynccontextmanager
async def node(*, is_needed: bool) -> AsyncIterator[Node]:
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        made = Node(tasks, is_needed=is_needed)
        yield made
        made.work.may_go.set()


async def test_who_has_nothing_to_move_stops_at_once() -> None:
    async with node(is_needed=False) as idle:
        idle.leaving.stop()
        assert idle.stopping.is_set()
        assert idle.work.limits == []


async def test_work_moves_away_before_the_node_stops() -> None:
    async with node(is_needed=True) as busy:
        busy.leaving.stop()
        await asyncio.sleep(0)
        assert busy.work.limits == [30.0]
        assert not busy.stopping.is_set()
        busy.work.may_go.set()
        await busy.stopping.wait()


async def test_who_asks_twice_does_not_wait() -> None:
    async with node(is_needed=True) as busy:
        busy.leaving.stop()
        busy.leaving.stop()
        assert busy.stopping.is_set()


async def test_who_stops_a_node_is_told_what_becomes_of_its_work() -> None:
    async with node(is_needed=True) as busy:
        assert "moves to other machines first, for at most 30 s" in await busy.leaving.outlook()
        busy.work.lack = "no other machine can hold its work, so it ends here: tiny needs 2 GB"
        assert await busy.leaving.outlook() == busy.work.lack
        busy.leaving.stop()
        assert await busy.leaving.outlook() == "", "the second stop does not wait"
    async with node(is_needed=False) as idle:
        assert await idle.leaving.outlook() == ""


async def test_sleep_is_announced_once_the_work_is_away_and_over_when_the_machine_wakes() -> None:
    async with node(is_needed=True) as tired:
        tired.leaving.sleep()
        tired.leaving.sleep()
        await asyncio.sleep(0)
        assert tired.leaving.sleeps_soon
        assert tired.work.limits == [4.0]
        assert not tired.asleep.is_set()
        tired.work.may_go.set()
        await tired.asleep.wait()
        tired.leaving.stays()
        assert not tired.leaving.sleeps_soon
        assert tired.work.undone == 1
        tired.leaving.stays()
        assert tired.work.undone == 1


async def test_a_machine_that_slept_before_its_work_was_away_does_not_announce_it_later() -> None:
    async with node(is_needed=True) as tired:
        tired.leaving.sleep()
        await asyncio.sleep(0)
        tired.leaving.stays()
        tired.work.may_go.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not tired.asleep.is_set()
