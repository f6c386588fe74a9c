"""A stage's tables of windowed classes: they roll on with their rows, and refuse what no engine sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.backend.types import BlockRun, WindowRuns
from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import EngineId, Epoch, SequenceId, StepId
from edgepipe.sampling import SamplingParams
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.scheduler import ScheduledStep, WindowBlocks
from edgepipe.spec.memory_classes import WindowPool
from edgepipe.stage.sequences import SequenceTable
from edgepipe.wire.common import epoch_to_wire
from edgepipe.wire.plans import NewWindow, PlanRow, StepPlan, plan_from_wire
from edgepipe.wire.registrations import Registration
from edgepipe.wire.steps import step_to_wire

POOL = WindowPool(window=8, slack=4, num_blocks=10, block_size=4)
EPOCH = Epoch(1, EngineId("engine"))
ONE = SequenceId(1)


def begun(pool: WindowPool = POOL) -> SequenceTable:
    table = SequenceTable(
        num_blocks=64,
        block_size=4,
        windows=[pool],
        model=ModelBounds(vocab_size=32, context_length=256),
        new_sampler=None,
    )
    table.tell(Registration(sequence=ONE, sampling=SamplingParams(), prompt_tokens=1))
    return table


def apply(table: SequenceTable, position: int, count: int, *new: NewWindow, first: bool = False) -> WindowRuns:
    row = PlanRow(ONE, position, count, 0, (BlockRun(0, 64),) if first else (), new)
    plan = StepPlan(epoch=EPOCH, step=StepId(1), last_slice=0, rows=(row,), registers=(ONE,) if first else ())
    return table.apply(plan).rows[0].windows[0]


def test_a_table_rolls_on_and_keeps_the_slack() -> None:
    table = begun()
    assert apply(table, 0, 12, NewWindow(0, 0, BlockRun(2, 3)), first=True) == WindowRuns(0, (BlockRun(2, 3),))
    assert apply(table, 12, 8, NewWindow(0, 3, BlockRun(5, 2))) == WindowRuns(0, (BlockRun(2, 5),))
    found = apply(table, 20, 4, NewWindow(0, 5, BlockRun(2, 1)))
    assert found == WindowRuns(2, (BlockRun(4, 3), BlockRun(2, 1)))
    assert apply(table, 17, 2) == found  # truncated, within the slack


def test_a_table_keeps_what_a_free_pool_lets_be_in_flight() -> None:
    table = begun(replace(POOL, more=8))
    apply(table, 0, 12, NewWindow(0, 0, BlockRun(0, 3)), first=True)
    apply(table, 12, 16, NewWindow(0, 3, BlockRun(3, 4)))
    found = apply(table, 27, 1)
    assert found.first == 2  # block 2 has what a row at 15 sees: 12 tokens before this one
    assert apply(table, 15, 13) == found


def test_a_table_begins_where_a_prefix_ends() -> None:
    assert apply(begun(), 40, 1, NewWindow(0, 8, BlockRun(1, 3)), first=True) == WindowRuns(8, (BlockRun(1, 3),))


@pytest.mark.parametrize(
    ("position", "new"),
    [
        (0, NewWindow(0, 0, BlockRun(8, 3))),  # beyond the pool
        (0, NewWindow(1, 0, BlockRun(0, 3))),  # another class
        (0, NewWindow(0, 0, BlockRun(0, 0))),  # no blocks
        (40, NewWindow(0, 9, BlockRun(0, 3))),  # behind the window's begin
        (40, NewWindow(0, 8, BlockRun(0, 2))),  # too short
    ],
)
def test_wrong_tables_are_refused(position: int, new: NewWindow) -> None:
    with pytest.raises(RemoteProtocolError):
        apply(begun(), position, 1, new, first=True)


def test_a_gap_in_a_table_is_refused() -> None:
    table = begun()
    apply(table, 0, 4, NewWindow(0, 0, BlockRun(0, 1)), first=True)
    with pytest.raises(RemoteProtocolError):
        apply(table, 4, 4, NewWindow(0, 2, BlockRun(1, 1)))


def test_a_step_brings_its_windows_blocks() -> None:
    step = ScheduledStep(
        step=StepId(1),
        sequences=(ONE,),
        positions=(40,),
        num_tokens=(1,),
        samples=(0,),
        token_ids=(3,),
        block_rows=(0,),
        block_starts=(0,),
        block_counts=(11,),
        registers=(),
        frees=(),
        windows=(WindowBlocks((0, 0), (8, 9), (4, 1), (1, 2)), WindowBlocks((0,), (2,), (7,), (9,))),
    )
    message = step_to_wire(step, epoch=epoch_to_wire(EPOCH), last_slice=0, with_token_ids=True)
    (row,) = plan_from_wire(message).rows
    assert row.new_windows == (
        NewWindow(0, 8, BlockRun(4, 1)),
        NewWindow(0, 9, BlockRun(1, 2)),
        NewWindow(1, 2, BlockRun(7, 9)),
    )
    message.windows[1].row[0] = 1
    with pytest.raises(RemoteProtocolError):
        plan_from_wire(message)
