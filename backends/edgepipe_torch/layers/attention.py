"""Attention per sequence, on KV in place if the sequence lies in one run.

T packed rows, n rows of one sequence, L its keys, Hq and Hkv heads, G = Hq / Hkv, D head dim, V numbers of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.backend.step_layout import Indices, RowLayout
from edgepipe_torch.layers.dot_attention import Attend, attend
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv import KVPool, KVStorage
from edgepipe_torch.layers.prepared import PreparedStep

SHORT_ROWS = 8  # a sequence's rows up to which kernels attend with each on its own
TILE_ROWS = 64  # query rows at once, which limits masked work to 64 columns (2.1 ms instead of 2.8 ms for 512 rows)


class StepAttention(Protocol):
    """Attention of one step, bound to its rows and the KV pool."""

    def run(self, heads: LayerHeads, queries: Tensor, out: Tensor) -> None:
        """Attend with rotated queries [T, Hq, D]; write out [T, Hq, V]. The pool has the step's keys and values."""
        ...


@dataclass(frozen=True, slots=True)
class SingleQuery:
    """Keys of one row of a step."""

    row: int  # row of queries and results
    first: int  # slot of the first key, unless they are scattered
    length: int
    slots: npt.NDArray[np.int64] | None  # [length] of scattered keys
    rests: npt.NDArray[np.int64] | None = None  # slots of the lower bits of the last keys; None: the KV has no such


class BoundQueries(StepAttention, Protocol):
    """Attention of rows with one query each; it leaves out's other rows as they are."""

    def fill(self, rows: Sequence[SingleQuery]) -> None:
        """Set the rows' keys; as many rows as at the start."""
        ...


class QueryKernels(Protocol):
    """A device's kernels for rows with one query each."""

    def attends(self, heads: LayerHeads) -> bool:
        """Return whether kernels compute the attention of a layer's single queries."""
        ...

    def single_queries(self, heads: LayerHeads, num_rows: int, longest: int, pool: KVPool) -> BoundQueries:
        """Return attention for rows with at most ``longest`` keys each, in layers of one kind.

        ``heads``: of any of them, which ``attends`` accepts.
        """
        ...


