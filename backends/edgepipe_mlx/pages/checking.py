"""Compare attention over pages with float64, before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import sqrt

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgepipe.backend.step_layout import RestSlots, RowLayout
from edgepipe.backend.types import KernelError, SlowPath
from edgepipe.spec.kv_forms import KV_4BIT, KV_8BIT, REST_TOKENS
from edgepipe_mlx.kernel_check import KernelCheck, measured_error
from edgepipe_mlx.kv import Paged
from edgepipe_mlx.kv_codes import codes_of
from edgepipe_mlx.pages.kernels import MetalPages, PageKernels, widened
from edgepipe_mlx.pages.rows import MOST_SHARES, MOST_TOKENS, PageForm, page_arrays

_BLOCK = 32  # tokens of the block of a check without a model
_EARLIER = (0, 31, 128, 300)  # tokens: none, no whole batch of keys, a whole share, three shares
_NO_SCALE, _BYTES = 255, (124, 140)  # byte of no group, and bytes of scales from 0.05 to 0.2
_CAP = 1.5  # cap of logits whose standard deviation is 1
_ROUNDING = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11, mx.float32: 2.0**-23}
_FLOAT32_SUMS = 2.0**-16  # relative to the weighted sum of the values' sizes; logits are such sums, too
_LEAST_BOUND = 1e-30  # sums of values that are all zero

Float64s = npt.NDArray[np.float64]

_CHECK = KernelCheck(
    kernels="of attention over pages",
    slow=SlowPath(
        what="attention takes one sequence after another, and copies the context of scattered ones",
        cost="16 chats of 8,192 tokens, 8B, M4 Max: up to 63 ms more a step (arithmetic; no Mac has timed it)",
        reason="",
    ),
)


def checked_pages(forms: Iterable[PageForm]) -> PageKernels | SlowPath:
    """Return kernels that passed their check on the default device, or what the backend lacks without them."""

    def errors(kernels: PageKernels) -> Iterator[tuple[str, float]]:
        for form in forms:
            for error in form_errors(kernels, form):
                yield f"the error with {_words(form)}", error

    return _CHECK.passed(MetalPages, errors)


def page_errors(dtype: mx.Dtype) -> Iterator[KernelError]:
    """Return the error of heads that many models have. MLX compiles the kernels for it."""
    for kv, name in (("", "KV as computed"), (KV_8BIT, "KV in 8 bits"), (KV_4BIT, "KV in 4 bits")):
        form = PageForm(
            num_heads=8,
            num_kv_heads=2,
            head_dim=128,
            value_width=128,
            window=0,
            capped=False,
            sinks=False,
            block_size=_BLOCK,
            dtype=dtype,
            kv=kv,
        )
        yield measured_error(f"attention over pages, {name}", partial(_form_errors, form))


def form_errors(kernels: PageKernels, form: PageForm) -> Iterator[float]:
    """Return errors of a form in units of their bounds, for all numbers of queries that it is compiled for."""
    counts = {form.queries(tokens): tokens for tokens in range(MOST_TOKENS, 0, -1)}
    for tokens in sorted({*counts.values(), MOST_TOKENS}):
        yield case_error(kernels, form, _case(form, tokens))
    yield case_error(kernels, form, _case(form, 1), most_shares=1)


def _form_errors(form: PageForm) -> Iterator[float]:
    return form_errors(MetalPages(), form)


def case_error(
    kernels: PageKernels, form: PageForm, rows: Sequence[RowLayout], *, most_shares: int = MOST_SHARES
) -> float:
    """Return the largest error with made-up numbers for the rows, in units of its bound.

    The bound is one rounding of the result, and the error of float32 sums. Slots of no token are no numbers.
    """
    random = np.random.default_rng(0)
    paged = _pool(form, rows, random)
    sinks = mx.array(random.standard_normal(form.num_heads, np.float32)).astype(form.dtype) if form.sinks else None
    asked = random.standard_normal((rows[-1].end_row, form.head_dim, 1, form.num_heads + 1), np.float32)
    queries = mx.array(asked).astype(form.dtype).swapaxes(1, 3)[:, 1:]  # neither rows, nor heads, nor values adjoin
    scale = 1 / sqrt(form.head_dim)
    arrays = page_arrays(rows, form, scale=scale, cap=_CAP, most_shares=most_shares)
    found, first, worst = _exactly(kernels.attend(queries, paged, arrays, form, sinks))[:, :, 0], 0, 0.0
    heads = None if sinks is None else _exactly(sinks)
    for row, table in zip(rows, arrays.tables, strict=True):
        own = _exactly(queries[row.first_row : row.end_row, :, 0])
        forms = [[_exactly(each)[:, 0] for each in pair] for pair in widened(paged, table, row.length, form)]
        expected, sizes = _attended(own, forms, form, scale=scale, sinks=heads)
        bound = _ROUNDING[form.dtype] * np.abs(expected) + _FLOAT32_SUMS * sizes + _LEAST_BOUND
        error = np.abs(found[first : first + row.num_tokens] - expected) / bound
        worst = max(worst, float(np.where(np.isnan(error), np.inf, error).max()))
        first += row.num_tokens
    return worst


def scattered_rows(counts: Sequence[tuple[int, int, int]], form: PageForm) -> list[RowLayout]:
    """Return sequences in scattered blocks.

    counts  of each: tokens before the step, new ones, and packed rows of others between it and the sequence before it
    """
    behind = REST_TOKENS if form.span else 0
    sizes = [-(-(earlier + count + behind) // form.block_size) for earlier, count, _ in counts]
    blocks = np.random.default_rng(1).permutation(sum(sizes) + 1).astype(np.int32)
    rows: list[RowLayout] = []
    for (earlier, count, gap), size in zip(counts, sizes, strict=True):
        own, blocks = blocks[:size], blocks[size:]
        length, slots = earlier + count, np.zeros(0, np.int32)
        rows.append(
            RowLayout(
                first_row=gap + (rows[-1].end_row if rows else 0),
                num_tokens=count,
                length=length,
                blocks=own[: -(-length // form.block_size)],
                start_slot=int(own[0]) * form.block_size,
                contiguous=False,
                rests=RestSlots(form.span, 0, slots, own) if form.span else None,
            )
        )
    return rows


def _case(form: PageForm, tokens: int) -> list[RowLayout]:
    """Return sequences of one and of ``tokens`` new tokens in turn."""
    return scattered_rows([(earlier, tokens if index % 2 else 1, 0) for index, earlier in enumerate(_EARLIER)], form)


def _pool(form: PageForm, rows: Sequence[RowLayout], random: np.random.Generator) -> Paged:
    """Return a pool for the rows' tokens."""
    tables = [row.blocks if row.rests is None else row.rests.blocks for row in rows]
    shape = (form.num_kv_heads, (1 + max(int(table.max()) for table in tables)) * form.block_size, form.head_dim)
    used = np.concatenate(
        [
            row.blocks[(at := np.arange(row.length)) // form.block_size] * form.block_size + at % form.block_size
            for row in rows
        ]
    )
    made = [_vectors(form, shape, used, random) for _ in range(1 if form.value_width < form.head_dim else 2)]
    (keys, key_scales), (values, value_scales) = made[0], made[-1]
    return Paged(keys, values, None if key_scales is None or value_scales is None else (key_scales, value_scales))


def _vectors(
    form: PageForm, shape: tuple[int, int, int], used: npt.NDArray[np.int64], random: np.random.Generator
) -> tuple[mx.array, mx.array | None]:
    """Return vectors, or codes and scales, of a standard deviation near 1; no numbers in slots that are not used."""
    if not form.kv:
        numbers = np.full(shape, np.nan, np.float32)
        numbers[:, used] = random.standard_normal((shape[0], len(used), shape[2]), np.float32)
        return mx.array(numbers).astype(form.dtype), None
    (width, kind), (per_vector, scale_kind) = codes_of(form.kv, form.head_dim, form.latent_width).kinds
    codes = random.integers(0, 256, (*shape[:2], width), np.uint8)
    of_used = (shape[0], len(used), per_vector)
    if scale_kind == mx.float16:
        scales = np.full((*shape[:2], per_vector), np.nan, np.float16)
        scales[:, used] = random.uniform(0.005, 0.02, of_used)
    else:
        scales = np.full((*shape[:2], per_vector), _NO_SCALE, np.uint8)
        scales[:, used] = random.integers(_BYTES[0], _BYTES[1], of_used)
    return mx.array(codes).view(kind), mx.array(scales)


def _attended(
    queries: Float64s, forms: Sequence[Sequence[Float64s]], form: PageForm, *, scale: float, sinks: Float64s | None
) -> tuple[Float64s, Float64s]:
    """Return sums of values [n, Hq, V] for queries [n, Hq, D], and the same sums of the values' sizes.

    forms  keys [Hkv, L, D] and values [Hkv, L, V] as tokens of other spans read them, and as those of their own do
    """
    rough, whole = ([np.repeat(each, form.group, axis=0) for each in pair] for pair in forms)
    count, length = len(queries), rough[0].shape[1]
    asking, positions = np.arange(length - count, length)[:, None], np.arange(length)
    newest = positions >= asking // form.span * form.span if form.span else np.zeros((count, length), bool)
    own, others = (np.einsum("nhd,hld->hnl", queries, each[0]) * scale for each in (whole, rough))
    logits = np.where(newest, own, others)
    if form.capped:
        logits = _CAP * np.tanh(logits / _CAP)
    seen = (positions <= asking) & (positions > asking - (form.window or length))
    logits = np.where(seen, logits, -np.inf)
    highest = logits.max(-1, keepdims=True)
    found = np.exp(logits - highest)
    found /= found.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[:, None, None] - highest))
    near, far = np.where(newest, found, 0), np.where(newest, 0, found)

    def summed(own: Float64s, others: Float64s) -> Float64s:
        return np.einsum("hnl,hlv->nhv", near, own) + np.einsum("hnl,hlv->nhv", far, others)

    return summed(whole[1], rough[1]), summed(np.abs(whole[1]), np.abs(rough[1]))


def _exactly(array: mx.array) -> Float64s:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _words(form: PageForm) -> str:
    kind = f"KV in {form.kv}" if form.kv else "KV in the compute type"
    return f"heads of {form.head_dim} and {kind}"
