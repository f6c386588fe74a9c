"""The KV pools of a slice in 8 bits, one for each kind of layer: codes ``[layers, slots, entries, D]``, their scales.

A slot's head has int8 codes and one float16 scale of its own, so what a token stores depends on that token alone:
chunks of a prompt, truncation and copies of blocks leave the same codes. A value is ``code * scale``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from edgepipe.backend.types import BlockCopy
from edgepipe_torch.layers.head_shape import LayerHeads, by_kind

HIGHEST_CODE = 127
SCALE_FACTOR = (1 + 2**-11) / HIGHEST_CODE  # rounding of a normal float16 is included: no code exceeds the highest
LEAST_SCALE = 2**-24  # the smallest float16: of zeros, and the rounding of scales near it


class Codes(NamedTuple):
    """KV of L tokens in one layer; see ``LayerHeads.entries``."""

    codes: Tensor  # [L, entries, D] int8
    scales: Tensor  # [L, entries] float16


class PackedKVStorage:
    """Codes of a slice's layers. Physical block b has slots ``[b * size, (b + 1) * size)``."""

    def __init__(
        self,
        heads: Sequence[LayerHeads],
        *,
        classes: Sequence[int],
        num_blocks: Sequence[int],
        block_size: int,
        device: torch.device,
    ) -> None:
        """The arguments: see ``KVStorage``. Raises RuntimeError or MemoryError for lack of memory."""
        self.block_size = block_size
        self.device = device
        self.pools = [
            _empty((len(alike), num_blocks[each] * block_size, alike[0].entries), alike[0].head_dim, device)
            for alike, each in zip(by_kind(heads), classes, strict=True)
        ]
        self._copied = [array for pool, each in zip(self.pools, classes, strict=True) if each == 0 for array in pool]
        self._layers = [Codes(*(array[each.place] for array in self.pools[each.kind])) for each in heads]

    @property
    def num_bytes(self) -> int:
        """Memory of the pools."""
        return sum(array.nbytes for pool in self.pools for array in pool)

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write kv [T, entries, D] to slots [T]; ``layer`` counts from the slice's first."""
        pool, made = self._layers[layer], encode(kv)
        pool.codes.index_copy_(0, slots, made.codes)
        pool.scales.index_copy_(0, slots, made.scales)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every layer that keeps the context, in the given order."""
        for copy in copies:
            source, target = copy.source * self.block_size, copy.target * self.block_size
            for array in self._copied:
                array[:, target : target + self.block_size].copy_(array[:, source : source + self.block_size])

    def arrays(self, layer: int) -> Codes:
        """Return a layer's slots: codes [slots, entries, D] and scales [slots, entries]."""
        return self._layers[layer]

    def run(self, layer: int, first_slot: int, end_slot: int) -> Codes:
        """Return views of ``[first_slot, end_slot)`` in a layer."""
        pool = self._layers[layer]
        return Codes(pool.codes[first_slot:end_slot], pool.scales[first_slot:end_slot])

    def gather(self, layer: int, slots: Tensor) -> Codes:
        """Return copies of slots [L] of a layer."""
        pool = self._layers[layer]
        return Codes(pool.codes.index_select(0, slots), pool.scales.index_select(0, slots))


def _empty(entries: tuple[int, int, int], head_dim: int, device: torch.device) -> Codes:
    """Return codes [layers, slots, entries, D] and scales of zeros."""
    codes = torch.zeros((*entries, head_dim), dtype=torch.int8, device=device)
    return Codes(codes, torch.zeros(entries, dtype=torch.float16, device=device))


def encode(kv: Tensor) -> Codes:
    """Round kv [T, heads, D] to codes within half a scale. A head with a NaN or an infinity gets the scale NaN."""
    highest = kv.abs().amax(-1).float()
    scales = (highest * SCALE_FACTOR + LEAST_SCALE).half()
    scales += scales - scales  # NaN where infinite
    return Codes((kv / scales.float().unsqueeze(-1)).round_().to(torch.int8), scales)
