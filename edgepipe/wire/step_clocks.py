"""Clocks of the machines in a trace of steps (PURE)."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.wire.engines import DeviceSpan

SAME_CLOCK_S = 0.002
"""Two monotonic clocks this close are one clock: the reply's travel time explains the difference."""
_LONGEST_GAP_S = 60.0


def clock_offsets_s(spans: Sequence[tuple[DeviceSpan, ...]]) -> list[float]:
    """Estimate by how many seconds each stage's clock is ahead of the first stage's clock.

    A stage starts a step only after the previous stage has ended it, and soon after. If the clocks show a start before
    that end, or minutes later, they are different clocks: then assume that the smallest gap is zero.
    """
    offsets: list[float] = [0.0] * (len(spans[0]) if spans else 0)
    for stage in range(1, len(offsets)):
        gap_s = min(step[stage].begin_us - step[stage - 1].end_us for step in spans) * 1e-6
        foreign = not -SAME_CLOCK_S <= gap_s <= _LONGEST_GAP_S
        offsets[stage] = offsets[stage - 1] + (gap_s if foreign else 0.0)
    return offsets
