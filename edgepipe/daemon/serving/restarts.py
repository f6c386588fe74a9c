"""When an engine's process starts again after it ended unasked: at once, then after pauses that double.

A pause lets the cause pass (memory that another program holds, a request that crashes the engine) and bounds what a
crash loop costs. No number of crashes is final. Time in which the engine serves lowers the next pause again.

PURE: callers pass the time, in seconds on a monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Pauses before the second and before late restarts; the first comes at once.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
GOOD_S = 60.0  # time of serving that makes up for one crash
SHORT_PAUSE_S = 4.0  # a request waits so long for its engine; before a longer pause it ends with an error
MOVES_AFTER = 4  # crashes on one node; then another node of the ring has the engine

_MOST = 12.0  # crashes that count: a few more than lead to the longest pause


@dataclass(slots=True)
class Restarts:
    """The crashes of one pipeline's engine on this node."""

    crashes: float = 0.0  # crashes that still count
    next_start_s: float = float("-inf")  # earliest time of the next start
    _serving_since_s: float | None = None

    def serves(self, now_s: float) -> None:
        """Note that the engine serves; later calls in the same run change nothing."""
        if self._serving_since_s is None:
            self._serving_since_s = now_s

    def ended(self, now_s: float) -> float:
        """Note that the process ended unasked, or did not start. Return the pause before the next start."""
        self.stopped(now_s)
        pause_s = pause_after(math.ceil(self.crashes))
        self.crashes = min(self.crashes + 1, _MOST)
        self.next_start_s = now_s + pause_s
        return pause_s

    def stopped(self, now_s: float) -> None:
        """Note that the process was ended on purpose."""
        if self._serving_since_s is not None:
            self.crashes = max(0.0, self.crashes - (now_s - self._serving_since_s) / GOOD_S)
            self._serving_since_s = None

    def left_s(self, now_s: float) -> float:
        """Return how long the engine must still pause."""
        return max(0.0, self.next_start_s - now_s)

    @property
    def should_move(self) -> bool:
        """Whether the engine has crashed so often here that another node is worth a try."""
        return math.ceil(self.crashes) >= MOVES_AFTER


def pause_after(earlier_crashes: int) -> float:
    """Return the pause after a crash that so many crashes preceded."""
    if earlier_crashes < 1:
        return 0.0
    return min(FIRST_PAUSE_S * 2.0 ** (earlier_crashes - 1), LONGEST_PAUSE_S)


def next_host(own_id: str, ring: tuple[str, ...], usable: frozenset[str]) -> str | None:
    """Return the node after this one in the ring that may have the engine; None if no other may.

    Only nodes of the ring come into question: they compute these requests anyway, so no other machine learns prompts.
    """
    others = list(dict.fromkeys(ring))
    at = others.index(own_id) + 1 if own_id in others else 0
    return next((node for node in (*others[at:], *others[:at]) if node != own_id and node in usable), None)
