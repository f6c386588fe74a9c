"""Laying a step out on the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from edgepipe_mlx.device import stores_scores
from edgepipe_mlx.kv import independent
from edgepipe_mlx.tiles import tile_rows

from edgepipe.backend.step_layout import StepLayout, lay_out_step
from edgepipe.backend.types import BlockCopy, Step, StepRow
from edgepipe.errors import StepFailed
from edgepipe.ids import StepId
from edgepipe.spec.layer_spec import Attention
from tests.support.backends.mlx_models import row

NUM_BLOCKS = 40  # 640 tokens


def layout_of(*rows: StepRow) -> StepLayout:
    step = Step(step=StepId(1), slice_index=0, rows=rows, logit_rows=np.zeros(0, np.int32))
    return lay_out_step(step, block_size=16, num_blocks=NUM_BLOCKS, dtype=np.int32)


@given(
    blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=8, unique=True),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_every_token_goes_to_its_own_slot_of_the_block_table(blocks: list[int], cut: tuple[float, float]) -> None:
    capacity = len(blocks) * 16
    position = int(min(cut) * (capacity - 1))
    num_tokens = max(1, int(max(cut) * capacity) - position)
    table = row(position, num_tokens, *((block, 1) for block in blocks))
    plan = layout_of(table)
    expected = [blocks[at // 16] * 16 + at % 16 for at in range(position, position + num_tokens)]
    assert plan.slots.tolist() == expected
    assert plan.positions.tolist() == list(range(position, position + num_tokens))
    (planned,) = plan.rows
    if planned.contiguous:
        assert [planned.start_slot + at for at in range(position, position + num_tokens)] == expected
    else:
        assert planned.blocks.tolist() == blocks[: len(planned.blocks)]


@given(length=st.integers(1, 300), num_tokens=st.integers(1, 300), max_scores=st.integers(1, 4000))
def test_tiles_cover_every_row_once_and_see_the_keys_up_to_their_end(
    length: int, num_tokens: int, max_scores: int
) -> None:
    num_tokens = min(length, num_tokens)
    table = (0, -(-length // 16))
    rows = layout_of(row(length - num_tokens, num_tokens, table)).rows
    tiles = tile_rows(rows, max_scores)
    covered = [at for tile in tiles for at in range(tile.first_row, tile.first_row + tile.num_tokens)]
    assert covered == list(range(num_tokens))
    for tile in tiles:
        assert tile.length == length - num_tokens + tile.first_row + tile.num_tokens
        assert tile.num_tokens == 1 or tile.num_tokens * tile.length <= max_scores


@pytest.mark.parametrize(
    ("kind", "changes", "stored"),
    [
        (mx.gpu, {}, False),
        (mx.gpu, {"head_dim": 256}, True),
        (mx.gpu, {"softcap": 30.0}, True),
        (mx.cpu, {}, True),
    ],
    ids=["Metal", "Metal, large heads", "Metal, capped scores", "CPU"],
)
def test_only_kernels_that_store_scores_need_tiles(
    kind: mx.DeviceType, changes: dict[str, float], *, stored: bool
) -> None:
    spec = replace(Attention(num_heads=32, num_kv_heads=8, head_dim=128, rope=None), **changes)
    assert stores_scores(mx.Device(kind), spec) == stored


def test_adjacent_runs_are_one_run() -> None:
    plan = layout_of(row(0, 40, (3, 2), (5, 1)))
    assert plan.rows[0].contiguous


def test_blocks_reserved_beyond_the_length_do_not_break_a_run() -> None:
    plan = layout_of(row(0, 16, (3, 1), (9, 1)))
    assert plan.rows[0].contiguous


@pytest.mark.parametrize(
    "bad",
    [row(0, 17, (0, 1)), row(16, 1, (0, 1)), row(0, 1, (NUM_BLOCKS, 1)), row(0, 1), row(0, 0, (0, 1))],
    ids=["short", "short when decoding", "outside the pool", "none", "no tokens"],
)
def test_a_block_table_that_cannot_be_right_is_refused(bad: StepRow) -> None:
    with pytest.raises(StepFailed):
        layout_of(bad)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_grouped_copies_end_as_copies_done_one_by_one(pairs: list[tuple[int, int]]) -> None:
    copies = [BlockCopy(source, target) for source, target in pairs]
    expected = list(range(10))
    for copy in copies:
        expected[copy.target] = expected[copy.source]
    blocks = np.arange(10)
    for group in independent(copies):
        blocks[[copy.target for copy in group]] = blocks[[copy.source for copy in group]]
    assert blocks.tolist() == expected
