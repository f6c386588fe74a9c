"""Plans by the bytes of packed weights; models of 16 bits are planned as before."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import named_device, parse_devices
from edgepipe.backend.types import DeviceProfile
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.ids import NodeId
from edgepipe.planner.cluster import Cluster, known_cluster
from edgepipe.planner.demand import Demand, Objective, decode_work
from edgepipe.planner.placement import Need, NodeRoom, stage_bytes
from edgepipe.planner.plan import Plan, plan
from edgepipe.planner.preview import plan_text, which_fit
from edgepipe.planner.profiles import Links, estimated_speed, slice_costs
from edgepipe.planner.shortage import shortage_of
from edgepipe.planner.what_if import changed
from edgepipe.shapes.loader import named_shape, shape_names
from edgepipe.simulation.imagined import ImaginedCluster, imagine
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.spec.kv_forms import LARGEST_BLOCK, REST_TOKENS
from edgepipe.spec.layout import is_exact, layer_parameters, slice_parameters, spec_tensors
from edgepipe.spec.memory_classes import memory_classes
from edgepipe.units import parse_link
from edgepipe.weights.mixes import mix_names, mix_table, named_model
from edgepipe.weights.resident import dtype_of
from tests.support.models.specs import first_attention

GB = 10**9
names = st.sampled_from(shape_names())
mixes = st.sampled_from(mix_names())


def cluster(model: str, devices: str, link: str = "1gbit,0.3ms") -> Cluster:
    config, weights = named_model(model)
    return known_cluster(parse_devices(devices), config, link=parse_link(link), weights=weights)


def planned(model: str, devices: str, link: str = "1gbit,0.3ms", **demand: Any) -> Plan:
    there = cluster(model, devices, link)
    wanted = Demand(config=there.config, weights=there.weights, **demand)
    return plan(wanted, there.machines, there.links, explain=False)


def room(free_bytes: int, packing: str, value_bytes: int) -> NodeRoom:
    return NodeRoom(
        node_id=NodeId("a"),
        name="a",
        free_bytes=free_bytes,
        bytes_per_weight=value_bytes,
        packing=packing,
    )


LATENCY, THROUGHPUT = Objective.LATENCY, Objective.THROUGHPUT


@pytest.mark.parametrize(
    ("model", "devices", "link", "objective", "layers", "kv_tokens", "tokens_per_s"),  # of a planner that knew no types
    [
        (
            "qwen2.5-32b",
            "4x rtx4090 24GB, m4",
            "1gbit,0.3ms",
            LATENCY,
            "a:0-20,c:21-42,b:43-63",
            5387,
            12.717597392448743,
        ),
        (
            *("qwen2.5-32b", "4x rtx4090 24GB, m4", "1gbit,0.3ms", THROUGHPUT),
            *("a:0-15,c:16-32,d:33-48,b:49-63", 81474, 193.24577161719117),
        ),
        (
            *("qwen2.5-32b", "m4max, 2x rtx4090 24GB", "2.5gbit,0.2ms", THROUGHPUT),
            *("a:0-29,c:30-47,b:48-63", 67087, 115.26778354282382),
        ),
        ("llama-3.1-8b", "rtx3090 24GB, m2pro", "1gbit,1ms", THROUGHPUT, "b:0-1,a:2-31", 68055, 456.41723198836763),
        ("qwen2.5-14b", "2x m1pro, rtx4090 24GB", "180mbit,5ms", LATENCY, "a:0-11,c:12-47", 7619, 11.58445151256035),
        ("smollm2-1.7b", "m1, m2", "ideal", THROUGHPUT, "a:0-9,b:10-23", 86491, 175.2053281053346),
        (
            *("llama-3.3-70b", "8x rtx4090 24GB", "10gbit,0.1ms", LATENCY),
            *("a:0-10,c:11-22,d:23-34,e:35-46,f:47-58,g:59-69,b:70-79", 34940, 6.010742743463506),
        ),
        (
            *("qwen3-4b", "12x m4", "1gbit,0.3ms", THROUGHPUT),
            *("b:0-9,c:10-19,d:20-29,a:30-35", 224694, 142.63229562266912),
        ),
    ],
)
def test_models_of_16_bits_are_planned_as_before(
    model: str, devices: str, link: str, objective: Objective, layers: str, kv_tokens: int, tokens_per_s: float
) -> None:
    found = planned(model, devices, link, objective=objective)
    assert (plan_text(found), found.kv_tokens) == (layers, kv_tokens)
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=1e-12)


@given(
    name=names,
    packing=st.sampled_from(("", "torch-cpu", "torch-cuda", "mlx", "mlx-blocks", "emulated", "of a later version")),
    value_bytes=st.sampled_from((2, 4)),
    start=st.integers(0, 22),
    kv_tokens=st.integers(0, 10_000),
    ends=st.tuples(st.booleans(), st.booleans()),
)
def test_a_stage_of_floats_takes_its_parameters_bytes(
    name: str, packing: str, value_bytes: int, start: int, kv_tokens: int, ends: tuple[bool, bool]
) -> None:
    config = named_shape(name)
    part = Slice(index=0, layers=LayerRange(start, config.num_layers), embedding=ends[0], head=ends[1])
    classes, form = memory_classes(config), dtype_of(value_bytes)
    kept = classes.kept_tokens(kv_tokens, block_size=16)
    kv = sum(config.kv_bytes_per_token((layer,), form=form) * kept[layer] for layer in part.layers)
    states = classes.states(num_blocks=-(-kv_tokens // 16), block_size=16)
    kv += config.state_bytes(part.layers) * (states.kept_slots if states else 0)
    need = Need(config=config, kv_tokens=kv_tokens)
    exact = exact_parameters(config, part.layers) * (4 - value_bytes)
    exact += 4 * router_padding(config, part.layers) if packing == "torch-cpu" else 0
    expected = slice_parameters(config, part) * value_bytes + exact + kv
    assert stage_bytes(need, room(0, packing, value_bytes), part) == expected


def exact_parameters(config: ModelConfig, layers: LayerRange) -> int:
    """Return the number of weights that are float32 everywhere: routers, and small ones of recurrent layers."""
    return sum(
        math.prod(shape)
        for layer in layers
        for name, shape in spec_tensors(config.layers[layer], config.hidden_size).items()
        if is_exact(name)
    )


def router_padding(config: ModelConfig, layers: LayerRange) -> int:
    """Return the number of zeros that fill routers up to tiles of 16 experts."""
    experts = (config.layers[layer].experts for layer in layers)
    return sum(-spec.count % 16 * config.hidden_size for spec in experts if spec)


@given(name=names, head=st.booleans(), count=st.integers(1, 24), rows=st.integers(1, 300))
def test_a_step_of_floats_takes_the_time_that_it_took(name: str, head: bool, count: int, rows: int) -> None:
    config, device = named_shape(name), named_device("rtx4090")
    cost = CostModel(config, device).slice_cost(Slice(index=1, layers=LayerRange(0, count), embedding=False, head=head))
    layers = LayerRange(0, count)
    num_bytes = 2 * (sum(layer_parameters(config, i) for i in layers) + exact_parameters(config, layers))
    assert cost.read_s + cost.expert_read_s == pytest.approx(num_bytes / device.bandwidth_bytes_per_s)
    assert cost.widen_s == cost.head_widen_s == 0.0
    table = 2 * config.vocab_size * config.hidden_size if head else 0
    assert cost.head_read_s == pytest.approx(table / device.bandwidth_bytes_per_s)
    assert cost.step_s(StepWork.of_rows([9] * rows, [1] * rows, logit_rows=0)) > 0


def test_a_70b_at_four_bits_fits_two_cards_of_24_gb_and_at_sixteen_it_does_not() -> None:
    found = planned("llama-3.3-70b:q4_k_m", "2x rtx4090")
    assert len(found.stages) == 2
    assert sum(stage.weight_bytes for stage in found.stages) == pytest.approx(43.4e9, rel=0.01)
    assert all(stage.weight_bytes + stage.kv_bytes <= stage.machine.room.free_bytes for stage in found.stages)
    assert found.single.tokens_per_s == pytest.approx(19, rel=0.1)  # 43 GB at 857 GB/s
    with pytest.raises(NoFeasiblePlacement):
        planned("llama-3.3-70b", "2x rtx4090")
    with pytest.raises(NoFeasiblePlacement):
        planned("llama-3.3-70b:q5_k_m", "2x rtx4090")
    short = shortage_of(Demand(config=named_shape("llama-3.3-70b")), cluster("llama-3.3-70b", "2x rtx4090").machines)
    assert [(remedy.what, remedy.enough) for remedy in short.helps if ":q4_k_m" in remedy.what] == [
        ("take a smaller type of it (:q4_k_m)", True)
    ]
    assert short.weight_bytes == pytest.approx(141.1e9, rel=0.001)


@pytest.mark.parametrize(
    ("name", "devices", "advice", "enough"),
    [
        ("glm-4.5-air:q4_k_m", "rtx4090, m4max", ":q4_0", True),
        ("glm-4.5-air:q8_0", "rtx4090, m4max", ":q4_0", True),
        ("llama-3.3-70b:q4_k_m", "2x m4", ":q4_0", False),  # Q3 takes more memory on a Mac
        ("llama-3.3-70b:q4_0", "rtx4090", "", False),  # none is smaller on this card
    ],
)
def test_the_best_smaller_type_that_fits_is_named(name: str, devices: str, advice: str, enough: bool) -> None:
    config, weights = named_model(name)
    short = shortage_of(Demand(config=config, weights=weights), cluster(name, devices).machines)
    found = [(remedy.what, remedy.enough) for remedy in short.helps if "smaller type" in remedy.what]
    assert found == ([(f"take a smaller type of it ({advice})", enough)] if advice else [])


def test_kv_of_fewer_bits_is_named_where_it_helps() -> None:
    config, weights = named_model("llama-3.3-70b:q4_k_m")
    demand = Demand(config=config, weights=weights, must_keep_tokens=4096)
    machines = cluster("llama-3.3-70b:q4_k_m", "2x rtx4090 24GB").machines
    short = shortage_of(demand, machines)
    assert ("--kv 8bit", True) in [(remedy.what, remedy.enough) for remedy in short.helps]
    assert not any("4bit" in remedy.what for remedy in short.helps), "8 bits are enough"
    more = replace(demand, must_keep_tokens=12_000)
    found = [(remedy.what, remedy.enough) for remedy in shortage_of(more, machines).helps if "--kv" in remedy.what]
    assert found == [("--kv 8bit", False), ("--kv 4bit", True)]
    kept = [replace(machine, room=replace(machine.room, kv="4bit")) for machine in machines]
    assert not any("--kv" in remedy.what for remedy in shortage_of(more, kept).helps)


def test_4_bits_make_room_for_9000_tokens_of_a_70b_on_two_cards() -> None:
    config, weights = named_model("llama-3.3-70b:q4_k_m")
    link = parse_link("1gbit,0.3ms")
    found = known_cluster(["rtx4090"] * 2, config, link=link, weights=weights, kv="4bit")
    assert plan(Demand(config=config, weights=weights), found.machines, found.links).kv_tokens >= 9_000


@given(
    name=names,
    mix=mixes,
    devices=st.lists(st.sampled_from(("rtx4090", "m4", "m1", "rtx3090")), min_size=1, max_size=3),
    free_gb=st.lists(st.floats(0.05, 60), min_size=3, max_size=3),
)
def test_a_plan_never_puts_more_on_a_machine_than_fits(
    name: str, mix: str, devices: list[str], free_gb: list[float]
) -> None:
    there = cluster(f"{name}:{mix}", ", ".join(devices))
    machines = [
        replace(machine, room=replace(machine.room, free_bytes=int(free * GB)))
        for machine, free in zip(there.machines, free_gb, strict=False)
    ]
    demand = Demand(config=there.config, weights=there.weights)
    need = Need(config=there.config, kv_tokens=demand.least_kv_tokens, weights=there.weights)
    try:
        found = plan(demand, machines, there.links, explain=False)
    except NoFeasiblePlacement:
        (whole,) = make_slices([LayerRange(0, there.config.num_layers)], there.config.num_layers)
        assert all(stage_bytes(need, machine.room, whole) > machine.room.free_bytes for machine in machines)
        return
    assert all(stage_bytes(need, each.machine.room, each.part) <= each.machine.room.free_bytes for each in found.stages)


def test_a_machine_holds_as_many_layers_as_fit_though_layers_differ() -> None:
    """The first layers of Q4_K_M are larger than the mean, the middle ones smaller."""
    config, weights = named_model("llama-3.3-70b:q4_k_m")
    sizes = room(0, "emulated", 2).sizes(config, weights)
    assert max(sizes.layers) * 80 > 1.04 * sum(sizes.layers)
    tight = sum(sizes.layers) + sizes.embedding + sizes.head + sizes.norm + 512 * 80 * 4096
    devices = cluster("llama-3.3-70b:q4_k_m", "2x rtx4090")
    demand = Demand(config=config, weights=weights)
    fits, lacks = (
        [replace(machine, room=replace(machine.room, free_bytes=size)) for machine in devices.machines[:1]]
        for size in (tight, tight - 1)
    )
    assert plan_text(plan(demand, fits, devices.links)) == "a:0-79"
    with pytest.raises(NoFeasiblePlacement):
        plan(demand, lacks, devices.links)


def test_a_node_that_widens_is_planned_by_wide_weights() -> None:
    config, weights = named_model("qwen3-8b:q4_k_m")
    whole = Slice(index=0, layers=LayerRange(0, 36), embedding=True, head=True)
    need = Need(config=config, kv_tokens=0, weights=weights)
    old = stage_bytes(need, room(0, "", 4), whole)
    assert old == 4 * slice_parameters(config, whole)
    assert stage_bytes(need, room(0, "torch-cpu", 4), whole) < 0.25 * old
    packs, widens = (estimated_speed(profile(packing), config, weights=weights) for packing in ("torch-cpu", ""))
    work = StepWork.of_rows([100], [1], logit_rows=1)
    assert (packs.parts(work).layer_s < 0.25 * widens.parts(work).layer_s).all()
    assert packs.parts(work).head_s < 0.4 * widens.parts(work).head_s


def profile(packing: str) -> DeviceProfile:
    return DeviceProfile(
        backend="torch",
        device="cpu",
        name="CPU",
        compute_dtype="float32",
        memory_total_bytes=64 * GB,
        memory_free_bytes=64 * GB,
        bandwidth_bytes_per_s=40e9,
        flops=1e12,
        packing=packing,
    )


@given(name=names, mix=mixes)
def test_decode_takes_the_time_of_the_bytes_and_a_long_prompt_pays_for_widening(name: str, mix: str) -> None:
    config = named_shape(name)
    device = replace(named_device("rtx4090"), reads_as="")  # the bytes of the file
    weights = mix_table(config, mix)
    part = Slice(index=1, layers=LayerRange(0, config.num_layers), embedding=False, head=False)
    packed, wide = CostModel(config, device, weights=weights), CostModel(config, device)
    num_bytes = packed.weight_bytes([part])
    found = packed.slice_cost(part)
    assert found.read_s + found.expert_read_s == pytest.approx(num_bytes / device.bandwidth_bytes_per_s)
    assert packed.mean_cost(config.num_layers, head=False) == packed.slice_cost(part)
    decode, many = StepWork.of_rows([64], [1], logit_rows=0), StepWork.of_rows([0], [512], logit_rows=0)
    assert packed.slice_cost(part).step_s(decode) <= wide.slice_cost(part).step_s(decode)
    if weights.packed:
        extra_s = (num_bytes + wide.weight_bytes([part])) / device.bandwidth_bytes_per_s
        assert packed.slice_cost(part).widen_s == pytest.approx(extra_s)
        assert packed.slice_cost(part).step_s(many) > max(extra_s, packed.slice_cost(part).token_s * 512)


def test_a_layer_takes_the_time_of_its_own_bytes() -> None:
    there = cluster("llama-3.1-8b:q4_k_m", "rtx4090")
    sizes = there.machines[0].room.sizes(there.config, there.weights)
    parts = there.machines[0].speed.parts(StepWork.of_rows([0], [1], logit_rows=0))
    device = named_device("rtx4090")
    own_s = np.array(sizes.layers) / device.bandwidth_bytes_per_s + device.layer_overhead_s
    assert list(parts.layer_s) == pytest.approx(list(own_s), rel=0.01)
    assert max(parts.layer_s) > 1.08 * min(parts.layer_s)


def test_simulations_take_the_type() -> None:
    config, weights = named_model("llama-3.3-70b:q4_k_m")
    imagined = ImaginedCluster(devices=["rtx4090"] * 2, config=config, weights=weights, link=parse_link("1gbit,0.3ms"))
    assert imagine(imagined).limits.num_blocks > 0
    with pytest.raises(NoFeasiblePlacement):
        imagine(replace(imagined, weights=mix_table(config, "bf16")))


def test_fits_follow_the_type_and_order_by_parameters() -> None:
    sizes = ("llama-3.3-70b:q4_k_m", "llama-3.3-70b", "qwen3-8b", "qwen3-32b:q4_k_m")
    found = which_fit(
        [(name, cluster(name, "2x rtx4090").machines) for name in sizes], Links(assumed=parse_link("ideal"))
    )
    assert [fit.model for fit in found] == ["llama-3.3-70b:q4_k_m", "qwen3-32b:q4_k_m", "qwen3-8b", "llama-3.3-70b"]
    assert [fit.plan is not None for fit in found] == [True, True, True, False]
    assert found[0].weight_bytes == pytest.approx(43.4e9, rel=0.01)
    assert found[0].num_parameters == found[3].num_parameters


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_long_contexts_are_read_in_the_form_of_the_kv(device: str) -> None:
    """What a step takes longer for more context is the time of the KV's bytes."""
    config, _ = named_model("llama-3.1-8b")
    profile = DeviceProfile(
        backend="torch",
        device=device,
        name="device",
        compute_dtype="bfloat16",
        memory_total_bytes=10**11,
        memory_free_bytes=10**11,
        bandwidth_bytes_per_s=10**11,
        flops=10**15,
    )
    few, many = (decode_work(1, read_tokens=tokens) for tokens in (1000, 9000))
    (part,) = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    for form in ("bfloat16", "8bit", "4bit"):
        kv = "" if form == "bfloat16" else form
        expected_s = 8000 * config.kv_bytes_per_token((0,), form=form) / 1e11
        speed = estimated_speed(profile, config, kv=kv)
        assert speed.parts(many).layer_s - speed.parts(few).layer_s == pytest.approx(expected_s)
        cost = slice_costs(profile, config, [part], kv=kv)[0]
        assert cost.step_s(many) - cost.step_s(few) == pytest.approx(expected_s * config.num_layers)


