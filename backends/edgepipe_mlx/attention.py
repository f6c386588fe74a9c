"""Attention over packed rows: few new tokens of all sequences over pages, others sequence by sequence.

T packed rows, n rows of one sequence, L visible keys, Hq and Hkv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx
import numpy as np

from edgepipe.backend.step_layout import RowLayout, StepLayout
from edgepipe.spec.kv_forms import REST_TOKENS
from edgepipe.spec.layer_spec import Attention, Temperature
from edgepipe.spec.rope import temperatures
from edgepipe_mlx.kv import KVPool, NewestPart, RestArrays, SpanPool
from edgepipe_mlx.pages.kernels import PageKernels
from edgepipe_mlx.pages.rows import MOST_TOKENS, PageArrays, PageForm, page_arrays
from edgepipe_mlx.tiles import tile_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """How a layer attends over pages."""

    kernels: PageKernels
    form: PageForm
    scale: float  # factor of logits
    cap: float  # see ``layer_spec.Attention.softcap``


class StepArrays:
    """Device arrays shared by all layers of a step. ``submit`` makes them; they live until the step's end."""

    def __init__(self, plan: StepLayout, *, max_scores: int | None) -> None:
        """``max_scores``: maximum of queries times keys of one head in one product; None: any number."""
        self.rows = plan.rows if max_scores is None else tile_rows(plan.rows, max_scores)
        self.positions = mx.array(plan.positions)
        self._plan = plan
        self.slots = mx.array(plan.slots.astype(np.uint32))
        self.rests = _rests(plan)
        self.whole_rows = plan.rows
        self._blocks: dict[tuple[int, int], mx.array] = {}
        self._masks: dict[tuple[int, int], mx.array] = {}
        self._temperatures: dict[Temperature, mx.array] = {}
        self._pages: dict[LayerPages, PageArrays] = {}

    def temperatures(self, temperature: Temperature) -> mx.array:
        """Return the factors [T, 1, 1, 1] of the rows' queries, float32."""
        if temperature not in self._temperatures:
            factors = temperatures(temperature, self._plan.positions).astype(np.float32)
            self._temperatures[temperature] = mx.array(factors)[:, None, None, None]
        return self._temperatures[temperature]

    def pages(self, layer: LayerPages) -> PageArrays:
        """Return the arrays of the rows that attend over pages in layers such as this one."""
        if layer not in self._pages:
            rows = [row for row in self.rows if row.num_tokens <= MOST_TOKENS]
            self._pages[layer] = page_arrays(rows, layer.form, scale=layer.scale, cap=layer.cap)
        return self._pages[layer]

    def blocks(self, row: RowLayout, first_block: int) -> mx.array | None:
        """Return a row's block ids from ``first_block`` on; None where it lies in one run."""
        if row.contiguous:
            return None
        key = (row.first_row, first_block)
        if key not in self._blocks:
            self._blocks[key] = mx.array(row.blocks[first_block:])
        return self._blocks[key]

    def span_mask(self, row: RowLayout, window: int | None, first: int, begin: int) -> mx.array:
        """Return [n, L + length - begin], True where a row sees a key with 4 bits, and one of the newest with 8."""
        key = (row.first_row, -(window or 0) - 1)
        if key not in self._masks:
            assert row.rests is not None
            queries = mx.arange(row.position, row.length)[:, None]
            spans = queries // row.rests.span * row.rests.span
            seen = queries - (window or row.length)
            rough, whole = mx.arange(first, row.length)[None], mx.arange(begin, row.length)[None]
            parts = [(rough < spans) & (rough > seen), (whole >= spans) & (whole <= queries) & (whole > seen)]
            self._masks[key] = mx.concatenate(parts, axis=1)
        return self._masks[key]

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

    def __init__(
        self, step: StepArrays, pool: KVPool, spec: Attention, *, block_size: int, pages: LayerPages | None = None
    ) -> None:
        """``pages``: kernels that attend over pages; None: every sequence attends by itself."""
        self._step = step
        self._pool = pool
        self._spec = spec
        self._block_size = block_size
        self._pages = None if pages is not None and self._is_alone(pages.form) else pages

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
        opened = self._opened(self._pool) if isinstance(self._pool, SpanPool) else {}
        self._pool.write(self._step.slots, keys, values, self._step.rests)
        attended = self._over_pages(queries, sinks)
        parts: list[mx.array] = []
        for over_pages, rows in groupby(self._step.rows, key=self._is_over_pages):
            if over_pages:
                count = sum(row.num_tokens for row in rows)
                parts.append(attended[:count])
                attended = attended[count:]
            else:
                parts += [self._attend_row(row, queries, sinks, opened) for row in rows]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _is_alone(self, form: PageForm) -> bool:
        """Return whether the step has one sequence that MLX's own kernel reads where it lies."""
        rows = self._step.rows
        return len(rows) == 1 and rows[0].contiguous and not form.kv and not form.capped

    def _is_over_pages(self, row: RowLayout) -> bool:
        return self._pages is not None and row.num_tokens <= MOST_TOKENS

    def _over_pages(self, queries: mx.array, sinks: mx.array | None) -> mx.array:
        """Return [N, Hq, 1, V] of all rows that attend over pages, one behind the other."""
        if self._pages is None or not any(self._is_over_pages(row) for row in self._step.rows):
            return queries[:0]
        arrays = self._step.pages(self._pages)
        turned, form = self._pool.turned(queries), self._pages.form
        return self._pool.turned(self._pages.kernels.attend(turned, self._pool.paged, arrays, form, sinks))

    def _opened(self, pool: SpanPool) -> dict[int, Sequence[mx.array]]:
        """Return lower bits that a long row's codes will overwrite, by its first row; evaluated before that."""
        found = {
            row.first_row: pool.rests_at(_begun_slots(row))
            for row in self._step.whole_rows
            if row.rests is not None
            and row.position > row.rests.first
            and row.num_tokens > REST_TOKENS - row.rests.span
        }
        mx.eval([*found.values()])
        return found

    def _attend_row(
        self, row: RowLayout, queries: mx.array, sinks: mx.array | None, opened: Mapping[int, Sequence[mx.array]]
    ) -> mx.array:
        if isinstance(self._pool, SpanPool):
            return self._attend_spans(self._pool, row, queries, sinks, opened)
        first = self._first_visible(row)
        keys, values = self._pool.read(row, first, self._step.blocks(row, first // self._block_size))
        if self._spec.softcap and row.num_tokens > 1:
            mask = self._step.mask(row, self._spec.window, first)
        else:
            mask = self._mask(row, first)
        return self._result(row, queries, keys, values, mask, sinks)

    def _attend_spans(
        self,
        pool: SpanPool,
        row: RowLayout,
        queries: mx.array,
        sinks: mx.array | None,
        opened: Mapping[int, Sequence[mx.array]],
    ) -> mx.array:
        """Attend to the tokens before a row's span with 4 bits, and to those of the span with 8."""
        assert row.rests is not None
        first = self._first_visible(row)
        blocks = self._step.blocks(row, first // self._block_size)
        rests, begin = pool.rests_of(row.first_row, row.first_row + row.num_tokens), row.position
        start = max(first, row.rests.start(row.position))
        if start < begin:
            earlier = self._earlier(pool, row, start, opened)
            rests, begin = [mx.concatenate([*pair], axis=1) for pair in zip(earlier, rests, strict=True)], start
        mask = self._step.span_mask(row, self._spec.window, first, begin) if row.num_tokens > 1 else None
        keys, values = pool.read_newest(row, first, blocks, NewestPart(begin, rests, twice=mask is not None))
        return self._result(row, queries, keys, values, mask, sinks)

    def _earlier(
        self, pool: SpanPool, row: RowLayout, start: int, opened: Mapping[int, Sequence[mx.array]]
    ) -> Sequence[mx.array]:
        """Return the lower bits of the tokens ``[start, position)`` of a row, of this step or of earlier ones."""
        assert row.rests is not None
        whole = next(each for each in self._step.whole_rows if each.first_row <= row.first_row < each.end_row)
        own = max(start, whole.position)
        parts: list[Sequence[mx.array]] = []
        if start < whole.position:
            found = opened.get(whole.first_row)
            skipped = start - row.rests.first
            parts.append(
                pool.rests_at(mx.array(row.rests.of(start, whole.position).astype(np.uint32)))
                if found is None
                else [each[:, skipped:] for each in found]
            )
        if own < row.position:
            place = whole.first_row + own - whole.position
            parts.append(pool.rests_of(place, place + row.position - own))
        return [mx.concatenate([*each], axis=1) for each in zip(*parts, strict=True)]

    def _result(
        self,
        row: RowLayout,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend with a row's queries of [T, Hq, 1, D] to keys and values [1, Hkv, L, D]. Returns [n, Hq, 1, V]."""
        own = self._pool.turned(queries[row.first_row : row.first_row + row.num_tokens])
        own = own.transpose(2, 1, 0, 3)  # [1, Hq, n, D]
        scale, cap = self._spec.logit_scale, self._spec.softcap
        if cap:
            assert not isinstance(mask, str)
            out = _attend_capped(own, keys, values, scale=scale, cap=cap, mask=mask, sinks=sinks)
        else:
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


def _rests(plan: StepLayout) -> RestArrays | None:
    """Return where the lower bits of a step's tokens go; None if the form of KV has no spans.

    Those of a row's last tokens only: others would lie in slots of this step's codes.
    """
    if not plan.rows or plan.rows[0].rests is None:
        return None
    counts = [min(row.num_tokens, REST_TOKENS) for row in plan.rows]
    ends = [row.first_row + row.num_tokens for row in plan.rows]
    tokens = [np.arange(end - count, end, dtype=np.uint32) for count, end in zip(counts, ends, strict=True)]
    slots = [row.rests.slots[-count:] for row, count in zip(plan.rows, counts, strict=True) if row.rests is not None]
    return RestArrays(mx.array(np.concatenate(tokens)), mx.array(np.concatenate(slots).astype(np.uint32)))


def _begun_slots(row: RowLayout) -> mx.array:
    """Return the slots of the lower bits of a row's span, up to its first token."""
    assert row.rests is not None
    return mx.array(row.rests.of(row.rests.first, row.position).astype(np.uint32))


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
