"""Steps retire in the order of computing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgepipe.ids import EngineId, Epoch, StepId
from edgepipe.sampling import Sampled
from edgepipe.stage.retirement import Retirement
from edgepipe.stage.sampler import StepResult


def result(step: int) -> StepResult:
    return StepResult(sampled=(Sampled(step),))


@given(st.permutations(range(1, 8)))
def test_sampler_threads_may_finish_in_any_order(finished: list[int]) -> None:
    retirement = Retirement(Epoch(1, EngineId("engine")))
    for step in range(1, 8):
        retirement.due(StepId(step))
    retired = [done.step for step in finished for done in retirement.settle(StepId(step), result(step), ())]
    assert retired == list(range(1, 8))
