"""Attention over pages, all sequences in one call per layer (``paging.py`` has the kernel and what it requires).

Elsewhere ``SequenceAttention`` computes the same, slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from edgepipe.backend.step_layout import StepLayout
from edgepipe_torch.attention import StepAttention
from edgepipe_torch.dot_attention import beside_sinks
from edgepipe_torch.head_shape import LayerHeads
from edgepipe_torch.kv import KVStorage
from edgepipe_torch.paging import AlsoReturn, VarlenAttention, pages_fit
from edgepipe_torch.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSequences:
    """Rows and keys of N sequences, int32 on the device."""

    row_starts: Tensor  # [N + 1]
    key_starts: Tensor  # [N + 1] as if the keys were packed; required although pages are read
    lengths: Tensor  # [N] number of keys
    tables: Tensor  # [N, pages]


class PagedAttention:
    """Attention of one step's sequences over their pages, in one kernel per layer."""

    def __init__(
        self, attend: VarlenAttention, pool: KVStorage, sequences: PagedSequences, *, max_q: int, max_k: int
    ) -> None:
        """``max_q`` and ``max_k``: upper bounds of any sequence's rows and keys."""
        self._attend = attend
        self._pool = pool
        self._arguments: dict[str, Any] = {
            "cu_seq_q": sequences.row_starts,
            "cu_seq_k": sequences.key_starts,
            "max_q": max_q,
            "max_k": max_k,
            "seqused_k": sequences.lengths,
            "block_table": sequences.tables,
        }

    @classmethod
    def of(cls, layout: StepLayout, pool: KVStorage, *, attend: VarlenAttention, transfer: Transfer) -> PagedAttention:
        """Attend for the rows of a step, with tables as wide as its longest."""
        counts = [row.num_tokens for row in layout.rows]
        lengths = [row.length for row in layout.rows]
        tables = np.zeros((len(layout.rows), max(len(row.blocks) for row in layout.rows)), np.int32)
        for table, row in zip(tables, layout.rows, strict=True):
            table[: len(row.blocks)] = row.blocks
        sequences = PagedSequences(
            row_starts=transfer.upload(np.cumsum([0, *counts], dtype=np.int32)),
            key_starts=transfer.upload(np.cumsum([0, *lengths], dtype=np.int32)),
            lengths=transfer.upload(np.asarray(lengths, np.int32)),
            tables=transfer.upload(tables),
        )
        return cls(attend, pool, sequences, max_q=max(counts), max_k=max(lengths))

    def run(self, heads: LayerHeads, queries: Tensor, out: Tensor) -> None:
        """Attend for all rows. See StepAttention."""
        keys, values = self._pool.pages(heads.layer)
        seen, splits = (-1 if heads.window is None else heads.window - 1, 0), 1
        shared = heads.num_heads > heads.num_kv_heads
        if heads.window is None and self._arguments["max_q"] == 1 and shared and heads.sinks is None:
            # A single query sees all keys. With this window, the kernel lets the heads of a group share their reads,
            # and may split them. With any other split, torch 2.13 gave NaN for sequences shorter than max_k.
            seen, splits = (-1, -1), None
        found = self._attend(
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


class MixedAttention:
    """Attention over pages in layers that the kernel computes, and of each sequence in the others."""

    def __init__(self, paged: PagedAttention, others: StepAttention) -> None:
        self._paged = paged
        self._others = others

    def run(self, heads: LayerHeads, queries: Tensor, out: Tensor) -> None:
        """See StepAttention."""
        (self._paged if pages_fit(heads) else self._others).run(heads, queries, out)
