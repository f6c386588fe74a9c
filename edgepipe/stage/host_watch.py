"""Watches the machine's memory for a stage that keeps idle KV in host memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from edgepipe.backend.protocol import HostMemoryBackend
from edgepipe.backend.types import TierMove
from edgepipe.clock import Clock
from edgepipe.stage.host_bound import LOOK_S, HostBound, HostUse, check_places
from edgepipe.wire.tiers import DiskCopies, PlacesBack


class HostWatch:
    """One stage's host memory, from its allocation on. All methods are called on the loop."""

    def __init__(self, backend: HostMemoryBackend, *, host_places: Sequence[int], clock: Clock) -> None:
        """``host_places``: see ``Backend.allocate_kv``."""
        self._backend = backend
        self._host_places = tuple(host_places)
        self._clock = clock
        self._use = HostUse(backend.host_place_bytes(), self._host_places)
        self._bound = HostBound(tier_bytes=self._use.total_bytes)
        self.available_bytes = 0  # what the machine had left for all programs at the last look

    @property
    def permille(self) -> int:
        """Share of the places that may be used."""
        return self._bound.permille

    def look(self) -> bool:
        """Measure the machine's memory. Return whether ``permille`` has changed."""
        memory = self._backend.machine_memory()
        if memory is None:
            return False
        self.available_bytes, total = memory
        return self._bound.look(
            available_bytes=self.available_bytes,
            machine_bytes=total,
            held_bytes=self._use.held_bytes,
            now_s=self._clock.monotonic_s(),
        )

    async def run(self, changed: Callable[[], None]) -> None:
        """Look again and again, and call ``changed`` at each change, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.look():
                changed()

    def moved(self, moves: Iterable[TierMove]) -> None:
        """Note the moves of a step."""
        self._use.moved(moves)

    def copied(self, copies: DiskCopies) -> None:
        """Note copies from disk."""
        for place in copies.host_places if not copies.out else ():
            self._use.filled(copies.memory_class, place)

    def give_back(self, back: PlacesBack) -> None:
        """Give the memory of places back to the system. Raises RemoteProtocolError."""
        check_places(back.memory_class, back.places, self._host_places)
        self._backend.give_back(back.memory_class, back.places)
        self._use.given_back(back.memory_class, back.places)
