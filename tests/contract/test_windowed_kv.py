"""Windowed memory classes on every backend: the same results as with KV of the whole context, in less memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import BlockRun, StepRow, WindowRuns
from edgepipe.errors import StepFailed
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.kv_forms import REST_TOKENS
from edgepipe.testing.tiny_model import tiny_config
from tests.support.backends.maker import Maker
from tests.support.backends.steps import make_step, run_step, step_row, token_ids

WINDOW = 40
TOKENS = np.random.default_rng(7).integers(0, 97, 192).tolist()


def windowed() -> ModelConfig:
    """Two layers with a window between layers that keep the context."""
    plain = tiny_config()
    layers = [
        spec.with_attention(window=WINDOW if index in (1, 2) else None) for index, spec in enumerate(plain.layers)
    ]
    return replace(plain, layers=tuple(layers))


class Rolling:
    """A sequence whose window's blocks come from a small pool, in turns: an old block is soon another token's.

    Its tables have what a form of KV needs behind the tokens.
    """

    def __init__(self, size: int, *, window_blocks: int, whole: tuple[int, int], sequence: int = 1) -> None:
        self._size, self._window_blocks, self._whole, self._sequence = size, window_blocks, whole, sequence

    def row(self, position: int, num_tokens: int) -> StepRow:
        first = max(0, position - WINDOW + 1) // self._size
        last = (position + num_tokens + REST_TOKENS - 1) // self._size
        places = range(first, last + 1)
        assert len(places) <= self._window_blocks
        runs = tuple(BlockRun(place * 5 % self._window_blocks, 1) for place in places)
        whole = step_row(position, num_tokens, self._whole, sequence=self._sequence)
        return replace(whole, windows=(WindowRuns(first, runs),))


def compute(backend: Backend, rows: list[StepRow]) -> np.ndarray:
    parts = [TOKENS[row.position : row.position + row.num_tokens] for row in rows]
    return run_step(backend, make_step(rows), token_ids(*parts))


@pytest.mark.parametrize("chunks", [(60, 1, 1, 37, 1, 50, 1, 1), (1,) * 90, (3, 70, 7, 7, 60, 1)], ids=str)
def test_a_window_in_few_blocks_computes_what_the_whole_context_does(maker: Maker, chunks: tuple[int, ...]) -> None:
    whole, few = maker.loaded(windowed()), maker.loaded(windowed())
    size = maker.block_size
    blocks = -(-(WINDOW + max(chunks) + REST_TOKENS) // size) + 1
    if blocks % 5 == 0:
        blocks += 1
    few.allocate_kv(num_blocks=12, block_size=size, window_blocks=(blocks,))
    rolling, position = Rolling(size, window_blocks=blocks, whole=(0, 12)), 0
    for count in chunks:
        expected = compute(whole, [step_row(position, count, (0, 12))])
        maker.assert_same(compute(few, [rolling.row(position, count)]), expected)
        position += count


def test_sequences_share_a_step_and_a_split_keeps_its_own_layers(maker: Maker) -> None:
    size = maker.block_size
    whole, few = maker.loaded(windowed()), maker.loaded(windowed(), cuts=[2])
    few.allocate_kv(num_blocks=12, block_size=size, window_blocks=(16,))
    tables = [(WindowRuns(0, (BlockRun(0, 6),))), (WindowRuns(0, (BlockRun(6, 6),)))]
    for position, count in ((0, 50), (50, 1), (51, 20)):
        rows = [step_row(position, count, (at * 6, 6), sequence=at) for at in range(2)]
        held = [replace(row, windows=(table,)) for row, table in zip(rows, tables, strict=True)]
        tokens = token_ids(*[TOKENS[position : position + count]] * 2)
        between = run_step(few, make_step(held), tokens)
        maker.assert_same(run_step(few, make_step(held, slice_index=1), between), compute(whole, rows))


def test_copies_are_of_the_context_s_blocks_only(maker: Maker) -> None:
    size = maker.block_size
    few = maker.loaded(windowed())
    few.allocate_kv(num_blocks=12, block_size=size, window_blocks=(6,))
    window = (WindowRuns(0, (BlockRun(0, 6),)),)
    first = replace(step_row(0, size, (0, 6)), windows=window)
    compute(few, [first])
    again = replace(step_row(size, 3, (6, 6), sequence=2), windows=window)
    found = run_step(few, make_step([again], copies=[(0, 6)]), token_ids(TOKENS[size : size + 3]))
    expected = compute(maker.loaded(windowed()), [step_row(0, size + 3, (0, 6))])[size:]
    maker.assert_same(found, expected)


def test_a_row_without_the_window_s_table_fails(maker: Maker) -> None:
    few = maker.loaded(windowed())
    few.allocate_kv(num_blocks=12, block_size=maker.block_size, window_blocks=(6,))
    with pytest.raises(StepFailed):
        few.prepare(make_step([step_row(0, 3, (0, 1))]))
