"""PURE: how much of their host memory an epoch's stages may use. The stage with the least room sets it for all."""

from __future__ import annotations

from edgepipe.units import format_bytes
from edgepipe.wire.tiers import HostRoom

_WHOLE = 1000  # permille


class HostRooms:
    """Collects what the stages say about other programs' use of their machines' memory."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._rooms: dict[int, tuple[str, HostRoom]] = {}  # node's name and newest report of each stage

    def note(self, stage: int, node_name: str, room: HostRoom) -> int | None:
        """Add a stage's report. Return the share of host memory that may be used, in permille.

        None until all stages have reported, unless it is a smaller share: an epoch begins with that of the one before.
        """
        self._rooms[stage] = node_name, room
        least = min(room.permille for _, room in self._rooms.values())
        return least if least < _WHOLE or len(self._rooms) == self._num_stages else None

    @property
    def problem(self) -> str:
        """What bounds host memory, for people; empty if nothing does."""
        name, room = min(self._rooms.values(), key=lambda each: each[1].permille, default=("", None))
        if room is None or room.permille >= _WHOLE:
            return ""
        return f"{name} has {format_bytes(room.available_bytes)} left for all programs"
