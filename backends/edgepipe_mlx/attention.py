"""Attention over packed rows: mlx-lm's layers get one token per row, attention runs per sequence.

Shape letters: T packed rows, n rows of one sequence, L visible keys, D head dim.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from edgepipe.backend.step_layout import RowLayout, StepLayout
from edgepipe_mlx.kv import KVPool
from edgepipe_mlx.tiles import tile_rows


class StepArrays:
    """Device arrays shared by all layers of a step. ``submit`` makes them; they live until the step's end."""

    def __init__(self, plan: StepLayout, *, max_scores: int) -> None:
        """``max_scores``: maximum of queries times keys of one head in one product."""
        self.rows = tile_rows(plan.rows, max_scores)
        self.positions = mx.array(plan.positions)
        self.slots = mx.array(plan.slots)
        self._blocks: dict[tuple[int, int], mx.array] = {}
        self._masks: dict[tuple[int, int], mx.array] = {}

    def blocks(self, row: RowLayout, first_block: int) -> mx.array | None:
        """A row's block ids from ``first_block`` on; None where it lies in one run."""
        if row.contiguous:
            return None
        key = (row.first_row, first_block)
        if key not in self._blocks:
            self._blocks[key] = mx.array(row.blocks[first_block:])
        return self._blocks[key]

    def window_mask(self, row: RowLayout, window: int, first: int) -> mx.array:
        """Return [n, L], True where a row sees a key: not after itself, and among the last ``window`` tokens."""
        key = (row.first_row, window)
        if key not in self._masks:
            queries = mx.arange(row.length - row.num_tokens, row.length)[:, None]
            keys = mx.arange(first, row.length)[None]
            self._masks[key] = (keys <= queries) & (keys > queries - window)
        return self._masks[key]


class LayerCache:
    """One layer's pool in one step, with the interface of an mlx-lm cache."""

    def __init__(self, step: StepArrays, pool: KVPool, *, window: int | None, block_size: int) -> None:
        self._step = step
        self._pool = pool
        self._window = window
        self._block_size = block_size

    @property
    def offset(self) -> mx.array:
        """Positions of the rows [T], for rope."""
        return self._step.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the step's keys and values [T, kv heads, 1, D]; ``attend`` later reads them per sequence."""
        self._pool.write(self._step.slots, keys, values)
        return keys, values

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Attend with queries [T, heads, 1, D]; returns [T, heads, 1, D]."""
        parts = [self._attend_row(row, queries, scale) for row in self._step.rows]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _attend_row(self, row: RowLayout, queries: mx.array, scale: float) -> mx.array:
        first = self._first_visible(row)
        keys, values = self._pool.read(row, first, self._step.blocks(row, first // self._block_size))
        own = queries[row.first_row : row.first_row + row.num_tokens].transpose(2, 1, 0, 3)  # [1, heads, n, D]
        out = mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask=self._mask(row, first))
        return out.transpose(2, 1, 0, 3)

    def _first_visible(self, row: RowLayout) -> int:
        """Return the first token visible to any of the sequence's rows in this step."""
        if self._window is None:
            return 0
        return max(0, row.length - row.num_tokens - self._window + 1)

    def _mask(self, row: RowLayout, first: int) -> mx.array | str | None:
        if row.num_tokens == 1:
            return None  # a single row sees all keys read
        if self._window is None or row.length <= self._window:
            return "causal"  # aligned at the end: the last row sees all keys
        return self._step.window_mask(row, self._window, first)


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any = None, **_: Any
) -> mx.array:
    """Replace mlx-lm's attention function. Ignores keys, values and mask, which belong to packed rows."""
    layer: LayerCache = cache
    return layer.attend(queries, scale)
