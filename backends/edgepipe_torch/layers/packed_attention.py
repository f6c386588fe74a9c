"""Attention per sequence over KV as codes, also over those of the step's own tokens: chunks do not change results.

T packed rows, n rows of one sequence, L its visible keys, Hq and Hkv heads, G = Hq / Hkv, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from edgepipe.backend.step_layout import RowLayout
from edgepipe_torch.layers.attention import (
    SHORT_ROWS,
    TILE_ROWS,
    BoundQueries,
    CausalMasks,
    QueryKernels,
    SequenceAttention,
    StepAttention,
    short_queries,
)
from edgepipe_torch.layers.dot_attention import Attend, attend, capped, shares
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv_codes import Codes, KVCodes
from edgepipe_torch.layers.packed_kv import PackedKVStorage, Storage
from edgepipe_torch.layers.prepared import PreparedStep

_WIDENED_BYTES = 64 << 20  # limit of widened keys and values at once; heads take turns where all need more


class PackedSequenceAttention:
    """Attention of each sequence to its own codes. Any device."""

    def __init__(
        self,
        prepared: PreparedStep,
        pool: PackedKVStorage,
        masks: CausalMasks,
        dtype: torch.dtype,
        kernels: QueryKernels | None = None,
        *,
        dot_attention: Attend = attend,
    ) -> None:
        """``dtype``: compute dtype. ``kernels``: for sequences with few rows; without, torch computes all."""
        self._prepared = prepared
        self._kernels = kernels
        self._attend = dot_attention
        self._queries: dict[int, BoundQueries | None] = {}  # one per kind of layer
        self._pool = pool
        self._masks = masks
        self._dtype = dtype
        device = pool.device
        self._slots = [None if slots is None else torch.from_numpy(slots).to(device) for slots in prepared.scattered]

    def run(self, heads: LayerHeads, queries: Tensor, out: Tensor) -> None:
        """Attend for all rows. See StepAttention."""
        kernels = self._kernels if self._kernels is not None and self._kernels.attends(heads) else None
        if heads.kind not in self._queries:
            self._queries[heads.kind] = None if kernels is None else self._bind(heads, kernels)
        if (short := self._queries[heads.kind]) is not None:
            short.run(heads, queries, out)
        form = self._pool.form(heads)
        queries = queries.view(queries.shape[0], heads.num_kv_heads, -1, heads.head_dim)
        out = out.view(out.shape[0], heads.num_kv_heads, -1, heads.out_dim)
        for row, slots in zip(self._prepared.layout.rows, self._slots, strict=True):
            if kernels is not None and row.num_tokens <= SHORT_ROWS:
                continue
            rows = slice(row.first_row, row.first_row + row.num_tokens)
            low = 0 if heads.window is None else max(0, row.length - row.num_tokens - heads.window + 1)
            kv = self._read(heads.layer, row, slots, low)
            if row.num_tokens == 1 and self._dtype == torch.float32 and form.scales_vectors:
                self._attend_one(heads, kv, queries[rows.start], out[rows.start])
            else:
                self._attend_tiles(heads, form, kv, queries[rows], out[rows])

    def _bind(self, heads: LayerHeads, kernels: QueryKernels) -> BoundQueries | None:
        rows = short_queries(self._prepared, heads.window)
        if not rows:
            return None
        queries = kernels.single_queries(heads, len(rows), max(row.length for row in rows), self._pool)
        queries.fill(rows)
        return queries

    def _read(self, layer: int, row: RowLayout, slots: Tensor | None, low: int) -> Codes:
        """Return the codes of a sequence's tokens ``[low, length)``."""
        if slots is None:
            return self._pool.run(layer, row.start_slot + low, row.start_slot + row.length)
        return self._pool.gather(layer, slots[low : row.length])

    def _attend_one(self, heads: LayerHeads, kv: Codes, queries: Tensor, out: Tensor) -> None:
        """Attend with one row's queries [Hkv, G, D]; out [Hkv, G, V].

        Scales multiply scores and weights, one value per key, instead of keys and values.
        """
        scales = kv.scales.float().t().unsqueeze(1)  # [entries, 1, L]
        sinks = heads.grouped_sinks
        for some in self._turns(heads, len(kv.codes)):
            of_values = _value_entries(heads, some)
            keys = kv.codes[:, some].to(self._dtype).permute(1, 2, 0)  # [heads, D, L]
            scores = capped(torch.bmm(queries[some], keys).mul_(scales[some]).mul_(heads.scale), heads.softcap)
            weights = shares(scores, None if sinks is None else sinks[some]) * scales[of_values]
            values = kv.codes[:, of_values, : heads.out_dim].to(self._dtype)
            out[some] = torch.bmm(weights, values.transpose(0, 1))

    def _attend_tiles(self, heads: LayerHeads, form: KVCodes, kv: Codes, queries: Tensor, out: Tensor) -> None:
        """Attend with the queries of a sequence's last n tokens [n, Hkv, G, D]; out [n, Hkv, G, V]."""
        num_rows, num_keys, sinks = queries.shape[0], len(kv.codes), heads.grouped_sinks
        for some in self._turns(heads, num_keys):
            keys = self._widen(form, kv, some)
            values = (
                keys[..., : heads.value_width]
                if heads.value_width
                else self._widen(form, kv, _value_entries(heads, some))
            )
            for at in range(0, num_rows, TILE_ROWS):
                tile = slice(at, min(at + TILE_ROWS, num_rows))
                high = num_keys - num_rows + tile.stop
                low = 0 if heads.window is None else max(0, num_keys - num_rows + at - heads.window + 1)
                count = tile.stop - at
                mask = None if count == 1 else self._masks.get(count, high - low, heads.window)
                own = form.turned(queries[tile, some]).permute(1, 2, 0, 3)
                seen = (keys[:, low:high], values[:, low:high], mask)
                found = self._attend(own, *seen, heads, None if sinks is None else sinks[some])
                out[tile, some] = form.turned(found.permute(2, 0, 1, 3))

    def _widen(self, form: KVCodes, kv: Codes, entries: slice) -> Tensor:
        """Return vectors [heads, L, D] of some entries in the compute dtype."""
        return form.widen(Codes(kv.codes[:, entries], kv.scales[:, entries]), self._dtype).transpose(0, 1)

    def _turns(self, heads: LayerHeads, num_keys: int) -> Iterator[slice]:
        """Split the kv heads so that keys and values of each piece keep to ``_WIDENED_BYTES``, or are one head's."""
        head_bytes = 2 * num_keys * heads.head_dim * self._dtype.itemsize
        count = max(1, min(heads.num_kv_heads, _WIDENED_BYTES // head_bytes))
        for first in range(0, heads.num_kv_heads, count):
            yield slice(first, min(first + count, heads.num_kv_heads))


def by_sequence(prepared: PreparedStep, pool: Storage, masks: CausalMasks, dtype: torch.dtype) -> StepAttention:
    """Return attention of each sequence by itself, by torch. ``dtype``: compute dtype."""
    if isinstance(pool, PackedKVStorage):
        return PackedSequenceAttention(prepared, pool, masks, dtype)
    return SequenceAttention(prepared, pool, masks)


def _value_entries(heads: LayerHeads, kv_heads: slice) -> slice:
    """Return the entries of a slot that hold the values of some kv heads."""
    first = 0 if heads.value_width else heads.num_kv_heads
    return slice(first + kv_heads.start, first + kv_heads.stop)
