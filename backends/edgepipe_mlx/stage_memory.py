"""The KV pools and states of a stage's layers, and their copies in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from edgepipe.backend.types import BlockCopy, TierMove
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe.spec.memory_classes import stage_classes
from edgepipe_mlx.host_copies import HostCopies, MovedLayer
from edgepipe_mlx.kv import KVPool, KVStorage
from edgepipe_mlx.latent_kv import latent_pool
from edgepipe_mlx.packed_kv import packed_pool
from edgepipe_mlx.states import LayerStates


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Sizes that ``Backend.allocate_kv`` was called with; all 0: it was not called."""

    num_blocks: int = 0
    block_size: int = 0
    window_blocks: tuple[int, ...] = ()
    state_slots: int = 0


class StageMemory:
    """A pool for each layer with a mixer."""

    def __init__(
        self, config: ModelConfig, parts: Sequence[Slice], sizes: PoolSizes, *, dtype: mx.Dtype, kv: str
    ) -> None:
        """``kv``: form of the KV; empty: values in ``dtype``. Raises what MLX raises for lack of memory."""
        self._parts = parts
        self._sizes = sizes
        self._dtype = dtype
        self._kv = kv
        classes = stage_classes(config, parts, num_blocks=sizes.num_blocks, window_blocks=sizes.window_blocks)
        self._class_of = {layer: n for n, (_, own) in enumerate(classes) for part in own for layer in part.layers}
        self._pools: dict[int, list[KVPool | LayerStates | None]] = {
            part.index: [
                self._make_pool(config.layers[layer], num_blocks=classes[self._class_of[layer]][0])
                for layer in part.layers
            ]
            for part in parts
        }
        self._host: HostCopies | None = None

    def add_host(self, places: Sequence[int]) -> None:
        """Allocate host memory below the pools. ``places``: see ``Backend.allocate_kv``. Raises MemoryError."""
        self._host = HostCopies(list(self._moved_layers()), places, self._sizes.block_size)

    @property
    def host(self) -> HostCopies | None:
        """The copies in host memory; None: the stage has no host memory."""
        return self._host

    def pools(self, slice_index: int) -> list[KVPool | LayerStates | None]:
        """Return a slice's pools by layer; None for a layer without a mixer."""
        return self._pools[slice_index]

    def class_of(self, layer: int) -> int:
        """Return the memory class of a layer, which has an index in the model."""
        return self._class_of[layer]

    def last_pool(self, slice_index: int) -> KVPool:
        """Return the pool of a slice's last layer, which has attention."""
        pool = self._pools[slice_index][-1]
        assert pool is not None
        assert not isinstance(pool, LayerStates)
        return pool

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every layer of the stage, because only its first slice of a step has the copies."""
        if copies:
            for layer, pool in self._layer_pools():
                if self._class_of[layer] or pool is None or isinstance(pool, LayerStates):
                    continue  # blocks of windows are shared, never copied
                pool.copy(copies)

    def move(self, moves: Sequence[TierMove]) -> None:
        """Perform the moves between the device and host memory."""
        if self._host is not None:
            self._host.move(moves)

    def close(self) -> None:
        """Free host memory."""
        if self._host is not None:
            self._host.close()

    def _layer_pools(self) -> Iterator[tuple[int, KVPool | LayerStates | None]]:
        """Yield each layer's index in the model and its pool."""
        for part in self._parts:
            yield from zip(part.layers, self._pools[part.index], strict=True)

    def _moved_layers(self) -> Iterator[MovedLayer]:
        """Yield the pools of the stage's layers, with their memory classes."""
        for layer, pool in self._layer_pools():
            if pool is not None:
                is_state = isinstance(pool, LayerStates)
                yield MovedLayer(1 + len(self._sizes.window_blocks) if is_state else self._class_of[layer], pool)

    def _make_pool(self, layer: LayerSpec, *, num_blocks: int) -> KVPool | LayerStates | None:
        """Make a layer's KV pool or slots; None for a layer without a mixer."""
        block_size = self._sizes.block_size
        if layer.recurrent is not None:
            return LayerStates(layer.recurrent, self._sizes.state_slots)
        if (spec := layer.attention) is None:
            return None
        if spec.latent is not None:
            return latent_pool(spec, num_blocks=num_blocks, block_size=block_size, dtype=self._dtype, form=self._kv)
        make = partial(packed_pool, form=self._kv) if self._kv else KVStorage
        return make(
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self._dtype,
        )
