"""Several prompts are computed at the same time: a short one does not wait for a long one, and none waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.ids import SequenceId
from edgepipe.scheduler import EndReason, Priority, SarathiPolicy
from edgepipe.scheduler.prompts import MAX_SIDE_BY_SIDE, MIN_CHUNK_TOKENS, Prompts
from edgepipe.scheduler.sequence import Sequence
from tests.support.worlds.scheduler import World, limits, spec
from tests.support.worlds.scheduler_ring import Ring

LONG = 131_072


def wide(**changes: int) -> Ring:
    """A ring that holds a prompt of 128k tokens and a little more."""
    defaults = {"num_blocks": 8_600, "block_size": 16, "context_length": LONG + 100, "micro_batches": 4}
    return Ring(limits(**{**defaults, **changes}))


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("bystanders", [0, 16])
def test_a_short_prompt_behind_one_of_128k_tokens_is_answered_within_four_turns(
    micro_batches: int, bystanders: int
) -> None:
    ring = wide(micro_batches=micro_batches)
    if bystanders:
        ring.submit(*(spec(index, 8) for index in range(1, bystanders + 1)))
        ring.go(4 * micro_batches)
    ring.submit(spec(100, LONG, max_tokens=2))
    ring.go(3 * micro_batches)
    ring.submit(spec(101, 200, max_tokens=2))
    assert ring.steps_until_token(101, most=4 * micro_batches) <= 4 * micro_batches
    assert ring.tokens[100] == 0, "the long one is still under way"


@pytest.mark.parametrize("turns", [1, 10, 30, 60])
def test_a_short_prompt_does_not_wait_when_a_long_one_fills_the_kv_cache(turns: int) -> None:
    ring = wide(num_blocks=8_260, micro_batches=2)
    ring.submit(*(spec(index, 8) for index in range(1, 5)))
    ring.go(8)
    ring.submit(spec(100, LONG, max_tokens=2))
    ring.go(2 * turns)
    ring.submit(spec(101, 200, max_tokens=2))
    assert ring.tokens[100] == 0, "the long one is still under way"
    assert ring.steps_until_token(101, most=40) <= 40


def test_a_prompt_that_has_begun_ends_although_the_kv_cache_is_nearly_full() -> None:
    ring = Ring(limits(num_blocks=300, context_length=1200, micro_batches=2))
    ring.submit(spec(1, 8))
    ring.go(4)
    ring.submit(spec(2, 1150, max_tokens=2))
    assert ring.steps_until_token(2, most=80) <= 80


def test_a_short_prompt_passes_several_long_ones() -> None:
    ring = wide()
    ring.submit(*(spec(index, 20_000, max_tokens=2) for index in range(1, 6)), spec(6, 200, max_tokens=2))
    assert ring.steps_until_token(6, most=16) <= 16


def test_a_long_prompt_advances_by_half_of_each_step_however_many_short_ones_come() -> None:
    ring = wide(max_waiting=10_000, micro_batches=2)
    ring.submit(spec(1, 40_000, max_tokens=2))
    for index in range(2, 100):
        ring.submit(*(spec(100 * index + more, 900, max_tokens=1) for more in range(3)))
        ring.go(1)
    assert 1 in ring.ended


def test_a_batch_prompt_that_is_admitted_goes_on_beside_constant_interactive_load() -> None:
    ring = Ring(limits(num_blocks=2000, block_size=16, context_length=20_000, micro_batches=2, max_waiting=10_000))
    ring.submit(spec(1, 10_000, max_tokens=3, priority=Priority.BATCH))
    ring.go(2)
    index = 1
    for _ in range(80):  # each step there is another prompt that is more important
        index += 1
        ring.submit(spec(index, 2_500, max_tokens=1))
        ring.go(1)
    assert 1 in ring.ended, "it has had all of its tokens"
    assert ring.scheduler.stats().waiting > 0, "and the others were never done"


def test_a_batch_prompt_lets_eight_pass_while_it_waits_and_while_it_is_computed() -> None:
    world = World(limits(micro_batches=1, num_blocks=200), SarathiPolicy(max_tokens=8))
    world.submit(spec(1, 40, max_tokens=1, priority=Priority.BATCH))
    world.fill()
    for index in range(2, 40):
        world.submit(spec(index, 8, max_tokens=1))
        world.retire()
        world.fill()
    assert list(world.ended).index(SequenceId(1)) <= 8 + 2 * 5
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_a_prompt_that_waits_for_anothers_prefix_lets_those_behind_it_pass() -> None:
    prompt = tuple(range(90)) * 10
    world = World(limits(num_blocks=1000, block_size=4, context_length=2000), SarathiPolicy(max_tokens=32))
    world.submit(
        spec(1, (*prompt, 1), max_tokens=4), *(spec(index, (*prompt, index), max_tokens=4) for index in (2, 3))
    )
    world.submit(spec(4, 20, max_tokens=4))
    for _ in range(6):
        world.fill()
        world.retire()
    assert len(world.output[SequenceId(4)]) > 0
    world.run()
    assert [world.ended[SequenceId(index)].cached_prompt_tokens for index in (1, 2, 3, 4)] == [0, 900, 900, 0]
    world.check_outputs()
    world.assert_invariants()


def test_a_chat_does_not_wait_for_a_batch_prompt_that_computes_the_same() -> None:
    prompt = tuple(range(90)) * 4
    world = World(limits(num_blocks=1000, micro_batches=1, context_length=1000), SarathiPolicy(max_tokens=16))
    world.submit(spec(1, (*prompt, 1), max_tokens=1, priority=Priority.BATCH))
    world.fill()
    world.submit(spec(2, 60, max_tokens=1), spec(3, (*prompt, 3), max_tokens=1))
    world.submit(*(spec(index, 300, max_tokens=1) for index in range(4, 8)))
    world.run()
    assert list(world.ended).index(SequenceId(3)) == 2, "after the first ones"
    assert world.ended[SequenceId(3)].cached_prompt_tokens == 360


def test_a_prompt_that_waits_for_a_prefix_can_be_cancelled() -> None:
    prompt = tuple(range(80))
    world = World(limits(micro_batches=1), SarathiPolicy(max_tokens=8))
    world.submit(*(spec(index, (*prompt, index), max_tokens=2) for index in (1, 2, 3)))
    world.fill()
    world.cancel(2)
    assert world.ended[SequenceId(2)].reason is EndReason.CANCELLED
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_cancelling_those_who_wait_for_a_prefix_all_day_keeps_the_queue_short() -> None:
    prompt = tuple(range(80))
    world = World(limits(micro_batches=1), SarathiPolicy(max_tokens=1))
    world.submit(spec(1, (*prompt, 1), max_tokens=2))
    for index in range(2, 1000):
        world.submit(spec(index, (*prompt, index % 90), max_tokens=2))
        world.fill()
        world.cancel(index)
        if index % 20 == 0:
            world.retire()
    assert world.scheduler._waiting.num_entries < 100  # pyright: ignore[reportPrivateUsage]
    world.run()
    world.assert_invariants()


def test_a_large_prompt_that_does_not_fit_is_not_passed_by_small_ones() -> None:
    world = World(limits(num_blocks=20, micro_batches=2))
    world.submit(spec(1, 30, max_tokens=20), spec(2, 60, max_tokens=2))
    for index in range(3, 30):
        world.submit(spec(index, 4, max_tokens=2))
        world.fill()
        world.retire()
    world.run()
    assert list(world.ended)[:2] == [1, 2]
    world.check_outputs()
    world.assert_invariants()


def prompt_of(sequence: int, tokens: int, *, priority: int) -> Sequence:
    return Sequence(
        sequence=SequenceId(sequence),
        arrival=sequence,
        tokens=[0] * tokens,
        prompt_tokens=tokens,
        stop_ids=frozenset(),
        limit=10**6,
        priority=Priority(priority),
        room=10**6,  # blocks for all its tokens
    )


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 1)), min_size=1, max_size=MAX_SIDE_BY_SIDE),
    budget=st.integers(1, 2048),
)
def test_a_steps_tokens_are_shared_by_age_and_length(lengths: list[tuple[int, int]], budget: int) -> None:
    sequences = [prompt_of(index, tokens, priority=p) for index, (tokens, p) in enumerate(lengths)]
    prompts = Prompts()
    for sequence in sequences:
        prompts.add(sequence)
    chunks = dict(prompts.share(budget, replays=False))
    assert all(0 < count <= sequence.next_tokens for sequence, count in chunks.items())
    assert sum(chunks.values()) <= budget
    unused = budget - sum(chunks.values())
    assert unused < MIN_CHUNK_TOKENS or all(chunks[s] == s.next_tokens for s in sequences)
    first = min(sequences, key=lambda sequence: (sequence.priority, sequence.arrival))
    assert chunks[first] >= min(first.next_tokens, budget / 2)
    if any(sequence.priority is Priority.BATCH for sequence in chunks):
        assert all(s in chunks for s in sequences if s.priority is Priority.INTERACTIVE), "interactive ones go first"
    for sequence, count in chunks.items():
        assert count >= min(sequence.next_tokens, MIN_CHUNK_TOKENS, budget // 2)
