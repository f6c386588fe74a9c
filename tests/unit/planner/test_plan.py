"""From machines and constraints to a placement with reasons."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edgepipe.errors import LinkNotMeasured, NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.planner.cluster import known_cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.placement import Placed, place_by_plan
from edgepipe.planner.plan import Plan, describe, plan
from edgepipe.planner.profiles import Links
from edgepipe.planner.shortage import shortage_of
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.config_json import config_to_json
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model
from edgepipe.wire.serving import BrokenLink, SurveyReply
from edgepipe.wire.surveys import cluster_of
from tests.support.worlds.planner import GB, machine, machines

BIG, SMALL = named_shape("qwen2.5-32b"), named_shape("qwen2.5-7b")
LAN = Links(assumed=parse_link("1gbit,0.3ms"))


def layers(found: Plan) -> str:
    return ",".join(f"{stage.machine.name}:{stage.part.layers}" for stage in found.stages)


def names(found: Plan) -> set[str]:
    return {stage.machine.name for stage in found.stages}


def test_one_chat_takes_the_fastest_machines_that_hold_the_model() -> None:
    assert layers(plan(Demand(config=SMALL), machines("m4max, rtx4090", SMALL), LAN)) == "b:0-27"
    found = plan(Demand(config=BIG), machines("4x rtx4090, m4", BIG), LAN)
    assert len(found.stages) == 3
    assert "e" not in names(found)


def test_many_chats_take_more_machines_and_balance_their_time() -> None:
    demand = Demand(config=BIG, objective=Objective.THROUGHPUT, concurrency=64)
    found = plan(demand, machines("4x rtx4090", BIG), LAN)
    assert len(found.stages) == 4
    steps = found.many.step_s
    assert max(steps) < 1.2 * min(steps)  # a layer more or less, and the head
    for_one_chat = plan(Demand(config=BIG), machines("4x rtx4090", BIG), LAN)
    assert found.many.tokens_per_s > for_one_chat.many.tokens_per_s
    assert found.single.tokens_per_s <= for_one_chat.single.tokens_per_s


def test_every_machine_that_is_left_out_has_a_reason() -> None:
    able = [*machines("rtx4090, m4", SMALL), machine("tiny", "m4", SMALL, free_bytes=GB // 10)]
    found = plan(Demand(config=SMALL), able, LAN, Constraints(exclude=()))
    reasons = {left_out.machine.name: left_out.reason for left_out in found.left_out}
    assert reasons.keys() == {"b", "tiny"}
    assert "it would slow each token by" in reasons["b"]
    assert "cannot hold one layer" in reasons["tiny"]


def test_a_context_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    config = named_shape("qwen2.5-32b")
    able = machines("4x rtx4090", config)
    with pytest.raises(NoFeasiblePlacement) as caught:
        plan(Demand(config=config, context_tokens=131072, must_keep_tokens=131072), able, LAN)
    most = int(caught.value.next_step.split()[2])
    assert caught.value.next_step.startswith(f"give --context {most} or less")
    plan(Demand(config=config, context_tokens=most, must_keep_tokens=most), able, LAN)
    with pytest.raises(NoFeasiblePlacement):
        plan(Demand(config=config, context_tokens=most + 256, must_keep_tokens=most + 256), able, LAN)


def test_nodes_that_do_not_reach_each_other_are_no_neighbours() -> None:
    able = machines("3x rtx4090", BIG)
    a, b, c = (machine.node_id for machine in able)
    apart = replace(LAN, broken=frozenset({(a, b), (b, a)}))
    found = plan(Demand(config=BIG), able, apart, Constraints(num_nodes=3))
    assert [stage.machine.node_id for stage in found.stages][1] == c
    assert found.engine == c
    free = plan(Demand(config=BIG), able, LAN, Constraints(num_nodes=3))
    assert found.tokens_per_s == pytest.approx(free.tokens_per_s, rel=0.01)
    with pytest.raises(NoFeasiblePlacement, match="do not reach each other"):
        plan(Demand(config=SMALL), able[:2], apart, Constraints(num_nodes=2))


@pytest.mark.parametrize("objective", list(Objective))
def test_a_link_that_fails_one_way_turns_the_ring_round(objective: Objective) -> None:
    demand, able = Demand(config=SMALL, objective=objective, concurrency=8), machines("2x rtx4090", SMALL)
    two = Constraints(num_nodes=2)
    order = [stage.machine.node_id for stage in plan(demand, able, LAN, two).stages]
    fails = replace(LAN, unreached=frozenset({(order[0], order[1])}))
    found = plan(demand, able, fails, two)
    assert [stage.machine.node_id for stage in found.stages] == order[::-1]
    assert found.tokens_per_s == pytest.approx(plan(demand, able, LAN, two).tokens_per_s), "tokens go home there"
    with pytest.raises(NoFeasiblePlacement, match="do not reach each other"):
        plan(demand, able, replace(LAN, unreached=frozenset({(order[0], order[1]), (order[1], order[0])})), two)


def test_a_survey_tells_which_links_carry_nothing() -> None:
    survey = SurveyReply(
        model="tiny",
        model_config=json.dumps(config_to_json(SMALL)),
        broken=(BrokenLink(node_id=NodeId("a"), other_id=NodeId("b")),),
    )
    links = cluster_of(survey).links
    assert links.broken == {(NodeId("a"), NodeId("b"))}
    assert links.between(NodeId("a"), NodeId("b")).shape.one_way_s > 1e5


def test_a_slow_link_costs_its_machine_the_place() -> None:
    able = machines("3x rtx4090", BIG)
    wifi = parse_link("20mbit,15ms")
    links = LAN
    for other in "bc":
        links = links.with_shape(NodeId("a"), NodeId(other), wifi).with_shape(NodeId(other), NodeId("a"), wifi)
    small = plan(Demand(config=BIG, objective=Objective.THROUGHPUT), machines("3x rtx4090", BIG)[1:] + able[:1], links)
    used = [stage.machine.name for stage in small.stages]
    assert used[0] == "a" or used[-1] == "a"  # all three are needed; at an end only one slow upload is paid


@pytest.mark.parametrize(
    ("constraints", "expected"),
    [
        (Constraints(num_nodes=2), lambda found: len(found.stages) == 2),
        (Constraints(exclude=("a",)), lambda found: "a" not in names(found)),
        (Constraints(first="c"), lambda found: found.stages[0].machine.name == "c"),
        (Constraints(layers="c:0-9,a:10-27"), lambda found: layers(found) == "c:0-9,a:10-27"),
    ],
)
def test_wishes_are_kept(constraints: Constraints, expected) -> None:
    assert expected(plan(Demand(config=SMALL), machines("3x rtx4090", SMALL), LAN, constraints))


@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(exclude=("nobody",)),
        Constraints(first="a", exclude=("a",)),
        Constraints(layers="a:0-27", num_nodes=1),
        Constraints(layers="a:0-27", first="a"),
        Constraints(num_nodes=29),
    ],
)
def test_contradictory_wishes_are_refused(constraints: Constraints) -> None:
    with pytest.raises(PlanInvalid):
        plan(Demand(config=SMALL), machines("2x rtx4090", SMALL), LAN, constraints)


def test_a_link_that_nobody_measured_is_no_guess() -> None:
    with pytest.raises(LinkNotMeasured):
        plan(Demand(config=BIG), machines("3x rtx4090", BIG), Links())


def test_what_fits_nowhere_is_added_up_and_what_helps_is_named() -> None:
    able = [machine("a", "rtx4090", BIG, taken_bytes=3 * GB), *machines("m4", BIG)[:0]]
    demand = Demand(config=BIG, context_tokens=32768, must_keep_tokens=32768)
    with pytest.raises(NoFeasiblePlacement) as error:
        plan(demand, able, LAN)
    assert "missing" in error.value.fact
    short = shortage_of(demand, able)
    assert short.needed_bytes == short.weight_bytes + short.kv_bytes
    assert short.missing_bytes == short.needed_bytes - short.free_bytes
    helps = {remedy.what: remedy for remedy in short.helps}
    assert helps["close other programs on a"].gain_bytes == 3 * GB
    assert helps["--context 4096"].gain_bytes == short.kv_bytes * 7 // 8
    assert any(remedy.enough and "machine" in remedy.what for remedy in short.helps)


def test_the_largest_short_context_that_would_fit_is_named() -> None:
    able = machines("4x rtx4090", BIG)
    demand = Demand(config=BIG, context_tokens=131072, must_keep_tokens=131072)
    short = shortage_of(demand, able)
    (shorter,) = [remedy for remedy in short.helps if remedy.what.startswith("--context")]
    context = int(shorter.what.split()[-1])
    assert shorter.enough
    assert 4096 < context < 131072
    assert short.kv_bytes * (131072 - context) // 131072 >= short.missing_bytes
    assert short.kv_bytes * (131072 - context - 4096) // 131072 < short.missing_bytes
    with pytest.raises(NoFeasiblePlacement) as error:
        plan(demand, able, LAN)
    assert f"--context {context}" not in error.value.next_step, "the search names it more precisely"


def test_the_engine_is_beside_the_first_stage_unless_another_way_is_shorter() -> None:
    able = machines("3x rtx4090", BIG)
    found = plan(Demand(config=BIG), able, LAN, Constraints(layers="a:0-20,b:21-41,c:42-63"))
    assert found.engine == "a"
    slow = parse_link("1gbit,20ms")
    links = LAN.with_shape(NodeId("c"), NodeId("a"), slow)
    found = plan(Demand(config=BIG), able, links, Constraints(layers="a:0-20,b:21-41,c:42-63"))
    assert found.engine == "b"


def test_figures_of_a_placement_add_up() -> None:
    able = machines("2x rtx4090, m4max", BIG)
    found = describe(Demand(config=BIG), place_by_plan_of(able, "a:0-20,b:21-41,c:42-63"), able, LAN)
    forecast = found.single
    hops = sum(hop.upload_s + hop.latency_s for hop in forecast.hops)
    assert forecast.turn_s == pytest.approx(sum(forecast.step_s) + hops + forecast.closing_s)
    assert forecast.tokens_per_s == pytest.approx(1 / forecast.turn_s)
    assert found.many.tokens_per_s > forecast.tokens_per_s
    assert found.many.bottleneck == "stage 2"
    assert not found.measured


def place_by_plan_of(able, text: str) -> tuple[Placed, ...]:
    from edgepipe.planner.placement import Need

    rooms = [machine.room for machine in able]
    return place_by_plan(Need(config=BIG, kv_tokens=512), rooms, text)


@pytest.mark.parametrize("model", ["qwen3.6-35b-a3b:q4_k_m", "gemma-4-31b:q4_k_m", "llama-3.1-8b:q8_0"])
def test_weights_and_kv_fill_the_device_and_not_more(model: str) -> None:
    config, weights = named_model(model)
    there = known_cluster(["rtx4090"], config, link=parse_link("1gbit,0.3ms"), weights=weights)
    found = plan(Demand(config=config, weights=weights), there.machines, there.links, explain=False)
    (stage,) = found.stages
    room = stage.machine.room

    def with_kv(tokens: int) -> int:
        return stage.weight_bytes + room.kv_bytes(config, stage.part.layers, tokens)

    assert with_kv(found.kv_tokens) <= room.free_bytes < with_kv(found.kv_tokens + 1)
