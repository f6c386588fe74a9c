"""Several pipelines on disjoint machines: which machines go together, how many pipelines, and what is refused."""

from __future__ import annotations

import re
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import NoFeasiblePlacement, PlanInvalid
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.profiles import Links, Machine
from edgepipe.planner.replicas import (
    Layout,
    _partitions,
    best_layout,
    layout_of,
    layouts_text,
    rate_of,
    shares_by_speed,
)
from edgepipe.shapes.loader import named_shape
from edgepipe.units import parse_link
from tests.support.worlds.planner import GB, machine, machines

CONFIG = named_shape("qwen2.5-7b")
CABLE = Links(assumed=parse_link("1gbit,0.3ms"))
SLOW = Links(assumed=parse_link("50mbit,8ms"))


def demand(concurrency: int, *, context: int = 1024) -> Demand:
    return Demand(
        config=CONFIG, objective=Objective.LATENCY, concurrency=concurrency, context_tokens=context, read_tokens=256
    )


def used(layout: Layout) -> list[set[str]]:
    return [{str(stage.machine.node_id) for stage in found.stages} for found in layout.plans]


def stirling(size: int, count: int) -> int:
    return sum((-1) ** k * comb(count, k) * (count - k) ** size for k in range(count + 1)) // int(
        np.prod(range(1, count + 1), dtype=np.int64)
    )


@pytest.mark.parametrize(("size", "count"), [(1, 1), (4, 1), (4, 2), (5, 3), (6, 4), (6, 6), (3, 4)])
def test_every_grouping_of_machines_is_tried_once(size: int, count: int) -> None:
    found = list(_partitions(size, count))
    assert len({frozenset(groups) for groups in found}) == len(found) == (stirling(size, count) if count <= size else 0)
    assert all(sorted(index for group in groups for index in group) == list(range(size)) for groups in found)


@pytest.mark.parametrize("seed", range(4))
def test_replicas_share_no_machine_and_hold_every_layer(seed: int) -> None:
    draw = np.random.default_rng(seed)
    keys = draw.choice(["rtx4090", "rtx3090", "m4max", "m4pro"], 4)
    able = [
        machine(name, str(key), CONFIG, free_bytes=int(draw.integers(9, 24)) * GB)
        for name, key in zip("abcd", keys, strict=True)
    ]
    for layout in best_layout(demand(int(draw.integers(1, 80))), able, CABLE):
        groups = used(layout)
        assert all(not one & other for one, other in combinations(groups, 2))
        for found in layout.plans:
            covered = [layer for stage in found.stages for layer in stage.part.layers]
            assert covered == list(range(CONFIG.num_layers))
        assert layout.tokens_per_s == pytest.approx(sum(rate_of(found) for found in layout.plans))
        assert sum(layout.shares) == pytest.approx(1)


@pytest.mark.parametrize("concurrency", [1, 64])
@pytest.mark.parametrize("links", [CABLE, SLOW])
def test_the_best_number_is_no_worse_than_any_other(concurrency: int, links: Links) -> None:
    able = machines("4x rtx4090", CONFIG)
    best, *others = best_layout(demand(concurrency), able, links)
    assert {len(each.plans) for each in (best, *others)} == ({1, 2, 3, 4} if concurrency > 1 else {1})
    for other in others:
        worth = 0.99 if len(other.plans) > len(best.plans) else 1.0
        assert best.tokens_per_s >= other.tokens_per_s * worth / 1.01


def test_slow_links_make_replicas_and_one_chat_makes_one_pipeline() -> None:
    able = machines("4x rtx4090", CONFIG)
    assert len(best_layout(demand(64), able, SLOW)[0].plans) > 1
    assert len(best_layout(demand(1), able, SLOW)[0].plans) == 1


