"""Interactive sequences go first; batch sequences go some time."""

from __future__ import annotations

import pytest

from edgepipe.errors import RequestInvalid
from edgepipe.ids import SequenceId
from edgepipe.scheduler import POLICIES, Priority, SarathiPolicy, SchedulerLimits, make_policy
from tests.support.worlds.scheduler import World, limits, spec, stateful, windowed

FULL = {
    "blocks": limits(num_blocks=104),
    "few sequences": limits(num_blocks=200, max_running=3),
    "windows": windowed((40, 20), num_blocks=200, share=4),
    "slots": stateful(num_blocks=200, num_slots=3),
}
"""Pipelines that three batch answers fill."""


def begun(world: World) -> list[int]:
    """Sequences in the order of their first rows."""
    return list(dict.fromkeys(sequence for step in world.steps for sequence in step.sequences))


def test_interactive_sequences_are_admitted_before_batch_sequences() -> None:
    world = World(limits(max_running=1))
    world.submit(*(spec(index, max_tokens=2, priority=index % 2) for index in range(1, 7)))
    world.run()
    assert begun(world) == [2, 4, 6, 1, 3, 5]
    world.check_outputs()
    world.assert_invariants()


def test_an_interactive_prompt_passes_a_batch_prompt_under_way() -> None:
    world = World(limits(micro_batches=1), SarathiPolicy(max_tokens=8))
    world.submit(spec(1, 40, max_tokens=2, priority=Priority.BATCH))
    world.fill()
    world.submit(spec(2, 8, max_tokens=2))
    world.retire()
    world.fill()
    assert world.in_flight[0].sequences == (2,)
    world.run()
    assert list(world.ended) == [2, 1]
    world.check_outputs()
    world.assert_invariants()


def test_a_batch_sequence_is_preempted_before_a_younger_interactive_one() -> None:
    world = World(limits(num_blocks=10, micro_batches=2))
    world.submit(spec(1, 8, max_tokens=24, priority=Priority.BATCH), spec(2, 8, max_tokens=24))
    world.run()
    assert world.scheduler.stats().preemptions == 1
    assert list(world.ended) == [2, 1]
    world.check_outputs()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pipeline", FULL.values(), ids=list(FULL))
def test_an_interactive_prompt_does_not_wait_for_the_end_of_batch_answers(
    pipeline: SchedulerLimits, policy: str
) -> None:
    world = World(pipeline, make_policy(policy))
    world.submit(*[spec(number, 30, max_tokens=160, priority=Priority.BATCH) for number in (1, 2, 3)])
    world.go(100)
    world.submit(spec(4, 180, max_tokens=5))
    world.go(40)
    assert len(world.output[SequenceId(4)]) == 5
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_a_batch_answer_goes_on_where_its_end_would_not_let_an_interactive_prompt_begin() -> None:
    world = World(limits(num_blocks=40))
    world.submit(spec(1, 100, max_tokens=30), spec(2, 8, max_tokens=20, priority=Priority.BATCH))
    world.go(12)
    world.submit(spec(3, 100, max_tokens=5))
    world.run()
    assert list(world.ended) == [2, 1, 3]
    assert world.scheduler.stats().preemptions == 0
    world.check_outputs()
    world.assert_invariants()


def test_a_batch_sequence_is_passed_a_few_times_only() -> None:
    world = World(limits(max_running=1, max_waiting=100))
    world.submit(spec(1, max_tokens=2, priority=Priority.BATCH), spec(2, max_tokens=2, priority=Priority.BATCH))
    for index in range(3, 60):  # there is always somebody who is more important
        world.submit(spec(index, max_tokens=2), spec(index + 100, max_tokens=2))
        while SequenceId(index) not in world.ended:
            world.fill()
            world.retire()
    assert SequenceId(1) in world.ended
    assert SequenceId(2) in world.ended
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_an_unknown_priority_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="priority 7"):
        spec(1, priority=7)
