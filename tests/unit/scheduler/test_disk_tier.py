"""A disk below host memory: conversations cross both, and what a disk cannot give is computed again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.backend.types import TierMove
from edgepipe.scheduler import HostRates, SchedulerLimits, ThrottledPolicy
from edgepipe.scheduler.disk_places import DiskPlaces
from edgepipe.scheduler.disk_works import FIRST_PAUSE_S, LONGEST_PAUSE_S, DiskWorks
from edgepipe.scheduler.host_tier import HostTier
from tests.support.worlds.scheduler import World, limits, spec, stateful, windowed

PIPELINES = {
    "shared": limits(num_blocks=40),
    "runs": limits(num_blocks=40, contiguous_kv=True),
    "windows": windowed((12, 8), num_blocks=40),
    "states": stateful(num_blocks=40, num_slots=4),
}
CHATS, ROUNDS = 6, 3
LATER = range(CHATS + 1, CHATS * ROUNDS + 1)


def over_disk(pipeline: SchedulerLimits, *, host: int = 70, disk: int = 200) -> SchedulerLimits:
    """Host memory for three conversations, and a disk for all."""
    classes = len(pipeline.pool_sizes)
    return replace(pipeline, host_places=(host,) * classes, disk_places=(disk,) * classes)


def taken_turns(pipeline: SchedulerLimits, *, damage: float = 0.0, disk_s: float = 0.0) -> World:
    """Let conversations of 80 tokens, of which the device holds one, take turns one by one."""
    world = World(pipeline, ThrottledPolicy(), damage=damage, disk_s=disk_s)
    known = {chat: [chat * 11 % 90] * 80 for chat in range(CHATS)}
    number = 0
    for _ in range(ROUNDS):
        for chat in range(CHATS):
            number += 1
            world.submit(spec(number, [*known[chat], 3, chat], max_tokens=6))
            world.run()
            known[chat] += [3, chat, *world.output[number]]  # type: ignore[index]
    world.check_outputs()
    world.assert_invariants()
    return world


def found(world: World) -> list[int]:
    return [world.ended[number].cached_prompt_tokens for number in LATER]  # type: ignore[index]


@pytest.mark.parametrize("name", PIPELINES)
def test_every_later_turn_finds_its_conversation(name: str) -> None:
    world = taken_turns(over_disk(PIPELINES[name]))
    assert found(world) == [84] * CHATS + [92] * CHATS, "all full blocks of the turns before"
    stats = world.scheduler.stats()
    assert stats.fetched_tokens > 0
    assert (stats.disk_blocks, stats.disk_problem) == (200, "")
    assert 0 < stats.used_disk_blocks <= 200
    without = taken_turns(replace(over_disk(PIPELINES[name]), disk_places=()))
    assert sum(found(without)) < sum(found(world)) / 2


@pytest.mark.parametrize("name", PIPELINES)
def test_copies_that_are_damaged_are_computed_again(name: str) -> None:
    world = taken_turns(over_disk(PIPELINES[name]), damage=0.03)
    assert world.lost_copies
    assert 0 < sum(found(world)) < CHATS * (84 + 92)


def test_a_small_disk_keeps_the_newest_conversations() -> None:
    world = taken_turns(over_disk(PIPELINES["shared"], disk=60))
    assert world.scheduler.stats().used_disk_blocks <= 60


def test_a_lost_stage_s_part_is_replayed_when_the_others_come_from_disk() -> None:
    """As for host memory: slice 1 computes its part again, slice 2 still has its own."""
    world = taken_turns(over_disk(PIPELINES["shared"]))
    world.next_epoch(lost=(1,))
    known = [*world.specs[LATER[-CHATS]].prompt, *world.output[LATER[-CHATS]]]  # type: ignore[index]
    world.submit(spec(99, [*known, 5, 6, 7, 8], max_tokens=2))
    world.run()
    world.check_outputs()
    assert world.computed[0] == world.computed[1] > world.computed[2]
    assert world.scheduler.stats().fetched_tokens > 0


def test_what_is_computed_faster_is_not_fetched() -> None:
    """A block takes 4 s to compute, 3 s to fetch, and host memory another second of copies each way."""
    rates = HostRates(block_s=1.0, slot_s=0.0, token_s=1.0)
    slow = taken_turns(replace(over_disk(PIPELINES["shared"]), host_rates=rates), disk_s=3.0)
    assert slow.scheduler.stats().fetched_tokens == 0
    assert slow.scheduler.stats().disk_problem == ""
    fast = taken_turns(replace(over_disk(PIPELINES["shared"]), host_rates=rates), disk_s=1.0)
    assert fast.scheduler.stats().fetched_tokens > 0


def test_a_disk_that_is_slower_than_computing_rests() -> None:
    rates = HostRates(block_s=0.1, slot_s=0.0, token_s=1.0)
    world = taken_turns(replace(over_disk(PIPELINES["shared"]), host_rates=rates), disk_s=5.0)
    stats = world.scheduler.stats()
    assert stats.disk_problem == "the disk is slow: it takes 5e+03 ms for a block, computing one takes 4e+03 ms"
    assert stats.used_disk_blocks == 0
    world.next_epoch()
    assert world.scheduler.stats().disk_problem == stats.disk_problem, "another epoch waits, too"
    assert world.scheduler.stats().disk_again_s == stats.disk_again_s == FIRST_PAUSE_S


def answer(world: World, problem: str = "") -> int:
    """Let all stages answer all works, and return how many there were."""
    works, world.works = world.works, []
    for work, _ in works:
        failed = range(len(work.moves)) if problem else ()
        world.scheduler.disk_done(work.number, failed=failed, problem=problem, now_s=world.now_s)
    return len(works)


def test_no_prompt_waits_for_a_disk_with_a_problem() -> None:
    world = taken_turns(over_disk(PIPELINES["shared"]))
    known = [*world.specs[LATER[-CHATS]].prompt, *world.output[LATER[-CHATS]]]  # type: ignore[index]
    world.submit(spec(99, [*known, 5, 6, 7, 8], max_tokens=2))
    world.fill()
    assert world.works
    assert not world.in_flight, "it waits for the disk"
    answer(world, "no space is left")
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert world.scheduler.stats().disk_problem == "no space is left"
    assert world.scheduler.next_disk_work() is None


def test_a_disk_with_a_problem_is_tried_again_after_pauses_that_double() -> None:
    world = taken_turns(over_disk(PIPELINES["shared"]))
    world.submit(spec(99, [1] * 100, max_tokens=2))
    while not world.works:
        world.go(1)
    pauses = list[float]()
    for _ in range(6):
        answer(world, "no space is left")
        again_s = world.scheduler.stats().disk_again_s
        assert again_s is not None
        pauses.append(again_s - world.now_s)
        world.now_s = again_s - 1.0
        world.fill()
        assert not world.works, "the pause is not over"
        world.now_s = again_s
        world.fill()
        ((work, _),) = world.works
        assert work.afresh
        assert all(move.out for move in work.moves), "what lay there is gone"
    assert pauses == [60.0, 120.0, 240.0, 480.0, 900.0, 900.0]
    answer(world)
    stats = world.scheduler.stats()
    assert (stats.disk_problem, stats.disk_again_s) == ("", None)
    assert stats.used_disk_blocks > 0
    world.fill()
    assert not any(work.afresh for work, _ in world.works)
    answer(world, "it is full again")
    again_s = world.scheduler.stats().disk_again_s
    assert again_s == world.now_s + 900.0, "a disk that has just come back rests long"
    world.run()
    world.check_outputs()


def test_a_disk_that_has_worked_for_long_rests_for_a_minute() -> None:
    works = DiskWorks([HostTier(0, 4, [], disk=DiskPlaces(4))])
    works.rest("it hangs", now_s=0.0)
    works.rest("it hangs", now_s=60.0)
    assert works.again_s == 180.0
    works = works.carry_over([tier := HostTier(0, 4, [], disk=DiskPlaces(4))])
    for number in range(4):
        tier.store(key(number), number)
    assert works.next((), idle=True, now_s=179.0) is None
    trial = works.next((), idle=True, now_s=180.0)
    assert trial is not None
    works.done(trial.number, now_s=181.0)
    assert works.problem == ""
    works.rest("it hangs", now_s=181.0 + LONGEST_PAUSE_S)
    assert works.again_s == 181.0 + LONGEST_PAUSE_S + FIRST_PAUSE_S


def test_conversations_come_from_a_disk_that_works_again() -> None:
    pipeline = over_disk(PIPELINES["shared"])
    world = World(pipeline, ThrottledPolicy())
    number, answers = 0, dict[int, list[int]]()
    for turn in range(4):
        for chat in range(CHATS):
            number += 1
            world.submit(spec(number, [*[chat * 11 % 90] * 80, *answers.get(chat, ())], max_tokens=4))
            world.run()
            answers[chat] = [*answers.get(chat, ()), *world.output[number]]  # type: ignore[index]
            if (turn, chat) == (1, 0):
                world.scheduler._tables.disk.rest("it was pulled out", now_s=0.0)  # type: ignore[union-attr]
                world.now_s = FIRST_PAUSE_S
    world.check_outputs()
    last = [world.ended[each].cached_prompt_tokens for each in range(3 * CHATS + 1, 4 * CHATS + 1)]  # type: ignore[index]
    assert min(last) >= 80
    assert world.scheduler.stats().disk_problem == ""


def test_others_pass_a_prompt_that_waits_for_the_disk() -> None:
    world = taken_turns(over_disk(PIPELINES["shared"]))
    known = [*world.specs[LATER[-CHATS]].prompt, *world.output[LATER[-CHATS]]]  # type: ignore[index]
    world.submit(spec(99, [*known, 5, 6, 7, 8], max_tokens=2), spec(100, [1, 2, 3], max_tokens=2))
    world.go(2)
    assert 100 in world.ended
    assert 99 not in world.ended
    world.run()
    world.check_outputs()


def key(number: int) -> bytes:
    return bytes([number]) * 16


def test_a_copy_comes_only_to_a_place_that_no_step_in_flight_uses() -> None:
    tier = HostTier(0, 2, [], disk=DiskPlaces(4))
    for number in range(2):
        tier.store(key(number), number)
    for wanted, _ in tier.writes((), most=9):
        tier.written(wanted, done=True)
    for number in (2, 3):  # push the first two out of host memory
        tier.store(key(number), number)
    for wanted, _ in tier.writes((), most=9):
        tier.written(wanted, done=True)
    assert tier.fetch([key(0)]) == {key(0)}
    assert tier.reads({0, 1}, most=9) == []
    ((_, move),) = tier.reads({1}, most=9)
    assert move.place == 0
    assert key(0) not in tier
    tier.arrived(key(0), done=True)
    assert key(0) in tier


def test_what_a_step_is_still_storing_is_not_written() -> None:
    tier = HostTier(0, 1, [], disk=DiskPlaces(4))
    tier.store(key(0), 0)
    assert tier.writes({0}, most=9) == []
    assert len(tier.writes((), most=9)) == 1
    tier.store(key(1), 1)
    assert key(1) not in tier, "the only place is being written"


def test_copies_that_were_on_their_way_are_not_found_in_the_next_epoch() -> None:
    moves: list[TierMove] = []
    tier = HostTier(0, 4, moves, disk=DiskPlaces(4))
    for number in range(3):
        tier.store(key(number), number)
    ((written, _), *_) = tier.writes((), most=1)
    after = tier.carry_over([], [])
    assert after.disk is not None
    assert written in after
    assert written not in after.disk
    assert [each for each, _ in after.writes((), most=1)] == [written], "it is written again"


def test_keys_without_a_copy_go_last_from_host_memory() -> None:
    tier = HostTier(0, 4, [], disk=DiskPlaces(4))
    for number in range(4):
        tier.store(key(number), number)
    ((written, _),) = tier.writes((), most=1)
    tier.written(written, done=True)
    assert tier.fetch([written]) == set(), "it is here, and now the last that was used"
    tier.store(key(4), 0)
    assert written == key(0)
    assert [number for number in range(5) if key(number) in tier] == [1, 2, 3, 4]
