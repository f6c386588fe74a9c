"""Searches against trying everything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgepipe.planner.partition import ExactSearch, Partition, evaluate
from edgepipe.planner.partition_many import ManySearch
from tests.support.worlds.brute_force import brute_force
from tests.support.worlds.planner import random_instance


def cycle_s(partition: Partition | None) -> float:
    return partition.cycle_s if partition is not None else float("inf")


@pytest.mark.parametrize("seed", range(40))
def test_the_exact_search_finds_what_trying_everything_finds(seed: int) -> None:
    generator = np.random.default_rng(seed)
    devices, layers = int(generator.integers(1, 5)), int(generator.integers(1, 8))
    problem = random_instance(generator, devices=devices, layers=layers, alike=seed % 2 == 0)
    found = ExactSearch(devices).best(problem)
    assert cycle_s(found) == pytest.approx(cycle_s(brute_force(problem)))
    if found is not None:
        assert evaluate(problem, found.devices, found.layers).cycle_s == found.cycle_s == found.bound_s


@pytest.mark.parametrize("seed", range(40))
def test_the_search_for_many_devices_is_exact_over_equal_links_and_bounds_the_rest(seed: int) -> None:
    generator = np.random.default_rng(100 + seed)
    devices, layers = int(generator.integers(1, 5)), int(generator.integers(1, 8))
    problem = random_instance(generator, devices=devices, layers=layers, alike=seed % 2 == 0)
    found, best = ManySearch(devices).best(problem), cycle_s(brute_force(problem))
    if seed % 2 == 0:
        assert cycle_s(found) == pytest.approx(best)
    elif found is not None:
        assert found.bound_s <= best * (1 + 1e-9)
        assert best <= found.cycle_s * (1 + 1e-9)


@pytest.mark.parametrize("kind", [ExactSearch, ManySearch])
@pytest.mark.parametrize("seed", range(20))
def test_wishes_are_kept(kind: type[ExactSearch] | type[ManySearch], seed: int) -> None:
    generator = np.random.default_rng(200 + seed)
    problem = random_instance(generator, devices=5, layers=9, alike=True)
    problem.most_layers[:] = 9
    found = kind(5, count=3, first=2, must=(4,)).best(problem)
    assert found is not None
    assert len(found.devices) == 3
    assert found.devices[0] == 2
    assert 4 in found.devices
    assert sum(found.layers) == 9
    free = kind(5).best(problem)
    assert free is not None
    assert free.cycle_s <= found.cycle_s * (1 + 1e-9)
    assert kind(5).best(problem, below_s=free.cycle_s * 0.999) is None


def test_a_model_that_does_not_fit_has_no_share() -> None:
    problem = random_instance(np.random.default_rng(0), devices=3, layers=9, alike=True)
    problem.most_layers[:] = 2
    assert ExactSearch(3).best(problem) is None
    assert ManySearch(3).best(problem) is None


def test_sixteen_devices_in_a_way_that_no_turn_round_shortens() -> None:
    generator = np.random.default_rng(7)
    problem = random_instance(generator, devices=16, layers=126, alike=False, micro_batches=4)
    problem.most_layers[:] = 12  # at least eleven are needed
    found = ManySearch(16).best(problem)
    assert found is not None
    assert len(set(found.devices)) == len(found.devices) >= 11
    assert found.bound_s <= found.cycle_s
    for start in range(1, len(found.devices) - 2):
        order, layers = list(found.devices), list(found.layers)
        order[start : start + 2], layers[start : start + 2] = (
            order[start + 1 : start - 1 : -1],
            layers[start + 1 : start - 1 : -1],
        )
        assert evaluate(problem, order, layers).turn_s >= found.turn_s * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_the_ten_best_of_many_devices_give_a_ring_at_least_as_fast(seed: int) -> None:
    """Two devices more than the exact search takes are useless, so it finds the best ring of all."""
    generator = np.random.default_rng(300 + seed)
    problem = random_instance(generator, devices=12, layers=24, alike=False)
    problem.most_layers[:10] = 24
    slow = generator.permutation(12)[:2]
    problem.base_s[slow] = 1e3
    rest = [device for device in range(12) if device not in slow]
    small = replace(
        problem,
        **{name: getattr(problem, name)[rest] for name in ("base_s", "layer_s", "head_s", "most_layers")},
        **{name: getattr(problem, name)[np.ix_(rest, rest)] for name in ("upload_s", "latency_s", "closing_s")},
    )
    found, best = ManySearch(12).best(problem), ExactSearch(10).best(small)
    assert found is not None
    assert best is not None
    assert found.cycle_s <= best.cycle_s * 1.01
    assert found.bound_s <= best.cycle_s * (1 + 1e-9)
    assert evaluate(problem, found.devices, found.layers).cycle_s == pytest.approx(found.cycle_s)


@pytest.mark.parametrize("seed", range(6))
def test_wishes_are_kept_among_the_ten_best_of_many_devices(seed: int) -> None:
    generator = np.random.default_rng(400 + seed)
    problem = random_instance(generator, devices=13, layers=20, alike=False)
    problem.most_layers[:] = 20
    problem.layer_s[11] = 9.0  # it is none of the ten best
    found = ManySearch(13, count=4, first=11, must=(3,)).best(problem)
    assert found is not None
    assert len(found.devices) == 4
    assert found.devices[0] == 11
    assert 3 in found.devices
    assert sum(found.layers) == 20
    assert ManySearch(13, count=4, first=11, must=(3,)).best(problem, below_s=found.cycle_s) is None
    free = ManySearch(13).best(problem)
    assert free is not None
    assert free.cycle_s <= found.cycle_s * 1.01
