"""An engine and its stages with a disk below host memory: conversations cross all tiers and every token is right."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from edgepipe.scheduler import disk_works
from edgepipe.stage import tier_file
from tests.cluster.test_engine_truth import TIERS
from tests.support.engine.lab import (
    CONFIG,
    EngineLab,
    FakeGateway,
    break_stage,
    engine_lab,
    lose_kv,
    oracle_tokens,
    submission,
)

CHATS, LENGTH, ANSWER = 6, 200, 8


class Users:
    """Chats that take turns on a device with room for one of them, and host memory for two."""

    def __init__(self, lab: EngineLab, gateway: FakeGateway, name: str) -> None:
        self.lab, self.gateway, self._config = lab, gateway, TIERS[name][0]
        self.known = [[(chat * 37 + 7 * place) % 241 for place in range(LENGTH)] for chat in range(CHATS)]
        self._turns = 0

    async def turn(self, chat: int) -> int:
        """Let a chat go on. Return how many of its tokens were known."""
        self._turns += 1
        prompt, name = [*self.known[chat], self._turns % 200], f"turn-{self._turns}"
        self.gateway.send(submission(name, prompt, ANSWER))
        answer = await self.gateway.ended(name)
        assert answer.error is None
        assert answer.ids == oracle_tokens(prompt, ANSWER, config=self._config)
        self.known[chat] = [*prompt, *answer.ids]
        assert answer.ended is not None
        return answer.ended.cached_prompt_tokens

    async def round(self) -> list[int]:
        return [await self.turn(chat) for chat in range(CHATS)]


@asynccontextmanager
async def users(name: str = "context", *, contiguous_kv: bool = False) -> AsyncIterator[Users]:
    async with engine_lab(
        max_blocks=24,
        max_host_blocks=44,
        max_disk_blocks=400,
        contiguous_kv=contiguous_kv,
        config=TIERS[name][0],
        kv=TIERS[name][1],
        bandwidth_bytes_per_s=1e12,
        flops=1e14,
    ) as lab:
        yield Users(lab, await lab.gateway(), name)


def file_of(lab: EngineLab, stage: int) -> int:
    """Return the descriptor of a stage's file: it has no name."""
    disk = lab.stages.stages[stage]._disk  # pyright: ignore[reportPrivateUsage]
    assert disk is not None
    assert disk._file is not None  # pyright: ignore[reportPrivateUsage]
    return disk._file._file  # pyright: ignore[reportPrivateUsage]


def mostly(found: Sequence[int]) -> bool:
    return sum(found) > 0.7 * CHATS * LENGTH


@pytest.mark.parametrize(
    ("name", "contiguous_kv"),
    [
        ("context", False),
        ("states", True),
        *[pytest.param(*each, marks=pytest.mark.long) for each in (("context", True), ("states", False))],
        *[pytest.param("windows", each, marks=pytest.mark.long) for each in (False, True)],
    ],
)
async def test_chats_go_on_where_they_were_though_a_stage_is_lost(name: str, contiguous_kv: bool) -> None:
    async with users(name, contiguous_kv=contiguous_kv) as world:
        assert sum(await world.round()) == 0
        assert mostly(await world.round())
        state = world.lab.engine.state()
        assert state.fetched_tokens > 0
        assert (state.disk_blocks, state.disk_problem) == (400, "")
        assert state.used_disk_blocks > 44
        recoveries = state.recoveries
        lose_kv(world.lab, 0)
        break_stage(world.lab, 0)
        await world.lab.until(lambda: world.lab.engine.state().recoveries > recoveries)
        await world.round()  # the other stage's part is used: a replay
        assert mostly(await world.round())


async def test_a_file_that_somebody_changed_costs_time_and_no_token(caplog: pytest.LogCaptureFixture) -> None:
    async with users() as world:
        await world.round()
        await world.round()
        file = file_of(world.lab, 1)
        assert os.fstat(file).st_nlink == 0
        assert os.fstat(file).st_mode & 0o777 == 0o600
        size = os.fstat(file).st_size
        os.pwrite(file, bytes(size), 0)
        await world.round()
        assert "a copy on disk is damaged" in caplog.text
        assert mostly(await world.round()), "what was computed again goes to disk again"
        assert world.lab.engine.state().disk_problem == ""


async def test_a_full_disk_rests_says_so_once_and_is_used_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_works, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(disk_works, "LONGEST_PAUSE_S", 0.2)
    async with users() as world:
        await world.round()
        monkeypatch.setattr(tier_file.os, "pwrite", full)
        await world.round()
        await world.round()
        state = world.lab.engine.state()
        assert state.disk_problem in ("node0: the disk is full", "node1: the disk is full")
        assert state.used_disk_blocks == 0
        warnings = [
            each for each in caplog.records if each.name == "edgepipe.engine.pump" and each.levelname == "WARNING"
        ]
        assert len(warnings) == 1
        assert state.disk_again_unix_s > 0
        monkeypatch.undo()
        await world.lab.until(lambda: not world.lab.engine.state().disk_problem)
        await world.round()
        assert world.lab.engine.state().used_disk_blocks > 0
        assert mostly(await world.round())
        assert world.lab.engine.state().disk_again_unix_s == 0


async def test_an_engine_without_a_disk_asks_for_none() -> None:
    async with engine_lab(max_blocks=24, max_host_blocks=44, config=CONFIG) as lab:
        await lab.gateway()
        assert lab.engine.state().disk_blocks == 0
        assert lab.stages.stages[0]._disk is None  # pyright: ignore[reportPrivateUsage]
