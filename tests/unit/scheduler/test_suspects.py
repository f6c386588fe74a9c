"""A request that is suspected of breaking steps gets steps of its own, and others hardly notice."""

from __future__ import annotations

import itertools

import pytest

from edgepipe.scheduler import Priority, SarathiPolicy
from tests.support.worlds.scheduler import World, limits, spec
from tests.support.worlds.scheduler_ring import Ring

SUSPECT = 1000


def crowd(*, micro_batches: int, bystanders: int = 32) -> Ring:
    """A ring in which so many decode for ever."""
    ring = Ring(limits(num_blocks=20_000, context_length=60_000, micro_batches=micro_batches))
    ring.submit(*(spec(index, 8) for index in range(1, bystanders + 1)))
    ring.go(8 * micro_batches)
    return ring


def begun(world: World | Ring, sequence: int) -> int:
    """The first step that holds the sequence."""
    return next(index for index, step in enumerate(world.steps) if sequence in step.sequences)


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_a_suspected_request_beside_a_crowd_gets_its_own_step_within_two_turns(micro_batches: int) -> None:
    ring = crowd(micro_batches=micro_batches)
    asked = len(ring.steps)
    ring.submit(spec(SUSPECT, 20, alone=True))
    ring.go(4 * micro_batches)
    first = begun(ring, SUSPECT)
    assert first - asked < 2 * micro_batches
    assert ring.steps[first].sequences == (SUSPECT,)
    assert ring.tokens[SUSPECT] >= 1


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_chats_beside_a_suspected_request_keep_half_of_their_speed_while_it_is_computed(micro_batches: int) -> None:
    ring = crowd(micro_batches=micro_batches)
    before = ring.tokens.total()
    ring.go(60)
    usual = ring.tokens.total() - before
    ring.submit(spec(SUSPECT, 50_000, alone=True, max_tokens=2))  # its prompt takes many steps
    before = ring.tokens.total()
    ring.go(60)
    assert sum(step.sequences == (SUSPECT,) for step in ring.steps[-60:]) >= 20, "it was computed all the time"
    assert ring.tokens.total() - before >= 0.45 * usual


def test_chats_have_their_whole_speed_again_after_a_clean_step() -> None:
    ring = crowd(micro_batches=4)
    ring.submit(spec(SUSPECT, 20, alone=True))
    ring.go(16)
    before = ring.tokens.total()
    ring.go(60)
    assert ring.tokens.total() - before >= 60 * 33 // 4
    assert all(len(step.sequences) > 1 for step in ring.steps[-30:])
    assert ring.tokens[SUSPECT] >= 15, "it runs beside the others now"


def test_a_new_user_behind_a_suspected_request_gets_an_answer() -> None:
    ring = crowd(micro_batches=4)
    ring.submit(spec(SUSPECT, 4000, alone=True), spec(SUSPECT + 1, 40))
    assert ring.steps_until_token(SUSPECT + 1, most=16) <= 16


def test_no_two_steps_of_suspected_requests_follow_one_another_while_others_have_work() -> None:
    ring = crowd(micro_batches=3)
    ring.submit(*(spec(SUSPECT + index, 3000, alone=True) for index in range(3)))
    ring.go(100)
    isolated = [step.sequences[0] >= SUSPECT and step.num_rows == 1 for step in ring.steps]
    assert not any(a and b for a, b in itertools.pairwise(isolated))
    turns = [step.sequences[0] for step in ring.steps if step.sequences[0] >= SUSPECT]
    assert turns[:6] == [SUSPECT, SUSPECT + 1, SUSPECT + 2] * 2, "they take turns"


def test_suspected_requests_without_company_use_every_step() -> None:
    world = World(limits(micro_batches=2), SarathiPolicy(max_tokens=8))
    world.submit(spec(1, 24, max_tokens=3, alone=True), spec(2, 16, max_tokens=3, alone=True))
    assert world.fill() == 2
    world.run()
    assert sum(step.num_samples for step in world.steps) == 6
    world.check_outputs()
    world.assert_invariants()


def test_a_suspected_prompt_is_computed_although_the_kv_cache_is_nearly_full() -> None:
    ring = Ring(limits(num_blocks=100, context_length=400, micro_batches=2))
    ring.submit(*(spec(index, 75, max_tokens=100) for index in range(1, 5)))
    ring.go(12)
    assert ring.scheduler.stats().free_blocks > 3
    ring.submit(spec(SUSPECT, 4, alone=True))
    assert ring.steps_until_token(SUSPECT, most=20) <= 20


def test_a_suspected_request_that_is_preempted_while_its_token_comes_is_cleared_by_it() -> None:
    world = World(limits(num_blocks=10, micro_batches=2))
    world.submit(spec(1, 8, max_tokens=24), spec(2, 8, max_tokens=24), spec(3, 8, max_tokens=24, alone=True))
    world.run()
    assert world.scheduler.stats().preemptions > 0
    world.check_outputs()
    world.assert_invariants()


def test_what_a_suspected_request_lost_is_replayed_in_steps_of_its_own() -> None:
    prompt = tuple(range(40))
    world = World(limits(micro_batches=2), SarathiPolicy(max_tokens=8))
    world.submit(spec(1, (*prompt, 3), max_tokens=30), spec(2, (*prompt[:8], *prompt), max_tokens=30, alone=True))
    for _ in range(20):
        world.fill()
        world.retire()
    world.next_epoch(lost=(0,))
    world.run()
    replayed = [step for step in world.steps if step.last_slice == 0]
    assert any(step.sequences == (2,) for step in replayed)
    world.check_outputs()
    world.assert_invariants()


@pytest.mark.parametrize("turns", range(8))
def test_a_suspected_request_that_is_cancelled_leaves_nothing_behind(turns: int) -> None:
    world = World(limits(micro_batches=3), SarathiPolicy(max_tokens=8))
    world.submit(*(spec(index, 6, max_tokens=20) for index in (1, 2, 3)))
    world.submit(spec(4, 24, max_tokens=5, alone=True, priority=Priority.BATCH), spec(5, 20, max_tokens=5, alone=True))
    for _ in range(turns):
        world.fill()
        world.retire()
    world.cancel(4)
    world.run()
    world.check_outputs()
    world.assert_invariants()
