"""Decide which departures of a running ring from its plan are lasting. PURE.

A machine that works on something else for a moment, or a load that comes and goes, makes steps several times as long.
Such times say nothing of another placement. Each measurement is compared with a forecast of its own load.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from edgepipe.planner.drift import Departure, Seen, departures
from edgepipe.planner.forecast import Forecast

LASTING_S = 30.0
"""How long times must differ from the plan."""
_LEAST_MEASUREMENTS = 5
_MOST_SPREAD = 1.5  # most spread of a lasting departure's ratios: more is noise
_MOST_RATIO = 8.0  # larger ratios come from another program or a fault, and say nothing of the machine's speed
_MOST_KEPT = 64  # a measurement each second


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting:
    """Departures that lasted, the largest first, and the times that show them; 0: no lasting departure."""

    departures: tuple[Departure, ...]
    seen: Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurement:
    at_s: float
    planned: Forecast
    seen: Seen
    ratios: dict[tuple[str, str], float]  # ratio of each departure, by place and quantity


class Steadiness:
    """The measurements since a ring was last as planned."""

    def __init__(self) -> None:
        self._kept: deque[_Measurement] = deque(maxlen=_MOST_KEPT)

    def clear(self) -> None:
        """Forget all measurements."""
        self._kept.clear()

    def add(self, planned: Forecast, seen: Seen, *, now_s: float) -> Lasting | None:
        """Take a measurement and the forecast of the same load. Return what has lasted, and begin anew; else None."""
        left = departures(planned, seen)
        if not left:
            self.clear()
            return None
        ratios = {(each.place, each.quantity): each.ratio for each in left}
        self._kept.append(_Measurement(at_s=now_s, planned=planned, seen=seen, ratios=ratios))
        if len(self._kept) < _LEAST_MEASUREMENTS or now_s - self._kept[0].at_s < LASTING_S:
            return None
        found = self._lasting()
        self.clear()
        return found

    def _lasting(self) -> Lasting | None:
        newest = self._kept[-1]
        mildest = {key: ratio for key in newest.ratios if (ratio := self._mildest(key))}
        if not mildest:
            return None

        def times(seen: tuple[float, ...], planned: list[float], quantity: str) -> tuple[float, ...]:
            places = [_place(quantity, index) for index in range(len(seen))]
            return tuple(mildest.get((place, quantity), 0.0) * planned[i] for i, place in enumerate(places))

        hops = newest.planned.hops
        seen = Seen(
            micro_batches=newest.seen.micro_batches,
            sequences=newest.seen.sequences,
            step_s=times(newest.seen.step_s, list(newest.planned.step_s), "step"),
            upload_s=times(newest.seen.upload_s, [hop.upload_s for hop in hops], "upload"),
            one_way_s=times(newest.seen.one_way_s, [hop.latency_s for hop in hops], "latency"),
        )
        left = departures(newest.planned, seen)
        return Lasting(departures=tuple(left), seen=seen) if left else None

    def _mildest(self, key: tuple[str, str]) -> float:
        """Return the ratio of a departure nearest to the plan; 0 if the departure did not last or wavers."""
        ratios = [each.ratios.get(key, 1.0) for each in self._kept]
        low, high = min(ratios), max(ratios)
        if low <= 0 or (low < 1 < high) or 1.0 in ratios or high / low > _MOST_SPREAD:
            return 0.0
        if high > _MOST_RATIO or low < 1 / _MOST_RATIO:
            return 0.0
        return low if low > 1 else high


def _place(quantity: str, index: int) -> str:
    return f"stage {index}" if quantity == "step" else f"link {index}-{index + 1}"
