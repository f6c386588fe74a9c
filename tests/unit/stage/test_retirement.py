"""Steps retire in the order of computing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgepipe.ids import EngineId, Epoch, StepId
from edgepipe.sampling import Sampled
from edgepipe.stage.retirement import Retirement
from edgepipe.stage.sampler import StepResult

STEPS = range(1, 8)


def result(step: int) -> StepResult:
    return StepResult(sampled=((Sampled(step),),))


def due() -> Retirement:
    retirement = Retirement(Epoch(1, EngineId("engine")))
    for step in STEPS:
        retirement.due(StepId(step))
    return retirement


def settle(retirement: Retirement, step: int) -> list[int]:
    return [done.step for done in retirement.settle(StepId(step), result(step), ())]


@given(st.permutations(STEPS), st.permutations(STEPS))
def test_sampler_threads_may_finish_in_any_order(computed: list[int], finished: list[int]) -> None:
    retirement = due()
    for step in computed:
        retirement.begin(StepId(step))
    assert [each for step in finished for each in settle(retirement, step)] == computed


def test_the_next_step_is_the_oldest_that_is_computed_and_not_settled() -> None:
    retirement = due()
    assert not retirement.is_next(StepId(2)), "no step is computed yet"
    for step in (2, 1):
        retirement.begin(StepId(step))
    assert [retirement.is_next(StepId(step)) for step in (1, 2)] == [False, True]
    assert settle(retirement, 1) == []
    assert retirement.is_next(StepId(2)), "step 1 waits behind it"
    assert settle(retirement, 2) == [2, 1]
    assert not retirement.is_next(StepId(2))


def test_a_step_without_rows_retires_after_all_older_ones() -> None:
    retirement = due()
    assert settle(retirement, 3) == []
    for step in (1, 5, 2):
        retirement.begin(StepId(step))
    assert settle(retirement, 1) == [1]
    assert settle(retirement, 5) == [5]
    assert settle(retirement, 2) == [2, 3]
