"""The keys of the blocks and snapshots that one stage has on the device.

The engine names a key once all stages have computed its block, and ahead of every plan that writes the block again. A
plan that will write a place takes its key, as soon as it arrives. So two stages that name the same key for the same
place both hold its content, however many plans one of them is behind the other.

What comes back from host memory has the key of its copy once it is there. A sequence may compute such a block again on
the first slices only. Then the engine names it while the move still waits on a later stage. This stage takes the key
once the move has brought that very block.

Everything is in arrays over all places, so the memory is fixed. A step without new blocks costs nothing, except the
states that its rows write.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from edgepipe.backend.types import BlockRun
from edgepipe.wire.sizes import KEY_BYTES


class DeviceKeys:
    """The keys of one memory class's places."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._keys = bytearray(KEY_BYTES * num_places)
        self._used = array("q", bytes(8 * num_places))  # value of ``_now`` when it was last used; 0: it has no key
        self._all_used = np.frombuffer(self._used, np.int64)  # the same memory
        self._now = 0
        self._moving: dict[int, object] = {}  # places that a move will write, and the newest such move
        # Those of them that a later write was planned for, and the key that the engine has named since; empty: none.
        self._rewritten: dict[int, bytes] = {}

    def name(self, place: int, key: bytes) -> None:
        """Note what a place holds, unless a move has yet to write it: then ``end_move`` knows."""
        if place in self._moving:
            if place in self._rewritten:
                self._rewritten[place] = key
            return
        self._now += 1
        self._used[place] = self._now
        self._keys[KEY_BYTES * place : KEY_BYTES * (place + 1)] = key

    def write(self, place: int) -> None:
        """Note that a step will write a place."""
        self._used[place] = 0
        if place in self._moving:
            self._rewritten[place] = b""

    def write_run(self, start: int, count: int) -> None:
        """Note that steps will write consecutive blocks."""
        self._all_used[start : start + count] = 0
        for place in [each for each in self._moving if start <= each < start + count]:
            self._rewritten[place] = b""

    def begin_move(self, place: int, move: object) -> None:
        """Note that a step will copy something to a place."""
        self._used[place] = 0
        self._moving[place] = move
        self._rewritten.pop(place, None)

    def end_move(self, place: int, move: object, key: bytes) -> None:
        """Note that a move is done. It counts if nothing else will write the place, or if the engine has named its key.

        Empty ``key``: what came is not known.
        """
        if self._moving.get(place) is not move:
            return
        del self._moving[place]
        named = self._rewritten.pop(place, key)
        if key and named == key:
            self.name(place, key)

    def forget_moves(self) -> None:
        """Note that no move that has begun will be done: its place holds what is not known."""
        self._moving.clear()
        self._rewritten.clear()

    def release(self, runs: Sequence[BlockRun]) -> None:
        """Note that a sequence has left. Its last blocks count as unused for longer: they are worth nothing alone."""
        for run in reversed(runs):
            used = self._all_used[run.start : run.start + run.count]
            stamps = np.arange(self._now + run.count, self._now, -1)
            np.copyto(used, stamps, where=used > 0)
            self._now += run.count

    def held(self) -> dict[bytes, int]:
        """Return the places by key, longest unused first. Of several places with one key it returns the newest."""
        order = np.argsort(self._all_used, kind="stable")
        places = order[np.count_nonzero(self._all_used == 0) :].tolist()
        keys = bytes(self._keys)
        found: dict[bytes, int] = {}
        for place in places:
            key = keys[KEY_BYTES * place : KEY_BYTES * (place + 1)]
            found.pop(key, None)
            found[key] = place
        return found
