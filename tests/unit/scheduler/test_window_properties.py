"""Windowed classes: whatever comes, every window holds what its tokens see, and every block comes back."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgepipe.scheduler import Policy, SchedulerLimits, ThrottledPolicy
from tests.support.scheduler_world import World, spec, windowed
from tests.unit.scheduler.test_scheduler_properties import Action, actions, play, policies

sizes = st.tuples(st.integers(1, 24), st.integers(1, 24))  # window, slack
pipelines = st.lists(sizes, min_size=1, max_size=2).flatmap(
    lambda windows: st.builds(
        lambda **changes: windowed(*windows, **changes),
        share=st.integers(1, 8),
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
