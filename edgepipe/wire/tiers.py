"""Messages about what stages keep: on the device, in host memory and on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import Epoch
from edgepipe.scheduler.place_keys import PlaceKey
from edgepipe.wire.sizes import KEY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCopies:
    """Copies of blocks or states of one memory class between host memory and the disk."""

    epoch: Epoch
    number: int  # counts from 1
    memory_class: int  # numbered like ``TierMove.number``
    out: bool  # True: to disk; False: to host memory
    host_places: tuple[int, ...]
    disk_places: tuple[int, ...]
    afresh: bool = False  # the disk rested: what it holds is worth nothing, and a stage with a problem opens a new file


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacesBack:
    """Places in host memory that nothing uses, whose memory a stage gives back to the system."""

    epoch: Epoch
    memory_class: int  # numbered like ``TierMove.number``
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPlaces:
    """What some places of one memory class in one tier hold, the longest unused first."""

    epoch: Epoch
    memory_class: int  # numbered like ``TierMove.number``
    tier: int  # see ``scheduler.host_tier.Tier``
    places: tuple[int, ...]
    keys: bytes  # KEY_BYTES for each place


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """How much of its host memory below the device a stage may use now."""

    epoch: Epoch
    permille: int  # share of the places
    available_bytes: int = 0  # memory that the machine has left for all programs; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCopied:
    """A stage's answer to ``DiskCopies``."""

    epoch: Epoch
    number: int
    failed: tuple[int, ...] = ()  # copies that were not made, by their place in the columns
    took_us: int = 0  # 0: not known
    problem: str = ""  # why the stage does not use its disk; empty: it does


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKeys:
    """What steps have left on the device, in columns."""

    epoch: Epoch
    key_class: tuple[int, ...]
    key_place: tuple[int, ...]
    keys: bytes  # KEY_BYTES for each place


def place_keys(classes: Sequence[int], places: Sequence[int], packed: bytes) -> tuple[PlaceKey, ...]:
    """Return what places on the device hold. Raises RemoteProtocolError if the columns differ in length."""
    if not len(classes) == len(places) == len(packed) / KEY_BYTES:
        raise RemoteProtocolError(
            "the engine names places on the device and other keys",
            fact=f"{len(classes)} classes, {len(places)} places, {len(packed)} bytes of keys",
        )
    return tuple(map(PlaceKey, classes, places, keys_of(packed)))


def keys_of(packed: bytes) -> Iterator[bytes]:
    """Yield the keys of blocks and snapshots that lie one behind another."""
    return (packed[begin : begin + KEY_BYTES] for begin in range(0, len(packed), KEY_BYTES))
