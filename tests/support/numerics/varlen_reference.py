"""Attention over pages on a CPU, with the signature of torch's ``varlen_attn``: every sequence by itself, in float32.

It refuses arguments that the CUDA kernel would compute garbage with. N sequences, T packed rows, P pages in a table.
"""

from __future__ import annotations

import math

import torch
from edgepipe_torch.cuda.paging import AlsoReturn
from torch import Tensor


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: AlsoReturn | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the heads' outputs [T, Hq, D]; ``edgepipe_torch.cuda.paging.VarlenAttention`` describes the arguments.

    The whole call is one operation to torch, so that a recorder of operations sees neither loops nor lengths.
    """
    grouped = query.shape[1] != key.shape[2]
    assert enable_gqa or not grouped, "query heads share keys only with enable_gqa"
    indices = (cu_seq_q, cu_seq_k, max_q, max_k, list(window_size), seqused_k, block_table, num_splits)
    out, total = torch.ops.edgepipe_tests.varlen(query, key, value, *indices, scale or query.shape[2] ** -0.5)
    return (out, total) if return_aux is not None and return_aux.lse else out


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    window_size: list[int],
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    row_starts, lengths, tables = cu_seq_q.tolist(), seqused_k.tolist(), block_table.tolist()
    before, after = window_size
    _check_types(query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table)
    _check_splits(query, key, max_q, (before, after), num_splits)
    assert row_starts[0] == 0
    assert row_starts[-1] == query.shape[0], "every row belongs to a sequence"
    assert cu_seq_k.tolist() == [0, *torch.cumsum(seqused_k, 0).tolist()], "keys start as if they were packed"
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    total = torch.empty(query.shape[1], query.shape[0])
    for index, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        start, end = row_starts[index], row_starts[index + 1]
        assert 0 < end - start <= max_q
        assert end - start <= length <= min(max_k, len(table) * key.shape[1])
        pages = table[: math.ceil(length / key.shape[1])]
        assert all(0 <= page < key.shape[0] for page in pages), "a page outside the pool"
        keys, values = (part[pages].flatten(0, 1)[:length].float() for part in (key, value))
        scores = _scores(query[start:end].float() * scale, keys, before=before, after=after)
        group = query.shape[1] // values.shape[1]
        out[start:end] = torch.einsum("hnl,lhd->nhd", scores.softmax(-1), values.repeat_interleave(group, 1))
        total[:, start:end] = scores.logsumexp(-1)
    return out, total


_LIBRARY = torch.library.Library("edgepipe_tests", "DEF")
_LIBRARY.define(
    "varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor cu_seq_k, int max_q, int max_k, "
    "int[] window_size, Tensor seqused_k, Tensor block_table, int? num_splits, float scale) -> (Tensor, Tensor)"
)
_LIBRARY.impl("varlen", _varlen, "CPU")


def _scores(query: Tensor, keys: Tensor, *, before: int, after: int) -> Tensor:
    """Return scores [Hq, n, L] of query [n, Hq, D] and keys [L, Hkv, D]; row n - 1 is at key L - 1."""
    scores = torch.einsum("nhd,lhd->hnl", query, keys.repeat_interleave(query.shape[1] // keys.shape[1], 1))
    own = torch.arange(query.shape[0])[:, None] + keys.shape[0] - query.shape[0]
    ahead = torch.arange(keys.shape[0])[None, :] - own
    hidden = (ahead > after if after >= 0 else ahead > keys.shape[0]) | (
        ahead < -before if before >= 0 else ahead < -keys.shape[0]
    )
    return scores.masked_fill(hidden, -torch.inf)


def _check_types(query: Tensor, key: Tensor, value: Tensor, *indices: Tensor) -> None:
    assert query.dtype == key.dtype == value.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert query.shape[1] % key.shape[2] == 0
    assert all(tensor.dtype == torch.int32 for tensor in indices)
    assert all(tensor.is_contiguous() for tensor in indices)


def _check_splits(query: Tensor, key: Tensor, max_q: int, window: tuple[int, int], num_splits: int | None) -> None:
    """torch 2.13 splits keys correctly only for lone queries that see all keys and share them."""
    if num_splits != 1:
        assert window == (-1, -1)
        assert max_q == 1
        assert query.shape[1] > key.shape[2]