class CausalMasks:
    """Additive masks [n, L] whose last row sees the last key: slices of one band, which grows by doubling."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, copied: bool = False) -> None:
        """``copied``: masks are copies, because the device's kernels read aligned pieces."""
        self._dtype = dtype
        self._device = device
        self._copied = copied
        self._bands: dict[int | None, Tensor] = {}  # one mask per window

    def get(self, num_rows: int, num_keys: int, window: int | None) -> Tensor:
        """Return a mask where row i of ``num_rows <= 64`` sees its own key and the ``window - 1`` before it."""
        band = self._bands.get(window)
        if band is None or band.shape[1] < num_keys + TILE_ROWS:
            band = self._bands[window] = self._make(2 * num_keys, window)
        first = band.shape[1] - TILE_ROWS - (num_keys - num_rows)
        mask = band[:num_rows, first : first + num_keys]
        return mask.contiguous() if self._copied else mask

    def _make(self, num_columns: int, window: int | None) -> Tensor:
        """Make a band [64, columns + 64]: row i sees columns up to ``columns + i``."""
        ahead = torch.arange(num_columns + TILE_ROWS)[None, :] - (num_columns + torch.arange(TILE_ROWS)[:, None])
        hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
        return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).to(self._device, self._dtype)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Query rows ``[start, end)`` of the step against keys ``[low, high)`` of their sequence."""

    start: int
    end: int
    low: int
    high: int
    row: RowLayout
    slots: Indices | None  # [length] of every token, where the row's blocks are not one run


def _tiles(prepared: PreparedStep, window: int | None) -> Iterator[_Tile]:
    for row, slots in zip(prepared.layout.rows, prepared.scattered, strict=True):
        context = row.length - row.num_tokens
        for at in range(0, row.num_tokens, TILE_ROWS):
            count = min(TILE_ROWS, row.num_tokens - at)
            low = 0 if window is None else max(0, context + at - window + 1)
            yield _Tile(row.first_row + at, row.first_row + at + count, low, context + at + count, row, slots)


class _BoundTile:
    """A tile with its views of the KV of all layers of a kind."""

    def __init__(
        self, tile: _Tile, pool: KVStorage, masks: CausalMasks, heads: LayerHeads, dot_attention: Attend
    ) -> None:
        """``heads``: of any layer of the kind."""
        self._attend = dot_attention
        self.start, self.end = tile.start, tile.end
        self._keys: Sequence[Tensor] = ()
        self._values: Sequence[Tensor] = ()
        self._slots: Tensor | None = None
        self._pool = pool
        if tile.slots is None:
            first = tile.row.start_slot
            self._keys, self._values = pool.run(heads.kind, first + tile.low, first + tile.high)
        else:
            self._slots = torch.from_numpy(tile.slots[tile.low : tile.high]).to(pool.device)
        self._mask: Tensor | None = None
        if tile.end - tile.start > 1:
            self._mask = masks.get(tile.end - tile.start, tile.high - tile.low, heads.window)

    def run(self, heads: LayerHeads, queries: Tensor, out: Tensor) -> None:
        """Attend for this tile; queries [T, Hkv, G, D], out [T, Hkv, G, V]."""
        keys, values = self._kv(heads)
        if self._mask is None and heads.is_plain:  # the group's heads act as rows: [1, Hkv, G, D], [1, Hkv, L, D]
            found = F.scaled_dot_product_attention(
                queries[self.start : self.end], keys.unsqueeze(0), values.unsqueeze(0), scale=heads.scale
            )
            out[self.start : self.end].copy_(found)
            return
        own = queries[self.start : self.end].permute(1, 2, 0, 3)
        found = self._attend(own, keys, values, self._mask, heads, heads.grouped_sinks)
        out[self.start : self.end].copy_(found.permute(2, 0, 1, 3))

    def _kv(self, heads: LayerHeads) -> tuple[Tensor, Tensor]:
        if self._slots is None:
            return self._keys[heads.place], self._values[heads.place]
        return self._pool.gather(heads.layer, self._slots)


class SequenceAttention:
    """Attention of each sequence to its own KV: views of runs, or gathered from scattered blocks. Any device."""

    def __init__(
        self,
        prepared: PreparedStep,
        pool: KVStorage,
        masks: CausalMasks,
        kernels: QueryKernels | None = None,
        *,
        dot_attention: Attend = attend,
    ) -> None:
        """``kernels``: for single queries; without, torch computes all. ``dot_attention``: torch's way."""
        self._prepared = prepared
        self._pool = pool
        self._masks = masks
        self._kernels = kernels
        self._attend = dot_attention
        self._bound: dict[int, tuple[list[_BoundTile], BoundQueries | None]] = {}  # keys are kinds of layers

    def run(self, heads: LayerHeads, queries: Tensor, out: Tensor) -> None:
        """Attend for all rows. See StepAttention."""
        bound = self._bound.get(heads.kind)
        if bound is None:
            bound = self._bound[heads.kind] = self._bind(heads)
        tiles, singles = bound
        if singles is not None:
            singles.run(heads, queries, out)
        if tiles:
            queries = queries.view(queries.shape[0], heads.num_kv_heads, -1, heads.head_dim)
            out = out.view(out.shape[0], heads.num_kv_heads, -1, heads.out_dim)
            for tile in tiles:
                tile.run(heads, queries, out)

    def _bind(self, heads: LayerHeads) -> tuple[list[_BoundTile], BoundQueries | None]:
        kernels = self._kernels if self._kernels is not None and self._kernels.attends(heads) else None
        tiles = list(_tiles(self._prepared, heads.window))
        short = [tile for tile in tiles if kernels is not None and tile.end - tile.start <= SHORT_ROWS]
        others = [tile for tile in tiles if kernels is None or tile.end - tile.start > SHORT_ROWS]
        bound = [_BoundTile(tile, self._pool, self._masks, heads, self._attend) for tile in others]
        if not short or kernels is None:
            return bound, None
        rows = [query for tile in short for query in _single_queries(tile, heads.window)]
        queries = kernels.single_queries(heads, len(rows), max(row.length for row in rows), self._pool)
        queries.fill(rows)
        return bound, queries


def single_queries(prepared: PreparedStep, window: int | None) -> list[SingleQuery]:
    """Return the keys of every packed row of a step, as queries of their own."""
    return [query for tile in _tiles(prepared, window) for query in _single_queries(tile, window)]


def short_queries(prepared: PreparedStep, window: int | None) -> list[SingleQuery]:
    """Return the keys of every row of sequences with few rows, as queries of their own."""
    tiles = (tile for tile in _tiles(prepared, window) if tile.row.num_tokens <= SHORT_ROWS)
    return [query for tile in tiles for query in _single_queries(tile, window)]


def _single_queries(tile: _Tile, window: int | None) -> Iterator[SingleQuery]:
    for row in range(tile.start, tile.end):
        high = tile.high - (tile.end - 1 - row)
        low = 0 if window is None else max(0, high - window)
        rests = None
        if tile.row.rests is not None:
            own = tile.row.rests.of(max(low, tile.row.rests.start(high - 1)), high)
            rests = np.ascontiguousarray(own)
        if tile.slots is None:
            yield SingleQuery(row, tile.row.start_slot + low, high - low, None, rests)
        else:
            yield SingleQuery(row, 0, high - low, np.ascontiguousarray(tile.slots[low:high]), rests)
