"""The KV pool of a slice: ``[layers, slots, 2 * kv heads, D]``; a slot is one token position in a block.

A slot holds one token's keys, then its values. So writing a token is one copy, and a run of blocks is one view over all
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from edgepipe.backend.types import BlockCopy


class KVPool(Protocol):
    """What a step needs of a slice's keys and values, in any form."""

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write kv [T, 2 * kv heads, D] to slots [T]; ``layer`` counts from the slice's first."""
        ...

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every layer, in the given order."""
        ...


class KVStorage:
    """Keys and values of a slice's layers. Physical block b has slots ``[b * size, (b + 1) * size)``."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        spare_blocks: int = 0,
    ) -> None:
        """Raises RuntimeError or MemoryError for lack of memory."""
        self.block_size = block_size
        self.spare_block = num_blocks  # belongs to no sequence; only if ``spare_blocks``
        self._num_kv_heads = num_kv_heads
        shape = (num_layers, (num_blocks + spare_blocks) * block_size, 2 * num_kv_heads, head_dim)
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = self.pool.unbind(0)

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write kv [T, 2 * kv heads, D] to slots [T]; ``layer`` counts from the slice's first."""
        self._layers[layer].index_copy_(0, slots, kv)

    def layer(self, layer: int) -> Tensor:
        """Return a layer's slots [slots, 2 * kv heads, D]."""
        return self._layers[layer]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every layer, in the given order."""
        for copy in copies:
            source, target = copy.source * self.block_size, copy.target * self.block_size
            self.pool[:, target : target + self.block_size].copy_(self.pool[:, source : source + self.block_size])

    def run(self, first_slot: int, end_slot: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of keys and values of ``[first_slot, end_slot)``, per layer [kv heads, slots, D]."""
        view = self.pool[:, first_slot:end_slot].transpose(1, 2)
        heads = self._num_kv_heads
        return list(view[:, :heads].unbind(0)), list(view[:, heads:].unbind(0))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values of slots [L], each [kv heads, L, D]."""
        rows = self._layers[layer].index_select(0, slots).transpose(0, 1)
        return rows[: self._num_kv_heads], rows[self._num_kv_heads :]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys and values as pages [blocks, block size, kv heads, D]."""
        rows = self._layers[layer].view(-1, self.block_size, 2 * self._num_kv_heads, self.pool.shape[-1])
        return rows[:, :, : self._num_kv_heads], rows[:, :, self._num_kv_heads :]
