"""Sizes at which a step's time jumps: kernels work on tiles of rows, so one more token can cost a whole tile.

``TileEdges`` groups steps by size, ``TILE`` tokens per group; kernels' own tiles are multiples of it. An edge lies
between two neighbouring groups if the larger group takes clearly longer. Time that grows evenly with the tokens has
no edge where a group is a small part of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE = 16  # tokens
CLEARLY = 0.1  # share by which a group takes longer than the group before
_ENOUGH = 4  # steps until a group counts
_SMOOTHING = 0.1  # weight of the newest value: about the last twenty count
_MOST_GROUPS = 256  # larger steps than this many tiles are ignored


@dataclass(slots=True)
class _Group:
    seconds: float = 0.0  # smoothed
    count: int = 0


class TileEdges:
    """Tile edges in one slice's measured step times."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    def note(self, *, num_tokens: int, seconds: float) -> None:
        """Record one step on the device."""
        number = (num_tokens - 1) // TILE
        if 0 <= number < _MOST_GROUPS:
            group = self._groups.setdefault(number, _Group())
            group.count += 1
            group.seconds += max(_SMOOTHING, 1 / group.count) * (seconds - group.seconds)

    def edges(self) -> tuple[int, ...]:
        """Return the token counts above which a step takes clearly longer, ascending."""
        known = {number: group.seconds for number, group in self._groups.items() if group.count >= _ENOUGH}
        return tuple(
            number * TILE
            for number, seconds in sorted(known.items())
            if number - 1 in known and seconds > (1 + CLEARLY) * known[number - 1]
        )
