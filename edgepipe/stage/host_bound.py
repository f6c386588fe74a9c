"""PURE: how much of its host memory a stage may use while other programs need the machine's memory, too.

If a machine has less than its headroom left, its stage uses less at once: it tells its engine, whose scheduler takes
idle blocks out of places (``scheduler/host_tier.py``), and the stage gives the memory of these places back to the
system.
Room that comes back is used once it has been there for a while, so that the tier does not follow each short-lived
program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgepipe.backend.host_memory import headroom_bytes
from edgepipe.backend.types import TierMove
from edgepipe.errors import RemoteProtocolError

LOOK_S = 0.25  # between two looks at the machine's memory: some tenths of a millisecond each
GROW_S = 10.0  # room counts after this time: longer than a compiler or a browser's tab takes to use it
_CUSHION = 32  # a thirtieth of the tier less than what fits, so that a slow growth elsewhere does not count each time
_STEP = 16  # a sixteenth of the tier is worth growing by
_SCARCE = 4  # a quarter of the headroom: the machine may swap already
WHOLE = 1000  # permille
_MOST_PLACES = 256  # places in one message


class HostUse:
    """The places of a stage's host memory that hold something. Only these take memory from the machine."""

    def __init__(self, place_bytes: Sequence[int], num_places: Sequence[int]) -> None:
        """Both by memory class: see ``TierMove.number``."""
        self._place_bytes = place_bytes
        self._held = [bytearray(count) for count in num_places]
        self.total_bytes = sum(size * count for size, count in zip(place_bytes, num_places, strict=True))
        self.held_bytes = 0

    def moved(self, moves: Iterable[TierMove]) -> None:
        """Note the moves of a step."""
        for move in moves:
            if move.out:
                self.filled(move.number, move.kept)

    def filled(self, number: int, place: int) -> None:
        """Note that a place holds something."""
        held = self._held[number]
        self.held_bytes += self._place_bytes[number] * (not held[place])
        held[place] = 1

    def given_back(self, number: int, places: Iterable[int]) -> None:
        """Note that the system has the memory of places again."""
        held = self._held[number]
        for place in places:
            self.held_bytes -= self._place_bytes[number] * held[place]
            held[place] = 0


class HostBound:
    """Decides the share of a stage's host memory that may be used."""

    def __init__(self, *, tier_bytes: int) -> None:
        """``tier_bytes``: host memory of the stage below its device."""
        self._tier_bytes = max(1, tier_bytes)
        self.permille = WHOLE
        self._roomy_since_s: float | None = None  # since when there has been room for more
        self._least_room = 0  # bytes, since then

    def look(self, *, available_bytes: int, machine_bytes: int, held_bytes: int, now_s: float) -> bool:
        """Take a measurement. Return whether ``permille`` has changed.

        available_bytes  what the machine has left for all programs
        machine_bytes    memory of the machine
        held_bytes       what the tier takes of the machine's memory now
        now_s            the present time of any monotonic clock
        """
        headroom = headroom_bytes(machine_bytes)
        room = held_bytes + available_bytes - headroom
        if _SCARCE * available_bytes < headroom:  # how much more others want is not known: they wait for memory
            room = min(room, held_bytes // 2)
        before, bound = self.permille, self._tier_bytes * self.permille // WHOLE
        if room < bound:
            self._roomy_since_s = None
            self._set(room - self._tier_bytes // _CUSHION)
        elif before == WHOLE or room < min(self._tier_bytes, bound + self._tier_bytes // _STEP):
            self._roomy_since_s = None
        elif self._roomy_since_s is None:
            self._roomy_since_s, self._least_room = now_s, room
        else:
            self._least_room = min(self._least_room, room)
            if now_s - self._roomy_since_s >= GROW_S:
                self._roomy_since_s = None
                self._set(self._least_room)
        return self.permille != before

    def _set(self, num_bytes: int) -> None:
        self.permille = max(0, min(WHOLE, WHOLE * num_bytes // self._tier_bytes))


def check_places(number: int, places: Sequence[int], host_places: Sequence[int]) -> None:
    """Raise RemoteProtocolError for places to give back that a stage does not have, or too many.

    number       of the memory class
    host_places  numbers of places in host memory, by memory class
    """
    problem = ""
    if number >= len(host_places):
        problem = f"they are of memory class {number}"
    elif not 0 < len(places) <= _MOST_PLACES:
        problem = f"they are {len(places)}"
    elif max(places) >= host_places[number]:
        problem = f"host memory has {host_places[number]} places"
    if problem:
        raise RemoteProtocolError("places to give back are invalid", fact=problem)
