"""When a running ring's times justify the search for another placement: not for noise under load."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edgepipe.planner.drift import Seen
from edgepipe.planner.steadiness import Lasting, Steadiness

_PLANNED: Any = SimpleNamespace(step_s=(0.010, 0.010), hops=(SimpleNamespace(upload_s=0.004, latency_s=0.002),))


def _told(ratios: Sequence[float], *, every_s: float, sequences: Sequence[int] = (1,)) -> list[Lasting]:
    """What is told of stage 1 whose steps take these multiples of the planned time."""
    steadiness = Steadiness()
    found: list[Lasting | None] = []
    for index, ratio in enumerate(ratios):
        planned: Any = SimpleNamespace(
            step_s=tuple(each * sequences[index % len(sequences)] for each in _PLANNED.step_s), hops=_PLANNED.hops
        )
        seen = Seen(
            micro_batches=1,
            sequences=sequences[index % len(sequences)],
            step_s=(planned.step_s[0], planned.step_s[1] * ratio),
            upload_s=(0.0,),
            one_way_s=(0.0,),
        )
        found.append(steadiness.add(planned, seen, now_s=index * every_s))
    return [each for each in found if each is not None]


_CASES: dict[str, tuple[list[float], float, bool]] = {
    "as planned": ([1.0] * 40, 5.0, False),
    "a little slower": ([1.1] * 40, 5.0, False),
    "twice as slow for good": ([2.0] * 8, 5.0, True),
    "twice as fast for good": ([0.5] * 8, 5.0, True),
    "slow, within the noise of a clock": ([2.0, 2.2, 1.9, 2.1, 2.0, 2.3, 2.0, 2.1], 5.0, True),
    "slow for 20 s": ([2.0] * 5 + [1.0] * 20, 5.0, False),
    "slow, but measured three times only": ([2.0] * 3, 20.0, False),
    "from 2 to 70 times, as other programs come and go": ([2.0, 70.0, 5.0, 33.0, 2.0, 60.0, 9.0, 70.0], 5.0, False),
    "70 times for good: no speed of a machine": ([70.0] * 40, 5.0, False),
    "now faster, now slower": ([0.5, 2.0] * 20, 5.0, False),
    "planned again and again between": ([2.0, 2.0, 2.0, 1.0] * 10, 5.0, False),
}


@pytest.mark.parametrize("name", _CASES)
def test_only_a_lasting_and_steady_difference_is_told(name: str) -> None:
    ratios, every_s, wanted = _CASES[name]
    found = _told(ratios, every_s=every_s)
    assert bool(found) is wanted
    assert all(each.departures[0].place == "stage 1" for each in found)
    assert all(each.seen.step_s[0] == 0 for each in found), "the other stage is as planned"


def test_the_mildest_measurement_counts() -> None:
    (found,) = _told([2.4, 2.0, 2.8, 2.6, 2.5, 2.5, 2.4], every_s=5.0)
    assert found.departures[0].ratio == pytest.approx(2.0)


def test_each_measurement_is_compared_with_its_own_load() -> None:
    assert not _told([1.0] * 20, every_s=5.0, sequences=(1, 16, 4))
    (found,) = _told([2.0] * 8, every_s=5.0, sequences=(1, 16, 4))
    assert found.seen.sequences == 1, "the seventh measurement is 30 s behind the first"
    assert found.seen.step_s[1] == pytest.approx(2.0 * _PLANNED.step_s[1]), "its forecast is that of the same load"


def test_a_link_that_stays_late_shows_its_mildest_latency() -> None:
    steadiness = Steadiness()
    late_s = (0.030, 0.024, 0.028, 0.026, 0.024, 0.027, 0.025)
    planned: Any = SimpleNamespace(step_s=_PLANNED.step_s, hops=(SimpleNamespace(upload_s=0.004, latency_s=0.008),))
    found = [
        steadiness.add(
            planned,
            Seen(micro_batches=1, sequences=1, step_s=_PLANNED.step_s, upload_s=(0.004,), one_way_s=(one_way_s,)),
            now_s=1e6 + 5.0 * index,
        )
        for index, one_way_s in enumerate(late_s)
    ]
    assert found[:-1] == [None] * 6
    assert found[-1] is not None
    assert [(each.place, each.quantity) for each in found[-1].departures] == [("link 0-1", "latency")]
    assert found[-1].seen.one_way_s == pytest.approx((0.024,))
    assert (found[-1].seen.step_s, found[-1].seen.upload_s) == ((0.0, 0.0), (0.0,)), "all else is as planned"
