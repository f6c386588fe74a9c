"""A new engine finds what lies on the device, and no key ever says that a place holds other content."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgepipe.scheduler import Policy, SarathiPolicy, SchedulerLimits, ThrottledPolicy
from edgepipe.scheduler.kv import next_key
from tests.support.worlds.scheduler import NUM_SLICES, World, limits, spec, stateful, windowed
from tests.unit.scheduler.test_host_tier import Turn, over_disk, over_host, pipelines, play
from tests.unit.scheduler.test_scheduler_properties import policies

PIPELINES = {
    "shared": limits(num_blocks=200),
    "runs": limits(num_blocks=200, contiguous_kv=True),
    "windows": windowed((12, 8), num_blocks=200),
    "states": stateful(num_blocks=200, num_slots=40),
}
CHATS, LENGTH, ANSWER = 4, 80, 5  # the last step fills a block


def told(pipeline: SchedulerLimits, **more: float) -> World:
    """Let some chats have one turn each. All of them fit on the device."""
    world = World(pipeline, ThrottledPolicy(), **more)  # type: ignore[arg-type]
    for chat in range(CHATS):
        world.submit(spec(chat, [chat * 11] * LENGTH, max_tokens=ANSWER))
    world.run()
    return world


def go_on(world: World) -> list[int]:
    """Let each chat have another turn. Return how many of its tokens were found."""
    for chat in range(CHATS):
        world.submit(spec(100 + chat, [*world.specs[chat].prompt, *world.output[chat], 5, 6], max_tokens=2))  # type: ignore[index]
    world.run()
    world.check_outputs()
    world.assert_invariants()
    return [world.ended[100 + chat].cached_prompt_tokens for chat in range(CHATS)]  # type: ignore[index]


def cached_blocks(world: World, chat: int) -> int:
    """Count the blocks on the device that a chat begins with."""
    tokens, before, keys = [*world.specs[chat].prompt, *world.output[chat]], b"", list[bytes]()  # type: ignore[index]
    for start in range(0, len(tokens) - 3, 4):
        before = next_key(before, tokens[start : start + 4])
        keys.append(before)
    return len(world.scheduler._tables._kv.find(keys))  # pyright: ignore[reportPrivateUsage]


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // 4 * 4


@pytest.mark.parametrize("name", PIPELINES)
def test_all_chats_go_on_where_they_were(name: str) -> None:
    world = told(PIPELINES[name])
    for memory in world.slices:
        memory.obey()
    found = world.next_engine()
    assert found is not None
    assert found.num_blocks == CHATS * ((LENGTH + ANSWER - 1) // 4)
    assert go_on(world) == [whole_blocks(LENGTH + ANSWER - 1)] * CHATS
    assert world.next_engine() is not None, "stages tell what they computed for the second engine, too"


def test_a_slice_that_got_the_last_keys_alone_does_not_decide() -> None:
    world = told(PIPELINES["shared"])
    world.slices[0].obey()
    for memory in world.slices[1:]:
        memory.orders.clear()
    world.next_engine()
    assert sorted(go_on(world)) == [LENGTH, *[LENGTH + 4] * (CHATS - 1)], "one chat ended with the last keys"


def test_the_slices_up_to_a_lost_one_compute_their_part_again() -> None:
    world = told(PIPELINES["shared"])
    for memory in world.slices:
        memory.obey()
    found = world.next_engine(lost=(1,))
    assert found is not None
    assert found.stale_to == 1
    go_on(world)
    assert world.computed[0] == world.computed[1] > world.computed[2] + CHATS * LENGTH / 2
    assert world.next_engine(lost=(NUM_SLICES - 1,)) is None


def test_a_new_process_gets_no_keys_of_what_the_one_before_computed() -> None:
    world = World(PIPELINES["shared"], ThrottledPolicy())
    world.submit(spec(1, LENGTH, max_tokens=ANSWER), spec(2, 8, max_tokens=40))
    while 1 not in world.ended:
        world.go(1)
    world.next_epoch(lost=(1,))
    world.fill()
    for memory in world.slices:
        memory.obey()
    assert not any(world.slices[1].holds(world.limits).device)
    world.next_engine()


def test_the_end_of_a_chat_is_evicted_before_its_beginning() -> None:
    world = told(limits(num_blocks=100))
    for memory in world.slices:
        memory.obey()
    world.next_engine()
    world.submit(spec(50, [77] * 80, max_tokens=2))
    world.run()
    cached = [cached_blocks(world, chat) for chat in range(CHATS)]
    assert sorted(cached)[1:] == [(LENGTH + ANSWER - 1) // 4] * (CHATS - 1), "the oldest chat made room"
    assert 0 < min(cached) < (LENGTH + ANSWER - 1) // 4


def test_no_key_comes_before_the_move_that_a_later_slice_has_yet_to_do() -> None:
    """A chat's block came back from host memory, and only the first slices have computed it again."""
    turns = [*[("t", 0, 1, 1)] * 4, ("t", 0, 1, 3), ("t", 1, 1, 2), ("t", 0, 1, 1), ("e", 0, 1, 1), ("t", 1, 1, 1)]
    one_by_one = SarathiPolicy(max_tokens=1, min_prefill_tokens=1)
    pipeline = replace(limits(num_blocks=14, block_size=1, context_length=60, max_running=1), host_places=(8,))
    play(replace(pipeline, micro_batches=1), one_by_one, [*turns, ("k", 0, 1, 1)])


on_device = pipelines(())
kills = st.lists(
    st.tuples(st.sampled_from("ttttttttttrrrrpceaakk"), st.integers(0, 3), st.integers(1, 16), st.integers(1, 9)),
    min_size=8,
    max_size=80,
)
drafts = st.sampled_from([None, None, 0.0, 0.5, 1.0])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=on_device, policy=policies, turns=kills, acceptance=drafts, flies=st.booleans())
def test_keys_are_right_though_engines_are_killed_at_any_moment(
    pipeline: SchedulerLimits, policy: Policy, turns: list[Turn], acceptance: float | None, flies: bool
) -> None:
    flies = flies and acceptance is not None
    pipeline = replace(pipeline, micro_batches=1) if flies else pipeline
    play(pipeline, policy, turns, acceptance=acceptance, flies=flies)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pipeline=on_device | over_host | over_disk,
    policy=policies,
    turns=kills,
    acceptance=drafts,
    flies=st.booleans(),
)
def test_keys_are_right_in_many_more_worlds(
    pipeline: SchedulerLimits, policy: Policy, turns: list[Turn], acceptance: float | None, flies: bool
) -> None:
    flies = flies and acceptance is not None
    pipeline = replace(pipeline, micro_batches=1) if flies else pipeline
    play(pipeline, policy, turns, acceptance=acceptance, flies=flies)