def test_emulated_plans_and_simulations_take_the_form_of_the_kv() -> None:
    config, weights = named_model("llama-3.1-8b")
    attention = first_attention(config)
    link = parse_link("1gbit,0.3ms")
    plain, packed = (
        known_cluster(["rtx4090"], config, link=link, weights=weights, kv=kv).machines[0] for kv in ("", "8bit")
    )
    assert packed.room.kv_bytes(config, range(32), 1) == 32 * 2 * attention.num_kv_heads * (attention.head_dim + 2)
    work = decode_work(1, read_tokens=32_000)
    assert (packed.speed.parts(work).layer_s < plain.speed.parts(work).layer_s).all()
    added = changed(known_cluster(["rtx4090"], config, link=link, weights=weights, kv="8bit"), "add rtx4090")
    assert [machine.room.kv for machine in added.machines] == ["8bit", "8bit"]
    imagined = ImaginedCluster(devices=["rtx4090"], config=config, weights=weights, link=link)
    blocks = [imagine(replace(imagined, kv=kv)).limits.num_blocks for kv in ("", "8bit")]
    assert blocks[1] / blocks[0] == pytest.approx(2 * attention.head_dim / (attention.head_dim + 2), rel=0.01)
    steps = [imagine(replace(imagined, kv=kv)).ring.stages[0].step_s(work) for kv in ("", "8bit")]
    assert steps[1] < steps[0]


