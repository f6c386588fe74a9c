"""Keys of cached blocks and snapshots on the device, for the stages, which tell them to the next engine.

The pools note a key when the cache takes a block or a snapshot whose step has retired: then all stages have computed
it. The next plan, or a message of its own while no step is in flight, carries the keys to all stages in the order of
the plans. So a stage that gets a plan that writes a place again has got all keys of that place before.
"""

from __future__ import annotations

from typing import NamedTuple


class PlaceKey(NamedTuple):
    """What a place on the device holds."""

    number: int  # the memory class, see ``TierMove``
    place: int  # block or slot
    key: bytes  # see ``kv.Key``


class NewKeys:
    """Collects the new keys of one memory class."""

    def __init__(self, number: int, found: list[PlaceKey]) -> None:
        """``found``: takes the new keys of all classes, in order."""
        self._number = number
        self._found = found

    def note(self, key: bytes, place: int) -> None:
        """Note what a place holds that no step will write as long as the cache has it."""
        self._found.append(PlaceKey(self._number, place, key))
