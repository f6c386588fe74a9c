"""Replicas beside one pipeline: what ``--replicas auto`` chooses on six clusters of four machines, simulated.

The rivals are one pipeline over all four machines, and two pipelines over two machines each, in every pairing of
machines of different kinds, with the lines shared out by the machines' memory rates. ``auto`` sees the data sheets and
the number of lines under way only. The simulator runs the engines' scheduler with jitter and lengths that ``auto`` does
not know. Rates are those of full rings, of all replicas together, and means over two seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean

from figures import Row, at_least

from edgepipe.backend.devices import named_device, parse_devices
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.planner.cluster import Cluster, known_cluster
from edgepipe.planner.demand import Demand
from edgepipe.planner.replicas import Layout, best_layout, shares_by_speed
from edgepipe.scheduler import Priority, make_policy
from edgepipe.simulation.imagined import ImaginedCluster, imagine
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.simulation.workload import Arrivals, WorkloadSpec, make_workload, named_lengths
from edgepipe.store.typed_names import planned_name
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model

CLUSTERS = (
    ("4x rtx4090", "qwen2.5-14b:q4_k_m", "1gbit,0.3ms", 64, "sharegpt"),
    ("4x rtx4090", "qwen2.5-32b:q8_0", "10gbit,0.1ms", 128, "azure"),
    ("4x rtx3060", "qwen2.5-14b:q4_k_m", "100mbit,1ms", 32, "sharegpt"),
    ("4x m4max", "qwen2.5-32b:q4_k_m", "1gbit,0.3ms", 64, "sharegpt"),
    ("2x rtx4090, 2x rtx3060", "qwen2.5-14b:q4_k_m", "1gbit,0.3ms", 64, "sharegpt"),
    ("2x rtx3090, 2x m4max", "qwen2.5-32b:q4_k_m", "300mbit,2ms", 48, "sharegpt"),
)
SEEDS = (11, 23)
LEAST = 0.98
CONTEXT_TOKENS, READ_TOKENS = 4096, 1024  # as ``edgepipe serve`` plans
ROUNDS = 3  # requests for each line under way


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is computed."""

    model: str
    link: str
    lengths: str
    seed: int


def rate_of(devices: Sequence[str], load: Load, lines: int, *, plan: str = "") -> float:
    """Return simulated tokens per second of one pipeline with ``lines`` lines under way."""
    config, weights = named_model(planned_name(load.model))
    cluster = ImaginedCluster(
        devices=devices,
        config=config,
        weights=weights,
        link=parse_link(load.link),
        adjustments={"jitter": "0.05"},
        plan=plan,
        seed=load.seed,
    )
    prompt, output = named_lengths(load.lengths)
    spec = WorkloadSpec(
        arrivals=Arrivals.CLOSED,
        concurrency=lines,
        num_requests=max(48, ROUNDS * lines),
        prompt=prompt,
        output=output,
        priority=Priority.BATCH,
        seed=load.seed,
    )
    run = Run(cluster=imagine(cluster), workload=make_workload(spec), policy=make_policy("throttled"), itl_goal_s=None)
    return simulate(run).steady_tokens_per_s


def pairings(devices: Sequence[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the ways to split four machines into two pairs, those of equal kinds once."""
    found: dict[frozenset[tuple[str, ...]], tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for pair in combinations(range(4), 2):
        one = tuple(sorted(devices[index] for index in pair))
        other = tuple(sorted(devices[index] for index in range(4) if index not in pair))
        found.setdefault(frozenset((one, other)), (one, other))
    return list(found.values())


def pairs_rate(pairs: Sequence[Sequence[str]], load: Load, lines: int) -> float:
    """Return the rate of two pipelines over two machines each; 0 if the model does not fit."""
    speeds = [sum(named_device(key).bandwidth_bytes_per_s for key in pair) for pair in pairs]
    try:
        shares = shares_by_speed(lines, speeds)
        return sum(rate_of(pair, load, share) for pair, share in zip(pairs, shares, strict=True))
    except NoFeasiblePlacement:
        return 0.0


def auto_layout(cluster: Cluster, lines: int) -> Layout:
    """Return what ``auto`` chooses."""
    demand = Demand(
        config=cluster.config,
        weights=cluster.weights,
        concurrency=lines,
        context_tokens=CONTEXT_TOKENS,
        read_tokens=READ_TOKENS,
    )
    return best_layout(demand, cluster.machines, cluster.links)[0]


def layout_rate(layout: Layout, kinds: Mapping[str, str], load: Load) -> float:
    """Return the rate of a layout. ``kinds``: the device of each machine."""
    rate = 0.0
    for found in layout.plans:
        keys = [kinds[str(stage.machine.node_id)] for stage in found.stages]
        plan = ",".join(f"{chr(ord('a') + place)}:{stage.part.layers}" for place, stage in enumerate(found.stages))
        rate += rate_of(keys, load, found.demand.concurrency, plan=plan)
    return rate


def replica_rows() -> list[Row]:
    """Simulate all clusters; rates are means over the seeds."""
    return [row_of(*cluster) for cluster in CLUSTERS]


def row_of(text: str, model: str, link: str, lines: int, lengths: str) -> Row:
    """Compare ``auto`` with its rivals on one cluster."""
    devices = parse_devices(text)
    config, weights = named_model(planned_name(model))
    cluster = known_cluster(devices, config, link=parse_link(link), model=model, weights=weights)
    kinds = {str(machine.node_id): key for machine, key in zip(cluster.machines, devices, strict=True)}
    chosen = auto_layout(cluster, lines)
    loads = [Load(model=model, link=link, lengths=lengths, seed=seed) for seed in SEEDS]
    rivals = {"one of four": mean(rate_of(devices, load, lines) for load in loads)}
    rivals["two of two"] = max(mean(pairs_rate(pairs, load, lines) for load in loads) for pairs in pairings(devices))
    rate = mean(layout_rate(chosen, kinds, load) for load in loads)
    best = max(rivals, key=lambda name: rivals[name])
    words = " | ".join("+".join(kinds[str(stage.machine.node_id)] for stage in found.stages) for found in chosen.plans)
    figures = ", ".join(f"{name} {each:.0f}" for name, each in rivals.items())
    name = f"{text}, {model}, {link}, {lines} lines, {lengths}"
    say(f"{name}: {figures}, auto {rate:.0f} ({words})")
    return at_least(name, rate, "tok/s", rivals[best], best, LEAST)
