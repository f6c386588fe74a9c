"""Blocks of KV and slots of states in host memory, below the device. See ``docs/adr/kv-tiers.md``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from edgepipe.backend.types import TierMove


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
        for each in stored:
            shape = list(each.tensor.shape)
            shape[each.axis] = each.size
            host = torch.empty((host_places[each.number], *shape), dtype=each.tensor.dtype)
            self._stored.setdefault(each.number, []).append((each, host))

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
