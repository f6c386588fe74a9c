"""Checks that the pauses grow between epochs that the same machine ends without progress."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from edgepipe.engine.progress import EpochProgress
from edgepipe.ids import NodeId

_FIRST_S, _LONGEST_S = 1.0, 300.0


@dataclass(slots=True)
class _Row:
    """Ends of one machine without progress between them."""

    ended_s: float  # the last of them
    least_s: float = 0.0  # pause that must follow: none after the first, then 1 s, doubling


class PauseCheck:
    """Compares the time from each end to the next use of the machine with the least pause."""

    def __init__(self) -> None:
        self._rows: dict[NodeId, _Row] = {}

    def ended(self, node_id: NodeId | None, now_s: float, progress: EpochProgress, *, crashed: bool) -> None:
        """A machine ended an epoch. Crashed steps are for others to judge."""
        if progress.further or crashed or node_id is None:
            self.forget()
        elif (row := self._rows.get(node_id)) is not None:
            row.ended_s, row.least_s = now_s, max(_FIRST_S, min(2 * row.least_s, _LONGEST_S))
        else:
            self._rows[node_id] = _Row(now_s)

    def prepared(self, node_ids: Collection[NodeId], now_s: float) -> None:
        """These machines are used again."""
        for row in [row for node_id, row in self._rows.items() if node_id in node_ids]:
            pause_s = now_s - row.ended_s
            assert pause_s > row.least_s - 1e-6, f"a pause of {pause_s:.1f} s, {row.least_s:.1f} s must pass"

    def forget(self) -> None:
        """Something happened after which all machines count as new."""
        self._rows.clear()
