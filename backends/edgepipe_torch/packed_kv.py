"""The KV pool of a slice in 8 bits: codes ``[layers, slots, 2 * kv heads, D]`` and their scales.

A slot's head has int8 codes and one float16 scale of its own, so what a token stores depends on that token alone:
chunks of a prompt, truncation and copies of blocks leave the same codes. A value is ``code * scale``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from edgepipe.backend.types import BlockCopy

_HIGHEST_CODE = 127
_SCALE_MARGIN = 1 + 2**-11  # at least the rounding of a normal float16, so that no code exceeds the highest
_LEAST_SCALE = 2**-24  # the smallest float16: of zeros, and the rounding of scales near it


class Codes(NamedTuple):
    """KV of L tokens in one layer; keys of the kv heads come first, then values."""

    codes: Tensor  # [L, 2 * kv heads, D] int8
    scales: Tensor  # [L, 2 * kv heads] float16


class PackedKVStorage:
    """Codes of a slice's layers. Physical block b has slots ``[b * size, (b + 1) * size)``."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        """Raises RuntimeError or MemoryError for lack of memory."""
        self.block_size = block_size
        heads = (num_layers, num_blocks * block_size, 2 * num_kv_heads)
        self.codes = torch.zeros((*heads, head_dim), dtype=torch.int8, device=device)
        self.scales = torch.zeros(heads, dtype=torch.float16, device=device)
        self._layers = [Codes(*each) for each in zip(self.codes.unbind(0), self.scales.unbind(0), strict=True)]

    @property
    def num_bytes(self) -> int:
        """Memory of the pool."""
        return self.codes.nbytes + self.scales.nbytes

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write kv [T, 2 * kv heads, D] to slots [T]; ``layer`` counts from the slice's first."""
        pool, made = self._layers[layer], encode(kv)
        pool.codes.index_copy_(0, slots, made.codes)
        pool.scales.index_copy_(0, slots, made.scales)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every layer, in the given order."""
        for copy in copies:
            source, target = copy.source * self.block_size, copy.target * self.block_size
            for pool in (self.codes, self.scales):
                pool[:, target : target + self.block_size].copy_(pool[:, source : source + self.block_size])

    def run(self, layer: int, first_slot: int, end_slot: int) -> Codes:
        """Return views of ``[first_slot, end_slot)`` in a layer."""
        pool = self._layers[layer]
        return Codes(pool.codes[first_slot:end_slot], pool.scales[first_slot:end_slot])

    def gather(self, layer: int, slots: Tensor) -> Codes:
        """Return copies of slots [L] of a layer."""
        pool = self._layers[layer]
        return Codes(pool.codes.index_select(0, slots), pool.scales.index_select(0, slots))


def encode(kv: Tensor) -> Codes:
    """Round kv [T, heads, D] to codes within half a scale. A head with a NaN or an infinity gets the scale NaN."""
    highest = kv.abs().amax(-1).float()
    scales = (highest * (_SCALE_MARGIN / _HIGHEST_CODE) + _LEAST_SCALE).half()
    scales += scales - scales  # NaN where infinite
    return Codes((kv / scales.float().unsqueeze(-1)).round_().to(torch.int8), scales)
