"""What a running ring shows against its plan, and when moving is worth it."""

from __future__ import annotations

import pytest

from edgepipe.ids import NodeId
from edgepipe.planner.cluster import Cluster
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.drift import Departure, Seen, corrected, departures
from edgepipe.planner.forecast import Forecast, Ring
from edgepipe.planner.moving import MoveCost, move_cost, worth_moving
from edgepipe.planner.placement import Placed
from edgepipe.planner.plan import plan
from edgepipe.planner.profiles import Links
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.units import parse_link
from tests.support.worlds.planner import GB, machine

SHAPE = named_shape("qwen2.5-7b")
CLUSTER = Cluster(  # one machine alone does not hold the model
    model="",
    config=SHAPE,
    machines=tuple(machine(name, "m4max", SHAPE, free_bytes=14 * GB) for name in "ab"),
    links=Links(assumed=parse_link("1gbit,1ms")),
)
DEMAND = Demand(config=SHAPE, objective=Objective.THROUGHPUT)


def placed(*counts: int) -> tuple[Placed, ...]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    ranges = [LayerRange(end - count, end) for end, count in zip(ends, counts, strict=True)]
    slices = make_slices(ranges, SHAPE.num_layers)
    return tuple(Placed(node_id=NodeId("ab"[i]), part=part) for i, part in enumerate(slices))


HALVES = placed(15, 13)


def forecast(cluster: Cluster = CLUSTER) -> Forecast:
    ring = Ring(DEMAND, HALVES, {machine.node_id: machine for machine in cluster.machines}, cluster.links)
    return ring.of(2, 16)


def seen(*, slower: float = 1.0, later_s: float = 0.0, rate: float = 1.0) -> Seen:
    """Stage b that much slower, the link with that much more latency and that much of its rate."""
    planned = forecast()
    return Seen(
        micro_batches=2,
        sequences=16,
        step_s=(planned.step_s[0], slower * planned.step_s[1]),
        upload_s=(planned.hops[0].upload_s / rate,),
        one_way_s=(planned.hops[0].latency_s + later_s,),
    )


@pytest.mark.parametrize(
    ("shown", "left"),
    [
        (seen(slower=1.1), []),
        (seen(slower=1.3), ["stage 1"]),
        (seen(slower=0.7), ["stage 1"]),
        (seen(later_s=0.0008), []),  # hosts are not steadier than that
        (seen(slower=1.3, later_s=0.02), ["link 0-1", "stage 1"]),
        (seen(rate=0.2), ["link 0-1"]),
        (Seen(micro_batches=2, sequences=16, step_s=(0, 0), upload_s=(0,), one_way_s=(0,)), []),
    ],
)
def test_times_leave_the_plan_when_they_differ_clearly(shown: Seen, left: list[str]) -> None:
    assert [departure.place for departure in departures(forecast(), shown)] == left


def test_a_time_without_a_plan_is_no_departure() -> None:
    assert Departure(place="link 0-1", planned_s=0.0, seen_s=0.003, quantity="latency").size == 0


def test_a_corrected_cluster_shows_what_the_ring_showed() -> None:
    shown = seen(slower=1.6, later_s=0.029, rate=0.25)
    again = forecast(corrected(CLUSTER, HALVES, forecast(), shown))
    assert again.step_s == pytest.approx(shown.step_s)
    assert again.hops[0].upload_s == pytest.approx(shown.upload_s[0])
    assert again.hops[0].link.shape.one_way_s == pytest.approx(0.030)
    assert departures(again, shown) == []


def test_a_slower_link_delays_every_turn_and_first_token_by_its_latency() -> None:
    def ring(latency: str) -> Ring:
        links = Links(assumed=parse_link(f"1gbit,{latency}"))
        return Ring(DEMAND, HALVES, {each.node_id: each for each in CLUSTER.machines}, links)

    near, far = ring("1ms"), ring("21ms")
    assert far.of(2, 16).turn_s - near.of(2, 16).turn_s == pytest.approx(2 * 0.020), "to the next stage and back"
    for prompt_tokens in (1, 512, 2000):
        later_s = far.prompt(prompt_tokens).first_token_s - near.prompt(prompt_tokens).first_token_s
        assert later_s == pytest.approx(2 * 0.020), "more chunks in flight hide the rest"


def test_a_machine_that_got_slower_gets_fewer_layers() -> None:
    before = plan(DEMAND, CLUSTER.machines, CLUSTER.links)
    slowed = corrected(CLUSTER, HALVES, forecast(), seen(slower=2.0))
    after = plan(DEMAND, slowed.machines, slowed.links)
    count = {stage.machine.name: len(stage.part.layers) for stage in after.stages}
    assert count["b"] < {stage.machine.name: len(stage.part.layers) for stage in before.stages}["b"]


def test_moving_costs_what_is_loaded_fetched_and_computed_again() -> None:
    rooms = {machine.node_id: machine.room for machine in CLUSTER.machines}

    def cost(after: tuple[Placed, ...], missing: int = 0) -> MoveCost:
        return move_cost(
            SHAPE,
            HALVES,
            after,
            rooms,
            fetch_bytes=lambda node_id, _slices: missing if node_id == "b" else 0,
            fetch_bytes_per_s=1e8,
            replay_s=3.0,
        )

    assert cost(HALVES).load_s == 0
    assert 5 < cost(placed(14, 14)).load_s < 15  # half of 15 GB from an SSD
    assert cost(placed(14, 14), missing=2 * GB).load_s == pytest.approx(cost(placed(14, 14)).load_s + 20)
    assert 3 < cost(HALVES).pause_s < 5
    assert cost(placed(14, 14)).pause_s > 5 + 3, "both held other layers, and nothing goes on while they load"


def test_stages_move_for_clear_gains_that_pay_soon() -> None:
    cheap, dear = MoveCost(load_s=10, pause_s=2), MoveCost(load_s=300, pause_s=60)
    assert worth_moving(0.2, cheap)
    assert not worth_moving(0.08, cheap)
    assert not worth_moving(0.15, dear)
    assert worth_moving(0.5, dear)
