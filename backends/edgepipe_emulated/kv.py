"""The emulated KV pool of a memory class: one uint64 per layer, block and slot. And the pool of states.

Shape letters: L the stage's layers of the class, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import BlockCopy, BlockRun, StepRow, TierMove
from edgepipe_emulated import arithmetic
from edgepipe_emulated.arithmetic import Words

Slots = slice | npt.NDArray[np.int64]
"""Slots of the pool: a slice (view) if the block table is one run, else indices."""

Layers = slice | npt.NDArray[np.int64]
"""Layers of a pool: a slice (view) if they follow one another, else indices."""


GIVEN_BACK = np.uint64(0xDEAD_BEEF_DEAD_BEEF)  # content of a place in host memory whose memory the system has


class KVStorage:
    """KV values ``[L, num_blocks * block_size]``, initially zero; the system allocates pages when they are written."""

    def __init__(self, *, num_layers: int, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._values = np.zeros((num_layers, num_blocks * block_size), dtype=np.uint64)
        self._host = np.zeros((host_blocks, num_layers, block_size), dtype=np.uint64)

    def move(self, move: TierMove) -> None:
        """Copy a block to host memory, or back."""
        if move.out:
            self._host[move.kept] = self._values[:, self._block(move.place)]
        else:
            self._values[:, self._block(move.place)] = self._host[move.kept]

    def host_place(self, kept: int) -> list[memoryview]:
        """See ``DiskBackend.host_place``."""
        return [self._host[kept].reshape(-1).view(np.uint8).data]

    @property
    def host_place_bytes(self) -> int:
        """Bytes of a place in host memory."""
        return self._values.shape[0] * self.block_size * self._host.itemsize

    def give_back(self, places: Sequence[int]) -> None:
        """Spoil places in host memory: a step that reads them afterwards gets wrong tokens."""
        self._host[list(places)] = GIVEN_BACK

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every layer, one after another."""
        for item in copies:
            self._values[:, self._block(item.target)] = self._values[:, self._block(item.source)]

    def read(self, layers: Layers, slots: Slots) -> Words:
        """Return the values ``[layers, n]`` of n slots."""
        return self._values[layers][:, slots]

    def write(self, layers: Layers, slots: npt.NDArray[np.int64], values: Words) -> None:
        """Store values ``[layers, T]`` in slots ``[T]``."""
        places = np.arange(len(self._values))[layers]
        self._values[places[:, None], slots] = values

    def _block(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)


class StateStorage:
    """States of recurrent layers, by the model's layer: one uint64 per slot."""

    def __init__(self, layers: Sequence[int], num_slots: int, host_slots: int = 0) -> None:
        self.num_slots = num_slots
        self._values = {layer: np.zeros(num_slots, np.uint64) for layer in layers}
        self._host = {layer: np.zeros(host_slots, np.uint64) for layer in layers}

    def move(self, move: TierMove) -> None:
        """Copy a slot to host memory, or back."""
        for layer, values in self._values.items():
            if move.out:
                self._host[layer][move.kept] = values[move.place]
            else:
                values[move.place] = self._host[layer][move.kept]

    def host_place(self, kept: int) -> list[memoryview]:
        """See ``DiskBackend.host_place``."""
        return [values[kept : kept + 1].view(np.uint8).data for values in self._host.values()]

    @property
    def host_place_bytes(self) -> int:
        """Bytes of a place in host memory."""
        return len(self._host) * np.uint64().itemsize

    def give_back(self, places: Sequence[int]) -> None:
        """See ``KVStorage.give_back``."""
        for values in self._host.values():
            values[list(places)] = GIVEN_BACK

    def run(self, layer: int, rows: Sequence[StepRow], values: Words) -> Words:
        """Return a layer's states ``[T]`` behind each token of the rows, and keep those that the rows name.

        values  [T] what the tokens add
        """
        pool, factors = self._values[layer], arithmetic.state_factors(layer)
        found = np.empty_like(values)
        kept: list[tuple[int, np.uint64]] = []
        first = 0
        for row in rows:
            state = row.state
            assert state is not None
            before = np.uint64(0) if state.read is None else pool[state.read]
            own = arithmetic.next_states(before, values[first : first + row.num_tokens], factors)
            found[first : first + row.num_tokens] = own
            kept += [(write.slot, own[write.after - 1]) for write in state.writes]
            first += row.num_tokens
        for slot, value in kept:
            pool[slot] = value
        return found


def table_slots(runs: Sequence[BlockRun], start: int, stop: int, block_size: int) -> npt.NDArray[np.int64]:
    """Return the slots of positions ``[start, stop)`` of a block table."""
    blocks = np.concatenate([np.arange(run.start, run.start + run.count, dtype=np.int64) for run in runs])
    positions = np.arange(start, stop, dtype=np.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


def slot_at(runs: Sequence[BlockRun], position: int, block_size: int) -> int:
    """Return the slot of one position of a block table, which must cover it."""
    index, offset = divmod(position, block_size)
    for run in runs:
        if index < run.count:
            return (run.start + index) * block_size + offset
        index -= run.count
    raise IndexError(f"position {position} is beyond the block table")


def past_slots(runs: Sequence[BlockRun], start: int, stop: int, block_size: int) -> Slots:
    """Return the slots of positions ``[start, stop)`` of a block table, as a slice if its first run covers them."""
    if stop <= runs[0].count * block_size:
        first = runs[0].start * block_size
        return slice(first + start, first + stop)
    return table_slots(runs, start, stop, block_size)
