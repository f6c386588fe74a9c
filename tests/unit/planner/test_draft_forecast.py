"""What plans say of drafts: the time of a draft, the window that pays, and the factor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.backend.cost import StepWork
from edgepipe.backend.devices import parse_devices
from edgepipe.backend.drafting import MTP_RIGHT, RIGHT, ImaginedDrafts
from edgepipe.cli.views.plan_view import words_of_drafts
from edgepipe.planner.cluster import Cluster, known_cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.draft_forecast import DraftForecast, draft_forecast
from edgepipe.planner.drift import ScaledSpeed
from edgepipe.planner.plan import Plan, plan
from edgepipe.planner.profiles import TableSpeed
from edgepipe.scheduler import make_policy
from edgepipe.simulation.drafts import SimulatedDrafts
from edgepipe.simulation.imagined import ImaginedCluster, imagine
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.simulation.workload import Arrivals, FixedLengths, WorkloadSpec, make_workload
from edgepipe.spec.drafting import draft_kv_tokens
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model
from edgepipe.weights.weight_table import DraftModelNeed

LINK = parse_link("1gbit,0.3ms")


def _cluster(model: str, devices: str, draft: str) -> Cluster:
    config, weights = named_model(model)
    own, table = named_model(draft)
    need = DraftModelNeed(config=own, weights=table, kv_tokens=draft_kv_tokens(own))
    cluster = known_cluster(parse_devices(devices), config, link=LINK, weights=weights)
    return replace(cluster, weights=replace(weights, draft=need))


def _forecast(cluster: Cluster) -> DraftForecast:
    found = draft_forecast(_plan(cluster), cluster)
    assert found is not None
    return found


def _plan(cluster: Cluster) -> Plan:
    demand = Demand(
        config=cluster.config,
        weights=cluster.weights,
        objective=Objective.LATENCY,
        concurrency=1,
        context_tokens=4096,
        must_keep_tokens=0,
        read_tokens=1024,
    )
    return plan(demand, cluster.machines, cluster.links, Constraints(num_nodes=len(cluster.machines)))


def _simulated_factor(devices: ImaginedCluster, drafts: ImaginedDrafts) -> float:
    """Return a lone chat's speed with drafts over that without."""
    workload = make_workload(
        WorkloadSpec(
            arrivals=Arrivals.CLOSED,
            concurrency=1,
            num_requests=1,
            prompt=FixedLengths(tokens=32),
            output=FixedLengths(tokens=2000),
        )
    )
    run = Run(cluster=imagine(devices), workload=workload, policy=make_policy("throttled"))
    off, on = (simulate(replace(run, drafts=each)).steady_tokens_per_s for each in (None, drafts))
    return on / off


def test_the_forecast_is_what_a_simulation_of_such_a_draft_model_gives() -> None:
    found = _forecast(_cluster("llama-3.3-70b:q4_k_m", "3x rtx4090", "llama-3.2-3b:q4_k_m"))
    assert 0.003 < found.draft_s < 0.007, "2 GB of weights at 1 TB/s, and the overheads of 28 layers"
    assert found.machine == "a", "the planner put the head there"
    config, weights = named_model("llama-3.3-70b:q4_k_m")
    devices = ImaginedCluster(devices=["rtx4090"] * 3, config=config, weights=weights, link=LINK)
    imagined = ImaginedDrafts.of(f"{RIGHT.at(0)},{1e3 * found.draft_s:.3f}ms")
    assert found.factor == pytest.approx(_simulated_factor(devices, imagined), rel=0.08)
    assert found.factor > 1.7


def test_a_draft_model_almost_as_slow_as_the_model_does_not_pay() -> None:
    found = _forecast(_cluster("llama-3.2-3b:q4_k_m", "rtx4090", "llama-3.2-3b:q4_k_m"))
    assert (found.count, found.factor) == (0, 1.0)


def test_drafts_of_a_device_that_is_slower_than_its_data_sheet_are_slower_too() -> None:
    cluster = _cluster("llama-3.3-70b:q4_k_m", "3x rtx4090", "llama-3.2-3b:q4_k_m")
    slower = tuple(replace(machine, speed=ScaledSpeed(machine.speed, 1.5)) for machine in cluster.machines)
    fast, slow = _forecast(cluster), _forecast(replace(cluster, machines=slower))
    assert slow.draft_s == pytest.approx(1.5 * fast.draft_s)
    assert slow.num_bytes == fast.num_bytes


def _with_own_layer(model: str, devices: str) -> tuple[Cluster, Cluster]:
    """Return a cluster without and with the model's own layer for drafts."""
    config, weights = named_model(model)
    plain = known_cluster(parse_devices(devices), config, link=LINK, weights=weights)
    return plain, known_cluster(parse_devices(devices), config.with_mtp(), link=LINK, weights=weights)


