"""Slots of states: whatever comes, each row finds the state of exactly its tokens, and every slot comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgepipe.scheduler import Policy, SarathiPolicy, SchedulerLimits, ThrottledPolicy
from edgepipe.spec.memory_classes import StateSlots
from tests.support.worlds.scheduler import World, check_shared_replay, limits, spec, stateful, windowed
from tests.unit.scheduler.test_scheduler_properties import Action, actions, play, policies

pipelines = st.builds(
    lambda window, blocks, num_slots, **changes: replace(
        windowed(*window, **changes),
        states=StateSlots(num_slots=num_slots, gap=blocks * changes["block_size"]),
    ),
    st.sampled_from([(), (), ((12, 8),)]),
    st.integers(1, 8),
    st.integers(1, 20),
    num_blocks=st.integers(4, 40),
    block_size=st.sampled_from([1, 4, 16]),
    context_length=st.integers(20, 120),
    micro_batches=st.integers(1, 6),
    max_running=st.integers(1, 8),
    max_waiting=st.integers(1, 12),
    contiguous_kv=st.booleans(),
    prefix_cache=st.sampled_from([True, True, False]),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=pipelines, policy=policies, actions=actions)
def test_every_row_finds_the_state_of_its_tokens(
    pipeline: SchedulerLimits, policy: Policy, actions: list[Action]
) -> None:
    play(pipeline, policy, actions)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=pipelines, policy=policies, actions=actions)
def test_every_row_finds_the_state_of_its_tokens_in_many_more_worlds(
    pipeline: SchedulerLimits, policy: Policy, actions: list[Action]
) -> None:
    play(pipeline, policy, actions)


def cached(world: World, sequence: int) -> int:
    return world.ended[sequence].cached_prompt_tokens  # type: ignore[index]


def prompt_of(world: World, sequence: int) -> tuple[int, ...]:
    return world.specs[sequence].prompt  # type: ignore[index]


def output_of(world: World, sequence: int) -> list[int]:
    return world.output[sequence]  # type: ignore[index]


def test_the_same_prompt_again_begins_behind_its_last_full_block() -> None:
    world = World(stateful(num_blocks=64), ThrottledPolicy())
    world.submit(spec(1, 70, max_tokens=1))
    world.run()
    world.submit(spec(2, prompt_of(world, 1), max_tokens=3))
    world.run()
    assert cached(world, 2) == 68
    world.check_outputs()
    world.assert_invariants()


def test_a_chat_goes_on_behind_the_last_full_block_of_its_answer() -> None:
    world = World(stateful(num_blocks=64), ThrottledPolicy())
    world.submit(spec(1, 70, max_tokens=15))
    world.run()
    world.submit(spec(2, [*prompt_of(world, 1), *output_of(world, 1), 5, 6, 7], max_tokens=3))
    world.run()
    assert cached(world, 2) == 84  # 85 tokens, of which the last one was never computed
    world.check_outputs()


def test_a_chat_whose_answer_comes_back_shorter_goes_on_behind_its_prompt() -> None:
    world = World(stateful(num_blocks=64, num_slots=4), ThrottledPolicy())
    world.submit(spec(1, 70, max_tokens=40))
    world.run()
    world.submit(spec(2, [*prompt_of(world, 1), 1, 2, 3, 4, 5, 6], max_tokens=3))
    world.run()
    assert cached(world, 2) == 68
    world.check_outputs()


def test_where_prompts_part_the_second_leaves_a_snapshot_for_the_third() -> None:
    world = World(stateful(num_blocks=64, gap=400), ThrottledPolicy())
    system = list(range(42))
    for number in (1, 2, 3):
        world.submit(spec(number, [*system, *([number] * 30)], max_tokens=1))
        world.run()
    assert [cached(world, number) for number in (1, 2, 3)] == [0, 0, 40]
    world.check_outputs()


def test_prompts_that_come_together_wait_for_the_first_one_s_snapshot() -> None:
    world = World(stateful(num_blocks=200, gap=400, num_slots=20), ThrottledPolicy())
    system = [each % 90 for each in range(100)]
    for number in (1, 2, 3):
        world.submit(spec(number, [*system, *([number] * 30)], max_tokens=2))
    world.run()
    assert [cached(world, number) for number in (2, 3)] == [100, 100]
    world.check_outputs()
    world.assert_invariants()


def test_a_long_prompt_leaves_snapshots_on_its_way() -> None:
    world = World(stateful(num_blocks=64, gap=32), ThrottledPolicy())
    world.submit(spec(1, 150, max_tokens=1))
    world.run()
    world.submit(spec(2, [*prompt_of(world, 1)[:110], 1, 2, 3], max_tokens=1))
    world.run()
    assert cached(world, 2) == 96
    world.check_outputs()


def test_slots_bound_the_sequences_that_run() -> None:
    world = World(stateful(num_blocks=400, num_slots=3, max_running=50, micro_batches=4), ThrottledPolicy())
    world.submit(*[spec(number, 20, max_tokens=20) for number in range(1, 11)])
    most = 0
    while world.fill() or world.in_flight:
        most = max(most, world.scheduler.stats().running)
        world.retire()
    assert most == 3
    assert world.scheduler.stats().missed_snapshots > 0
    world.check_outputs()
    world.assert_invariants()


def test_snapshots_without_a_slot_are_counted() -> None:
    """The prompt wants five, and two slots are free beside its own."""
    world = World(stateful(num_blocks=64, gap=32, num_slots=3), SarathiPolicy())
    world.submit(spec(1, 150, max_tokens=1))
    world.run()
    assert world.scheduler.stats().missed_snapshots == 3


def test_a_prompt_that_finds_a_free_slot_misses_no_snapshot() -> None:
    world = World(stateful(num_blocks=64, num_slots=2), ThrottledPolicy())
    world.submit(spec(1, 20, max_tokens=1))
    world.run()
    assert world.scheduler.stats().missed_snapshots == 0


def test_after_an_epoch_without_a_loss_only_the_last_block_is_computed_again() -> None:
    world = World(stateful(num_blocks=64), ThrottledPolicy())
    world.submit(spec(1, 50, max_tokens=60))
    while len(output_of(world, 1)) < 33:
        world.fill()
        world.retire()
    world.fill()
    world.next_epoch()
    world.run()
    world.check_outputs()
    stats = world.scheduler.stats()
    assert stats.kept_tokens == 80  # of 83 known, the newest of which no step has retired


@pytest.mark.parametrize("contiguous_kv", [False, True], ids=["shared", "copied"])
@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)], ids=str)
def test_slices_behind_the_last_lost_one_compute_only_what_follows_the_snapshots(
    lost: tuple[int, ...], contiguous_kv: bool
) -> None:
    world = World(stateful(num_blocks=64, contiguous_kv=contiguous_kv), ThrottledPolicy())
    world.submit(spec(1, 50, max_tokens=60), spec(2, 30, max_tokens=40))
    world.go(50)
    known = [50 + len(output_of(world, 1)), 30 + len(output_of(world, 2))]
    world.next_epoch(lost=lost)
    world.run()
    world.check_outputs()
    world.assert_invariants()
    behind = [(count - 1) // 4 * 4 for count in known]  # the newest token was in flight
    all_tokens = 50 + 60 - 1 + 30 + 40 - 1
    last = max(lost)
    assert [world.computed[index] for index in range(last + 1)] == [all_tokens] * (last + 1)
    assert all_tokens - world.computed[2] == world.scheduler.stats().replayed_tokens == sum(behind)


def test_nothing_is_kept_if_the_last_slice_is_lost() -> None:
    world = World(stateful(num_blocks=64), ThrottledPolicy())
    world.submit(spec(1, 50, max_tokens=60))
    world.go(20)
    world.next_epoch(lost=(2,))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert [world.computed[index] for index in range(3)] == [50 + 60 - 1] * 3


def test_what_sequences_share_is_replayed_once() -> None:
    check_shared_replay(stateful(num_blocks=200, num_slots=20, gap=400))


def test_a_second_loss_while_the_first_is_replayed_reaches_as_far_as_both() -> None:
    world = World(stateful(num_blocks=64, num_slots=20, micro_batches=1), SarathiPolicy(max_tokens=8))
    world.submit(spec(1, 50, max_tokens=60), spec(2, 70, max_tokens=40))
    world.go(40)
    world.next_epoch(lost=(1,))
    world.go(12)
    assert 0 < world.computed[2] < world.computed[1]
    world.next_epoch(lost=(0,))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert {step.last_slice for step in world.steps} == {None, 1}


def test_a_replay_that_was_cancelled_leaves_the_rest_to_the_next_sequence() -> None:
    world = World(stateful(num_blocks=64, num_slots=20, micro_batches=1), SarathiPolicy(max_tokens=8))
    world.submit(spec(1, 90, max_tokens=60))
    world.go(30)
    world.next_epoch(lost=(1,))
    world.go(6)
    assert world.computed[1] == 48
    world.cancel(1)
    world.submit(spec(2, [*prompt_of(world, 1), 1, 2, 3], max_tokens=3))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert cached(world, 2) == 32, "the snapshot that the replay has passed"
    assert world.computed[2] == 93 + 2 - 88, "behind the last full block of the first prompt"


def test_a_preempted_replay_goes_on_behind_the_snapshots_that_it_refreshed() -> None:
    world = World(stateful(num_blocks=36, num_slots=20, micro_batches=1, gap=16), SarathiPolicy(max_tokens=8))
    world.submit(spec(1, 20, max_tokens=100), spec(2, 70, max_tokens=30))
    world.go(30)
    world.next_epoch(lost=(0,))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert world.scheduler.stats().preemptions > 0


def test_a_prompt_that_may_not_use_the_cache_takes_the_place_of_what_is_replayed() -> None:
    world = World(stateful(num_blocks=64, num_slots=6, gap=16, micro_batches=2), SarathiPolicy(max_tokens=8))
    world.submit(spec(1, 90, max_tokens=60))
    world.go(40)
    world.next_epoch(lost=(1,))
    world.go(3)
    world.submit(spec(2, prompt_of(world, 1), max_tokens=9, reuse_prefix=False))
    world.submit(spec(3, [*prompt_of(world, 1), 1], max_tokens=9))
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_a_model_without_recurrent_layers_names_no_slots() -> None:
    world = World(limits(), ThrottledPolicy())
    world.submit(spec(1, 20, max_tokens=5))
    world.run()
    assert not any(step.states for step in world.steps)
