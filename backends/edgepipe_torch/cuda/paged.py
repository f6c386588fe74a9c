"""Attention over pages, all sequences in one call per layer (``paging.py`` has the kernels and what they require).

Elsewhere ``SequenceAttention`` computes the same, slower.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.backend.step_layout import Indices, RowLayout, StepLayout
from edgepipe_torch.cuda.paging import AlsoReturn, PagedDecode, Paging
from edgepipe_torch.layers.attention import SHORT_ROWS, CausalMasks, StepAttention
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.dot_attention import beside_sinks
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.packed_attention import SpanAttention, StepRests, by_sequence, rest_places
from edgepipe_torch.layers.packed_kv import PackedKVStorage, Storage
from edgepipe_torch.layers.prepared import PreparedStep
from edgepipe_torch.layers.transfer import Transfer

logger = logging.getLogger(__name__)


class PageKernels:
    """What attends over pages in each layer of a slice."""

    def __init__(self, paging: Paging, heads: Sequence[LayerHeads]) -> None:
        """Load what the layers need, which may take seconds; log what is missing."""
        self.attend = paging.attend
        self.fits = paging.fits
        self._decode: dict[int, PagedDecode] = {}  # one per kind of layer
        self._without: set[int] = set()
        for each in heads:
            if not paging.fits(each) and each.kind not in self._decode and each.kind not in self._without:
                try:
                    self._decode[each.kind] = paging.decode(each)
                except KernelsUnavailable as exc:
                    self._without.add(each.kind)
                    logger.warning("layers with heads of %d attend without pages and graphs: %s", each.head_dim, exc)

    @property
    def whole(self) -> bool:
        """Whether every layer attends over pages, so that graphs hold a decode step."""
        return not self._without

    @property
    def plain(self) -> bool:
        """Whether ``attend`` serves every layer."""
        return self.whole and not self._decode

    def decode(self, heads: LayerHeads) -> PagedDecode | None:
        """Return the kernel for single rows of a layer that ``attend`` excludes, or None if it could not be loaded."""
        return self._decode.get(heads.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSequences:
    """Rows and keys of N sequences, int32 on the device."""

    row_starts: Tensor  # [N + 1]
    key_starts: Tensor  # [N + 1] as if the keys were packed; required although pages are read
    lengths: Tensor  # [N] number of keys
    tables: Tensor  # [N, pages]


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleRows:
    """R rows and the keys that each sees, int32 on the device."""

    rows: Tensor  # [R] places among the packed rows
    lengths: Tensor  # [R] keys up to the row's own
    tables: Tensor  # [R, pages]

    @classmethod
    def of(cls, layout: StepLayout, transfer: Transfer) -> SingleRows | None:
        """Return the rows of sequences with few rows in a step, or None if it has none."""
        short = [row for row in layout.rows if row.num_tokens <= SHORT_ROWS]
        if not short:
            return None
        counts = [row.num_tokens for row in short]
        rows = [np.arange(row.first_row, row.first_row + row.num_tokens, dtype=np.int32) for row in short]
        lengths = [np.arange(row.length - row.num_tokens, row.length, dtype=np.int32) + 1 for row in short]
        return cls(
            rows=transfer.upload(np.concatenate(rows)),
            lengths=transfer.upload(np.concatenate(lengths)),
            tables=transfer.upload(np.repeat(_tables(short), counts, axis=0)),
        )


def table_of(row: RowLayout) -> Indices:
    """Return the blocks of a row that attention reads, those of its newest tokens' lower bits included."""
    return row.blocks if row.rests is None else row.rests.blocks


def _tables(rows: Sequence[RowLayout]) -> npt.NDArray[np.int32]:
    """Return the rows' block tables [N, P], as wide as the longest."""
    found = [table_of(row) for row in rows]
    tables = np.zeros((len(rows), max(map(len, found))), np.int32)
    for table, blocks in zip(tables, found, strict=True):
        table[: len(blocks)] = blocks
    return tables


