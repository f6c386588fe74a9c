"""Host memory below the device: conversations that were pushed out go on where they were, with exactly their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgepipe.errors import PromptTooLong, QueueFull
from edgepipe.scheduler import HostRates, Policy, SarathiPolicy, SchedulerLimits, ThrottledPolicy
from edgepipe.spec.memory_classes import StateSlots
from tests.support.worlds.scheduler import World, limits, spec, stateful, windowed
from tests.unit.scheduler.test_scheduler_properties import LOSSES, policies

Turn = tuple[str, int, int, int]


def below(pipeline: SchedulerLimits, *places: int, disk: Sequence[int] = ()) -> SchedulerLimits:
    """Add host memory, and a disk, with so many places of each memory class."""
    return replace(pipeline, host_places=places, disk_places=tuple(disk))


def pipelines(
    places: tuple[tuple[int, int], ...], disk: tuple[tuple[int, int], ...] = ()
) -> st.SearchStrategy[SchedulerLimits]:
    """Pipelines with numbers of places in these bounds, for up to three memory classes."""
    return st.builds(
        lambda window, slots, places, disk, **changes: below(
            replace(windowed(*window, **changes), states=StateSlots(num_slots=slots, gap=8) if slots else None),
            *places[: 1 + len(window) + bool(slots)],
            disk=disk[: 1 + len(window) + bool(slots)],
        ),
        st.sampled_from([(), (), ((12, 8),)]),
        st.sampled_from([0, 0, 3, 6, 12]),
        st.tuples(*[st.integers(*each) for each in places]),
        st.tuples(*[st.integers(*each) for each in disk]),
        num_blocks=st.integers(14, 30),
        block_size=st.sampled_from([1, 2, 4]),
        context_length=st.integers(60, 120),
        micro_batches=st.integers(1, 4),
        max_running=st.integers(1, 6),
        contiguous_kv=st.booleans(),
        host_rates=st.none()
        | st.builds(
            HostRates,
            block_s=st.just(1.0),
            slot_s=st.just(1.0),
            token_s=st.sampled_from([0.5, 100.0, 100.0]),
            beside_s=st.none() | st.integers(1, 12),
        ),
    )


over_host = pipelines(((8, 80), (8, 40), (2, 40)))
over_disk = pipelines(((8, 24), (8, 24), (4, 12)), ((16, 120), (8, 80), (4, 40)))
# Kind, conversation, tokens of the question, tokens of the answer.
turns = st.lists(
    st.tuples(st.sampled_from("tttttttttrrrpceadbwk"), st.integers(0, 3), st.integers(1, 16), st.integers(1, 9)),
    min_size=8,
    max_size=80,
)


def play(pipeline: SchedulerLimits, policy: Policy, turns: list[Turn], **more: Any) -> World:
    """Let four conversations take turns, each of which goes on from its last answer. ``more``: see ``World``."""
    world = World(pipeline, policy, **more)
    latest: dict[int, int] = {}  # newest sequence of each conversation
    next_id = 0
    for kind, chat, question, answer in turns:
        last = latest.get(chat)
        if kind == "t" and (last is None or last in world.ended):
            known = () if last is None else (*world.specs[last].prompt, *world.output[last])  # type: ignore[index]
            next_id += 1
            asked = spec(next_id, [*known, *[(chat * 7 + each) % 90 for each in range(question)]], max_tokens=answer)
            try:
                world.submit(asked)
                latest[chat] = next_id
            except (PromptTooLong, QueueFull):
                latest.pop(chat, None)
        elif kind == "r" and world.in_flight:
            world.retire()
        elif kind == "p" and (place := world.passing()) is not None:
            world.retire(place)
        elif kind == "c" and last is not None:
            world.cancel(last, at_position=answer)
        elif kind == "a":
            world.plan_ahead()
        elif kind == "b":  # other programs take host memory, or give it back
            world.bound_host(min(1000, 80 * question))
        elif kind == "w":
            world.now_s += 60.0 * question
        elif kind == "d":
            for _ in range(question):
                world.use_disk()
        elif kind == "e":
            world.next_epoch(lost=LOSSES[question % len(LOSSES)] if answer % 2 else ())
        elif kind == "k":
            world.next_engine(lost=LOSSES[question % len(LOSSES)] if answer % 2 else ())
        world.fill()
        if kind == "t":
            for _ in range(question + answer):  # most turns end before the next one begins
                world.use_disk()
                if world.in_flight:
                    world.retire()
                    world.fill()
    world.run()
    world.check_outputs()
    world.assert_invariants()
    return world


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=over_host, policy=policies, turns=turns)
def test_conversations_get_their_tokens_whatever_is_pushed_out(
    pipeline: SchedulerLimits, policy: Policy, turns: list[Turn]
) -> None:
    play(pipeline, policy, turns)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pipeline=over_disk,
    policy=policies,
    turns=turns,
    damage=st.sampled_from([0.0, 0.0, 0.1]),
    breakage=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_conversations_get_their_tokens_over_all_three_tiers(
    pipeline: SchedulerLimits, policy: Policy, turns: list[Turn], damage: float, breakage: float
) -> None:
    play(pipeline, policy, turns, damage=damage, breakage=breakage)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pipeline=over_host | over_disk,
    policy=policies,
    turns=turns,
    damage=st.sampled_from([0.0, 0.0, 0.1]),
    breakage=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_conversations_get_their_tokens_in_many_more_worlds(
    pipeline: SchedulerLimits, policy: Policy, turns: list[Turn], damage: float, breakage: float
) -> None:
    play(pipeline, policy, turns, damage=damage, breakage=breakage)


def test_a_current_snapshot_behind_stale_blocks_is_not_replayed() -> None:
    """Host memory that shrinks drops current blocks, of which the disk has older copies: these come back stale."""
    places = {"host_places": (20, 8), "disk_places": (54, 8)}
    pipeline = stateful(
        num_slots=12, gap=8, num_blocks=16, block_size=2, context_length=94, micro_batches=1, max_running=2, **places
    )
    before = "t3.1.9 t0.11.1 t0.13.1 t0.1.1 b0.3.1 t0.4.6 t3.11.2 t0.8.5 t0.6.3 t3.1.1 t2.14.1 t3.8.1"
    after = "e0.13.7 t0.6.8 t3.11.8 t2.9.1 t0.1.1 t0.14.1"
    turns = [(word[0], *map(int, word[1:].split("."))) for word in f"{before} {after}".split()]
    play(pipeline, SarathiPolicy(max_tokens=2), turns)  # type: ignore[arg-type]


def taken_turns(pipeline: SchedulerLimits, *, chats: int = 4, rounds: int = 3) -> World:
    """Let conversations of 80 tokens take turns one by one."""
    world = World(pipeline, ThrottledPolicy())
    known: dict[int, list[int]] = {chat: [chat * 11 % 90] * 80 for chat in range(chats)}
    number = 0
    for _ in range(rounds):
        for chat in range(chats):
            number += 1
            world.submit(spec(number, [*known[chat], 3, chat], max_tokens=6))
            world.run()
            known[chat] += [3, chat, *world.output[number]]  # type: ignore[index]
    world.check_outputs()
    world.assert_invariants()
    return world


PIPELINES = {
    "shared": limits(num_blocks=40),
    "runs": limits(num_blocks=40, contiguous_kv=True),
    "windows": windowed((12, 8), num_blocks=40),
    "states": stateful(num_blocks=40, num_slots=4),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_every_later_turn_finds_its_conversation(name: str) -> None:
    """The device holds one conversation and a part of a second one, host memory all four."""
    pipeline = PIPELINES[name]
    with_tier, without = taken_turns(below(pipeline, *[200] * len(pipeline.pool_sizes))), taken_turns(pipeline)
    later = range(5, 13)
    found = [[world.ended[number].cached_prompt_tokens for number in later] for world in (with_tier, without)]  # type: ignore[index]
    assert found == [[84] * 4 + [92] * 4, [0] * 8], "all full blocks of the turns before, or none"
    assert with_tier.scheduler.stats().restored_tokens > 0


def test_beside_a_chat_a_conversation_comes_back_in_pieces() -> None:
    """A step has time for 4 blocks: each of them, and the one that it pushes out."""
    rates = HostRates(block_s=0.01, slot_s=0.0, token_s=1.0, beside_s=0.08)
    world = World(replace(below(limits(num_blocks=48), 200), host_rates=rates), ThrottledPolicy())
    known = list(range(80))
    world.submit(spec(1, known, max_tokens=1))
    world.run()
    world.submit(spec(2, [90] * 120, max_tokens=1))  # pushes it out
    world.run()
    world.submit(spec(3, 8, max_tokens=60))
    world.go(3)
    before = len(world.steps)
    world.submit(spec(4, [*known, 1, 2], max_tokens=2))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert world.ended[4].cached_prompt_tokens == 80  # type: ignore[index]
    back = [sum(not move.out for move in step.moves) for step in world.steps[before:]]
    assert sum(back) > 4
    assert max(back) == 4
    assert all(3 in step.sequences for step, count in zip(world.steps[before:], back, strict=True) if count == 4)


@pytest.mark.parametrize("chats", [1, 3])
def test_copies_beside_chats_fit_into_a_step_that_uses_none_of_them(chats: int) -> None:
    """Conversations come back, and new ones push others out. A step has time for 8 copies."""
    rates = HostRates(block_s=0.01, slot_s=0.0, token_s=1.0, beside_s=0.08)
    world = World(replace(below(limits(num_blocks=72), 400), host_rates=rates), ThrottledPolicy())
    known = [[11 * number] * 80 for number in range(6)]
    for number, tokens in enumerate(known):
        world.submit(spec(number, tokens, max_tokens=1))
    world.run()
    world.submit(*[spec(10 + chat, 4, max_tokens=100) for chat in range(chats)])
    world.go(3 * chats)
    before = len(world.steps)
    world.submit(spec(20, [*known[0], 1, 2], max_tokens=2))
    while 20 not in world.ended:
        world.go(1)
    world.submit(spec(21, [90] * 80, max_tokens=2))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert world.ended[20].cached_prompt_tokens == 80  # type: ignore[index]
    beside = [step for step in world.steps[before:] if any(chat in step.sequences for chat in range(10, 10 + chats))]
    moves = [len(step.moves) for step in beside]
    assert sum(moves) > 20
    assert max(moves) <= 8 + chats, "a chat's next block may push out one more"
    for number in (20, 21):
        first = next(place for place, step in enumerate(world.steps) if number in step.sequences)
        assert len(world.steps[first].moves) <= chats, "steps before it carried its moves"
        assert any(len(step.moves) >= 4 for step in world.steps[before:first])


def test_what_is_computed_faster_is_not_brought_back() -> None:
    rates = HostRates(block_s=0.01, slot_s=0.0, token_s=0.001)
    world = taken_turns(replace(below(PIPELINES["shared"], 200), host_rates=rates))
    assert world.scheduler.stats().restored_tokens == 0


def test_what_comes_back_pushes_nothing_of_itself_out_of_host_memory() -> None:
    """Host memory has no place for the blocks that give way on the device."""
    world = World(below(limits(num_blocks=12), 5), ThrottledPolicy())
    known = list(range(21))
    world.submit(spec(1, known, max_tokens=1))
    world.run()
    world.submit(spec(2, [90] * 44, max_tokens=1))
    world.run()
    world.submit(spec(3, [*known, 1, 2], max_tokens=2))
    world.run()
    world.check_outputs()
    assert world.ended[3].cached_prompt_tokens == 20  # type: ignore[index]


def test_a_replay_whose_moves_the_last_stages_never_made_leaves_nothing_to_find() -> None:
    """An epoch ends behind a replay: the slices behind it have not brought its blocks back."""
    world = World(below(limits(num_blocks=24, micro_batches=1), 60), SarathiPolicy(max_tokens=8))
    known = list(range(60))
    world.submit(spec(1, known, max_tokens=1))
    world.run()
    world.submit(spec(2, [90] * 88, max_tokens=1))
    world.run()
    world.next_epoch(lost=(0,))
    world.submit(spec(3, [*known, 1, 2], max_tokens=2))
    world.fill()
    assert world.steps[-1].last_slice == 0
    assert any(not move.out for move in world.steps[-1].moves)
    world.retire()
    world.next_epoch()
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_copies_of_a_step_that_never_retired_are_not_found_in_the_next_epoch() -> None:
    world = World(below(limits(num_blocks=24), 60), ThrottledPolicy())
    known = list(range(60))
    world.submit(spec(1, known, max_tokens=1))
    world.run()
    world.submit(spec(2, [90] * 88, max_tokens=1))
    world.fill()
    assert any(move.out for step in world.in_flight for move in step.moves)
    world.next_epoch()
    world.run()
    world.submit(spec(3, [*known, 1, 2], max_tokens=2))
    world.run()
    world.check_outputs()
    world.assert_invariants()
