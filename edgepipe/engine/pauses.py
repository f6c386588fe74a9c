"""PURE: growing pauses before a node that ends epochs is used again. Times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgepipe.engine.settings import FREE_ENDS, EngineTimeouts
from edgepipe.ids import NodeId


@dataclass(slots=True)
class _Ends:
    """Epochs that one node ended."""

    in_a_row: int = 0  # epochs with less than ``forgiven_s`` between them
    barren: int = 0  # epochs in a row without progress
    last_s: float = float("-inf")
    until_s: float = 0.0


class Pauses:
    """Pauses by the node that ended epochs; ``None`` stands for an unknown node, and concerns every placement.

    The first recovery is immediate. After the second epoch in a row without progress the pause is 1 s, doubling to
    5 min. Epochs with progress lead to short pauses, from the fourth on.
    """

    def __init__(self, timeouts: EngineTimeouts) -> None:
        self._timeouts = timeouts
        self._ends: dict[NodeId | None, _Ends] = {}

    def ended(self, node_id: NodeId | None, now_s: float, *, further: bool, served_s: float) -> None:
        """Count an epoch that served ``served_s`` and that a node ended. ``further``: a sequence got further in it."""
        times, ends = self._timeouts, self._ends.setdefault(node_id, _Ends())
        long_ago = served_s >= times.forgiven_s
        ends.in_a_row = 1 if long_ago or now_s - ends.last_s >= times.forgiven_s else ends.in_a_row + 1
        ends.barren = 0 if further else 1 if long_ago else ends.barren + 1
        ends.last_s = now_s
        barren_s = growing(ends.barren - 1, times.barren_min_s, times.barren_max_s)
        broken_s = growing(ends.in_a_row - FREE_ENDS, times.broken_min_s, times.broken_max_s)
        ends.until_s = now_s + max(barren_s, broken_s)

    def worked(self) -> None:
        """End all rows of epochs without progress: the whole pipeline computes."""
        for ends in self._ends.values():
            ends.barren = 0

    def until_s(self, node_ids: Iterable[NodeId]) -> float:
        """Return when a placement on these nodes may be prepared; 0.0 if at once."""
        return max((self._ends[key].until_s for key in (None, *node_ids) if key in self._ends), default=0.0)

    def returned(self, node_id: NodeId, now_s: float) -> None:
        """Shorten the pause of a node that rejoined the cluster: it may be repaired."""
        if (ends := self._ends.get(node_id)) is not None:
            ends.until_s = min(ends.until_s, now_s + self._timeouts.broken_max_s)

    def forgive(self, node_ids: Iterable[NodeId | None]) -> None:
        """Take back one epoch for each entry, because a request was to blame; end these nodes' pauses."""
        for node_id in node_ids:
            if (ends := self._ends.get(node_id)) is not None:
                ends.in_a_row, ends.barren = max(0, ends.in_a_row - 1), max(0, ends.barren - 1)
                ends.until_s = 0.0


def growing(count: int, first_s: float, most_s: float) -> float:
    """Return the pause before attempt ``count``: 0 s below 1, ``first_s`` for 1, then doubling up to ``most_s``."""
    return 0.0 if count < 1 else min(first_s * 2 ** min(count - 1, 32), most_s)
