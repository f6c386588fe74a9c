"""Imagined changes of a cluster, what would help, and a plan as plain values."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edgepipe.backend.devices import parse_devices
from edgepipe.errors import ConfigInvalid, PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.planner.cluster import Cluster, known_cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.plan import plan
from edgepipe.planner.preview import plan_as_dict, plan_text, preview, preview_as_dict, shortage_as_dict, which_fit
from edgepipe.planner.shortage import shortage_of
from edgepipe.planner.what_if import alternatives, changed, helps
from edgepipe.shapes.loader import named_shape
from edgepipe.units import parse_link
from tests.support.worlds.planner import GB

BIG = named_shape("qwen2.5-32b")


def cluster(devices: str, link: str = "1gbit,0.3ms") -> Cluster:
    return known_cluster(parse_devices(devices), BIG, link=parse_link(link), model="qwen2.5-32b")


def names(found: Cluster) -> list[str]:
    return [machine.name for machine in found.machines]


def test_machines_come_and_go() -> None:
    found = changed(cluster("2x rtx4090"), "add m4max, remove a, add rtx4090")
    assert names(found) == ["b", "new m4max", "new rtx4090"]
    assert len({machine.node_id for machine in found.machines}) == 3


def test_links_change_everywhere_or_at_one_node() -> None:
    before = cluster("3x rtx4090")
    everywhere = changed(before, "link 2.5gbit,0.1ms").links
    assert everywhere.between(NodeId("a"), NodeId("c")).shape == parse_link("2.5gbit,0.1ms")
    assert changed(before, "link wifi").links.between(NodeId("a"), NodeId("b")).shape == parse_link("wifi")
    slower = changed(before, "link b 100mbit").links
    assert slower.between(NodeId("a"), NodeId("b")).shape.bytes_per_s == 12.5e6
    assert slower.between(NodeId("a"), NodeId("c")).shape == parse_link("1gbit,0.3ms")


def test_memory_is_what_the_machine_then_has() -> None:
    assert changed(cluster("rtx4090"), "memory a 96GB").machines[0].room.free_bytes == 96 * GB


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("buy rtx4090", ConfigInvalid),
        ("add toaster", ConfigInvalid),
        ("memory a", ConfigInvalid),
        ("link fast", ConfigInvalid),
        ("remove z", PlanInvalid),
        ("memory z 8GB", PlanInvalid),
    ],
)
def test_a_change_that_cannot_be_is_refused(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        changed(cluster("2x rtx4090"), text)


def test_a_slow_network_is_helped_by_cables_first() -> None:
    slow = cluster("4x rtx4090", link="50mbit,10ms")
    demand = Demand(config=BIG, objective=Objective.THROUGHPUT)
    base = plan(demand, slow.machines, slow.links)
    found = helps(demand, slow, base, Constraints())
    assert found[0].what.startswith("cables of")
    assert found[0].gain_over(base) > 0.5
    gains = [option.gain_over(base) for option in found]
    assert gains == sorted(gains, reverse=True)


def test_a_plan_by_hand_is_compared_with_what_would_be_done_and_helped_by_nothing() -> None:
    there = cluster("4x rtx4090")
    constraints = Constraints(layers="a:0-11,b:12-23,c:24-43,d:44-63")
    demand = Demand(config=BIG)
    base = plan(demand, there.machines, there.links, constraints)
    free = next(alternatives(demand, there, base, constraints))
    assert free.what == "without constraints"
    assert free.gain_over(base) >= 0
    assert preview(demand, there, constraints).helps == ()


def test_a_single_machine_that_cannot_hold_the_model_is_said_to() -> None:
    there = cluster("4x rtx4090")
    base = plan(Demand(config=BIG), there.machines, there.links)
    single = next(
        option for option in alternatives(Demand(config=BIG), there, base, Constraints()) if "single" in option.what
    )
    assert single.plan is None
    assert "needs" in single.why_not


def test_a_preview_is_plain_json_that_says_what_the_plan_says() -> None:
    there = cluster("4x rtx4090")
    shown = preview(Demand(config=BIG), there, Constraints())
    as_json = json.loads(json.dumps(preview_as_dict(shown)))
    assert as_json["model"] == "qwen2.5-32b"
    assert as_json["plan"] == plan_text(shown.plan)
    assert (
        sum(int(stage["layers"].split("-")[1]) - int(stage["layers"].split("-")[0]) + 1 for stage in as_json["stages"])
        == 64
    )
    assert len(as_json["links"]) == len(as_json["stages"]) - 1
    assert as_json["source"] == "estimated"
    assert as_json["what_if"] is None
    assert as_json["one_chat_tokens_per_s"] == pytest.approx(1 / as_json["token_s"], rel=0.01)
    assert all(0 <= stage["busy"] <= 1 for stage in plan_as_dict(shown.plan)["stages"])
    again = plan(Demand(config=BIG), there.machines, there.links, Constraints(layers=as_json["plan"]))
    assert again.placed == shown.plan.placed


def test_a_shortage_as_plain_values_adds_up() -> None:
    there = cluster("2x rtx4090")
    as_json = shortage_as_dict(shortage_of(Demand(config=BIG), there.machines))
    assert as_json["missing_bytes"] == as_json["needed_bytes"] - as_json["free_bytes"] > 0
    assert as_json["free_bytes"] == sum(machine["free_bytes"] for machine in as_json["machines"])
    assert any(remedy["enough"] for remedy in as_json["helps"])


def test_models_that_fit_come_first_the_largest_of_them() -> None:
    sizes = ("llama-3.3-70b", "qwen2.5-7b", "qwen2.5-14b")
    clusters = [
        (name, known_cluster(["m4max"], named_shape(name), link=parse_link("ideal")).machines) for name in sizes
    ]
    found = which_fit(clusters, cluster("m4max").links)
    assert [fit.model for fit in found] == ["qwen2.5-14b", "qwen2.5-7b", "llama-3.3-70b"]
    assert found[-1].plan is None


def test_only_memory_that_can_be_bought_is_advised() -> None:
    """A GPU's and a Mac's is what it is; a PC that computes on its CPU takes another module."""
    whole = cluster("rtx4090, m4max")
    as_cpu = [
        replace(machine, device="EPYC", room=replace(machine.room, shares_host_memory=True))
        for machine in whole.machines
    ]
    for machines, advised in ((whole.machines, False), (tuple(as_cpu), True)):
        tight = replace(whole, machines=machines)
        base = plan(Demand(config=BIG), tight.machines, tight.links)
        advice = [advice.what for advice in helps(base.demand, tight, base, Constraints())]
        assert any("8 GB more RAM in a" in what for what in advice) is advised
        assert not any("8 GB more on" in what for what in advice)


def test_a_desktop_keeps_its_share_of_every_device() -> None:
    free = {
        machine.name: machine.room.free_bytes / machine.total_bytes
        for machine in cluster("rtx4090 24GB, m4max").machines
    }
    assert free == {"a": pytest.approx(22.5 / 24), "b": pytest.approx(0.75)}
