"""A step's host arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from edgepipe_torch.layers.prepared import PreparedStep, prepare_step
from edgepipe_torch.layers.rope import Rotations

from edgepipe.errors import StepFailed
from edgepipe.testing.tiny_model import tiny_config
from tests.support.backends.steps import make_step, step_row

ROTATIONS = Rotations(tiny_config())


def plan(*rows: object, **extra: object) -> PreparedStep:
    return prepare_step(make_step(rows, **extra), rotations=ROTATIONS, block_size=4, num_blocks=30)  # type: ignore[arg-type]


@given(st.permutations(range(30)), st.integers(0, 20), st.integers(1, 20))
def test_tokens_go_where_the_table_says(blocks: list[int], position: int, count: int) -> None:
    found = plan(step_row(position, count, *((block, 1) for block in blocks[:10])))
    expected = [blocks[at // 4] * 4 + at % 4 for at in range(position + count)]
    assert found.layout.slots.tolist() == expected[position:]
    (row,), (slots,) = found.layout.rows, found.scattered
    in_place = list(range(row.start_slot, row.start_slot + row.length))
    assert (in_place if slots is None else slots.tolist()) == expected


def test_runs_that_touch_are_one_run() -> None:
    assert plan(step_row(0, 12, (3, 2), (5, 1))).scattered[0] is None
    assert plan(step_row(0, 12, (3, 2), (6, 1))).scattered[0] is not None
    assert plan(step_row(0, 8, (3, 2), (6, 1))).scattered[0] is None  # the break lies behind the tokens


def test_rows_are_packed_in_order() -> None:
    found = plan(step_row(5, 3, (0, 2)), step_row(0, 2, (7, 1), sequence=2))
    assert [row.first_row for row in found.layout.rows] == [0, 3]
    assert found.layout.slots.tolist() == [5, 6, 7, 28, 29]
    np.testing.assert_allclose(np.abs(found.rotations), 1.0, atol=1e-6)


@pytest.mark.parametrize(
    "row", [step_row(0, 9, (0, 2)), step_row(0, 0, (0, 2)), step_row(0, 1, (30, 1)), step_row(0, 1, (-1, 1))], ids=str
)
def test_tables_that_cannot_be_are_refused(row: object) -> None:
    with pytest.raises(StepFailed):
        plan(row)


def test_copies_and_logits_that_cannot_be_are_refused() -> None:
    with pytest.raises(StepFailed):
        plan(step_row(0, 1, (0, 1)), copies=[(0, 30)])
    with pytest.raises(StepFailed):
        plan(step_row(0, 1, (0, 1)), logit_rows=[1])
