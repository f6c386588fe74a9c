"""Steps in any order that the rule allows leave the same numbers as in the order of their plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.types import BlockCopy, BlockRun, RowState, StateWrite, StepRow, TierMove, WindowRuns
from edgepipe.ids import SequenceId
from edgepipe.spec.memory_classes import WindowPool
from edgepipe.stage.step_order import StepUses

BLOCK_SIZE = 4
NUM_BLOCKS = 12
WINDOW = WindowPool(window=6, slack=8, num_blocks=8, block_size=BLOCK_SIZE)


class Memory:
    """A stage's blocks, slots of states and samplers. Each step mixes what it reads into what it writes."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, int], int] = {}
        self.outputs: dict[int, int] = {}

    def compute(self, number: int, rows: list[StepRow], copies: list[BlockCopy]) -> None:
        for copy in copies:
            self.cells["kv", copy.target] = self.cells.get(("kv", copy.source), 0)
        mixed = number
        for row in rows:
            end, first = row.position + row.num_tokens, row.position // BLOCK_SIZE
            blocks = ids(row.runs)[: -(-end // BLOCK_SIZE)]
            seen = [("kv", block) for block in blocks]
            written = [("kv", block) for block in blocks[first:]]
            for table in row.windows:
                held = ids(table.runs)[: -(-end // BLOCK_SIZE) - table.first]
                seen += [("window", block) for block in held[max(0, WINDOW.first_block(row.position) - table.first) :]]
                written += [("window", block) for block in held[max(0, first - table.first) :]]
            if row.state is not None:
                seen += [("state", row.state.read)] if row.state.read is not None else []
                written += [("state", write.slot) for write in row.state.writes]
            cells = [*seen, ("sampler", row.sequence)]
            mixed = hash((mixed, row.position, *(self.cells.get(cell, 0) for cell in cells)))
            for cell in (*written, ("sampler", row.sequence)):
                self.cells[cell] = hash((mixed, self.cells.get(cell, 0)))
        self.outputs[number] = mixed


def ids(runs: tuple[BlockRun, ...]) -> list[int]:
    return [block for run in runs for block in range(run.start, run.start + run.count)]


def runs_of(blocks: list[int]) -> tuple[BlockRun, ...]:
    return tuple(BlockRun(block, 1) for block in blocks)


@st.composite
def step_rows(draw: st.DrawFn, sequence: int) -> StepRow:
    position = draw(st.integers(0, 11))
    num_tokens = draw(st.integers(1, 6))
    needed = -(-(position + num_tokens) // BLOCK_SIZE)
    blocks = draw(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=needed, max_size=needed + 1, unique=True))
    first = draw(st.integers(0, WINDOW.first_block(position)))
    held = needed - first
    table = draw(st.lists(st.integers(0, WINDOW.num_blocks - 1), min_size=held, max_size=held + 1, unique=True))
    slots = draw(st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True))
    return StepRow(
        sequence=SequenceId(sequence),
        position=position,
        num_tokens=num_tokens,
        runs=runs_of(blocks),
        windows=(WindowRuns(first, runs_of(table)),),
        state=RowState(draw(st.none() | st.integers(0, 5)), tuple(StateWrite(1, slot) for slot in slots)),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[StepRow], list[BlockCopy]]:
    sequences = draw(st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True))
    rows = [draw(step_rows(sequence)) for sequence in sequences]
    pairs = draw(st.lists(st.tuples(*[st.integers(0, NUM_BLOCKS - 1)] * 2), max_size=1))
    return rows, [BlockCopy(source, target) for source, target in pairs]


@given(st.lists(steps(), min_size=2, max_size=6), st.data())
def test_an_order_that_is_allowed_changes_no_number(
    planned: list[tuple[list[StepRow], list[BlockCopy]]], data: st.DataObject
) -> None:
    uses = [StepUses(rows, copies, block_size=BLOCK_SIZE, windows=(WINDOW,)) for rows, copies in planned]
    in_order, reordered = Memory(), Memory()
    for number, (rows, copies) in enumerate(planned):
        in_order.compute(number, rows, copies)
    left = list(range(len(planned)))
    while left:
        allowed = [
            step for place, step in enumerate(left) if all(uses[step].may_pass(uses[older]) for older in left[:place])
        ]
        step = data.draw(st.sampled_from(allowed))
        reordered.compute(step, *planned[step])
        left.remove(step)
    assert reordered.cells == in_order.cells
    assert reordered.outputs == in_order.outputs


def row(sequence: int, blocks: list[int], *, position: int, num_tokens: int = 1) -> StepRow:
    return StepRow(sequence=SequenceId(sequence), position=position, num_tokens=num_tokens, runs=runs_of(blocks))


def uses_of(*rows: StepRow, copies: tuple[BlockCopy, ...] = (), moves: tuple[TierMove, ...] = ()) -> StepUses:
    return StepUses(rows, copies, moves, block_size=BLOCK_SIZE)


def test_slots_behind_a_row_count_as_its_own() -> None:
    """Of KV in 4 bits: the lower bits of a row's tokens lie there."""
    first = row(1, [0, 1, 2, 3], position=0)
    second = row(2, [2, 4, 5, 6], position=0)
    assert uses_of(first).may_pass(uses_of(second))
    apart = [StepUses([each], (), block_size=BLOCK_SIZE, rest_tokens=2 * BLOCK_SIZE) for each in (first, second)]
    assert not apart[0].may_pass(apart[1])


CHUNK = uses_of(row(1, [0, 1, 2], position=4, num_tokens=8))


@pytest.mark.parametrize(
    ("decode", "allowed"),
    [
        (uses_of(row(2, [3, 4], position=5)), True),
        (uses_of(row(2, [0, 4], position=5)), True),  # both read the block of a common beginning
        (uses_of(row(1, [0, 1, 2, 3], position=12)), False),  # the same sequence
        (uses_of(row(2, [1, 4], position=5)), False),  # it reads what the chunk writes
        (uses_of(row(2, [3, 0], position=5)), False),  # it writes what the chunk reads
        (uses_of(row(2, [3, 4], position=5), copies=(BlockCopy(2, 5),)), False),
        (uses_of(row(2, [3, 4], position=5), copies=(BlockCopy(5, 0),)), False),
        (uses_of(row(2, [3, 4], position=5), copies=(BlockCopy(0, 5),)), True),
        (uses_of(row(2, [3, 4], position=5), moves=(TierMove(0, 2, 7, out=True),)), False),  # which the chunk writes
        (uses_of(row(2, [3, 4], position=5), moves=(TierMove(0, 0, 7, out=False),)), False),  # which the chunk reads
        (uses_of(row(2, [3, 4], position=5), moves=(TierMove(0, 0, 7, out=True),)), True),
        (uses_of(row(2, [3, 4], position=5), moves=(TierMove(1, 2, 7, out=True),)), True),  # a slot of states
    ],
)
def test_a_decode_passes_a_chunk_that_touches_nothing_of_it(decode: StepUses, allowed: bool) -> None:
    assert decode.may_pass(CHUNK) is allowed


@pytest.mark.parametrize(
    ("older", "newer", "allowed"),
    [
        (TierMove(0, 3, 7, out=True), TierMove(0, 5, 7, out=False), False),  # the way there and back
        (TierMove(0, 3, 7, out=False), TierMove(0, 5, 7, out=True), False),  # the place is another block's then
        (TierMove(0, 3, 7, out=False), TierMove(0, 5, 7, out=False), True),
        (TierMove(0, 3, 7, out=True), TierMove(1, 5, 7, out=False), True),  # places of another class
    ],
)
def test_moves_of_one_place_keep_their_order(older: TierMove, newer: TierMove, allowed: bool) -> None:
    first = uses_of(row(1, [8], position=0), moves=(older,))
    assert uses_of(row(2, [9], position=0), moves=(newer,)).may_pass(first) is allowed


def test_a_slot_that_an_older_step_reads_is_not_written_before() -> None:
    def with_state(sequence: int, read: int | None, write: int) -> StepUses:
        return uses_of(
            StepRow(
                sequence=SequenceId(sequence),
                position=0,
                num_tokens=1,
                runs=runs_of([sequence]),
                state=RowState(read, (StateWrite(1, write),)),
            )
        )

    assert with_state(2, None, 7).may_pass(with_state(1, 3, 4))
    assert not with_state(2, None, 3).may_pass(with_state(1, 3, 4))
    assert not with_state(2, 4, 7).may_pass(with_state(1, 3, 4))


@pytest.mark.parametrize("copy", [BlockCopy(8, 4), BlockCopy(4, 8)])
def test_a_copy_passes_a_step_that_writes_the_block_behind_its_own(copy: BlockCopy) -> None:
    older = uses_of(row(1, [5], position=0))
    assert uses_of(row(2, [9], position=0), copies=(copy,)).may_pass(older)
