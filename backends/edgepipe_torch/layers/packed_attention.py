"""Attention per sequence over KV as codes, also over those of the step's own tokens: chunks do not change results.

With 4 bits, a token reads those of its own span (``kv_forms``) with 8 bits. Their lower bits are in later slots of the
pool, which a long row overwrites: ``open`` reads them before that.

T packed rows, n rows of one sequence, L its visible keys, Hq and Hkv heads, G = Hq / Hkv, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.backend.step_layout import RowLayout, StepLayout
from edgepipe.spec.kv_forms import REST_TOKENS
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
from edgepipe_torch.layers.kv_codes import Codes, FourBits, KVCodes, WholeCodes
from edgepipe_torch.layers.packed_kv import PackedKVStorage, Storage
from edgepipe_torch.layers.prepared import PreparedStep

_WIDENED_BYTES = 64 << 20  # limit of widened keys and values at once; heads take turns where all need more


class StepRests:
    """Where the lower bits of a step's tokens go, in the layers of one memory class."""

    def __init__(self, pool: PackedKVStorage, tokens: Tensor | None, slots: Tensor) -> None:
        """
        tokens  [K] of the step, int64, whose lower bits later steps may read; None: all of a step in which nothing else
                reads them
        slots   [K] of the pool, int64
        """
        self.pool = pool
        self.tokens = tokens
        self.slots = slots

    def write(self, heads: LayerHeads, slots: Tensor, kv: Tensor) -> None:
        """Write kv [T, entries, D] to slots [T] of a layer, and the lower bits."""
        if self.tokens is None:
            self.pool.write_whole(heads, slots, kv, self.slots)
        else:
            self.pool.write(heads.layer, slots, kv)
            self.keep(heads)

    def keep(self, heads: LayerHeads) -> None:
        """Write the lower bits of the tokens that were written last to a layer."""
        assert self.tokens is not None  # else ``write`` does
        self.pool.keep(heads, self.tokens, self.slots)


class SpanAttention:
    """Attention over KV that may have spans whose tokens are read with more bits."""

    rests: StepRests | None = None  # only for a form with spans

    def open(self, heads: LayerHeads) -> None:
        """Read the lower bits of earlier tokens, before a layer's codes are written."""
        raise NotImplementedError


