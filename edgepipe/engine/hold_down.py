"""PURE: which nodes and directed links a recovery leaves alone for a while: they failed it lately, or come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_FIRST_S, _LONGEST_S = 30.0, 600.0  # barred after a failure, doubling
_FLAPS, _FLAPS_WITHIN_S = 3, 60.0  # lost so often within so long: it flaps


@dataclass(slots=True)
class _Record:
    barred_s: float = 0.0  # how long the last time; 0: never
    until_s: float = 0.0
    losses: deque[float] = field(default_factory=lambda: deque[float](maxlen=_FLAPS))


class HoldDown(Generic[K]):
    """Nodes, or links. Driven by whoever knows the time, in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._records: dict[K, _Record] = {}

    def failed(self, one: K, now_s: float) -> None:
        """It could not be used: barred for 30 s, then for twice as long each time it fails again soon after."""
        record = self._records.setdefault(one, _Record())
        forgiven = now_s > record.until_s + _LONGEST_S
        record.barred_s = _FIRST_S if forgiven or not record.barred_s else min(2 * record.barred_s, _LONGEST_S)
        record.until_s = now_s + record.barred_s

    def lost(self, one: K, now_s: float) -> None:
        """It was lost while it served. Once is no fault; three times within a minute is treated as a failure."""
        losses = self._records.setdefault(one, _Record()).losses
        losses.append(now_s)
        if len(losses) == _FLAPS and now_s - losses[0] <= _FLAPS_WITHIN_S:
            losses.clear()
            self.failed(one, now_s)

    def barred(self, now_s: float) -> dict[K, float]:
        """What a plan avoids where it can, and for how many seconds still."""
        return {one: record.until_s - now_s for one, record in self._records.items() if now_s < record.until_s}
