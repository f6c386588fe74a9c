"""Layers that differ in time or bytes: the searches against trying everything, and plans of real models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.backend.cost import CostModel, StepWork, layer_kinds
from edgepipe.backend.devices import named_device
from edgepipe.backend.types import DeviceProfile
from edgepipe.planner.demand import Demand, Objective, decode_work
from edgepipe.planner.layer_profile import LayerProfile, Point
from edgepipe.planner.partition import ExactSearch, Partition, UnequalLayers, evaluate
from edgepipe.planner.partition_unequal import ManyUnequalSearch, UnequalSearch, earliest_within
from edgepipe.planner.plan import plan
from edgepipe.planner.profiles import Links, TableSpeed, measured_speed
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.layer_spec import Dense, Experts, Router
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model
from edgepipe.weights.weight_table import FLOATS
from tests.support.worlds.brute_force import brute_force
from tests.support.worlds.planner import GB, machines, random_instance, unequal_instance

LAN = Links(assumed=parse_link("1gbit,0.3ms"))


def cycle_s(partition: Partition | None) -> float:
    return partition.cycle_s if partition is not None else float("inf")


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), devices=st.integers(1, 4), layers=st.integers(1, 7), alike=st.booleans())
def test_the_search_finds_what_trying_everything_finds(seed: int, devices: int, layers: int, alike: bool) -> None:
    problem = unequal_instance(np.random.default_rng(seed), devices=devices, layers=layers, alike=alike)
    found, best = UnequalSearch(devices).best(problem), brute_force(problem)
    assert cycle_s(found) == pytest.approx(cycle_s(best))
    if found is not None:
        assert evaluate(problem, found.devices, found.layers).cycle_s == found.cycle_s == found.bound_s
    many = ManyUnequalSearch(devices).best(problem)
    if many is not None:
        assert many.bound_s <= cycle_s(best) * (1 + 1e-9)
        assert cycle_s(best) <= many.cycle_s * (1 + 1e-9)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), devices=st.integers(1, 6), layers=st.integers(1, 12), alike=st.booleans())
def test_equal_layers_are_shared_out_as_the_search_for_them_does(
    seed: int, devices: int, layers: int, alike: bool
) -> None:
    problem = random_instance(np.random.default_rng(seed), devices=devices, layers=layers, alike=alike)
    counts = np.arange(layers + 1)
    unequal = UnequalLayers(
        done_s=problem.layer_s[:, None] * counts,
        earliest=np.maximum(counts - problem.most_layers[:, :, None], 0),
    )
    found = UnequalSearch(devices).best(replace(problem, unequal=unequal))
    assert cycle_s(found) == pytest.approx(cycle_s(ExactSearch(devices).best(problem)))


@pytest.mark.parametrize("kind", [UnequalSearch, ManyUnequalSearch])
@pytest.mark.parametrize("seed", range(10))
def test_wishes_are_kept(kind: type[UnequalSearch] | type[ManyUnequalSearch], seed: int) -> None:
    problem = unequal_instance(np.random.default_rng(seed), devices=5, layers=9, alike=seed % 2 == 0)
    assert problem.unequal is not None
    problem.unequal.earliest[:] = 0
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
    even = kind(5).balanced(problem, free, slack=0.05)
    assert even.server_s <= free.server_s
    assert even.cycle_s <= free.cycle_s * 1.05 * (1 + 1e-9)


def test_the_first_layers_of_large_ones_and_the_last_of_small_ones() -> None:
    found = earliest_within(np.array([5, 5, 1, 1, 1]), [5, 2, 4, -1])
    assert found.tolist() == [[0, 0, 1, 2, 2, 2], [0, 1, 2, 2, 2, 3], [0, 1, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5]]


def unequal_model(*, dense: int, experts: int, inner: int = 10_944, of: int = 128, used: int = 8) -> ModelConfig:
    """Return the shape of GLM-4.5-Air's layers: dense ones first, then experts."""
    plain = named_shape("llama-3.1-8b")
    first = replace(plain.layers[0], dense=Dense(inner=inner))
    mixture = Experts(count=of, used=used, inner=1408, router=Router(score="sigmoid"), shared_inner=1408)
    return replace(plain, layers=(first,) * dense + (replace(first, dense=None, experts=mixture),) * experts)


def windowed_model(layers: int = 30) -> ModelConfig:
    """Return a model of which 5 of 6 layers see the last 1024 tokens, as in Gemma 3."""
    plain = named_shape("llama-3.1-8b")
    short = plain.layers[0].with_attention(window=1024)
    return replace(plain, layers=tuple(plain.layers[0] if i % 6 == 5 else short for i in range(layers)))


