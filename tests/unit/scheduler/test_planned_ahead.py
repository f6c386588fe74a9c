"""Steps that are planned ahead: they begin with the tokens that steps in flight sample."""

from __future__ import annotations

import pytest

from edgepipe.scheduler import ScheduledStep
from tests.support.worlds.scheduler import World, limits, next_token, spec


def world_of(*, micro_batches: int = 1, turns: int = 1, acceptance: float | None = None, **changes: int) -> World:
    world = World(limits(micro_batches=micro_batches, **changes), acceptance=acceptance)
    world.plan_ahead(turns)
    return world


def newest(world: World) -> ScheduledStep:
    world.fill()
    return world.steps[-1]


def test_a_chats_next_step_is_planned_while_its_token_is_sampled() -> None:
    world = world_of()
    world.submit(spec(1, 4, max_tokens=4))
    prompt, decode = (world.fill(), world.steps)[1]
    assert (prompt.after, prompt.positions) == (None, (0,))
    assert (decode.after, decode.positions, decode.num_tokens) == (prompt.step, (4,), (1,))
    world.retire()
    assert (newest(world).after, newest(world).positions) == (decode.step, (5,))
    world.run()
    assert len(world.steps) == 4, "none is planned behind the last token"
    world.check_outputs()
    world.assert_invariants()


@pytest.mark.parametrize(("turns", "counts"), [(2, [3, 0, 2, 0, 2]), (4, [5, 0, 0, 3, 0, 0, 3])])
def test_several_steps_are_planned_at_once(turns: int, counts: list[int]) -> None:
    world = world_of(turns=turns)
    world.submit(spec(1, 4, max_tokens=30))
    found: list[int] = []
    for _ in counts:
        found.append(world.fill())
        world.retire()
    assert found == counts
    assert [(step.after, step.positions) for step in world.steps[1:4]] == [(1, (4,)), (2, (5,)), (3, (6,))][
        : len(world.steps) - 1
    ]
    world.run()
    assert len(world.steps) == 30, "none is planned behind the last token"
    world.check_outputs()
    world.assert_invariants()


def test_steps_planned_ahead_hold_the_chats_that_go_on() -> None:
    world = world_of(turns=6)
    world.submit(spec(1, 4, max_tokens=3), spec(2, 4, max_tokens=9))
    world.run()
    assert len(world.steps) == 9
    world.check_outputs()
    world.assert_invariants()


def test_no_more_steps_are_planned_once_a_prompt_comes() -> None:
    world = world_of(turns=4)
    world.submit(spec(1, 4, max_tokens=40))
    world.go(2)
    world.submit(spec(2, 4, max_tokens=40))
    world.fill()
    newest, prompt = world.steps[-2:]
    assert prompt.registers == (2,)
    assert prompt.may_retire_before(newest)
    world.go(6)
    world.fill()
    assert sorted(world.steps[-1].sequences) == [1, 2]
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_drafts_that_come_keep_the_next_steps_from_being_planned() -> None:
    world = world_of(turns=6, acceptance=1.0)
    world.submit(spec(1, 4, max_tokens=60))
    world.run()
    assert max(step.num_samples for step in world.steps) > 1, "windows go on"
    assert len(world.steps) < 40
    world.check_outputs()
    world.assert_invariants()


def test_no_step_is_planned_ahead_beside_another_micro_batch() -> None:
    world = world_of(micro_batches=2)
    world.submit(*[spec(number, 4, max_tokens=30) for number in range(1, 5)])
    world.go(12)
    world.fill()
    assert [(step.num_rows, step.after) for step in world.in_flight] == [(2, None), (2, None)]
    world.run()
    world.check_outputs()


def test_a_new_prompt_waits_for_one_step_more_at_most() -> None:
    world = world_of()
    world.submit(spec(1, 4, max_tokens=40))
    world.go(5)
    world.fill()
    planned = len(world.steps)
    world.submit(spec(2, 4, max_tokens=40))
    world.fill()
    world.retire()
    world.fill()
    world.retire()
    world.fill()
    assert any(2 in step.sequences for step in world.steps[planned : planned + 1])
    world.run()
    world.check_outputs()


def test_chats_that_could_share_a_step_are_not_planned_ahead_apart() -> None:
    world = world_of()
    world.submit(spec(1, 4, max_tokens=40))
    world.go(3)
    world.submit(spec(2, 4, max_tokens=40))
    world.go(6)
    assert newest(world).num_rows == 2
    world.run()
    world.check_outputs()


@pytest.mark.parametrize("turns", [1, 5])
def test_what_a_stop_token_leaves_behind_is_dropped(turns: int) -> None:
    first = spec(1, 4)
    stop = next_token(first.prompt)
    world = world_of(turns=turns)
    world.submit(spec(1, 4, max_tokens=9, stop_ids=frozenset({stop})))
    world.fill()
    assert world.steps[-1].after is not None
    world.run()
    assert world.output[first.sequence] == [stop]
    world.check_outputs()
    world.assert_invariants()


@pytest.mark.parametrize(("turns", "retired"), [(1, 0), (1, 1), (3, 0), (3, 3)])
def test_a_cancelled_chats_blocks_wait_for_the_steps_planned_ahead(turns: int, retired: int) -> None:
    world = world_of(turns=turns)
    world.submit(spec(1, 4, max_tokens=9))
    world.go(turns + 1)
    world.fill()
    assert len(world.in_flight) == turns + 1
    world.cancel(1)
    for _ in range(retired):
        world.retire()
    assert world.scheduler.stats().free_blocks < world.limits.num_blocks
    world.run()
    world.assert_invariants()


def test_no_chat_is_put_off_for_a_step_planned_ahead() -> None:
    world = world_of(num_blocks=2, block_size=4)
    world.submit(spec(1, 3, max_tokens=5), spec(2, 3, max_tokens=5))
    world.run()
    world.check_outputs()
    world.assert_invariants()
