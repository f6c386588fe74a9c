"""Attention of a few new tokens of all sequences over pages: by Metal kernels, and by plain operations as reference.

T packed rows, N of them attend here, Hq and Hkv heads, D head dim, V values of a head. Shares: see ``pages.metal``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from edgepipe.spec.kv_forms import REST_TOKENS
from edgepipe_mlx.kv import Paged
from edgepipe_mlx.kv_codes import FourBits, codes_of
from edgepipe_mlx.pages.rows import PageArrays, PageForm

_LANES = 32  # threads of a simdgroup
_SIMDGROUPS = 4  # simdgroups of a threadgroup
_CONSTANT = 8  # MLX gives smaller arrays in the constant address space, by other code


class PageKernels(Protocol):
    """Attention over pages, summed in float32 and rounded once. A sequence does not depend on its neighbours."""

    def attend(
        self, queries: mx.array, paged: Paged, arrays: PageArrays, form: PageForm, sinks: mx.array | None
    ) -> mx.array:
        """Return [N, Hq, 1, V] of queries [T, Hq, 1, D], in their type. ``sinks`` [Hq], if the form has them."""
        ...


@cache
def _source(name: str) -> str:
    return (Path(__file__).parent / f"{name}.metal").read_text(encoding="utf-8")


class MetalPages:
    """Own kernels. MLX compiles a form when it is first used, and raises RuntimeError where that fails."""

    def __init__(self) -> None:
        make: Any = mx.fast.metal_kernel
        self._shares = make(
            name="edgepipe_page_shares",
            input_names=["x", "keys", "values", "key_scales", "value_scales", "rows", "tables", "numbers"],
            output_names=["y"],
            header=_source("pages"),
            source=_source("shares"),
            ensure_row_contiguous=False,  # queries may be a part of a wider product
        )
        self._join = make(
            name="edgepipe_page_join",
            input_names=["parts", "sinks"],
            output_names=["y"],
            source=_source("join"),
        )

    def attend(
        self, queries: mx.array, paged: Paged, arrays: PageArrays, form: PageForm, sinks: mx.array | None
    ) -> mx.array:
        """See ``PageKernels``."""
        scales = (paged.keys, paged.values) if paged.scales is None else paged.scales
        size = form.queries(arrays.most_tokens)
        tiles = -(-form.group * arrays.most_tokens // size)
        sequences, shape = arrays.rows.shape[0], (arrays.num_tokens, form.num_heads)
        constants = [("HEADS", form.num_heads), ("WIDTH", form.value_width)]
        parts = self._shares(
            inputs=[queries, paged.keys, paged.values, *scales, arrays.rows, arrays.tables, arrays.numbers],
            template=[
                ("X", queries.dtype),
                ("K", paged.keys.dtype),
                ("S", scales[0].dtype),
                *constants,
                ("DIM", form.head_dim),
                ("STORED", paged.keys.shape[-1]),
                ("SCALES", 0 if paged.scales is None else scales[0].shape[-1]),
                ("QUERIES", size),
                ("SIMDGROUPS", _SIMDGROUPS),
                ("BLOCK", form.block_size),
                ("WINDOW", form.window),
                ("CAPPED", int(form.capped)),
                ("SPAN", form.span),
                ("REST", REST_TOKENS),
            ],
            grid=(_LANES, _SIMDGROUPS * arrays.shares, sequences * form.num_kv_heads * tiles),
            threadgroup=(_LANES, _SIMDGROUPS, 1),
            output_shapes=[(*shape, arrays.shares, form.value_width + 2)],
            output_dtypes=[mx.float32],
        )[0]
        added = arrays.numbers if sinks is None else sinks
        found = self._join(
            inputs=[parts, added],
            template=[
                ("Y", queries.dtype),
                *constants,
                ("SINKS", int(sinks is not None)),
                ("IN_CONSTANT", int(added.size < _CONSTANT)),
            ],
            grid=(_LANES, form.num_heads, arrays.num_tokens),
            threadgroup=(_LANES, 1, 1),
            output_shapes=[(*shape, form.value_width)],
            output_dtypes=[queries.dtype],
        )[0]
        return found[:, :, None]


class ReferencePages:
    """The same by plain operations, sequence by sequence, for comparison."""

    def attend(
        self, queries: mx.array, paged: Paged, arrays: PageArrays, form: PageForm, sinks: mx.array | None
    ) -> mx.array:
        """See ``PageKernels``."""
        scale, cap = np.array(arrays.numbers)[:2].tolist()
        parts: list[mx.array] = []
        for (first_row, count, length, *_), table in zip(np.array(arrays.rows).tolist(), arrays.tables, strict=True):
            own = queries[first_row : first_row + count, :, 0].astype(mx.float32)
            own = own.reshape(count, form.num_kv_heads, form.group, form.head_dim).transpose(1, 2, 0, 3)
            rough, whole = widened(paged, table, length, form)
            positions, asking = mx.arange(length), mx.arange(length - count, length)[:, None]
            newest = positions >= asking // form.span * form.span if form.span else mx.zeros((count, length), mx.bool_)
            logits = mx.where(newest, own @ whole[0].swapaxes(-1, -2), own @ rough[0].swapaxes(-1, -2)) * scale
            if form.capped:
                logits = cap * mx.tanh(logits / cap)
            seen = (positions <= asking) & (positions > asking - (form.window or length))
            logits = mx.where(seen, logits, -mx.inf)  # [Hkv, group, n, L]
            if sinks is not None:
                column = sinks.astype(mx.float32).reshape(form.num_kv_heads, form.group, 1, 1)
                logits = mx.concatenate([logits, mx.broadcast_to(column, (*logits.shape[:-1], 1))], axis=-1)
            shares = mx.softmax(logits, axis=-1)[..., :length]
            found = mx.where(newest, shares, 0) @ whole[1] + mx.where(newest, 0, shares) @ rough[1]
            parts.append(found.transpose(2, 0, 1, 3).reshape(count, form.num_heads, 1, form.value_width))
        return mx.concatenate(parts).astype(queries.dtype)


def widened(paged: Paged, table: mx.array, length: int, form: PageForm) -> Sequence[Sequence[mx.array]]:
    """Return a sequence's keys [Hkv, 1, L, D] and values [Hkv, 1, L, V] in float32; then the same with all bits."""
    slots = _slots(table, 0, length, form)
    pools = (paged.keys, paged.values)
    if paged.scales is None:
        rough = [pool[:, slots].astype(mx.float32) for pool in pools]
        whole = rough
    else:
        codes = codes_of(form.kv, form.head_dim, form.latent_width)
        found = [(pool[:, slots], scales[:, slots]) for pool, scales in zip(pools, paged.scales, strict=True)]
        rough = [codes.decoded(*each, mx.float32) for each in found]
        whole = rough
        if isinstance(codes, FourBits):
            rests = [pool[:, _slots(table, REST_TOKENS, length, form)] for pool in pools]
            whole = [codes.whole(*each, rest, mx.float32) for each, rest in zip(found, rests, strict=True)]
    return [
        [each[:, None, :, :width] for each, width in zip(pair, (form.head_dim, form.value_width), strict=True)]
        for pair in (rough, whole)
    ]


def _slots(table: mx.array, behind: int, length: int, form: PageForm) -> mx.array:
    """Return the slots [L] of the tokens so far behind those of a sequence; tokens beyond the table have any."""
    tokens = mx.minimum(mx.arange(behind, behind + length), table.shape[0] * form.block_size - 1)
    return table[tokens // form.block_size] * form.block_size + tokens % form.block_size
