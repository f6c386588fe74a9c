"""A killed engine leaves stages with memory below the device: the next engine finds there what all of them hold."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest

from edgepipe.ids import Epoch
from edgepipe.stage.held_keys import HeldKeys
from edgepipe.wire.tiers import HeldPlaces
from tests.cluster.test_engine_disk_tier import CHATS, LENGTH, Users
from tests.cluster.test_engine_kept_kv import tokens_computed
from tests.cluster.test_engine_truth import TIERS
from tests.support.engine.lab import Answer, engine_lab, lose_kv, oracle_tokens, submission


class Below(NamedTuple):
    """Blocks below the device."""

    host: int
    disk: int


DISK, HOST = Below(44, 400), Below(400, 0)


@asynccontextmanager
async def users(name: str, below: Below, *, contiguous_kv: bool = False) -> AsyncIterator[Users]:
    """Chats that take turns on a device with room for one of them."""
    config, kv = TIERS[name]
    async with engine_lab(
        max_blocks=24,
        contiguous_kv=contiguous_kv,
        config=config,
        kv=kv,
        bandwidth_bytes_per_s=1e12,
        flops=1e14,
        max_host_blocks=below.host,
        max_disk_blocks=below.disk,
    ) as lab:
        yield Users(lab, await lab.gateway(), name)


async def replace_engine(world: Users, **changes: str) -> None:
    await world.lab.replace_engine(**changes)
    world.gateway = await world.lab.gateway()


def most(found: Sequence[int]) -> bool:
    """Return whether more than half was known: what lay on the device only is lost."""
    return sum(found) > CHATS * LENGTH / 2


@pytest.mark.parametrize(
    ("name", "contiguous_kv", "below"),
    [
        ("context", False, DISK),
        ("states", True, HOST),
        *[
            pytest.param(*each, marks=pytest.mark.long)
            for each in product(TIERS, (False, True), (HOST, DISK))
            if each not in (("context", False, DISK), ("states", True, HOST))
        ],
    ],
)
async def test_chats_go_on_where_they_were_though_the_engine_was_killed(
    name: str, contiguous_kv: bool, below: Below
) -> None:
    async with users(name, below, contiguous_kv=contiguous_kv) as world:
        assert sum(await world.round()) == 0
        await replace_engine(world)
        state = world.lab.engine.state()
        assert state.used_host_blocks > 0
        assert bool(state.used_disk_blocks) == bool(below.disk)
        assert most(await world.round())
        await replace_engine(world)
        assert most(await world.round()), "what the second engine pushed out is there, too"


@pytest.mark.parametrize("tier", ["host memory", "the disk"])
@pytest.mark.parametrize("more", [300, -4])
async def test_a_new_engine_keeps_the_numbers_of_places_where_they_still_fit(tier: str, more: int) -> None:
    async with users("context", DISK) as world:
        await world.round()
        for node in world.lab.nodes:
            if tier == "host memory":
                node.max_host_blocks += more
            else:
                node.max_disk_blocks += more
        await replace_engine(world)
        state, less = world.lab.engine.state(), min(more, 0)
        expected = (DISK.host + less, DISK.disk) if tier == "host memory" else (DISK.host, DISK.disk + less)
        assert (state.host_blocks, state.disk_blocks) == expected
        assert bool(state.used_disk_blocks) == (more > 0)
        found = await world.round()
        assert most(found) if more > 0 else not sum(found), "other numbers empty stages"


async def test_what_other_stages_hold_is_used_though_one_was_lost_with_the_engine() -> None:
    async with users("context", HOST) as world:
        await world.round()
        lose_kv(world.lab, 0)
        await replace_engine(world)
        await world.round()
        assert tokens_computed(world.lab, 0) > tokens_computed(world.lab, 1) + CHATS * LENGTH / 2
        assert most(await world.round())


@pytest.mark.parametrize("lost", ["the last stage", "another model"])
async def test_nothing_is_found_if_the_last_stage_is_lost_or_the_model_changed(lost: str) -> None:
    async with users("context", DISK) as world:
        await world.round()
        if lost == "the last stage":
            lose_kv(world.lab, 1)
        await replace_engine(world, manifest_hash="" if lost == "the last stage" else "other")
        state = world.lab.engine.state()
        assert (state.used_host_blocks, state.used_disk_blocks) == (0, 0)
        assert sum(await world.round()) == 0


async def test_a_stage_that_tells_nonsense_costs_what_it_held_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = HeldKeys.pages

    def twice(self: HeldKeys, epoch: Epoch) -> Sequence[HeldPlaces]:
        first, *others = pages(self, epoch)
        return [first, replace(first, places=first.places[::-1]), *others]

    async with users("context", HOST) as world:
        await world.round()
        monkeypatch.setattr(HeldKeys, "pages", twice)
        await replace_engine(world)
        assert (
            "idle conversations in the memory of stage 1 on node1 are not used: "
            "it names a place or a key on the device twice" in caplog.text
        )
        assert world.lab.engine.state().used_host_blocks == 0
        assert sum(await world.round()) == 0


def have_ended(answers: Sequence[Answer], wanted: int) -> bool:
    return sum(each.ended is not None for each in answers) >= wanted


async def kill_engines(world: Users, name: str, rng: random.Random) -> None:
    """Kill engines while some chats of the model ``name`` get their answers, whose tokens are checked. Lose KV, too."""
    known = world.known
    for attempt in range(5):
        names = [f"{attempt}-{chat}" for chat in range(CHATS)]
        prompts = [[*tokens, attempt] for tokens in known]
        world.gateway.send(*(submission(*each, 8) for each in zip(names, prompts, strict=True)))
        answers, wanted = [*map(world.gateway.answer, names)], rng.randint(0, CHATS)
        await world.gateway.until(partial(have_ended, answers, wanted))
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            right = oracle_tokens(prompt, 8, config=TIERS[name][0])
            assert answer.ids == right[: len(answer.ids)]
            if answer.ended is not None:
                known[number] = [*prompt, *right]
        if rng.random() < 0.3:
            lose_kv(world.lab, rng.randrange(2))
        await replace_engine(world)
    await world.round()
    await replace_engine(world)


@pytest.mark.parametrize("seed", [1, *[pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12)]])
async def test_every_token_is_right_though_engines_are_killed_at_any_moment(seed: int) -> None:
    """Answers break off in the middle of steps and of copies; stages are lost meanwhile, too."""
    rng = random.Random(seed)
    name = rng.choice([*TIERS])
    async with users(name, rng.choice([HOST, DISK]), contiguous_kv=rng.random() < 0.5) as world:
        await kill_engines(world, name, rng)
        assert sum(await world.round()) > 0
