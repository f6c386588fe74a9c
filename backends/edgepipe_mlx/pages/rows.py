"""What the kernels of attention over pages need to know of a step: numpy and device arrays, shared by layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgepipe.backend.step_layout import RowLayout
from edgepipe.spec.kv_forms import KV_4BIT, four_bits, span_tokens
from edgepipe.spec.layer_spec import Attention

MOST_TOKENS = 8
"""New tokens of a sequence that the kernels attend with: a token, or one with drafts behind it."""
MOST_SHARES = 32
"""Shares of a sequence's keys at most; ``join.metal`` has a lane for each."""
FEWEST_SHARES = 4
"""The same where many threadgroups share a share's keys. Then more shares would leave more sums than keys to read."""

CHUNK = 8
"""A head's size is a multiple of this many values."""

_BATCH = 32  # keys of a simdgroup at a time
_LEAST_SHARE = 128  # keys; a batch for each simdgroup of a threadgroup
_MOST_QUERIES = 8  # queries of a threadgroup: their sums fill its registers
_WIDE = 256  # values of a head, beyond which a lane keeps two chunks of each sum
_LEAST_ARRAY = 8  # MLX gives smaller arrays in the constant address space, by other code
_COLUMNS = 8  # columns of the table of rows, see ``pages.metal``


@dataclass(frozen=True, slots=True, kw_only=True)
class PageForm:
    """What kernels are compiled for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_width: int  # values that are a part of the keys are narrower
    window: int  # tokens that a query sees, with itself; 0: all
    capped: bool
    sinks: bool
    block_size: int
    dtype: mx.Dtype  # type of queries and results
    kv: str  # one of ``KV_FORMS``; empty: values in ``dtype``

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def latent_width(self) -> int:
        """Leading values of a key that are its value; 0: values are kept, too."""
        return self.value_width if self.value_width < self.head_dim else 0

    @property
    def span(self) -> int:
        """See ``span_tokens``."""
        return span_tokens(self.kv, self.block_size)

    def queries(self, tokens: int) -> int:
        """Return how many queries a threadgroup takes where a sequence has at most so many new tokens."""
        return min(self._most_queries, 1 << (self.group * tokens - 1).bit_length())

    def most_shares(self, tokens: int) -> int:
        """Return into how many shares the keys of a sequence with so many new tokens are cut at most."""
        return max(FEWEST_SHARES, MOST_SHARES // -(-self.group * tokens // self._most_queries))

    @property
    def _most_queries(self) -> int:
        return _MOST_QUERIES if self.value_width <= _WIDE else _MOST_QUERIES // 2


def page_form(spec: Attention, *, block_size: int, dtype: mx.Dtype, kv: str) -> PageForm | None:
    """Return the form of a layer; None if the kernels do not know the size of its heads.

    Half a group of 4-bit codes is a chunk, or more.
    """
    width = spec.latent_width or spec.head_dim
    if spec.head_dim % CHUNK or width % CHUNK:
        return None
    if kv == KV_4BIT and four_bits(spec.head_dim, spec.latent_width).group % (2 * CHUNK):
        return None
    return PageForm(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_width=width,
        window=spec.window or 0,
        capped=bool(spec.softcap),
        sinks=spec.sinks,
        block_size=block_size,
        dtype=dtype,
        kv=kv,
    )


@dataclass(frozen=True, slots=True, eq=False)
class PageArrays:
    """Sequences S of a step for layers of one form, N new tokens together."""

    rows: mx.array  # [S, 8] int32: see ``pages.metal``
    tables: mx.array  # [S, n] int32
    numbers: mx.array  # [8] float32: factor and cap of logits
    num_tokens: int  # N
    most_tokens: int  # tokens of the longest sequence
    shares: int  # shares of the sequence with the most


def share_of(num_keys: int, most_shares: int) -> int:
    """Return how many keys a share of a sequence has: whole batches."""
    return max(_LEAST_SHARE, -(-num_keys // (most_shares * _BATCH)) * _BATCH)


def page_arrays(
    rows: Sequence[RowLayout], form: PageForm, *, scale: float, cap: float, most_shares: int = MOST_SHARES
) -> PageArrays:
    """Make the arrays for rows of at most ``MOST_TOKENS`` tokens, with factor and cap of logits."""
    tokens = np.array([row.num_tokens for row in rows], np.int32)
    lengths = np.array([row.length for row in rows], np.int32)
    first = np.maximum(lengths - tokens - form.window + 1, 0) if form.window else np.zeros_like(lengths)
    of_rows = [min(most_shares, form.most_shares(row.num_tokens)) for row in rows]
    share = np.array([share_of(*each) for each in zip((lengths - first).tolist(), of_rows, strict=True)], np.int32)
    shares, most = int((-(-(lengths - first) // share)).max()), int(tokens.max())
    tiles = -(-form.group * most // form.queries(most))
    table = np.zeros((len(rows), _COLUMNS), np.int32)
    own = [[row.first_row for row in rows], tokens, lengths, np.cumsum(tokens) - tokens, first, share, shares, tiles]
    for column, values in enumerate(own):
        table[:, column] = values
    return PageArrays(
        rows=mx.array(table),
        tables=mx.array(_tables(rows)),
        numbers=mx.array(np.array([scale, cap, *[0] * (_LEAST_ARRAY - 2)], np.float32)),
        num_tokens=int(tokens.sum()),
        most_tokens=most,
        shares=shares,
    )


def _tables(rows: Sequence[RowLayout]) -> npt.NDArray[np.int32]:
    """Return the rows' block tables, as long as the longest, with blocks of lower bits."""
    parts = [row.blocks if row.rests is None else row.rests.blocks for row in rows]
    tables = np.zeros((len(rows), max(_LEAST_ARRAY, *(len(part) for part in parts))), np.int32)
    for table, part in zip(tables, parts, strict=True):
        table[: len(part)] = part
    return tables
