"""What plans say of long prompts, against the simulator and its scheduler."""

from __future__ import annotations

import pytest

from edgepipe.backend.devices import parse_devices
from edgepipe.planner.cluster import Cluster, known_cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.forecast import Ring
from edgepipe.planner.plan import Plan, plan
from edgepipe.planner.preview import LONG_PROMPT_TOKENS, preview, preview_as_dict
from edgepipe.scheduler import make_policy
from edgepipe.simulation.imagined import Imagined, ImaginedCluster, imagine
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.simulation.workload import FixedLengths, WorkloadSpec, make_workload
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model

LAN, FAST, WIFI = "1gbit,0.3ms", "10gbit,0.1ms", "300mbit,5ms"
RINGS = (
    ("4x rtx4090", "qwen3-8b:q4_k_m", LAN),
    ("4x rtx4090", "qwen3-8b:q4_k_m", FAST),
    ("2x rtx4090", "qwen2.5-32b:q4_k_m", LAN),
    ("2x rtx4090", "qwen2.5-32b:q4_k_m", WIFI),
    ("2x m4max", "qwen3-30b-a3b:q4_k_m", LAN),
    ("rtx4090, m4max", "gpt-oss-120b:mxfp4", LAN),
    ("rtx4090", "qwen3-8b:q4_k_m", LAN),
)


def imagined(devices: str, model: str, link: str) -> Imagined:
    config, weights = named_model(model)
    return imagine(
        ImaginedCluster(
            devices=parse_devices(devices),
            config=config,
            weights=weights,
            link=parse_link(link),
            adjustments={"jitter": "0"},
        )
    )


def simulated_s(cluster: Imagined, prompt_tokens: int) -> float:
    """Seconds until the first token of a lone prompt."""
    one = WorkloadSpec(num_requests=1, prompt=FixedLengths(tokens=prompt_tokens), output=FixedLengths(tokens=1))
    run = Run(cluster=cluster, workload=make_workload(one), policy=make_policy("throttled"))
    return simulate(run).ttft_s.mean


def planned(devices: str, model: str, link: str, layers: str) -> tuple[Plan, Cluster]:
    config, weights = named_model(model)
    cluster = known_cluster(parse_devices(devices), config, link=parse_link(link), model=model, weights=weights)
    demand = Demand(config=config, weights=weights, objective=Objective.THROUGHPUT)
    return plan(demand, cluster.machines, cluster.links, Constraints(layers=layers)), cluster


def ring_of(found: Plan, cluster: Cluster) -> Ring:
    return Ring(found.demand, found.placed, {each.node_id: each for each in cluster.machines}, cluster.links)


@pytest.mark.parametrize("prompt_tokens", [1024, LONG_PROMPT_TOKENS])
@pytest.mark.parametrize(("devices", "model", "link"), RINGS)
def test_the_first_word_comes_when_the_plan_says(devices: str, model: str, link: str, prompt_tokens: int) -> None:
    cluster = imagined(devices, model, link)
    ring = ring_of(*planned(devices, model, link, cluster.plan))
    forecast_s = ring.prompt(prompt_tokens).first_token_s
    assert forecast_s == pytest.approx(simulated_s(cluster, prompt_tokens), rel=0.16)


@pytest.mark.parametrize(("devices", "model", "link"), RINGS[:4])
def test_a_higher_goal_brings_a_prompt_beside_chats_sooner(devices: str, model: str, link: str) -> None:
    found, cluster = planned(devices, model, link, imagined(devices, model, link).plan)
    ring = ring_of(found, cluster)
    within = [ring.prompt(LONG_PROMPT_TOKENS, beside=found.many, goal_s=goal_s) for goal_s in (0.03, 0.1, 0.3)]
    assert within[-1].first_token_s <= within[0].first_token_s * 1.03, "forecasts within 3 % are equal to the pacer"
    assert within[0].chunk_tokens <= within[-1].chunk_tokens


def test_the_preview_has_a_long_prompt_where_the_kv_cache_holds_it() -> None:
    config, weights = named_model("qwen2.5-32b:q4_k_m")

    def shown(devices: str) -> dict[str, object]:
        cluster = known_cluster(parse_devices(devices), config, link=parse_link(LAN), weights=weights)
        made = preview(Demand(config=config, weights=weights), cluster, Constraints(num_nodes=0), compare=False)
        return preview_as_dict(made)

    assert shown("rtx4090")["long_prompt"] is None, "8,500 tokens fit beside the weights"
    two = shown("m4max")["long_prompt"]
    assert isinstance(two, dict)
    assert two["alone"]["prompt_tokens"] == LONG_PROMPT_TOKENS
    assert two["alone"]["first_token_s"] <= two["beside_many_chats"]["first_token_s"]


def test_a_prompt_has_tokens() -> None:
    found, cluster = planned("rtx4090", "qwen3-8b:q4_k_m", LAN, "a:0-35")
    with pytest.raises(ValueError, match="at least one token"):
        ring_of(found, cluster).prompt(0)
