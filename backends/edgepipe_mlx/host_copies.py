"""Blocks of KV and slots of states in host memory: bytes without MLX's objects, which any thread may read and write.

Apple's GPU shares the host's memory. The bytes lie apart from MLX's arrays nevertheless: a disk's thread reads and
writes them, and the system gets them back place by place. See ``docs/adr/kv-tiers.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from edgepipe.backend.host_places import HostPlaces
from edgepipe.backend.types import TierMove
from edgepipe_mlx.kv import KVPool, restore_block, stored_block
from edgepipe_mlx.states import LayerStates

_ALIGNED_BYTES = 64  # alignment of an array's part of a place: no type needs more


class MovedLayer(NamedTuple):
    """A layer's pool, whose blocks or slots move."""

    number: int  # memory class, see ``TierMove``
    pool: KVPool | LayerStates


@dataclass(frozen=True, slots=True)
class _Part:
    """An array's part of a place."""

    begin: int  # bytes
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    def write(self, place: memoryview, array: mx.array) -> None:
        """Copy an evaluated array into a place."""
        place[self.begin : self.begin + self.num_bytes] = np.asarray(array.view(mx.uint8)).reshape(-1).data

    def read(self, place: memoryview) -> mx.array:
        """Return a copy of what ``write`` wrote."""
        *outer, last = self.shape
        found = np.frombuffer(place, np.uint8, self.num_bytes, self.begin)
        return mx.array(found.reshape(*outer, last * self.dtype.size)).view(self.dtype)


class HostCopies:
    """Host memory for blocks and slots. A place holds one of them in all layers of its class."""

    def __init__(self, layers: Sequence[MovedLayer], host_places: Sequence[int], block_size: int) -> None:
        """``host_places``: see ``Backend.allocate_kv``. Raises MemoryError."""
        self._block_size = block_size
        self._layers: dict[int, list[tuple[KVPool | LayerStates, tuple[_Part, ...]]]] = {}
        self._sizes = [0] * len(host_places)
        for number, pool in layers:
            parts: list[_Part] = []
            for array in self._of_device(pool, 0):
                parts.append(_Part(self._sizes[number], tuple(array.shape), array.dtype))
                self._sizes[number] += -(-parts[-1].num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
            self._layers.setdefault(number, []).append((pool, tuple(parts)))
        self._places = HostPlaces(self._sizes, host_places)

    def place_bytes(self) -> list[int]:
        """Return the bytes of a place, by memory class."""
        return list(self._sizes)

    def place(self, number: int, kept: int) -> list[memoryview]:
        """Return the bytes of a place, see ``DiskBackend.host_place``."""
        return [self._places.place(number, kept)]

    def give_back(self, number: int, places: Sequence[int]) -> None:
        """See ``HostMemoryBackend``."""
        self._places.give_back(number, places)

    def move(self, moves: Sequence[TierMove]) -> None:
        """Perform the moves, one after another. The step evaluates updates of KV pools."""
        for move in moves:
            place, layers = self._places.place(move.number, move.kept), self._layers.get(move.number, ())
            if move.out:
                copied = [self._of_device(pool, move.place) for pool, _ in layers]
                mx.eval(copied)
                for (_, parts), arrays in zip(layers, copied, strict=True):
                    for part, array in zip(parts, arrays, strict=True):
                        part.write(place, array)
                continue
            for pool, parts in layers:
                arrays = tuple(part.read(place) for part in parts)
                if isinstance(pool, LayerStates):
                    mx.eval(pool.write([move.place], arrays))
                else:
                    restore_block(pool, move.place, self._block_size, arrays)

    def close(self) -> None:
        """Free what was given back."""
        self._places.close()

    def _of_device(self, pool: KVPool | LayerStates, place: int) -> tuple[mx.array, ...]:
        """Return a block of a KV pool, or a slot's state."""
        if isinstance(pool, LayerStates):
            return tuple(mx.contiguous(each) for each in pool.read([place]))
        return stored_block(pool, place, self._block_size)
