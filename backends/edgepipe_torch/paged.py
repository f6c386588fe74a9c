"""Attention over pages on CUDA, all sequences in one call: torch's variable-length FlashAttention with a block table.

Only where torch has it (2.13), the card is Ampere or newer, and pages hold a multiple of 256 tokens, which
FlashAttention-2 asks for. Elsewhere ``SequenceAttention`` computes the same, slower.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgepipe_torch.kv import KvPool
from edgepipe_torch.plan import StepPlan
from edgepipe_torch.transfer import Transfer

_PAGE_TOKENS = 256


@cache
def varlen_attention() -> Callable[..., Any] | None:
    """torch's function if this torch has one that takes a block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None


def can_page(device: torch.device, dtype: torch.dtype, *, block_size: int) -> bool:
    """Whether paged attention works here."""
    if device.type != "cuda" or dtype != torch.bfloat16 or block_size % _PAGE_TOKENS:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8 and varlen_attention() is not None


class PagedAttention:
    """One step's sequences, attended over their pages in one kernel per layer."""

    def __init__(self, plan: StepPlan, pool: KvPool, transfer: Transfer) -> None:
        self._pool = pool
        self._arguments = _arguments(plan, transfer)

    def run(self, layer: int, window: int | None, queries: Tensor, out: Tensor) -> None:
        """See StepAttention."""
        attend = varlen_attention()
        assert attend is not None, "can_page was asked"
        keys, values = self._pool.pages(layer)
        back = -1 if window is None else window - 1
        found = attend(queries, keys, values, window_size=(back, 0), enable_gqa=True, **self._arguments)
        out.copy_(found)


def _arguments(plan: StepPlan, transfer: Transfer) -> dict[str, Any]:
    counts = [row.num_tokens for row in plan.rows]
    lengths = [row.length for row in plan.rows]
    tables = np.zeros((len(plan.rows), max(len(row.blocks) for row in plan.rows)), np.int32)
    for table, row in zip(tables, plan.rows, strict=True):
        table[: len(row.blocks)] = row.blocks
    return {
        "cu_seq_q": transfer.upload(np.cumsum([0, *counts], dtype=np.int32)),
        "cu_seq_k": None,
        "max_q": max(counts),
        "max_k": max(lengths),
        "seqused_k": transfer.upload(np.asarray(lengths, np.int32)),
        "block_table": transfer.upload(tables),
    }
