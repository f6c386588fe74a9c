"""Published bubbles and what a run of a schedule shows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from edgepipe.errors import ConfigInvalid
from edgepipe.simulation.schedules import SCHEDULES, DecodeRing, cyclic_decode, published, run_schedule


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "slices", "percent"),
    [
        ("naive", 8, 32, 1, 87.5),
        ("gpipe", 4, 4, 1, 42.9),
        ("gpipe", 32, 128, 1, 19.5),
        ("1f1b", 8, 32, 1, 17.9),
        ("interleaved", 8, 32, 2, 10.9),
        ("interleaved", 8, 32, 16, 1.4),
        ("dualpipe", 8, 32, 1, 10.9),
    ],
)
def test_published_bubbles(schedule: str, stages: int, micro_batches: int, slices: int, percent: float) -> None:
    found = published(schedule, stages=stages, micro_batches=micro_batches, slices=slices)
    assert 100 * found.bubble == pytest.approx(percent, abs=0.051)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 2), (4, 8), (8, 4), (5, 13)])
def test_a_run_shows_the_published_bubble_where_it_is_one_of_the_whole(stages: int, micro_batches: int) -> None:
    for schedule in ("naive", "gpipe", "1f1b"):
        expected = published(schedule, stages=stages, micro_batches=micro_batches)
        found = run_schedule(schedule, stages=stages, micro_batches=micro_batches)
        assert found.idle == pytest.approx(expected.bubble)
        assert found.peak_activations == min(expected.peak_activations, micro_batches)


@pytest.mark.parametrize("slices", [2, 4])
def test_interleaving_idles_for_less_of_the_whole_than_published(slices: int) -> None:
    bubble = published("interleaved", stages=4, micro_batches=8, slices=slices).bubble
    found = run_schedule("interleaved", stages=4, micro_batches=8, slices=slices)
    assert found.idle == pytest.approx(bubble / (1 + bubble))


def test_interleaving_needs_whole_groups() -> None:
    with pytest.raises(ConfigInvalid):
        run_schedule("interleaved", stages=4, micro_batches=6, slices=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_is_a_schedule(schedule: str) -> None:
    """Every pass once, none at the same time on a device, each after what it needs."""
    found = run_schedule(schedule, stages=4, micro_batches=8, slices=2)
    ends = {span.op: span.end for spans in found.devices for span in spans}
    count = 1 if schedule == "naive" else 8
    assert len(ends) == 2 * count * 4 * (2 if schedule == "interleaved" else 1)
    last = max(op.slice for op in ends)
    for spans in found.devices:
        assert all(before.end <= after.start for before, after in pairwise(spans))
        for op, start, _ in spans:
            if op.backward:
                needs = op._replace(slice=op.slice + 1) if op.slice < last else op._replace(backward=False)
            else:
                needs = op._replace(slice=op.slice - 1)
            assert ends.get(needs, 0.0) <= start + 1e-9


def test_dualpipe_idles_less_than_1f1b() -> None:
    both = (run_schedule(name, stages=8, micro_batches=32).idle for name in ("dualpipe", "1f1b"))
    assert next(both) < next(both)


def test_decoding_has_no_bubble_once_the_ring_is_full_and_pays_for_more() -> None:
    ring = DecodeRing(stages=4, weights=0.8, hop=0.1)
    free = [cyclic_decode(ring, micro_batches=count, kv_bound=False) for count in range(1, 13)]
    assert free[0].idle == pytest.approx(1 - 1 / 4.4)
    assert free[4].idle == pytest.approx(0)
    assert free[11].rate == pytest.approx(free[4].rate)
    bound = [cyclic_decode(ring, micro_batches=count, kv_bound=True) for count in range(1, 13)]
    assert bound[4].rate > bound[11].rate  # each further micro-batch reads the weights again
    assert bound[4].rate > bound[0].rate


def test_unknown_schedules_are_named() -> None:
    with pytest.raises(ConfigInvalid, match="zigzag"):
        published("zigzag", stages=2, micro_batches=2)
