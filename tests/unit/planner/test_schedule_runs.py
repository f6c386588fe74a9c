"""Schedules side by side, and the decode ring's run against its formula."""

from __future__ import annotations

import pytest

from edgepipe.simulation.schedule_runs import Sizes, compare_schedules, read_schedules, run_decode, steady_idle
from edgepipe.simulation.schedules import SCHEDULES, DecodeRing, cyclic_decode


@pytest.mark.parametrize("kv_bound", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4, 9])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 16])
def test_a_decoding_ring_idles_as_its_formula_says(stages: int, micro_batches: int, kv_bound: bool) -> None:
    ring = DecodeRing(stages=stages, weights=0.7, hop=0.2)
    said = cyclic_decode(ring, micro_batches=micro_batches, kv_bound=kv_bound)
    run = run_decode(ring, micro_batches=micro_batches, kv_bound=kv_bound)
    assert steady_idle(run, micro_batches=micro_batches) == pytest.approx(said.idle)


def test_naive_takes_all_as_one_and_is_the_longest() -> None:
    runs = compare_schedules(SCHEDULES, Sizes(stages=4, micro_batches=8, slices=2))
    lengths = [run.length or 0.0 for run in runs]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 2 * 4 * 8
    assert runs[0].peak == runs[0].peak_published == 8


def test_names() -> None:
    assert read_schedules("1f1b, gpipe,1f1b") == ("1f1b", "gpipe")
    assert read_schedules("all") == (*SCHEDULES, "decode")
