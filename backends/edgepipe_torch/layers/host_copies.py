"""Blocks of KV and slots of states in host memory, below the device. See ``docs/adr/kv-tiers.md``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from edgepipe.backend.types import TierMove
from edgepipe_torch.layers.given_memory import GivenMemory


class Stored(NamedTuple):
    """A tensor of the device whose parts move."""

    number: int  # memory class, see ``TierMove``
    tensor: Tensor
    axis: int  # along which blocks or slots follow one another
    size: int  # entries of that axis in a block or a slot


class HostCopies:
    """Memory for parts of ``stored``: each place holds one block or slot of a tensor, in one piece."""

    def __init__(self, stored: Sequence[Stored], host_places: Sequence[int]) -> None:
        """``host_places``: see ``Backend.allocate_kv``. Raises RuntimeError or MemoryError for lack of memory."""
        self._stored: dict[int, list[tuple[Stored, Tensor]]] = {}
        self._memory: dict[int, list[GivenMemory]] = {}
        self._num_classes = len(host_places)
        for each in stored:
            shape = list(each.tensor.shape)
            shape[each.axis] = each.size
            memory = GivenMemory(host_places[each.number], math.prod(shape) * each.tensor.dtype.itemsize)
            host = memory.tensor.view(each.tensor.dtype).view(host_places[each.number], *shape)
            self._stored.setdefault(each.number, []).append((each, host))
            self._memory.setdefault(each.number, []).append(memory)

    def place_bytes(self) -> list[int]:
        """Return the bytes of a place, by memory class."""
        return [sum(each.piece_bytes for each in self._memory.get(number, ())) for number in range(self._num_classes)]

    def give_back(self, number: int, places: Sequence[int]) -> None:
        """See ``HostMemoryBackend``."""
        for memory in self._memory.get(number, ()):
            memory.give_back(places)

    def place(self, number: int, kept: int) -> list[memoryview]:
        """Return the bytes of a place, see ``DiskBackend.host_place``."""
        hosts = [host for _, host in self._stored.get(number, ())]
        return [host[kept].reshape(-1).view(torch.uint8).numpy().data for host in hosts]

    def move(self, moves: Sequence[TierMove]) -> None:
        """Perform the moves, one after another."""
        for move in moves:
            for each, host in self._stored.get(move.number, ()):
                part = each.tensor.narrow(each.axis, move.place * each.size, each.size)
                if move.out:
                    host[move.kept].copy_(part)
                else:
                    part.copy_(host[move.kept])
