"""Attention per sequence over 8-bit KV. It reads codes also of the step's own tokens, so chunks do not change results.

T packed rows, n rows of one sequence, L its visible keys, Hq and Hkv heads, G = Hq / Hkv, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.backend.step_layout import RowLayout
from edgepipe.model.facts import ModelConfig
from edgepipe_torch.attention import TILE_ROWS, CausalMasks
from edgepipe_torch.packed_kv import Codes, PackedKVStorage
from edgepipe_torch.prepared import PreparedStep

_WIDENED_BYTES = 64 << 20  # of keys and values at once; heads take turns where all need more


class PackedSequenceAttention:
    """Attention of each sequence to its own codes. Any device."""

    def __init__(
        self, config: ModelConfig, prepared: PreparedStep, pool: PackedKVStorage, masks: CausalMasks, dtype: torch.dtype
    ) -> None:
        """``dtype``: compute dtype."""
        self._config = config
        self._rows = prepared.layout.rows
        self._pool = pool
        self._masks = masks
        self._dtype = dtype
        device = pool.codes.device
        self._slots = [None if slots is None else torch.from_numpy(slots).to(device) for slots in prepared.scattered]

    def run(self, layer: int, window: int | None, queries: Tensor, out: Tensor) -> None:
        """Attend for all rows. See StepAttention."""
        shape = (queries.shape[0], self._config.num_kv_heads, -1, self._config.head_dim)
        queries, out = queries.view(shape), out.view(shape)
        for row, slots in zip(self._rows, self._slots, strict=True):
            rows = slice(row.first_row, row.first_row + row.num_tokens)
            low = 0 if window is None else max(0, row.length - row.num_tokens - window + 1)
            kv = self._read(layer, row, slots, low)
            if row.num_tokens == 1 and self._dtype == torch.float32:
                self._attend_one(kv, queries[rows.start], out[rows.start])
            else:
                self._attend_tiles(kv, queries[rows], out[rows], window)

    def _read(self, layer: int, row: RowLayout, slots: Tensor | None, low: int) -> Codes:
        """Return the codes of a sequence's tokens ``[low, length)``."""
        if slots is None:
            return self._pool.run(layer, row.start_slot + low, row.start_slot + row.length)
        return self._pool.gather(layer, slots[low : row.length])

    def _attend_one(self, kv: Codes, queries: Tensor, out: Tensor) -> None:
        """Attend with one row's queries [Hkv, G, D]; out [Hkv, G, D].

        Scales multiply scores and weights, one value per key, instead of keys and values.
        """
        num_heads = queries.shape[0]
        scales = kv.scales.float().t().unsqueeze(1)  # [2 Hkv, 1, L]
        for heads in self._turns(len(kv.codes)):
            values = slice(num_heads + heads.start, num_heads + heads.stop)
            keys = kv.codes[:, heads].to(self._dtype).permute(1, 2, 0)  # [heads, D, L]
            scores = torch.bmm(queries[heads], keys).mul_(scales[heads]).mul_(self._config.head_dim**-0.5)
            weights = torch.softmax(scores, -1).mul_(scales[values])
            out[heads] = torch.bmm(weights, kv.codes[:, values].to(self._dtype).transpose(0, 1))

    def _attend_tiles(self, kv: Codes, queries: Tensor, out: Tensor, window: int | None) -> None:
        """Attend with the queries of a sequence's last n tokens [n, Hkv, G, D]; out [n, Hkv, G, D]."""
        num_rows, num_heads, num_keys = queries.shape[0], queries.shape[1], len(kv.codes)
        for heads in self._turns(num_keys):
            keys = self._widen(kv, heads)
            values = self._widen(kv, slice(num_heads + heads.start, num_heads + heads.stop))
            for at in range(0, num_rows, TILE_ROWS):
                tile = slice(at, min(at + TILE_ROWS, num_rows))
                high = num_keys - num_rows + tile.stop
                low = 0 if window is None else max(0, num_keys - num_rows + at - window + 1)
                found = self._attend(queries[tile, heads], keys[:, :, low:high], values[:, :, low:high], window=window)
                out[tile, heads] = found

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, *, window: int | None) -> Tensor:
        """Attend with queries [n, heads, G, D] to keys and values [heads, 1, L, D]; the last row sees the last key."""
        shape = (-1, queries.shape[2], -1, -1)
        mask = self._masks.get(queries.shape[0], keys.shape[2], window) if queries.shape[0] > 1 else None
        found = F.scaled_dot_product_attention(
            queries.permute(1, 2, 0, 3),
            keys.expand(shape),
            values.expand(shape),
            attn_mask=mask.contiguous() if mask is not None and mask.is_cuda else mask,  # CUDA reads aligned pieces
        )
        return found.permute(2, 0, 1, 3)

    def _widen(self, kv: Codes, heads: slice) -> Tensor:
        """Return values [heads, 1, L, D] of some heads in the compute dtype."""
        wide = kv.codes[:, heads].to(self._dtype) * kv.scales[:, heads].to(self._dtype).unsqueeze(-1)
        return wide.transpose(0, 1).unsqueeze(1)

    def _turns(self, num_keys: int) -> Iterator[slice]:
        """Split the kv heads so that keys and values of each piece keep to ``_WIDENED_BYTES``, or are one head's."""
        num_heads = self._config.num_kv_heads
        head_bytes = 2 * num_keys * self._config.head_dim * self._dtype.itemsize
        count = max(1, min(num_heads, _WIDENED_BYTES // head_bytes))
        for first in range(0, num_heads, count):
            yield slice(first, min(first + count, num_heads))
