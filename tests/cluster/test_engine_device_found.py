"""A killed engine leaves stages with chats on their devices: the next engine finds what all of them have."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product

import pytest

from tests.cluster.test_engine_disk_tier import ANSWER, CHATS, LENGTH, Users
from tests.cluster.test_engine_kept_kv import tokens_computed
from tests.cluster.test_engine_tiers_found import kill_engines, replace_engine
from tests.cluster.test_engine_truth import TIERS
from tests.support.engine.lab import engine_lab, lose_kv


@asynccontextmanager
async def users(
    name: str, *, contiguous_kv: bool = False, blocks: int = 200, acceptance: str = ""
) -> AsyncIterator[Users]:
    """Chats that take turns on a device, with nothing below it."""
    config, kv = TIERS[name]
    async with engine_lab(
        max_blocks=blocks,
        contiguous_kv=contiguous_kv,
        config=config,
        kv=kv,
        bandwidth_bytes_per_s=1e12,
        flops=1e14,
        acceptance=acceptance,
    ) as lab:
        yield Users(lab, await lab.gateway(), name)


@pytest.mark.parametrize(
    ("name", "contiguous_kv"),
    [
        *[("context", False), ("states", True)],
        *[
            pytest.param(*each, marks=pytest.mark.long)
            for each in product(TIERS, (False, True))
            if each not in (("context", False), ("states", True))
        ],
    ],
)
async def test_chats_that_never_left_the_device_go_on_where_they_were(name: str, contiguous_kv: bool) -> None:
    async with users(name, contiguous_kv=contiguous_kv) as world:
        assert sum(await world.round()) == 0
        for known in (LENGTH, LENGTH + ANSWER):
            await replace_engine(world)
            found = await world.round()
            assert min(found) >= known, "all of the turn before, up to a block"


async def test_what_other_stages_have_is_used_though_one_was_lost_with_the_engine() -> None:
    async with users("context") as world:
        await world.round()
        lose_kv(world.lab, 0)
        await replace_engine(world)
        await world.round()
        assert tokens_computed(world.lab, 0) > tokens_computed(world.lab, 1) + CHATS * LENGTH / 2


@pytest.mark.parametrize("changes", [{"manifest_hash": "other"}, {"kv_tokens": 1600}], ids=str)
async def test_nothing_is_found_of_another_model_or_in_another_pool(changes: dict[str, object]) -> None:
    async with users("context") as world:
        await world.round()
        await replace_engine(world, **changes)  # type: ignore[arg-type]
        assert sum(await world.round()) == 0


@pytest.mark.parametrize("more", [20, -20, 200])
async def test_stages_keep_their_blocks_where_there_is_a_little_more_room_now(more: int) -> None:
    async with users("context") as world:
        await world.round()
        for node in world.lab.nodes:
            node.max_blocks += more
        await replace_engine(world)
        assert world.lab.engine.state().num_blocks == (200 if more == 20 else 200 + more)
        assert (sum(await world.round()) > 0) == (more == 20), "another number empties stages"


@pytest.mark.parametrize("seed", [1, 2, *[pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 16)]])
async def test_every_token_is_right_though_engines_are_killed_at_any_moment(seed: int) -> None:
    """The pool is too small for all chats; drafts are rejected, answers are cancelled, and stages are lost, too."""
    rng = random.Random(seed)
    name = rng.choice([*TIERS])
    async with users(
        name,
        contiguous_kv=rng.random() < 0.5,
        blocks=rng.choice([30, 60, 200]),
        acceptance=rng.choice(["", "0.5"]),
    ) as world:
        await kill_engines(world, name, rng)
        assert await world.turn(CHATS - 1) > 0, "the newest chat is still there"