def test_a_pair_with_a_fast_link_becomes_a_replica() -> None:
    """Two sites: a-b and c-d reach each other by cable, the sites by radio. No machine holds the model alone."""
    able = [machine(name, "rtx4090", CONFIG, free_bytes=12 * GB) for name in "abcd"]
    cable, radio = parse_link("10gbit,0.1ms"), parse_link("30mbit,10ms")
    names = [each.node_id for each in able]
    sites = {names[0]: 1, names[1]: 1, names[2]: 2, names[3]: 2}
    links = Links(measured={(a, b): cable if sites[a] == sites[b] else radio for a in names for b in names if a != b})
    layout = layout_of(demand(32), able, links, count=2)
    assert sorted(map(sorted, used(layout))) == [["a", "b"], ["c", "d"]]
    assert best_layout(demand(32), able, links)[0].tokens_per_s >= layout.tokens_per_s


def test_a_faster_replica_gets_more_of_the_chats() -> None:
    able = machines("rtx4090, m4pro", CONFIG)
    layout = layout_of(demand(40), able, CABLE, count=2)
    chats = {
        next(iter(group)): found.demand.concurrency for group, found in zip(used(layout), layout.plans, strict=True)
    }
    assert chats["a"] > chats["b"] >= 1


def refused(able: list[Machine], count: int, constraints: Constraints | None = None) -> NoFeasiblePlacement:
    with pytest.raises(NoFeasiblePlacement) as caught:
        layout_of(demand(8), able, CABLE, constraints, count=count)
    return caught.value


def test_what_does_not_fit_is_refused_with_the_number_that_does() -> None:
    three = [
        machine(name, "rtx4090", CONFIG, free_bytes=free * GB) for name, free in zip("abc", (18, 9, 9), strict=True)
    ]
    error = refused(three, 3)
    assert error.what == "3 replicas do not fit on 3 machines that can compute"
    assert "each replica needs about 15.3 GB" in error.fact
    assert "a 18.0 GB, b 9.0 GB, c 9.0 GB" in error.fact
    assert error.next_step.startswith("give --replicas 2, or")
    assert refused(three[1:], 2).next_step.startswith("leave --replicas out")
    assert "5 replicas do not fit on 3 machines" in refused(three, 5).what
    assert refused(three, 2, Constraints(num_nodes=2)).what.startswith("2 replicas do not fit")


def test_excluded_machines_are_in_no_replica_and_contradictions_are_refused() -> None:
    able = machines("3x rtx4090", CONFIG)
    layout = layout_of(demand(8), able, CABLE, Constraints(exclude=("b",)), count=2)
    assert sorted(map(sorted, used(layout))) == [["a"], ["c"]]
    for constraints in (Constraints(first="a"), Constraints(layers="a:0-27")):
        with pytest.raises(PlanInvalid, match="--replicas contradict"):
            layout_of(demand(8), able, CABLE, constraints, count=2)


def test_more_machines_than_are_tried_in_all_ways_are_grouped_as_well() -> None:
    able = [machine(chr(ord("a") + index), "rtx4090", CONFIG, free_bytes=12 * GB) for index in range(9)]
    layout = layout_of(demand(32), able, CABLE, count=4)
    groups = used(layout)
    assert len(groups) == 4
    assert all(len(group) in (2, 3) for group in groups)
    assert all(not one & other for one, other in combinations(groups, 2))


def test_the_choice_is_told_with_its_figures() -> None:
    layouts = best_layout(demand(64), machines("2x rtx4090", CONFIG), SLOW)
    text = layouts_text(layouts)
    assert re.fullmatch(r"2 replicas: \d+ tok/s by forecast \(one pipeline: \d+ tok/s\)", text)


@given(concurrency=st.integers(1, 300), rates=st.lists(st.floats(0.1, 1e4), min_size=1, max_size=8))
def test_every_chat_has_one_replica(concurrency: int, rates: list[float]) -> None:
    shares = shares_by_speed(concurrency, rates)
    assert min(shares) >= 1
    assert sum(shares) == max(concurrency, len(rates))
    for (share, rate), (other, slower) in combinations(zip(shares, rates, strict=True), 2):
        assert share >= other - 1 or rate < slower
        assert other >= share - 1 or slower < rate
