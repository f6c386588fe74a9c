"""Experts are read as far as rows use them: the sizer's and the planner's M are the best in the simulator."""

from __future__ import annotations

import pytest

from edgepipe.backend.devices import parse_devices
from edgepipe.cli.workload_options import make_workload_of
from edgepipe.planner.cluster import known_cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.plan import plan
from edgepipe.scheduler import make_policy
from edgepipe.simulation.imagined import Imagined, ImaginedCluster, imagine
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model

LINK = "1gbit,0.3ms"
PROMPT, OUTPUT = 64, 300


def simulated(cluster: Imagined, sequences: int, micro_batches: int = 0) -> float:
    settings = {
        "workload": "fixed",
        "requests": str(sequences),
        "prompt-tokens": str(PROMPT),
        "output-tokens": str(OUTPUT),
    }
    run = Run(
        cluster=cluster,
        workload=make_workload_of(settings),
        policy=make_policy("throttled"),
        micro_batches=micro_batches,
    )
    return simulate(run).steady_tokens_per_s


@pytest.mark.parametrize("sequences", [4, 16, 64])
def test_the_chosen_number_of_micro_batches_is_the_best_among_its_neighbours(sequences: int) -> None:
    config, weights = named_model("qwen3-30b-a3b:q4_k_m")
    devices = parse_devices("2x rtx4090")
    cluster = imagine(
        ImaginedCluster(devices=devices, config=config, weights=weights, link=parse_link(LINK), context_length=2048)
    )
    known = known_cluster(devices, config, link=parse_link(LINK), weights=weights)
    demand = Demand(
        config=config,
        weights=weights,
        objective=Objective.THROUGHPUT,
        concurrency=sequences,
        context_tokens=1024,
        read_tokens=PROMPT + OUTPUT // 2,
    )
    found = plan(demand, known.machines, known.links, Constraints(layers=cluster.plan), explain=False)
    chosen = found.many.micro_batches
    around = [count for count in range(chosen - 1, chosen + 2) if 1 <= count <= sequences]
    rates = {count: simulated(cluster, sequences, count) for count in around}
    assert rates[chosen] >= 0.99 * max(rates.values()), rates
    assert found.many.tokens_per_s == pytest.approx(rates[chosen], rel=0.03)
    assert simulated(cluster, sequences) >= 0.94 * max(rates.values()), "the sizer gets there within the run"
