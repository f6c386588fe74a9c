"""The KV pool of a slice: ``[layers, slots, 2 * kv heads, D]``, a slot being one token's place in a block.

A row of a layer's pool is one token's keys then values, so that writing a token is one copy, and a run of blocks is one
view of every layer at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgepipe.backend.types import BlockCopy


class KVStorage:
    """Keys and values of a slice's layers. Blocks are physical: block b is slots ``[b * size, (b + 1) * size)``."""

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
        """Raises RuntimeError or MemoryError where torch finds no memory."""
        self.block_size = block_size
        self.spare_block = num_blocks  # that no sequence has; only pools that have one
        self._num_kv_heads = num_kv_heads
        shape = (num_layers, (num_blocks + spare_blocks) * block_size, 2 * num_kv_heads, head_dim)
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = self.pool.unbind(0)

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """kv [T, 2 * kv heads, D] into slots [T]; ``layer`` counts from the slice's first."""
        self._layers[layer].index_copy_(0, slots, kv)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every layer, in the given order."""
        for copy in copies:
            source, target = copy.source * self.block_size, copy.target * self.block_size
            self.pool[:, target : target + self.block_size].copy_(self.pool[:, source : source + self.block_size])

    def run(self, first_slot: int, end_slot: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of ``[first_slot, end_slot)``, per layer [kv heads, slots, D]: views, nothing is copied."""
        view = self.pool[:, first_slot:end_slot].transpose(1, 2)
        heads = self._num_kv_heads
        return list(view[:, :heads].unbind(0)), list(view[:, heads:].unbind(0))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of slots [L], each [kv heads, L, D], copied out of the pool."""
        rows = self._layers[layer].index_select(0, slots).transpose(0, 1)
        return rows[: self._num_kv_heads], rows[self._num_kv_heads :]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as pages [blocks, block size, kv heads, D]: views."""
        rows = self._layers[layer].view(-1, self.block_size, 2 * self._num_kv_heads, self.pool.shape[-1])
        return rows[:, :, : self._num_kv_heads], rows[:, :, self._num_kv_heads :]
