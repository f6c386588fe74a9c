"""Attention over packed rows, sequence by sequence.

T packed rows, n rows of one sequence, L visible keys, Hq and Hkv heads, D head dim.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from edgepipe.backend.step_layout import RowLayout, StepLayout
from edgepipe.spec.layer_spec import Attention, Temperature
from edgepipe.spec.rope import temperatures
from edgepipe_mlx.kv import KVPool
from edgepipe_mlx.tiles import tile_rows


class StepArrays:
    """Device arrays shared by all layers of a step. ``submit`` makes them; they live until the step's end."""

    def __init__(self, plan: StepLayout, *, max_scores: int | None) -> None:
        """``max_scores``: maximum of queries times keys of one head in one product; None: any number."""
        self.rows = plan.rows if max_scores is None else tile_rows(plan.rows, max_scores)
        self.positions = mx.array(plan.positions)
        self._plan = plan
        self.slots = mx.array(plan.slots.astype(np.uint32))
        self._blocks: dict[tuple[int, int], mx.array] = {}
        self._masks: dict[tuple[int, int], mx.array] = {}
        self._temperatures: dict[Temperature, mx.array] = {}

    def temperatures(self, temperature: Temperature) -> mx.array:
        """Return the factors [T, 1, 1, 1] of the rows' queries, float32."""
        if temperature not in self._temperatures:
            factors = temperatures(temperature, self._plan.positions).astype(np.float32)
            self._temperatures[temperature] = mx.array(factors)[:, None, None, None]
        return self._temperatures[temperature]

    def blocks(self, row: RowLayout, first_block: int) -> mx.array | None:
        """Return a row's block ids from ``first_block`` on; None where it lies in one run."""
        if row.contiguous:
            return None
        key = (row.first_row, first_block)
        if key not in self._blocks:
            self._blocks[key] = mx.array(row.blocks[first_block:])
        return self._blocks[key]

    def mask(self, row: RowLayout, window: int | None, first: int) -> mx.array:
        """Return [n, L], True where a row sees a key: not after itself, and among the last ``window`` tokens."""
        window = window or row.length
        key = (row.first_row, window)
        if key not in self._masks:
            queries = mx.arange(row.length - row.num_tokens, row.length)[:, None]
            keys = mx.arange(first, row.length)[None]
            self._masks[key] = (keys <= queries) & (keys > queries - window)
        return self._masks[key]


class LayerStep:
    """One layer's attention in one step."""

    def __init__(self, step: StepArrays, pool: KVPool, spec: Attention, *, block_size: int) -> None:
        self._step = step
        self._pool = pool
        self._spec = spec
        self._block_size = block_size

    @property
    def positions(self) -> mx.array:
        """Positions of the rows [T] int32."""
        return self._step.positions

    def tempered(self, queries: mx.array, temperature: Temperature) -> mx.array:
        """Return queries [T, Hq, 1, D] times the factors of their positions, in the same type."""
        return queries * self._step.temperatures(temperature).astype(queries.dtype)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, sinks: mx.array | None) -> mx.array:
        """Write keys and values [T, Hkv, 1, D] to the pool and attend with queries [T, Hq, 1, D].

        Values that are a part of the keys are narrower. ``sinks`` [Hq]: see ``layer_spec.Attention``. Returns [T, Hq,
        1, D], as wide as values.
        """
        self._pool.write(self._step.slots, keys, values)
        parts = [self._attend_row(row, queries, sinks) for row in self._step.rows]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _attend_row(self, row: RowLayout, queries: mx.array, sinks: mx.array | None) -> mx.array:
        first = self._first_visible(row)
        keys, values = self._pool.read(row, first, self._step.blocks(row, first // self._block_size))
        own = self._pool.turned(queries[row.first_row : row.first_row + row.num_tokens])
        own = own.transpose(2, 1, 0, 3)  # [1, Hq, n, D]
        scale = self._spec.logit_scale
        if self._spec.softcap:
            mask = None if row.num_tokens == 1 else self._step.mask(row, self._spec.window, first)
            out = _attend_capped(own, keys, values, scale=scale, cap=self._spec.softcap, mask=mask, sinks=sinks)
        else:
            mask = self._mask(row, first)
            out = mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask=mask, sinks=sinks)
        return self._pool.turned(out.transpose(2, 1, 0, 3))

    def _first_visible(self, row: RowLayout) -> int:
        """Return the first token visible to any of the sequence's rows in this step."""
        if self._spec.window is None:
            return 0
        return max(0, row.length - row.num_tokens - self._spec.window + 1)

    def _mask(self, row: RowLayout, first: int) -> mx.array | str | None:
        if row.num_tokens == 1:
            return None  # a single row sees all keys read
        if self._spec.window is None or row.length <= self._spec.window:
            return "causal"  # aligned at the end: the last row sees all keys
        return self._step.mask(row, self._spec.window, first)


def _attend_capped(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    cap: float,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend with logits ``cap * tanh(logit / cap)``, which MLX's own attention lacks; sinks are not capped.

    queries [1, Hq, n, D], keys and values [1, Hkv, L, D], mask [n, L]. Returns [1, Hq, n, D].
    """
    heads, groups = queries.shape[1], keys.shape[1]
    grouped = queries.reshape(1, groups, heads // groups, *queries.shape[2:])
    logits = (grouped @ keys[:, :, None].swapaxes(-1, -2)).astype(mx.float32) * scale
    logits = cap * mx.tanh(logits / cap)
    if mask is not None:
        logits = mx.where(mask, logits, -mx.inf)
    if sinks is not None:
        column = sinks.astype(mx.float32).reshape(1, groups, -1, 1, 1)
        logits = mx.concatenate([logits, mx.broadcast_to(column, (*logits.shape[:-1], 1))], axis=-1)
    shares = mx.softmax(logits, axis=-1)[..., : keys.shape[2]].astype(values.dtype)
    return (shares @ values[:, :, None]).reshape(*queries.shape[:3], -1)
