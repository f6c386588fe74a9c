"""What plans say of draft models: the time of a draft, the window that pays, and the factor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.backend.devices import parse_devices
from edgepipe.backend.drafting import ImaginedDrafts
from edgepipe.planner.cluster import Cluster, known_cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.draft_forecast import RIGHT, DraftForecast, draft_forecast
from edgepipe.planner.drift import ScaledSpeed
from edgepipe.planner.plan import plan
from edgepipe.scheduler import make_policy
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
    demand = Demand(
        config=cluster.config,
        weights=cluster.weights,
        objective=Objective.LATENCY,
        concurrency=1,
        context_tokens=4096,
        must_keep_tokens=0,
        read_tokens=1024,
    )
    nodes = Constraints(num_nodes=len(cluster.machines))
    found = draft_forecast(plan(demand, cluster.machines, cluster.links, nodes), cluster)
    assert found is not None
    return found


def test_the_forecast_is_what_a_simulation_of_such_a_draft_model_gives() -> None:
    found = _forecast(_cluster("llama-3.3-70b:q4_k_m", "3x rtx4090", "llama-3.2-3b:q4_k_m"))
    assert 0.003 < found.draft_s < 0.007, "2 GB of weights at 1 TB/s, and the overheads of 28 layers"
    assert found.machine == "a", "the planner put the head there"
    config, weights = named_model("llama-3.3-70b:q4_k_m")
    devices = ImaginedCluster(devices=["rtx4090"] * 3, config=config, weights=weights, link=LINK)
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
    imagined = ImaginedDrafts.of(f"{RIGHT},{1e3 * found.draft_s:.3f}ms")
    off, on = (simulate(replace(run, drafts=drafts)).steady_tokens_per_s for drafts in (None, imagined))
    assert found.factor == pytest.approx(on / off, rel=0.08)
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