class PagedAttention:
    """Attention of one step's sequences over their pages, in one kernel per layer."""

    def __init__(
        self,
        kernels: PageKernels,
        pool: Storage,
        sequences: PagedSequences,
        singles: SingleRows | None,
        *,
        max_q: int,
        max_k: int,
    ) -> None:
        """``max_q`` and ``max_k``: upper bounds of any sequence's rows and keys.

        singles  what own kernels compute in layers that ``VarlenAttention`` excludes
        """
        self._kernels = kernels
        self._pool = pool
        self._singles = singles
        self._arguments: dict[str, Any] = {
            "cu_seq_q": sequences.row_starts,
            "cu_seq_k": sequences.key_starts,
            "max_q": max_q,
            "max_k": max_k,
            "seqused_k": sequences.lengths,
            "block_table": sequences.tables,
        }

    @classmethod
    def of(cls, layout: StepLayout, pool: Storage, *, kernels: PageKernels, transfer: Transfer) -> PagedAttention:
        """Attend for the rows of a step, with tables as wide as its longest."""
        counts = [row.num_tokens for row in layout.rows]
        lengths = [row.length for row in layout.rows]
        sequences = PagedSequences(
            row_starts=transfer.upload(np.cumsum([0, *counts], dtype=np.int32)),
            key_starts=transfer.upload(np.cumsum([0, *lengths], dtype=np.int32)),
            lengths=transfer.upload(np.asarray(lengths, np.int32)),
            tables=transfer.upload(_tables(layout.rows)),
        )
        singles = None if kernels.plain else SingleRows.of(layout, transfer)
        return cls(kernels, pool, sequences, singles, max_q=max(counts), max_k=max(lengths))

    def run(self, heads: LayerHeads, queries: Tensor, out: Tensor) -> None:
        """Attend for all rows, or for single rows in layers of own kernels. See StepAttention."""
        keys, values = self._pool.pages(heads.layer)
        if self._kernels.fits(heads):
            assert isinstance(keys, Tensor)  # torch's kernel reads no codes
            assert isinstance(values, Tensor)
            self._run_all(heads, queries, keys, values, out)
        elif (rows := self._singles) is not None:
            decode = self._kernels.decode(heads)
            assert decode is not None
            decode(heads, queries, keys, values, out, rows=rows.rows, lengths=rows.lengths, tables=rows.tables)

    def _run_all(self, heads: LayerHeads, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        seen, splits = (-1 if heads.window is None else heads.window - 1, 0), 1
        shared = heads.num_heads > heads.num_kv_heads
        if heads.window is None and self._arguments["max_q"] == 1 and shared and heads.sinks is None:
            # A single query sees all keys. With this window, the kernel lets the heads of a group share their reads,
            # and may split them. With any other split, torch 2.13 gave NaN for sequences shorter than max_k.
            seen, splits = (-1, -1), None
        attend = self._kernels.attend
        assert attend is not None  # it fits
        found = attend(
            queries,
            keys,
            values,
            return_aux=None if heads.sinks is None else AlsoReturn(lse=True),
            scale=heads.scale,
            window_size=seen,
            num_splits=splits,
            enable_gqa=True,
            **self._arguments,
        )
        if heads.sinks is None:
            assert isinstance(found, Tensor)
            out.copy_(found)
        else:
            attended, total = found  # [T, Hq, D], [Hq, T]
            out.copy_(attended * beside_sinks(total, heads.sinks.unsqueeze(1)).t().unsqueeze(-1))


class MixedAttention(SpanAttention):
    """Attention over pages where kernels compute it, and of each sequence elsewhere.

    Own kernels compute single rows. So their layers attend to prompts sequence by sequence.
    """

    def __init__(
        self,
        prepared: PreparedStep,
        pool: Storage,
        kernels: PageKernels,
        *,
        masks: CausalMasks,
        transfer: Transfer,
        dtype: torch.dtype,
    ) -> None:
        """``dtype``: compute dtype."""
        self._kernels = kernels
        self._paged = PagedAttention.of(prepared.layout, pool, kernels=kernels, transfer=transfer)
        self._others = None if kernels.whole else by_sequence(prepared, pool, masks, dtype)
        self._long = by_sequence(_long_rows(prepared), pool, masks, dtype)
        if isinstance(pool, PackedKVStorage) and pool.has_rests:
            self.rests = StepRests(pool, *map(transfer.upload, rest_places(prepared.layout)))

    def open(self, heads: LayerHeads) -> None:
        alone = self._long if self._others is None or self._kernels.decode(heads) is not None else self._others
        if isinstance(alone, SpanAttention):
            alone.open(heads)

    def run(self, heads: LayerHeads, queries: Tensor, out: Tensor) -> None:
        """See StepAttention."""
        if self._kernels.fits(heads):
            self._paged.run(heads, queries, out)
        elif self._kernels.decode(heads) is None:
            assert self._others is not None
            self._others.run(heads, queries, out)
        else:
            self._paged.run(heads, queries, out)
            self._long.run(heads, queries, out)


def _long_rows(prepared: PreparedStep) -> PreparedStep:
    """Return the step without the sequences that ``SingleRows`` has."""
    pairs = zip(prepared.layout.rows, prepared.scattered, strict=True)
    kept = [(row, slots) for row, slots in pairs if row.num_tokens > SHORT_ROWS]
    layout = replace(prepared.layout, rows=tuple(row for row, _ in kept))
    return replace(prepared, layout=layout, scattered=tuple(slots for _, slots in kept))


def step_attention(
    prepared: PreparedStep,
    pool: Storage,
    kernels: PageKernels,
    *,
    masks: CausalMasks,
    transfer: Transfer,
    dtype: torch.dtype,
) -> StepAttention:
    """Return a step's attention over pages. ``dtype``: compute dtype."""
    if kernels.plain:
        return PagedAttention.of(prepared.layout, pool, kernels=kernels, transfer=transfer)
    return MixedAttention(prepared, pool, kernels, masks=masks, transfer=transfer, dtype=dtype)
