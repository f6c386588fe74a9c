"""The slots of states on their way to a stage: a step brings them, and a stage refuses what no engine sends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgepipe.backend.types import BlockRun, RowState, StateWrite, StepRow
from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import EngineId, Epoch, SequenceId, StepId
from edgepipe.sampling import SamplingParams
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.scheduler import ScheduledStep
from edgepipe.stage.sequences import SequenceTable
from edgepipe.wire.common import epoch_to_wire
from edgepipe.wire.plans import StepPlan, plan_from_wire
from edgepipe.wire.registrations import Registration
from edgepipe.wire.steps import step_to_wire
from edgepipe.wire.v1 import stage_pb2

EPOCH = Epoch(1, EngineId("engine"))
STATES = (
    RowState(3, (StateWrite(1, 3),)),
    RowState(None, (StateWrite(2, 5), StateWrite(4, 0))),
)


def message(states: tuple[RowState, ...] = STATES) -> stage_pb2.Plan:
    """The plan of a decoded row and of a prompt's chunk."""
    step = ScheduledStep(
        step=StepId(1),
        sequences=(SequenceId(1), SequenceId(2)),
        positions=(8, 0),
        num_tokens=(1, 4),
        samples=(1, 0),
        token_ids=(1, 2, 3, 4, 5),
        block_rows=(0, 1),
        block_starts=(0, 8),
        block_counts=(4, 4),
        registers=(SequenceId(1), SequenceId(2)),
        frees=(),
        states=states,
    )
    return step_to_wire(step, epoch=epoch_to_wire(EPOCH), last_slice=0, with_token_ids=True)


def rows_of(plan: StepPlan, *, state_slots: int) -> tuple[StepRow, ...]:
    table = SequenceTable(
        num_blocks=16,
        block_size=4,
        state_slots=state_slots,
        model=ModelBounds(vocab_size=32, context_length=256),
        new_sampler=None,
    )
    for number in (1, 2):
        table.tell(Registration(sequence=SequenceId(number), sampling=SamplingParams(), prompt_tokens=1))
    return table.apply(plan).rows


def test_a_step_brings_its_rows_slots() -> None:
    rows = rows_of(plan_from_wire(message()), state_slots=6)
    assert [row.state for row in rows] == [*STATES]
    assert rows[0].runs == (BlockRun(0, 4),)


def test_a_plan_without_slots_is_one_of_a_model_without_recurrent_layers() -> None:
    rows = rows_of(plan_from_wire(message(())), state_slots=0)
    assert [row.state for row in rows] == [None, None]


@pytest.mark.parametrize(("states", "state_slots"), [(STATES, 0), ((), 6)])
def test_slots_for_another_model_are_refused(states: tuple[RowState, ...], state_slots: int) -> None:
    with pytest.raises(RemoteProtocolError, match="slots of states"):
        rows_of(plan_from_wire(message(states)), state_slots=state_slots)


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.state_read.append(1),
        lambda plan: plan.state_read.pop(),
        lambda plan: plan.state_row.append(0),
        lambda plan: plan.state_slot.pop(),
        lambda plan: plan.state_row.__setitem__(0, 7),
    ],
)
def test_columns_that_do_not_match_are_refused(change: Callable[[stage_pb2.Plan], None]) -> None:
    plan = message()
    change(plan)
    with pytest.raises(RemoteProtocolError, match="state"):
        plan_from_wire(plan)