@pytest.mark.parametrize(
    ("device", "kv", "head_dim", "slower"),
    [
        ("rtx4090", "4bit", 128, False),
        ("rtx4090", "4bit", 64, False),
        ("rtx4090", "4bit", 96, True),  # of which own kernels read no codes
        ("rtx4090", "8bit", 128, False),
        ("rtx4090", "8bit", 64, False),
        ("rtx4090", "8bit", 96, True),
        ("m4max", "4bit", 128, False),
    ],
)
def test_kv_that_no_kernel_reads_is_planned_without_graphs_on_cuda(
    device: str, kv: str, head_dim: int, slower: bool
) -> None:
    """A lone chat of an 8B in 4 bits: an H100's host took 0.48 ms a layer to start kernels (docs/experiments.md)."""
    config, weights = named_model("llama-3.1-8b:q4_k_m")
    config = replace(config, layers=tuple(spec.with_attention(head_dim=head_dim) for spec in config.layers))
    link = parse_link("1gbit,0.3ms")
    work = decode_work(1, read_tokens=1000)
    plain, packed = (
        known_cluster([device], config, link=link, weights=weights, kv=each).machines[0].speed.parts(work)
        for each in ("", kv)
    )
    seconds = float(packed.layer_s.sum())
    assert (seconds > 1.5 * float(plain.layer_s.sum())) == slower
    assert not slower or seconds == pytest.approx(32 * 476e-6)


