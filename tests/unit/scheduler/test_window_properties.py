"""Windowed classes: whatever comes, every window holds what its tokens see, and every block comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgepipe.scheduler import Policy, SarathiPolicy, SchedulerLimits, ThrottledPolicy
from edgepipe.spec.memory_classes import StateSlots
from tests.support.worlds.scheduler import World, check_shared_replay, spec, windowed
from tests.unit.scheduler.test_scheduler_properties import Action, actions, play, policies

sizes = st.tuples(st.integers(1, 24), st.integers(1, 24))  # window, slack
pipelines = st.lists(sizes, min_size=1, max_size=2).flatmap(
    lambda windows: st.builds(
        lambda **changes: windowed(*windows, **changes),
        share=st.integers(1, 8),
        more=st.sampled_from([0, 0, 8, 40]),
        num_blocks=st.integers(4, 40),
        block_size=st.sampled_from([1, 4, 16]),
        context_length=st.integers(20, 120),
        micro_batches=st.integers(1, 6),
        max_running=st.integers(1, 8),
        max_waiting=st.integers(1, 12),
        contiguous_kv=st.booleans(),
        prefix_cache=st.sampled_from([True, True, False]),
    )
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=pipelines, policy=policies, actions=actions)
def test_every_window_holds_what_its_tokens_see(
    pipeline: SchedulerLimits, policy: Policy, actions: list[Action]
) -> None:
    play(pipeline, policy, actions)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=pipelines, policy=policies, actions=actions)
def test_every_window_holds_what_its_tokens_see_in_many_more_worlds(
    pipeline: SchedulerLimits, policy: Policy, actions: list[Action]
) -> None:
    play(pipeline, policy, actions)


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_chat_goes_on_where_every_class_holds_its_end(contiguous: bool) -> None:
    world = World(windowed((12, 8), num_blocks=64, contiguous_kv=contiguous), ThrottledPolicy())
    world.submit(spec(1, 80, max_tokens=10))
    world.run()
    world.submit(spec(2, [*world.specs[1].prompt, *world.output[1], 5, 6], max_tokens=4))  # type: ignore[index]
    world.run()
    world.check_outputs()
    assert world.ended[2].cached_prompt_tokens == 88  # type: ignore[index]
    world.assert_invariants()


def test_a_prefix_that_a_window_has_lost_counts_only_as_far_as_all_classes_hold_it() -> None:
    world = World(windowed((12, 8), num_blocks=64, share=10), ThrottledPolicy())
    world.submit(spec(1, 80, max_tokens=1))
    world.run()
    world.submit(spec(2, world.specs[1].prompt[:50], max_tokens=1))  # type: ignore[index]
    world.run()
    assert world.ended[2].cached_prompt_tokens == 0  # type: ignore[index]
    world.submit(spec(3, world.specs[1].prompt[:50], max_tokens=1))  # type: ignore[index]
    world.run()
    assert world.ended[3].cached_prompt_tokens == 48  # type: ignore[index]
    world.assert_invariants()


def test_a_long_sequence_takes_a_window_s_blocks_only() -> None:
    world = World(windowed((16, 16), num_blocks=256, share=100, context_length=900), ThrottledPolicy())
    (pool,) = world.limits.windows
    assert pool.num_blocks == pool.most_blocks == 9
    world.submit(spec(1, 700, max_tokens=50))
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_a_prompt_takes_more_of_a_free_pool_than_of_a_full_one() -> None:
    pipeline = windowed((16, 16), num_blocks=1024, share=16, more=96, context_length=900)
    (pool,) = pipeline.windows
    world = World(pipeline, ThrottledPolicy(max_prefill_tokens=64))
    world.submit(spec(1, 500, max_tokens=1))
    world.scheduler.next_step()
    first = len(world.scheduler._running[1].windows[0].blocks)  # type: ignore[index]
    assert pool.most_blocks < first <= pool.num_blocks // 2
    world.submit(*[spec(number, [number] * 500, max_tokens=1) for number in range(2, 7)])
    world.scheduler.next_step()
    held = [len(each.windows[0].blocks) for each in world.scheduler._running.values()]
    assert held == [first, *[pool.most_blocks] * (len(held) - 1)]
    assert len(held) >= 3, "what the first one took leaves room for others"


@pytest.mark.parametrize("contiguous", [False, True], ids=["shared", "copied"])
@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("states", [None, StateSlots(num_slots=12, gap=32)], ids=["windows", "windows and states"])
def test_slices_behind_the_last_lost_one_compute_only_what_follows_the_last_full_blocks(
    states: StateSlots | None, lost: tuple[int, ...], contiguous: bool
) -> None:
    pipeline = windowed((12, 8), (20, 8), share=2, num_blocks=80, contiguous_kv=contiguous, micro_batches=1)
    world = World(replace(pipeline, states=states), ThrottledPolicy())
    world.submit(spec(1, 50, max_tokens=60), spec(2, 30, max_tokens=60))
    world.go(40)
    known = [50 + len(world.output[1]), 30 + len(world.output[2])]  # type: ignore[index]
    world.next_epoch(lost=lost)
    world.run()
    world.check_outputs()
    world.assert_invariants()
    behind = [(count - 1) // 4 * 4 for count in known]  # the newest token was in flight
    all_tokens = 50 + 60 - 1 + 30 + 60 - 1
    last = max(lost)
    assert [world.computed[index] for index in range(last + 1)] == [all_tokens] * (last + 1)
    assert all_tokens - world.computed[2] == world.scheduler.stats().replayed_tokens == sum(behind)


def test_what_sequences_share_is_replayed_once() -> None:
    check_shared_replay(windowed((12, 8), num_blocks=200, share=1, micro_batches=1))


def test_a_window_without_room_for_a_replay_is_computed_by_all() -> None:
    pipeline = windowed((24, 8), num_blocks=40, share=40, micro_batches=1)
    assert pipeline.windows[0].num_blocks == pipeline.windows[0].most_blocks
    world = World(pipeline, SarathiPolicy(max_tokens=8))
    world.submit(spec(1, 70, max_tokens=40))
    world.go(20)
    world.next_epoch(lost=(0,))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert world.computed[2] == 70 + 40 - 1