@pytest.mark.parametrize("model", ["qwen3.6-27b:q4_k_m", "qwen3.6-35b-a3b:q4_k_m"])
def test_the_forecast_of_the_model_s_own_layer_is_what_a_simulation_of_it_gives(model: str) -> None:
    plain, drafting = _with_own_layer(model, "2x rtx4090")
    found, placed = _forecast(drafting), _plan(drafting)
    devices = ImaginedCluster(
        devices=["rtx4090"] * 2, config=drafting.config, weights=drafting.weights, link=LINK, context_length=4096
    )
    own = ImaginedDrafts.by_own_layer(imagine(devices).draft_s)
    assert found.draft_s == pytest.approx(own.token_s, rel=0.02)
    assert found.factor == pytest.approx(_simulated_factor(devices, own), rel=0.1)
    assert (found.source, found.right) == ("mtp", MTP_RIGHT.shares)
    assert found.count >= 2
    assert 1.3 < found.factor < 2.7, "less than the tokens of a window whose rows and drafts cost nothing"
    assert found.num_bytes == pytest.approx(
        sum(stage.weight_bytes for stage in placed.stages) - sum(stage.weight_bytes for stage in _plan(plain).stages)
    )


def test_a_draft_by_the_model_s_own_layer_takes_that_layer_and_the_head() -> None:
    _, drafting = _with_own_layer("qwen3.6-27b:q4_k_m", "rtx4090")
    draft_s = _forecast(drafting).draft_s
    parts = drafting.machines[0].speed.parts(StepWork.of_rows([1024], [1], logit_rows=1))
    assert parts.head_s < draft_s < parts.base_s + parts.head_s + 1.15 * parts.layer_s[-2], (
        "and a product of both inputs"
    )
    turn_s = _plan(drafting).single.turn_s
    assert 8 * draft_s < turn_s, "64 layers take longer"


def test_an_answer_without_drafts_does_not_pay_for_the_layer_that_drafts() -> None:
    plain, drafting = (_plan(each) for each in _with_own_layer("qwen3.6-27b:q4_k_m", "2x rtx4090"))
    assert drafting.single.turn_s == pytest.approx(plain.single.turn_s, rel=1e-6)
    assert drafting.many.tokens_per_s == pytest.approx(plain.many.tokens_per_s, rel=0.03)
    prompts = drafting.prompt.first_token_s / plain.prompt.first_token_s
    assert 1.0 < prompts < 1.04, "prompts do: the layer computes them in their steps"


def test_the_model_s_own_layer_is_right_less_often_the_further_it_guesses() -> None:
    drafts = ImaginedDrafts.by_own_layer(0.001)
    shares = [drafts.right(500, place) for place in range(5)]
    assert shares == [0.8, 0.7, 0.6, 0.6, 0.6]
    falling = ImaginedDrafts.of("0.8:200,0.1,1ms")
    assert [falling.right(199, 3), falling.right(200, 0)] == [0.8, 0.1]


def test_windows_in_flight_are_forecast_where_the_engine_would_fly_them_and_a_simulation_flies_them() -> None:
    config, weights = named_model("gpt-oss-120b")
    devices = ImaginedCluster(devices=["rtx4090"] * 4, config=config, weights=weights, link=LINK)
    flies = ImaginedDrafts.of("0.7,0.5ms")
    waits = replace(flies, goes_on=False)
    found: dict[bool, float] = {}
    for drafts in (flies, waits):
        simulated = SimulatedDrafts(drafts, imagine(devices).ring.times(), in_flight=lambda: 1, seed=0)
        outlook = simulated.drafting().forecast(RIGHT.by_place)
        assert (outlook.in_flight > 1) == drafts.goes_on
        found[drafts.goes_on] = _simulated_factor(devices, drafts)
        assert found[drafts.goes_on] == pytest.approx(outlook.factor, rel=0.1)
    assert found[True] > 1.1 * found[False]


def test_a_plan_with_a_fast_draft_model_says_how_many_windows_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = _cluster("gpt-oss-120b", "4x rtx4090", "llama-3.2-3b:q4_k_m")
    slow = _forecast(cluster)
    monkeypatch.setattr(TableSpeed, "token_s", lambda *_, **__: 0.0005)
    fast = _forecast(cluster)
    assert fast.in_flight > 1
    assert fast.factor > max(1.8, slow.factor)
    assert f"{fast.in_flight} windows of {fast.count}, " in words_of_drafts(fast)


@pytest.mark.parametrize("model", ["qwen3.6-35b-a3b:q4_k_m"])
def test_models_with_recurrent_layers_have_one_window_at_a_time(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TableSpeed, "token_s", lambda *_, **__: 0.0005)
    assert _forecast(_cluster(model, "4x rtx4090", "llama-3.2-3b:q4_k_m")).in_flight == 1
