"""A stage's next step waits for the tokens that an earlier step samples."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import EngineId, Epoch, SequenceId, StepId
from edgepipe.stage.home import Home
from edgepipe.stage.step_work import StageStep
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.plans import PlanRow, StepPlan

EPOCH = Epoch(1, EngineId("engine"))


class Waiting:
    """What ``Home`` uses of a step."""

    def __init__(self, plan: StepPlan) -> None:
        self.after = plan.after
        self.sequences = tuple([row.sequence for row in plan.rows])
        self.ids: list[int] = []

    def give_inputs(self, inputs: np.ndarray, *, arrived_s: float) -> None:
        assert inputs.dtype == np.int32
        self.ids = inputs.tolist()


class Bench:
    """A ``Home`` and the steps that it has passed on."""

    def __init__(self, *, kept: int = 8) -> None:
        self.passed: list[Waiting] = []
        self.home = Home(lambda work: self.passed.append(cast("Waiting", work)), clock=FakeClock(), kept=kept)

    def plan(self, step: int, *sequences: int, after: int | None = None) -> Waiting:
        plan = StepPlan(
            epoch=EPOCH,
            step=StepId(step),
            last_slice=0,
            rows=tuple([PlanRow(SequenceId(sequence), 5, 1, 1) for sequence in sequences]),
            after=StepId(after) if after is not None else None,
            home=True,
        )
        self.home.planned(plan)
        return Waiting(plan)

    def hold(self, work: Waiting) -> None:
        self.home.hold(cast("StageStep", work))


def test_a_step_begins_with_the_tokens_of_its_own_sequences() -> None:
    bench = Bench()
    bench.plan(1, 7, 8, 9)
    work = bench.plan(2, 9, 7, after=1)
    bench.hold(work)
    assert bench.home.holds
    assert not bench.passed
    bench.home.give(StepId(1), [70, 80, 90])
    assert bench.passed == [work]
    assert work.ids == [90, 70]
    assert not bench.home.holds


def test_tokens_that_are_there_already_do_not_let_a_step_wait() -> None:
    bench = Bench()
    bench.plan(1, 7)
    bench.home.give(StepId(1), [70])
    work = bench.plan(2, 7, after=1)
    bench.hold(work)
    assert work.ids == [70]


def test_other_steps_tokens_pass_nothing_on() -> None:
    bench = Bench()
    bench.plan(1, 7)
    bench.plan(2, 8)
    bench.hold(bench.plan(3, 8, after=2))
    bench.home.give(StepId(1), [70])
    bench.home.give(StepId(9), [90])
    assert not bench.passed
    bench.home.give(StepId(2), [80])
    assert [work.ids for work in bench.passed] == [[80]]


def test_a_paused_stage_starts_no_step() -> None:
    bench = Bench()
    bench.plan(1, 7)
    bench.home.pause()
    bench.hold(bench.plan(2, 7, after=1))
    bench.home.give(StepId(1), [70])
    assert not bench.passed
    bench.home.resume()
    assert [work.ids for work in bench.passed] == [[70]]


def test_a_closed_one_forgets_the_step_that_waits() -> None:
    bench = Bench()
    bench.plan(1, 7)
    bench.hold(bench.plan(2, 7, after=1))
    bench.home.close()
    bench.home.give(StepId(1), [70])
    assert not bench.passed
    assert not bench.home.holds


@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_step_that_follows_none_of_its_sequences_is_refused(after: int) -> None:
    bench = Bench()
    bench.plan(1, 7)
    bench.plan(2, 8)
    with pytest.raises(RemoteProtocolError, match=f"follows step {after}, which samples nothing for sequence"):
        bench.plan(3, 7, 8, after=after)


def test_only_the_newest_steps_are_kept() -> None:
    bench = Bench(kept=2)
    for step in range(1, 4):
        bench.plan(step, 7)
        bench.home.give(StepId(step), [step])
    with pytest.raises(RemoteProtocolError):
        bench.plan(4, 7, after=1)