def test_a_cuda_devices_profile_is_estimated_by_the_bytes_of_codes() -> None:
    config, weights = named_model("llama-3.1-8b:q4_k_m")
    work = decode_work(1, read_tokens=1000)

    def layer_s(device: str, kv: str) -> float:
        profile = DeviceProfile(
            backend="torch",
            device=device,
            name="device",
            compute_dtype="bfloat16",
            memory_total_bytes=10**11,
            memory_free_bytes=10**11,
            bandwidth_bytes_per_s=4 * 10**12,
            flops=10**15,
        )
        return float(estimated_speed(profile, config, weights=weights, kv=kv).parts(work).layer_s.mean())

    assert 476e-6 > layer_s("cuda:0", "") > layer_s("cuda:0", "8bit") > layer_s("cuda:0", "4bit")
    assert layer_s("mps", "4bit") <= layer_s("mps", "")


@pytest.mark.parametrize("concurrency", [1, 8])
def test_4_bits_promise_each_chat_its_tokens_beside_what_their_lower_bits_need(concurrency: int) -> None:
    """A card with room for exactly these chats has it for no chat more."""
    config, weights = named_model("llama-3.1-8b")
    demand = Demand(
        config=config, weights=weights, objective=Objective.THROUGHPUT, concurrency=concurrency, context_tokens=4096
    )
    machine = known_cluster(["rtx4090"], config, link=parse_link("1gbit"), weights=weights, kv="4bit").machines[0]
    token_bytes, blocks = (
        config.kv_bytes_per_token(form="4bit"),
        -(-concurrency * (4096 + REST_TOKENS) // LARGEST_BLOCK),
    )
    wanted = demand.kv_of(concurrency, machine.room.rest_tokens)
    assert machine.room.kv_bytes(config, range(config.num_layers), wanted) == blocks * LARGEST_BLOCK * token_bytes
    assert demand.kv_levels(machine.room.rest_tokens)[0] == wanted
    assert demand.sequences(wanted, rest_tokens=REST_TOKENS) == demand.chats(wanted, REST_TOKENS) == concurrency
    assert demand.chats(wanted - 1, REST_TOKENS) == concurrency - 1
