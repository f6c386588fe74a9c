"""The own kernel's attention of single rows over pages on a CPU: every row by itself, in float32.

It refuses arguments that the CUDA kernel would compute garbage with. R rows, P pages in a table.
"""

from __future__ import annotations

import math

import torch
from edgepipe_torch.cuda.paging import PagedDecode
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv_codes import Codes, FourBits, WholeCodes
from torch import Tensor

from edgepipe.spec.kv_forms import REST_TOKENS, SPAN_TOKENS


def reference_decode(_heads: LayerHeads) -> PagedDecode:
    """Return the reference, which computes any heads."""
    return _attend


def _attend(
    heads: LayerHeads,
    queries: Tensor,
    keys: Tensor | Codes,
    values: Tensor | Codes,
    out: Tensor,
    *,
    rows: Tensor,
    lengths: Tensor,
    tables: Tensor,
) -> None:
    """See ``PagedDecode``. The whole call is one operation to torch, as in ``varlen_reference.py``."""
    (keys, key_scales), (values, value_scales) = _parts(keys), _parts(values)
    if key_scales is None:
        assert queries.dtype == keys.dtype == values.dtype == out.dtype
    assert queries.shape[1:] == (heads.num_heads, heads.head_dim)
    assert out.shape == (queries.shape[0], heads.num_heads, heads.out_dim)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in (rows, lengths, tables))
    assert rows.shape == lengths.shape == tables.shape[:1]
    how = heads.sinks, heads.window or 0, heads.softcap, heads.scale
    kv = keys, key_scales, values, value_scales
    torch.ops.edgepipe_tests.decode(out, queries, *kv, rows, lengths, tables, *how)


def _parts(kept: Tensor | Codes) -> tuple[Tensor, Tensor | None]:
    return (kept.codes, kept.scales) if isinstance(kept, Codes) else (kept, None)


def _decode(
    out: Tensor,
    queries: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    values: Tensor,
    value_scales: Tensor | None,
    rows: Tensor,
    lengths: Tensor,
    tables: Tensor,
    sinks: Tensor | None,
    window: int,
    softcap: float,
    scale: float,
) -> None:
    group = queries.shape[1] // keys.shape[2]
    for row, length, table in zip(rows.tolist(), lengths.tolist(), tables.tolist(), strict=True):
        assert 0 <= row < queries.shape[0]
        assert 0 < length <= len(table) * keys.shape[1]
        pages = table[: math.ceil(length / keys.shape[1])]
        assert all(0 <= page < keys.shape[0] for page in pages), "a page outside the pool"
        first = max(0, length - window) if window else 0
        form = FourBits(queries.shape[2], out.shape[2] % queries.shape[2]) if keys.dtype == torch.uint8 else None
        own_keys, own_values = (
            (
                _widened(part[pages], None if scales is None else scales[pages]).flatten(0, 1)[first:length]
                if form is None or scales is None
                else _four_bits(form, part, scales, table, length)[first:]
            ).repeat_interleave(group, 1)[..., :size]
            for part, scales, size in (
                (keys, key_scales, queries.shape[2]),
                (values, value_scales, out.shape[2]),
            )
        )
        asked = queries[row].float() if form is None else form.turned(queries[row].float())
        logits = torch.einsum("hd,lhd->hl", asked * scale, own_keys)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        high = logits.amax(1, keepdim=True)
        weights = torch.exp(logits - high)
        total = weights.sum(1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks[:, None] - high)
        found = torch.einsum("hl,lhv->hv", weights / total, own_values)
        out[row] = found if form is None else form.turned(found)


def _widened(numbers: Tensor, scales: Tensor | None) -> Tensor:
    return numbers.float() if scales is None else numbers.float() * scales.float().unsqueeze(-1)


def _four_bits(form: FourBits, codes: Tensor, scales: Tensor, table: list[int], length: int) -> Tensor:
    """Return the vectors [length, Hkv, D] of a row, turned: those of its span of codes with 8 bits."""
    page = codes.shape[1]
    span = math.gcd(SPAN_TOKENS, page)
    begin = (length - 1) // span * span
    assert len(table) * page >= length + REST_TOKENS, "a table without the lower bits"
    assert all(0 <= each < codes.shape[0] for each in table[: math.ceil((length + REST_TOKENS) / page)])
    own_codes, own_scales = (part[table].flatten(0, 1) for part in (codes, scales))
    kept = Codes(own_codes[:length], own_scales[:length])
    newest = WholeCodes(Codes(*(part[begin:] for part in kept)), own_codes[begin + REST_TOKENS : length + REST_TOKENS])
    coarse = form.widen(Codes(*(part[:begin] for part in kept)), torch.float32)
    return torch.cat([coarse, form.widen_whole(newest, torch.float32)])


_LIBRARY = torch.library.Library("edgepipe_tests", "FRAGMENT")
_LIBRARY.define(
    "decode(Tensor(a!) out, Tensor queries, Tensor keys, Tensor? key_scales, Tensor values, "
    "Tensor? value_scales, Tensor rows, Tensor lengths, Tensor tables, "
    "Tensor? sinks, int window, float softcap, float scale) -> ()"
)
_LIBRARY.impl("decode", _decode, "CPU")
