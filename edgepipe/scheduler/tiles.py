"""Where a step's time jumps: kernels work on tiles of rows, so one token more can cost a whole tile.

Steps are sorted by size into groups of ``TILE`` tokens, of which the kernels' own tiles are multiples. An edge lies
between two neighbouring groups if the larger one takes clearly longer; what grows evenly with the tokens has none where
a group is a small part of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE = 16  # tokens
CLEARLY = 0.1  # longer than the group before
_ENOUGH = 4  # steps until a group is believed
_SMOOTHING = 0.1  # weight of the newest value: about the last twenty count
_MOST_GROUPS = 256  # of sizes; larger steps than that many tiles are not looked at


@dataclass(slots=True)
class _Group:
    seconds: float = 0.0  # smoothed
    count: int = 0


class TileEdges:
    """The edges of one slice's measured step times."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    def note(self, *, num_tokens: int, seconds: float) -> None:
        """One step on the device."""
        number = (num_tokens - 1) // TILE
        if 0 <= number < _MOST_GROUPS:
            group = self._groups.setdefault(number, _Group())
            group.count += 1
            group.seconds += max(_SMOOTHING, 1 / group.count) * (seconds - group.seconds)

    def edges(self) -> tuple[int, ...]:
        """Token counts above which a step takes clearly longer, ascending."""
        known = {number: group.seconds for number, group in self._groups.items() if group.count >= _ENOUGH}
        return tuple(
            number * TILE
            for number, seconds in sorted(known.items())
            if number - 1 in known and seconds > (1 + CLEARLY) * known[number - 1]
        )
