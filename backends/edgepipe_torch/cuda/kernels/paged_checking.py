"""Check the attention kernel against float64: when it loads, and in tests of any shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.spec.kv_forms import REST_TOKENS, SPAN_TOKENS, rest_tokens
from edgepipe_torch.cuda.kernels.paged_decode import PagedDecode, PagedForm
from edgepipe_torch.cuda.kernels.place_checking import Values, rotated
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.kv_codes import Codes, FourBits, codes_of

_BF16_ROUNDING = 2.0**-8  # rounding of the result, and of each weight
_FLOAT32_SUMS = 2.0**-20  # relative to the largest number


def worst_decode_error(kernel: PagedDecode, form: PagedForm, device: torch.device) -> float:
    """Return the largest error on small random sequences, in units of its bound; NaN counts as infinite.

    A large device splits short sequences into parts of one tile. So ``few`` makes parts of many.
    """
    whole = random_heads(form, device=device)
    special = random_heads(form, device=device, window=100, softcap=20.0, sinks=True)
    steep = random_heads(form, device=device, steepness=120.0, kv_heads=1, group=9)  # exponentials overflow
    few = kernel.as_on(multiprocessors=1)
    return max(
        decode_error(kernel, whole, (1, 64, 65, 700), page_tokens=128, device=device),
        decode_error(kernel, special, (700, 30, 0, 129), page_tokens=64, device=device),
        decode_error(few, special, (700, 30, 0, 129), page_tokens=128, device=device),
        *(decode_error(each, steep, (300,), page_tokens=128, device=device) for each in (kernel, few)),
    )


def random_heads(
    form: PagedForm,
    *,
    device: torch.device,
    group: int = 0,
    kv_heads: int = 2,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    steepness: float = 1.5,
) -> LayerHeads:
    """Return heads that the form is for.

    group      query heads of a kv head; 0: a few more than a block has
    steepness  standard deviation of the logits of random queries and keys
    """
    group = group or form.block_heads + 3
    drawn = np.random.default_rng(4).standard_normal(group * kv_heads, np.float32)
    return LayerHeads(
        layer=0,
        kind=0,
        place=0,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=form.head_dim,
        value_width=form.value_width,
        window=window,
        softcap=softcap,
        scale=steepness * form.head_dim**-0.5,
        rotates_whole=False,
        sinks=torch.from_numpy(drawn).to(device) if sinks else None,
        out_dim=form.value_dim,
        is_plain=not softcap and not sinks,
    )


def decode_error(
    kernel: PagedDecode,
    heads: LayerHeads,
    lengths: Sequence[int],
    *,
    page_tokens: int,
    device: torch.device,
    seed: int = 8,
) -> float:
    """Return the largest error of one call, in units of its bound. A row of length 0 must stay as it is.

    What no row may read is no number: pages without a sequence, and tokens beyond a sequence's end.
    """
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(lengths) + 2)[: len(lengths)]  # places among the packed rows
    tables, pool = _random_pool(heads, lengths, page_tokens, rng, kv=kernel.form.kv)
    queries = _bf16(rng.standard_normal((len(lengths) + 2, heads.num_heads + 1, heads.head_dim), np.float32))
    stored = pool.stored
    placed = Codes(*(part.to(device) for part in stored)) if isinstance(stored, Codes) else stored.to(device)
    keys, values = parted(placed, heads)
    out = torch.full((len(lengths) + 2, heads.num_heads, heads.out_dim), 7.0, dtype=torch.bfloat16, device=device)
    kernel(
        heads,
        queries.to(device)[:, :-1],
        keys,
        values,
        out,
        rows=torch.from_numpy(rows.astype(np.int32)).to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        tables=torch.from_numpy(tables).to(device),
    )
    found, worst, asked = out.double().cpu().numpy(), 0.0, _asked(queries, heads, kernel.form.kv)
    for row, length, table in zip(rows, lengths, tables, strict=True):
        keys, values = _seen(pool, heads, table, length)
        expected, bound = _expected(heads, asked[row, :-1], keys, values)
        error = np.abs(found[row] - expected) / bound
        worst = max(worst, float(np.max(np.where(np.isnan(error), np.inf, error))))
    untouched = np.delete(found, rows, axis=0)
    return worst if np.all(untouched == 7.0) else np.inf


class _Pool(NamedTuple):
    """Pages [pages, tokens, entries, D], and what they say in float64."""

    stored: Tensor | Codes
    said: Values
    newest: Values  # values for rows that read them with more bits; else the same as ``said``


def _random_pool(
    heads: LayerHeads, lengths: Sequence[int], page_tokens: int, rng: np.random.Generator, *, kv: str
) -> tuple[npt.NDArray[np.int32], _Pool]:
    """Return tables [R, P] and pages in bf16, of which some belong to no row.

    ``kv``: a form, of which they are the codes. Scales then differ from vector to vector.
    """
    counts = [-(-(length + rest_tokens(kv)) // page_tokens) for length in lengths]
    places = rng.permutation(sum(counts) + 2)
    tables = np.full((len(lengths), max(counts)), places[-1], np.int32)
    pool = np.full((len(places), page_tokens, heads.entries, heads.head_dim), np.nan, np.float32)
    at = 0
    for table, length, count in zip(tables, lengths, counts, strict=True):
        table[:count] = places[at : at + count]
        for index, page in enumerate(table[:count]):
            size = max(0, min(page_tokens, length - index * page_tokens))
            pool[page, :size] = rng.standard_normal((size, heads.entries, heads.head_dim), np.float32)
        at += count
    if not kv:
        said = _bf16(pool)
        return tables, _Pool(said, said.double().numpy(), said.double().numpy())
    pool *= rng.uniform(0.25, 1.5, (*pool.shape[:3], 1)).astype(np.float32)
    form = codes_of(kv, heads.head_dim, heads.value_width)
    if isinstance(form, FourBits):
        return tables, _four_bits(form, torch.from_numpy(pool), tables, lengths)
    codes = form.encode(torch.from_numpy(pool))
    said = codes.codes.double().numpy() * codes.scales.double().numpy()[..., None]
    return tables, _Pool(codes, said, said)


def _four_bits(form: FourBits, vectors: Tensor, tables: npt.NDArray[np.int32], lengths: Sequence[int]) -> _Pool:
    """Return codes of pages [pages, tokens, entries, D], with the lower bits of rows' newest spans in later slots."""
    made = form.encode_whole(vectors)
    said, newest = (
        rotated(each.numpy(), form.block)
        for each in (form.widen(made.codes, torch.float64), form.widen_whole(made, torch.float64))
    )
    codes, page_tokens = made.codes.codes.clone(), vectors.shape[1]
    for table, length in zip(tables, lengths, strict=True):
        places = np.arange(max(0, length - 1) // SPAN_TOKENS * SPAN_TOKENS, length)
        rests = made.rests[table[places // page_tokens], places % page_tokens]
        later = places + REST_TOKENS
        codes[table[later // page_tokens], later % page_tokens] = rests
    return _Pool(Codes(codes, made.codes.scales), said, newest)


def _seen(pool: _Pool, heads: LayerHeads, table: npt.NDArray[np.int32], length: int) -> tuple[Values, Values]:
    """Return the keys [length, Hkv, D] and values [length, Hkv, V] of a row."""
    span = max(0, length - 1) // SPAN_TOKENS * SPAN_TOKENS
    rows, newest = (part[table].reshape(-1, *part.shape[2:])[:length] for part in (pool.said, pool.newest))
    rows = np.concatenate([rows[:span], newest[span:]])
    first = 0 if heads.value_width else heads.num_kv_heads
    return rows[:, : heads.num_kv_heads], rows[:, first:, : heads.out_dim]


def _asked(queries: Tensor, heads: LayerHeads, kv: str) -> Values:
    """Return queries as the kernel rounds them: with 4 bits, when they are rotated."""
    form = codes_of(kv, heads.head_dim, heads.value_width) if kv else None
    if not isinstance(form, FourBits):
        return queries.double().numpy()
    return rotated(form.turned(queries).double().numpy(), form.block)


def parted(pages: Tensor | Codes, heads: LayerHeads) -> tuple[Tensor | Codes, Tensor | Codes]:
    """Return views of the keys and the values in pages [pages, tokens, entries, D].

    Values that are a part of their keys may have further numbers behind them.
    """
    if heads.value_width:
        return pages, pages
    if isinstance(pages, Codes):
        codes, scales = (part.split(heads.num_kv_heads, dim=2) for part in pages)
        return Codes(codes[0], scales[0]), Codes(codes[1], scales[1])
    keys, values = pages.split(heads.num_kv_heads, dim=2)
    return keys, values


def _expected(
    heads: LayerHeads,
    queries: Values,
    keys: Values,
    values: Values,
) -> tuple[Values, Values]:
    """Return a row's outputs [Hq, V] and their bound, for queries [Hq, D], keys [L, Hkv, D] and values [L, Hkv, V]."""
    if not len(keys):
        untouched = np.full((heads.num_heads, heads.out_dim), 7.0)
        return untouched, np.full_like(untouched, 1e-9)
    first = 0 if heads.window is None else max(0, len(keys) - heads.window)
    group = heads.num_heads // heads.num_kv_heads
    keys, values = (np.repeat(part[first:], group, axis=1) for part in (keys, values))
    logits = heads.scale * np.einsum("hd,lhd->hl", queries, keys)
    if heads.softcap:
        logits = heads.softcap * np.tanh(logits / heads.softcap)
    sinks = None if heads.sinks is None else heads.sinks.double().cpu().numpy()
    high = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - high)
    total = weights.sum(axis=1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - high)
    weights /= total
    expected = np.einsum("hl,lhv->hv", weights, values)
    spread = np.einsum("hl,lhv->hv", weights, np.abs(values))
    rotated_back = _FLOAT32_SUMS * spread.max(axis=1, keepdims=True)  # error of 4 bits: it sums numbers that cancel
    return expected, _BF16_ROUNDING * (np.abs(expected) + spread) + rotated_back + 1e-30


def _bf16(values: npt.NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(values).to(torch.bfloat16)
