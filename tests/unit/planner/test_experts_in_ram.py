"""Plans for nodes that keep experts in host memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import named_device, parse_devices
from edgepipe.backend.expert_wait import mean_wait_s
from edgepipe.errors import ConfigInvalid, NoFeasiblePlacement
from edgepipe.planner.cluster import known_cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand
from edgepipe.planner.expert_shares import place_with_shares
from edgepipe.planner.layer_profile import LayerProfile, Point
from edgepipe.planner.placement import Need, stage_bytes
from edgepipe.planner.plan import Plan, plan
from edgepipe.planner.preview import experts_text, preview
from edgepipe.planner.profiles import MeasuredSpeed, TableSpeed
from edgepipe.planner.shortage import least_share
from edgepipe.spec.expert_places import AUTO, check_has_experts, with_ram_percent
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model

MODEL = "qwen3-30b-a3b:q8_0"  # 32 GB


def planned(devices: str, percent: int) -> Plan:
    """The plan for devices, the first of which keeps so many percent of the experts in RAM."""
    config, weights = named_model(MODEL)
    there = known_cluster(parse_devices(devices), config, link=parse_link("1gbit,0.3ms"), weights=weights)
    kind = with_ram_percent("torch-cuda", percent)
    first = there.machines[0]
    own = replace(
        first,
        room=replace(first.room, packing=kind),
        speed=TableSpeed(CostModel(config, named_device(parse_devices(devices)[0]), weights=weights, kind=kind)),
    )
    demand = Demand(config=config, weights=weights)
    return plan(demand, [own, *there.machines[1:]], there.links, explain=False)


def test_a_model_fits_a_device_that_is_too_small_for_its_experts() -> None:
    with pytest.raises(NoFeasiblePlacement):
        planned("rtx4090", 0)
    for percent in (60, 100):
        assert len(planned("rtx4090", percent).stages) == 1


def test_two_devices_beat_one_that_reads_experts_from_ram() -> None:
    assert len(planned("2x rtx4090", 0).stages) == 2
    assert planned("rtx4090", 100).tokens_per_s < planned("2x rtx4090", 0).tokens_per_s


def chosen(devices: str, wanted: str, *, ram: str = "56GB", link: str = "1gbit,0.3ms", layers: str = "") -> Plan:
    """The plan of the emulated devices with experts in RAM as wanted."""
    config, weights = named_model(MODEL)
    cluster = known_cluster(
        parse_devices(devices), config, link=parse_link(link), weights=weights, adjustments={"ram": ram}
    )
    demand = Demand(config=config, weights=weights)
    constraints = Constraints(experts_in_ram=wanted, layers=layers)
    return plan(demand, cluster.machines, cluster.links, constraints, explain=False)


def test_auto_takes_the_smallest_share_with_which_the_device_holds_the_rest() -> None:
    (stage,) = chosen("rtx4090", "auto").stages
    free, percent = stage.machine.room.free_bytes, stage.machine.room.ram_percent
    assert stage.weight_bytes + stage.kv_bytes <= free
    config, weights = named_model(MODEL)
    less = stage.machine.room.with_ram_percent(percent - 1).sizes(config, weights)
    assert less.of_slice(stage.part) + stage.kv_bytes > free
    assert stage.ram_bytes == sum(stage.machine.room.sizes(config, weights).in_ram)


def test_auto_leaves_experts_on_devices_that_are_as_fast_together() -> None:
    found = chosen("2x rtx4090", "auto")
    assert [stage.ram_bytes for stage in found.stages] == [0, 0]
    assert found.without_ram is None


def test_auto_takes_one_device_where_the_link_is_slow() -> None:
    found = chosen("2x rtx4090", "auto", link="100mbit,40ms")
    assert len(found.stages) == 1
    assert found.without_ram is not None
    assert 0 < found.without_ram.tokens_per_s < found.tokens_per_s


def test_experts_fit_the_free_ram() -> None:
    with pytest.raises(NoFeasiblePlacement, match="the model needs about") as raised:
        chosen("rtx4090", "auto", ram="5GB")
    assert "experts-in-ram" not in raised.value.next_step
    found = chosen("2x rtx4090", "100%", ram="20GB")
    assert all(stage.ram_bytes <= 20e9 for stage in found.stages)


def test_a_given_share_counts_where_the_device_is_too_small() -> None:
    (stage,) = chosen("rtx4090", "50%").stages
    assert stage.machine.room.ram_percent == 50
    assert chosen("h100", "50%").stages[0].ram_bytes == 0


@pytest.mark.parametrize("ram_gb", [10, 11, 20])
def test_auto_finds_a_share_wherever_one_fits(ram_gb: int) -> None:
    fitting: list[int] = []
    for percent in range(26, 33):
        with suppress(NoFeasiblePlacement):
            fitting += [percent] if chosen("rtx4090", f"{percent}%", ram=f"{ram_gb}GB") else []
    if fitting:
        (stage,) = chosen("rtx4090", "auto", ram=f"{ram_gb}GB").stages
        assert stage.machine.room.ram_percent in fitting
    else:
        with pytest.raises(NoFeasiblePlacement):
            chosen("rtx4090", "auto", ram=f"{ram_gb}GB")


@pytest.mark.parametrize("free_gb", [4, 12, 20, 40])
def test_the_least_share_is_the_first_with_which_the_device_holds_the_rest(free_gb: int) -> None:
    config, weights = named_model(MODEL)
    demand = Demand(config=config, weights=weights)
    (machine,) = known_cluster(parse_devices("rtx4090"), config, link=parse_link("1gbit"), weights=weights).machines
    room = replace(machine.room, free_bytes=free_gb * 10**9, ram_bytes=56 * 10**9)
    need = Need(config=config, kv_tokens=demand.least_kv_tokens, weights=weights)
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    fitting = [
        percent
        for percent in range(1, 101)
        if stage_bytes(need, room.with_ram_percent(percent), whole) <= room.free_bytes
    ]
    assert least_share(demand, [replace(machine, room=room)]) == min(fitting, default=None)
    little_ram = replace(machine, room=replace(room, ram_bytes=10**9))
    assert least_share(demand, [little_ram]) == (1 if free_gb == 40 else None)


def test_a_share_that_does_not_fit_names_one_that_does() -> None:
    (auto,) = chosen("rtx4090", "auto", ram="14GB").stages
    with pytest.raises(NoFeasiblePlacement, match="the model needs about") as few:
        chosen("rtx4090", "10%", ram="14GB")
    with pytest.raises(NoFeasiblePlacement, match="60 % of the experts do not fit the RAM") as many:
        chosen("rtx4090", "60%", ram="14GB")
    for raised in (few, many):
        assert raised.value.next_step == f"give --experts-in-ram auto, which takes {auto.machine.room.ram_percent} %"


def test_a_share_is_refused_without_experts_and_noted_without_effect() -> None:
    dense, _ = named_model("llama-3.1-8b")
    with pytest.raises(ConfigInvalid, match="mixtures of experts"):
        check_has_experts("40%", dense)
    check_has_experts(AUTO, dense)
    config, weights = named_model(MODEL)
    cluster = known_cluster(["h100"], config, link=parse_link("1gbit,0.3ms"), weights=weights)
    demand = Demand(config=config, weights=weights)
    for wanted, noted in (("40%", True), (AUTO, False)):
        shown = preview(demand, cluster, Constraints(experts_in_ram=wanted), compare=False)
        assert bool(shown.note) == noted


def test_a_placement_by_hand_gets_shares_where_they_are_needed() -> None:
    a, b = chosen("2x rtx4090", "auto", layers="a:0-43,b:44-47").stages
    assert a.ram_bytes > 0
    assert b.ram_bytes == 0
    config, weights = named_model(MODEL)
    room = chosen("rtx4090", "auto").stages[0].machine.room
    with pytest.raises(NoFeasiblePlacement, match=r"lacks 2.* of RAM for experts"):
        place_with_shares(
            Need(config=config, kv_tokens=512, weights=weights),
            [replace(room, packing="emulated", ram_bytes=10**9)],
            "a:0-47",
            "100%",
        )


def test_the_plan_says_what_it_chose_and_why() -> None:
    words = experts_text(chosen("rtx4090", "auto"))
    assert words == "30 % of the experts in RAM of a, 9.4 GB: 42.5 tok/s; without: does not fit by 9.1 GB"
    assert experts_text(chosen("2x rtx4090", "auto")) == ""


def test_a_model_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(NoFeasiblePlacement) as raised:
        chosen("rtx4090", "")
    for what in (":q4_k_m", "--experts-in-ram auto", "add a machine with 12 GB"):
        assert what in raised.value.next_step


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8), st.floats(0, 3), st.floats(0, 3), st.floats(0, 20))
def test_the_mean_wait_is_that_of_all_choices(
    count: int, in_ram: int, read: int, ram_s: float, device_s: float, beside_s: float
) -> None:
    in_ram, read = min(in_ram, count), min(read, count)
    found = mean_wait_s(read, count, in_ram, ram_s=ram_s, device_s=device_s, beside_s=beside_s)
    away = [sum(expert < in_ram for expert in drawn) for drawn in combinations(range(count), read)]
    waits = [max(0.0, some * ram_s - (read - some) * device_s - beside_s) for some in away]
    assert found == pytest.approx(sum(waits) / len(waits))


def test_places_side_by_side_take_the_longer_of_both() -> None:
    config, weights = named_model(MODEL)
    device = replace(named_device("rtx4090"), ram_bytes_per_s=50e9)
    cost = CostModel(config, device, weights=weights)
    whole = chosen("rtx4090", "50%").stages[0].part
    all_there, split = cost.slice_cost(whole), cost.with_ram_percent(50).slice_cost(whole)
    in_ram = sum(chosen("rtx4090", "50%").stages[0].machine.room.with_ram_percent(50).sizes(config, weights).in_ram)
    assert split.ram_read_s == pytest.approx(in_ram / 50e9)
    assert split.expert_read_s == pytest.approx(all_there.expert_read_s / 2)
    work = StepWork.of_rows([0] * 64, [1] * 64, logit_rows=0)
    share = split.distinct_share(64)
    longer_s = split.crossing_s + max(0.0, split.ram_read_s - split.expert_read_s) * share
    assert split.wait_s(work) == pytest.approx(longer_s, rel=0.01)
    assert split.ram_s(work) < split.step_s(work) < all_there.step_s(work) + split.wait_s(work)


def test_a_device_waits_for_nothing_that_takes_it_as_long() -> None:
    config, weights = named_model("glm-4.5-air:q4_k_m")
    fast = replace(named_device("rtx4090"), ram_bytes_per_s=1e15)
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    split = replace(CostModel(config, fast, weights=weights).with_ram_percent(10).slice_cost(whole), ram_token_s=0.0)
    row = StepWork.of_rows([0], [1], logit_rows=0)
    assert split.beside_read_s > 0
    assert split.crossing_s == pytest.approx(split.wait_s(row))
    assert CostModel(config, fast, weights=weights).slice_cost(whole).wait_s(row) == 0


def test_a_measured_layer_with_experts_in_ram_takes_its_rest_and_the_wait() -> None:
    config, weights = named_model(MODEL)
    cost = CostModel(config, named_device("rtx4090"), weights=weights)
    profile = LayerProfile(
        base_s=1e-4,
        decode=(Point(1, 2e-4), Point(16, 4e-4)),
        prefill=(Point(64, 1e-3),),
        head=(Point(1, 1e-4),),
        kv_token_s=0.0,
        decode_context=64,
    )
    speed = MeasuredSpeed(profile, cost)
    work = StepWork.of_rows([0], [1], logit_rows=0)
    before, after = speed.parts(work).layer_s, speed.with_ram_percent(50).parts(work).layer_s
    wait_s = cost.with_ram_percent(50).slice_cost(chosen("rtx4090", "50%").stages[0].part).wait_s(work) / 48
    assert after == pytest.approx([after[0]] * 48)
    assert wait_s < after[0] < before[0] + wait_s