@pytest.mark.parametrize(
    ("model", "read_tokens"),
    [(unequal_model(dense=1, experts=12), 1024), (windowed_model(), 32_768), (unequal_model(dense=4, experts=9), 1024)],
)
def test_a_forecast_is_the_sum_of_its_layers_costs(model: ModelConfig, read_tokens: int) -> None:
    cost = CostModel(model, named_device("rtx4090"))
    parts = TableSpeed(cost).parts(decode_work(8, read_tokens=read_tokens))
    for layers in (LayerRange(0, 1), LayerRange(2, 9), LayerRange(0, model.num_layers)):
        part = Slice(index=1, layers=layers, embedding=False, head=layers.start == 0)
        work = decode_work(8, read_tokens=read_tokens)
        assert parts.slice_s(part) == pytest.approx(cost.slice_cost(part).step_s(work), rel=0.02)
    assert max(parts.layer_s) > 1.3 * min(parts.layer_s)


def test_kinds_count_what_costs() -> None:
    assert set(layer_kinds(named_shape("qwen2.5-32b"), FLOATS)) == {0}
    assert layer_kinds(windowed_model(7), FLOATS) == (0, 0, 0, 0, 0, 1, 0)
    config, weights = named_model("llama-3.3-70b:q4_k_m")
    assert len(set(layer_kinds(config, weights))) == 2


def test_a_window_limits_what_attention_reads() -> None:
    work = StepWork.of_rows([9_999] * 4, [1] * 4, logit_rows=0)
    assert work.within(1024).kv_tokens == 4 * 1024
    assert work.within(20_000) == work
    chunk = StepWork.of_rows([5_000], [512], logit_rows=0).within(1024)
    assert chunk.kv_tokens == 1024 + 511
    assert chunk.attention_pairs == 512 * 1024


@pytest.mark.parametrize("objective", list(Objective))
def test_the_plan_balances_time_not_layers(objective: Objective) -> None:
    """A dense layer takes six times as long as one with experts: a stage gets few of them."""
    config = unequal_model(dense=8, experts=24, inner=32_832, of=16, used=1)
    demand = Demand(config=config, objective=objective, concurrency=2, context_tokens=1024)
    able = machines("2x rtx4090", config)
    able = [replace(machine, room=replace(machine.room, free_bytes=20 * GB)) for machine in able]
    found = plan(demand, able, LAN)
    assert found.gap == pytest.approx(0, abs=1e-9)
    if objective is Objective.THROUGHPUT:
        short, long = sorted(found.many.step_s)
        assert long < 1.15 * short


def profile(context: int = 64) -> LayerProfile:
    return LayerProfile(
        base_s=1e-3,
        decode=(Point(1, 1e-3), Point(4, 2e-3), Point(16, 4e-3), Point(64, 7e-3)),
        prefill=(Point(32, 5e-3), Point(512, 9e-3)),
        head=(Point(1, 5e-3),),
        kv_token_s=1e-6,
        decode_context=context,
    )


DEVICE = DeviceProfile(
    backend="torch",
    device="cpu",
    name="CPU",
    compute_dtype="float32",
    memory_total_bytes=64 * GB,
    memory_free_bytes=64 * GB,
    bandwidth_bytes_per_s=40e9,
    flops=1e12,
)


@pytest.mark.parametrize("device", [DEVICE, replace(DEVICE, bandwidth_bytes_per_s=0.0)])
def test_a_measured_mean_is_shared_between_kinds_of_layers(device: DeviceProfile) -> None:
    model = unequal_model(dense=2, experts=12)
    speed = measured_speed(profile(), device, model)
    for rows in (1, 4, 16, 64):
        parts = speed.parts(StepWork.of_rows([63] * rows, [1] * rows, logit_rows=0))
        point = next(measured for measured in profile().decode if measured.size == rows)
        assert parts.layer_s.mean() == pytest.approx(point.seconds)
    single, many = (speed.parts(StepWork.of_rows([63] * rows, [1] * rows, logit_rows=0)) for rows in (1, 64))
    assert single.layer_s[0] / single.layer_s[5] > 2 * many.layer_s[0] / many.layer_s[5], "64 rows read most experts"


def test_rows_between_measured_ones_read_experts_as_predicted() -> None:
    """A straight line from 16 to 64 rows is too low at 32: distinct experts grow ever slower."""
    speed = measured_speed(profile(), DEVICE, unequal_model(dense=0, experts=12))
    between = speed.parts(StepWork.of_rows([63] * 32, [1] * 32, logit_rows=0)).layer_s[0]
    assert 1.04 * (4e-3 + 3e-3 / 3) < between < 7e-3


def test_measured_windowed_layers_read_their_window() -> None:
    speed = measured_speed(profile(), DEVICE, windowed_model())
    short, long = (speed.parts(StepWork.of_rows([n - 1], [1], logit_rows=0)).layer_s for n in (64, 33_024))
    assert list((long - short)[:6] / 1e-6) == pytest.approx([960] * 5 + [32_960])