def rest_places(layout: StepLayout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the tokens [K] whose lower bits later steps may read, and the slots of these. Rows have ``rests``.

    Lower bits of earlier tokens would lie in slots of this step's codes.
    """
    tokens: list[npt.NDArray[np.int64]] = []
    slots: list[npt.NDArray[np.int64]] = []
    for row in layout.rows:
        assert row.rests is not None
        count, end = min(row.num_tokens, REST_TOKENS), row.first_row + row.num_tokens
        tokens.append(np.arange(end - count, end))
        slots.append(row.rests.slots[-count:])
    return np.concatenate(tokens), np.concatenate(slots)


class PackedSequenceAttention(SpanAttention):
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
        self._begun: dict[int, Tensor] = {}  # slots of the lower bits in a span that goes on, by first row
        self._opened: dict[int, Tensor] = {}  # these lower bits in the layer at hand, by first row
        rows = prepared.layout.rows
        if rows and all(row.rests is not None for row in rows):
            places = (torch.from_numpy(each).to(device) for each in rest_places(prepared.layout))
            self.rests = StepRests(pool, *places)
        for row in rows:
            if row.rests is not None and row.position > row.rests.first:
                begun = row.rests.of(row.rests.first, row.position)
                self._begun[row.first_row] = torch.from_numpy(begun).to(device)

    def open(self, heads: LayerHeads) -> None:
        codes = self._pool.arrays(heads.layer).codes
        kernels = self._kernels_for(heads)
        self._opened = {
            row.first_row: codes.index_select(0, self._begun[row.first_row])
            for row in self._prepared.layout.rows
            if row.first_row in self._begun and not (kernels is not None and row.num_tokens <= SHORT_ROWS)
        }

    def run(self, heads: LayerHeads, queries: Tensor, out: Tensor) -> None:
        """Attend for all rows. See StepAttention."""
        kernels = self._kernels_for(heads)
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
            if isinstance(form, FourBits):
                self._attend_spans(heads, form, row, kv, queries[rows], out[rows])
            elif row.num_tokens == 1 and self._dtype == torch.float32:
                self._attend_one(heads, kv, queries[rows.start], out[rows.start])
            else:
                self._attend_tiles(heads, form, kv, queries[rows], out[rows])

    def _kernels_for(self, heads: LayerHeads) -> QueryKernels | None:
        return self._kernels if self._kernels is not None and self._kernels.attends(heads) else None

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
        num_rows = queries.shape[0]
        for some in self._turns(heads, len(kv.codes)):
            keys = self._widen(form, kv, some)
            values = (
                keys[..., : heads.value_width]
                if heads.value_width
                else self._widen(form, kv, _value_entries(heads, some))
            )
            for at in range(0, num_rows, TILE_ROWS):
                tile = slice(at, min(at + TILE_ROWS, num_rows))
                self._attend_tile(heads, form, some, tile, keys, values, queries, out)

    def _attend_tile(
        self,
        heads: LayerHeads,
        form: KVCodes,
        some: slice,
        tile: slice,
        keys: Tensor,
        values: Tensor,
        queries: Tensor,
        out: Tensor,
    ) -> None:
        """Attend with some rows of queries, in some kv heads; the other arguments: see ``_attend_tiles``.

        keys [heads, L, D] and values [heads, L, V] end with those of the queries' last row.
        """
        num_rows, num_keys, sinks = queries.shape[0], keys.shape[1], heads.grouped_sinks
        high = num_keys - num_rows + tile.stop
        low = 0 if heads.window is None else max(0, num_keys - num_rows + tile.start - heads.window + 1)
        count = tile.stop - tile.start
        mask = None if count == 1 else self._masks.get(count, high - low, heads.window)
        own = form.turned(queries[tile, some]).permute(1, 2, 0, 3)
        seen = (keys[:, low:high], values[:, low:high], mask)
        found = self._attend(own, *seen, heads, None if sinks is None else sinks[some])
        out[tile, some] = form.turned(found.permute(2, 0, 1, 3))

    def _attend_spans(
        self, heads: LayerHeads, form: FourBits, row: RowLayout, kv: Codes, queries: Tensor, out: Tensor
    ) -> None:
        """Attend as ``_attend_tiles`` does, span by span: a span's keys have 8 bits only for its own queries."""
        assert row.rests is not None
        span, num_keys = row.rests.span, len(kv.codes)
        first = row.length - num_keys  # position of the first key
        begin = max(first, row.rests.first)
        rests = self._pool.rests(heads, self._prepared.layout.num_tokens)[
            row.first_row : row.first_row + row.num_tokens
        ]
        if (opened := self._opened.get(row.first_row)) is not None:
            rests = torch.cat([opened[begin - row.rests.first :], rests])
        newest = slice(begin - first, num_keys)
        edges = [row.position, *range(row.rests.start(row.position) + span, row.length, span), row.length]
        for some in self._turns(heads, num_keys):
            entries = [some] if heads.value_width else [some, _value_entries(heads, some)]
            wide = [self._widen(form, kv, each) for each in entries]
            coarse = [each[:, newest].clone() for each in wide]
            for each, vectors in zip(entries, wide, strict=True):
                vectors[:, newest] = self._widen_whole(form, kv, rests, newest, each)
            keys, values = wide[0], wide[-1][..., : heads.out_dim]
            for start, end in pairwise(edges):
                tile = slice(start - row.position, end - row.position)
                self._attend_tile(heads, form, some, tile, keys, values, queries, out)
                before, behind = max(0, row.rests.start(start) - begin), end - begin
                for vectors, rounded in zip(wide, coarse, strict=True):
                    vectors[:, newest][:, before:behind] = rounded[:, before:behind]

    def _widen(self, form: KVCodes, kv: Codes, entries: slice) -> Tensor:
        """Return vectors [heads, L, D] of some entries in the compute dtype."""
        return form.widen(Codes(kv.codes[:, entries], kv.scales[:, entries]), self._dtype).transpose(0, 1)

    def _widen_whole(self, form: FourBits, kv: Codes, rests: Tensor, newest: slice, entries: slice) -> Tensor:
        """Return vectors [heads, n, D] of some entries of the newest tokens, whose lower bits are ``rests``."""
        codes = Codes(kv.codes[newest, entries], kv.scales[newest, entries])
        return form.widen_whole(WholeCodes(codes, rests[:, entries]), self._dtype).transpose(0, 1)

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
