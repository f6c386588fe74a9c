"""Blocks of KV and slots of states in host memory, below the device. See ``docs/adr/kv-tiers.md``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from edgepipe.backend.host_places import HostPlaces, Pins
from edgepipe.backend.step_layout import RowLayout, StepLayout
from edgepipe.backend.types import TierMove

_ALIGNED_BYTES = 64  # alignment of a tensor's part of a place: no type needs more


class Stored(NamedTuple):
    """A tensor of the device whose parts move."""

    number: int  # memory class, see ``TierMove``
    tensor: Tensor
    axis: int  # along which blocks or slots follow one another
    size: int  # entries of that axis in a block or a slot


class Mark(Protocol):
    """A moment on a device."""

    def synchronize(self) -> None:
        """Wait for it."""


class Mover(Protocol):
    """How a device copies to host memory and back."""

    pins: Pins | None  # None: its copies gain nothing from pinned memory

    def copying(self, *, at_once: bool, beside: bool) -> AbstractContextManager[None]:
        """Run copies before what is submitted afterwards.

        at_once  they need not wait for submitted steps
        beside   the next step need not wait for them
        """
        ...

    def end_beside(self) -> None:
        """Let what is submitted afterwards wait for all copies."""

    def mark(self) -> Mark | None:
        """Return what to wait for until the newest copies have ended; None if their step waits for them."""

    def wait(self) -> None:
        """Wait for all copies."""


class HostMover(Mover):
    """Copies within the host's memory."""

    pins = None

    def copying(self, *, at_once: bool, beside: bool) -> AbstractContextManager[None]:
        """See ``Mover``."""
        return nullcontext()


class HostCopies:
    """Memory for parts of ``stored``: a place holds one block or slot of all tensors of a class, in one piece."""

    def __init__(self, stored: Sequence[Stored], host_places: Sequence[int], mover: Mover) -> None:
        """``host_places``: see ``Backend.allocate_kv``. Raises RuntimeError or MemoryError for lack of memory."""
        shapes = [_part_shape(each) for each in stored]
        sizes, begins = [0] * len(host_places), list[int]()
        for each, shape in zip(stored, shapes, strict=True):
            begins.append(sizes[each.number])
            num_bytes = math.prod(shape) * each.tensor.dtype.itemsize
            sizes[each.number] += -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._mover = mover
        self._sizes = sizes
        self._places = HostPlaces(sizes, host_places, mover.pins)
        self._stored: dict[int, list[tuple[Stored, Tensor]]] = {}
        for each, shape, begin in zip(stored, shapes, begins, strict=True):
            if not (count := host_places[each.number]):
                continue
            stride, dtype = self._places.strides[each.number], each.tensor.dtype
            whole = torch.frombuffer(self._places.memory(each.number), dtype=torch.uint8, count=count * stride)
            part = whole.view(count, stride)[:, begin : begin + math.prod(shape) * dtype.itemsize]
            self._stored.setdefault(each.number, []).append((each, part.view(dtype).unflatten(1, shape)))

    def place_bytes(self) -> list[int]:
        """Return the bytes of a place, by memory class."""
        return list(self._sizes)

    def give_back(self, number: int, places: Sequence[int]) -> None:
        """See ``HostMemoryBackend``."""
        self._places.give_back(number, places)

    def place(self, number: int, kept: int) -> list[memoryview]:
        """Return the bytes of a place, see ``DiskBackend.host_place``."""
        return [self._places.place(number, kept)]

    def move(
        self, moves: Sequence[TierMove], running: Iterable[StepLayout], *, step: StepLayout | None = None
    ) -> Mark | None:
        """Perform a step's moves, one after another. The step waits for those up to the last one that it uses.

        running  submitted steps that may still compute
        step     None: it waits for all

        Returns what to wait for before the step counts as done; None if it waits itself.
        """
        self._mover.end_beside()
        if not moves:
            return None
        at_once = not any(uses_moved(other, moves) for other in running)
        awaited = len(moves) if step is None else num_awaited(step, moves)
        if awaited:
            self._copy(moves[:awaited], at_once=at_once, beside=False)
        if awaited < len(moves):
            self._copy(moves[awaited:], at_once=at_once or awaited > 0, beside=True)
        return self._mover.mark()

    def _copy(self, moves: Sequence[TierMove], *, at_once: bool, beside: bool) -> None:
        with self._mover.copying(at_once=at_once, beside=beside):
            for move in moves:
                pinned = self._places.prepare(move.number, move.kept)
                for each, host in self._stored.get(move.number, ()):
                    part = each.tensor.narrow(each.axis, move.place * each.size, each.size)
                    if move.out:
                        host[move.kept].copy_(part, non_blocking=pinned)
                    else:
                        part.copy_(host[move.kept], non_blocking=pinned)

    def close(self) -> None:
        """Wait for copies, and unpin the memory."""
        self._mover.wait()
        self._places.close()


def uses_moved(step: StepLayout, moves: Sequence[TierMove]) -> bool:
    """Return whether a step reads or writes a block or slot of the device that moves read or write."""
    return num_awaited(step, moves) > 0


def num_awaited(step: StepLayout, moves: Sequence[TierMove]) -> int:
    """Count the moves up to the last one of a block or slot that the step uses."""
    used = _used(step)
    places = [
        np.array([move.place for move in moves if move.number == number], np.int64) for number in range(len(used))
    ]
    found = [iter(np.isin(*each)) for each in zip(places, used, strict=True)]
    return max((count for count, move in enumerate(moves, 1) if next(found[move.number])), default=0)


def _used(step: StepLayout) -> list[np.ndarray]:
    """Return the places that a step uses, by memory class; last the slots of states."""
    copied = np.array([block for copy in step.copies for block in (copy.source, copy.target)], np.int64)
    tables = [
        np.concatenate([*[_blocks(row) for row in layout.rows], *([] if number else [copied])])
        for number, layout in enumerate((step, *step.windows))
    ]
    states = [row.state for row in step.rows if row.state is not None]
    read = [state.read for state in states if state.read is not None]
    return [*tables, np.array([*read, *[write.slot for state in states for write in state.writes]], np.int64)]


def _blocks(row: RowLayout) -> np.ndarray:
    """Return the blocks of a row, with those of its newest tokens' lower bits."""
    return row.blocks if row.rests is None else np.concatenate([row.blocks, row.rests.blocks])


def _part_shape(stored: Stored) -> list[int]:
    shape = list(stored.tensor.shape)
    shape[stored.axis] = stored.size
    return shape
