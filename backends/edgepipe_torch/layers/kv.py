"""The KV pools of a slice, one for each kind of layer: ``[layers, slots, entries, D]``.

A slot is one token position in a block. It holds one token's keys, then its values, unless these are parts of the keys.
So writing a token is one copy, and a run of blocks is one view over all layers of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from edgepipe.backend.types import BlockCopy
from edgepipe_torch.layers.head_shape import LayerHeads, by_kind
from edgepipe_torch.layers.host_copies import Stored


class KVPool(Protocol):
    """What a step needs of a slice's keys and values, in any form."""

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write kv [T, entries, D] to slots [T]; ``layer`` counts from the slice's first."""
        ...

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every layer that keeps the context, in the given order; blocks of windows are never copied."""
        ...

    def arrays(self, layer: int) -> tuple[Tensor, ...]:
        """Return a layer's arrays for compiled kernels: [slots, entries, D], of codes also their scales."""
        ...


class KVStorage:
    """Keys and values of a slice's layers. Physical block b has slots ``[b * size, (b + 1) * size)``."""

    def __init__(
        self,
        heads: Sequence[LayerHeads],
        *,
        classes: Sequence[int],
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        spare_blocks: int = 0,
    ) -> None:
        """Raises RuntimeError or MemoryError for lack of memory.

        heads       of the slice's layers
        classes     memory class of each kind of layer
        num_blocks  of each memory class
        """
        self.block_size = block_size
        self.num_blocks = num_blocks  # block n, after a class's last one, belongs to no sequence, if ``spare_blocks``
        self.device = device
        self.dtype = dtype
        self._heads = heads
        slots = [(num_blocks[each] + spare_blocks) * block_size for each in classes]
        self.pools = [
            torch.zeros(len(alike), count, alike[0].entries, alike[0].head_dim, dtype=dtype, device=device)
            for alike, count in zip(by_kind(heads), slots, strict=True)
        ]
        self._copied = [pool for pool, each in zip(self.pools, classes, strict=True) if each == 0]
        self.stored = [Stored(each, pool, 1, block_size) for pool, each in zip(self.pools, classes, strict=True)]
        self._layers = [self.pools[each.kind][each.place] for each in heads]

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write kv [T, entries, D] to slots [T]; ``layer`` counts from the slice's first."""
        self._layers[layer].index_copy_(0, slots, kv)

    def arrays(self, layer: int) -> tuple[Tensor]:
        """Return a layer's slots [slots, entries, D]."""
        return (self._layers[layer],)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every layer that keeps the context, in the given order."""
        for copy in copies:
            source, target = copy.source * self.block_size, copy.target * self.block_size
            for pool in self._copied:
                pool[:, target : target + self.block_size].copy_(pool[:, source : source + self.block_size])

    def run(self, kind: int, first_slot: int, end_slot: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return views of ``[first_slot, end_slot)`` per layer of a kind: keys [Hkv, L, D] and values [Hkv, L, V]."""
        alike = next(each for each in self._heads if each.kind == kind)
        keys, values = _parted(self.pools[kind][:, first_slot:end_slot], alike)
        return keys.transpose(1, 2).unbind(0), values.transpose(1, 2).unbind(0)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of keys [Hkv, L, D] and values [Hkv, L, V] of slots [L]."""
        keys, values = _parted(self._layers[layer].index_select(0, slots), self._heads[layer])
        return keys.transpose(0, 1), values.transpose(0, 1)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys and values as pages [blocks, block size, Hkv, D]."""
        rows = self._layers[layer]
        return _parted(rows.view(-1, self.block_size, *rows.shape[1:]), self._heads[layer])


def _parted(slots: Tensor, heads: LayerHeads) -> tuple[Tensor, Tensor]:
    """Return views of keys and values in [..., entries, D]."""
    if heads.value_width:
        return slots, slots[..., : heads.value_width]
    keys, values = slots.split(heads.num_kv_heads, dim=-2)
    return keys, values
