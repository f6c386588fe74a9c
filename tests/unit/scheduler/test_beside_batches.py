"""Chats beside a batch: as many of its decodes and prompt tokens in a step as chats hardly notice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.backend.cost import StepWork
from edgepipe.scheduler import Priority, ScheduledStep
from edgepipe.scheduler.pacing import Pacer, RingTimes, Waiting
from tests.support.worlds.scheduler import World, limits, spec

MOST = 1.25  # turn of chats beside a batch, as a multiple of their turn alone


def pacer(*, weights_s: float = 2e-2, token_s: float = 1e-3, stages: int = 2, goal_s: float | None = 0.1) -> Pacer:
    """A ring whose stages read their weights and multiply at the same time."""

    def step_s(work: StepWork) -> float:
        return max(weights_s, token_s * work.tokens)

    ring = RingTimes([[step_s]] * stages, [lambda tokens: 1e-5 * tokens] * (stages - 1), lambda: 1e-3)
    return Pacer(ring, most_tokens=512, goal_s=goal_s)


def batch_rows(world: World, step: ScheduledStep) -> int:
    return sum(world.specs[each].priority is Priority.BATCH for each in step.sequences)


@given(
    weights_s=st.floats(1e-3, 0.1),
    token_s=st.floats(1e-5, 1e-2),
    chats=st.integers(1, 40),
    micro_batches=st.integers(1, 6),
    stages=st.integers(1, 4),
)
def test_so_many_decodes_of_batches_as_keep_a_chats_turn(
    weights_s: float, token_s: float, chats: int, micro_batches: int, stages: int
) -> None:
    ring = pacer(weights_s=weights_s, token_s=token_s, stages=stages)
    choice = ring.beside_chats(chats, context=100, micro_batches=micro_batches)
    assert choice is not None
    assert choice.rows >= 1
    assert 1 <= choice.in_flight <= micro_batches

    def turn_s(decodes: int, in_flight: int) -> float:
        passage = ring.decode_passage(decodes, context=100)
        assert passage is not None
        return max(passage.turn_s, in_flight * passage.server_s)

    most_s = MOST * turn_s(-(-chats // micro_batches), min(chats, micro_batches))
    for in_flight in range(1, micro_batches + 1):
        own = -(-chats // in_flight)
        if in_flight == choice.in_flight:
            assert choice == (1, 1) or turn_s(own + choice.rows, in_flight) <= most_s * 1.001
        more = -(-choice.rows * choice.in_flight // in_flight)
        more = own + more + max(1, more // 8)
        assert more > 900 or turn_s(more, in_flight) > most_s, "not fewer than that, with any number of steps in flight"
    assert ring.beside_chats(chats, context=100, micro_batches=micro_batches) == choice


def test_steps_that_would_queue_at_the_slowest_stage_are_not_in_flight() -> None:
    choice = pacer(stages=2).beside_chats(1, context=100, micro_batches=4)
    assert choice is not None
    assert choice.in_flight == 2, "two stages of equal times: a third step would wait"


def test_without_a_goal_batches_have_no_bound() -> None:
    assert pacer(goal_s=None).beside_chats(3, context=100, micro_batches=2) is None


def test_a_batchs_chunk_lengthens_a_chats_turn_less_than_a_chats_chunk() -> None:
    def turn_s(*, batch: bool) -> float:
        ring = pacer(token_s=5e-4)
        waiting = Waiting(
            prompt=1, position=0, left=4000, others=0, decodes=8, context=100, micro_batches=2, protected=True,
            chats=4, batch=batch,
        )  # fmt: skip
        chunk = ring.chunk(waiting)
        alone = ring.decode_passage(2, context=100)
        assert chunk is not None
        assert alone is not None
        return max(chunk.in_flight, 2) * chunk.seconds / alone.turn_s

    assert turn_s(batch=True) <= MOST
    assert turn_s(batch=False) > MOST


@pytest.mark.parametrize(("token_s", "least", "most"), [(1e-4, 8, 40), (2e-2, 1, 2)])
def test_beside_chats_a_step_holds_few_rows_of_a_batch_and_all_end(token_s: float, least: int, most: int) -> None:
    world = World(limits(num_blocks=2000, max_running=64))
    ring = pacer(token_s=token_s)
    world.scheduler.set_pacer(ring)
    world.submit(*[spec(each, 20, max_tokens=150, priority=Priority.BATCH) for each in range(1, 41)])
    world.go(40)
    before = len(world.steps)
    world.submit(spec(100, 20, max_tokens=40))
    world.run()
    beside = [step for step in world.steps[before:] if 100 in step.sequences]
    rows = [batch_rows(world, step) for step in beside[4:]]
    assert least <= max(rows) <= most
    world.check_outputs()
    world.assert_invariants()


@settings(max_examples=25)
@given(
    num_blocks=st.sampled_from([24, 40, 120]),
    max_running=st.sampled_from([6, 40]),
    micro_batches=st.integers(1, 4),
    stages=st.integers(1, 3),
    token_s=st.sampled_from([1e-4, 2e-2]),
    step_s=st.sampled_from([0.0, 0.01, 3.0]),
    rounds=st.lists(
        st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50), st.sampled_from(Priority)), min_size=1, max_size=10),
        min_size=1,
        max_size=4,
    ),
)
def test_all_end_though_blocks_are_short(
    num_blocks: int,
    max_running: int,
    micro_batches: int,
    stages: int,
    token_s: float,
    step_s: float,
    rounds: list[list[tuple[int, int, Priority]]],
) -> None:
    world = World(limits(num_blocks=num_blocks, max_running=max_running, micro_batches=micro_batches), step_s=step_s)
    world.scheduler.set_pacer(pacer(token_s=token_s, stages=stages))
    number = 0
    for sequences in rounds:
        for prompt_tokens, max_tokens, priority in sequences:
            number += 1
            world.submit(spec(number, prompt_tokens, max_tokens=max_tokens, priority=priority))
        for _ in range(7):
            world.fill()
            if world.in_flight:
                world.retire()
    world.run(max_turns=6000)
    world.check_outputs()
    world.assert_invariants()


def test_chats_alone_and_batches_alone_have_no_such_bound() -> None:
    for priority in (Priority.INTERACTIVE, Priority.BATCH):
        world = World(limits(num_blocks=2000, max_running=64))
        world.scheduler.set_pacer(pacer(token_s=2e-2))
        world.submit(*[spec(each, 8, max_tokens=20, priority=priority) for each in range(1, 33)])
        world.run()
        assert max(largest(world.steps)) >= 8


def largest(steps: Sequence[ScheduledStep]) -> list[int]:
    return [sum(count == 1 for count in step.num_tokens) for step in steps]


def test_beside_chats_prompts_of_batches_ride_with_decodes() -> None:
    world = World(limits(num_blocks=4000, max_running=256, micro_batches=3))
    world.scheduler.set_pacer(pacer(token_s=1e-4))
    world.submit(spec(1000, 20, max_tokens=150))
    world.go(6)
    before = len(world.steps)
    world.submit(*[spec(each, 40, max_tokens=12, priority=Priority.BATCH) for each in range(1, 100)])
    world.go(100)
    beside = world.steps[before:]
    assert any(max(step.num_tokens) > 1 for step in beside)
    assert not [step for step in beside if min(step.num_tokens) > 1], "no step of prompts alone"
    world.run()
    world.check_outputs()


def test_a_batch_stays_small_for_a_while_after_the_last_chat_and_then_grows() -> None:
    world = World(limits(num_blocks=2000, max_running=64, micro_batches=2), step_s=0.4)
    world.scheduler.set_pacer(pacer(token_s=2e-2))
    world.submit(*[spec(each, 8, max_tokens=60, priority=Priority.BATCH) for each in range(1, 41)])
    world.submit(spec(100, 8, max_tokens=20))
    while 100 not in world.ended:
        world.go(1)
    left_s = world.now_s

    def rows_until(now_s: float) -> int:
        before = len(world.steps)
        while world.now_s < now_s:
            world.go(1)
        return max(batch_rows(world, step) for step in world.steps[before:])

    world.go(4)  # in flight when it left
    assert rows_until(left_s + 9.5) <= 3, "one decodes, one prompt ends and another begins"
    assert rows_until(left_s + 12) >= 16
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_a_step_with_a_chats_prompt_has_no_prompt_of_a_batch() -> None:
    world = World(limits(num_blocks=4000, context_length=500, max_running=64, micro_batches=2), step_s=0.05)
    world.scheduler.set_pacer(pacer(token_s=1e-4))
    world.submit(*[spec(each, 400, max_tokens=4, priority=Priority.BATCH) for each in range(1, 30)])
    world.go(3)
    world.submit(spec(100, 40, max_tokens=4))
    before = len(world.steps)
    world.run()
    chunks = [
        {sequence for sequence, tokens in zip(step.sequences, step.num_tokens, strict=True) if tokens > 1}
        for step in world.steps[before:]
    ]
    assert [chunk for chunk in chunks if 100 in chunk] == [{100}]
    assert any(len(chunk - {100}) for chunk in chunks)
    world.check_outputs()
    world.assert_invariants()


def test_where_turns_prove_long_a_batch_decodes_in_one_step() -> None:
    ring = pacer(token_s=1e-4, stages=2)
    forecast = ring.beside_chats(1, context=100, micro_batches=2)
    assert forecast is not None
    assert forecast.in_flight == 2
    for _ in range(4):
        ring.note_turn(0.05, 1, beside=False, context=100, micro_batches=2)
    for _ in range(18):
        ring.note_turn(0.1, 1, beside=True, context=100, micro_batches=2)
    measured = ring.beside_chats(1, context=100, micro_batches=2)
    assert measured is not None
    assert measured.in_flight == 1
    assert 1 <= measured.rows < forecast.rows * forecast.in_flight


def test_what_steps_of_a_batch_teach_about_devices_does_not_change_what_was_measured_of_chats() -> None:
    """Many rows take longer than the forecast says, so that all forecasts grow: chats alone are as fast as before."""
    factor = 1.0
    ring_times = RingTimes([[lambda _: factor * 0.02]] * 2, [lambda _: 1e-5], lambda: 1e-3)
    ring = Pacer(ring_times, most_tokens=512, goal_s=0.1)
    for _ in range(9):
        ring.note_turn(0.041, 1, beside=False, context=100, micro_batches=2)
    before = ring.beside_chats(1, context=100, micro_batches=2)
    factor = 2.0
    for _ in range(90):
        ring.note_turn(0.08, 1, beside=True, context=100, micro_batches=2)
    after = ring.beside_chats(1, context=100, micro_batches=2)
    assert before is not None
    assert after is not None
    assert after.rows * after.in_flight < before.rows * before.in_flight, "turns take twice as long as alone"
