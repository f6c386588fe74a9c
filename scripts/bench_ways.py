"""Ways to fill the steps of a batch: what each gives, and what ``auto`` chooses, on 12 simulated mixes.

Run as ``scripts/bench ways [MIX...] [SEEDS]``: places of mixes from 0, such as ``scripts/bench ways 0,3 2``. A mix
takes one to three minutes of one core. ``paper`` repeats TD-Pipe's comparison; ``emulated [MIX...]`` measures on the
runtime itself (``emulated_ways.py``). The rivals of ``auto`` are all ways that it may choose from and Sarathi at two
larger budgets, each over the whole run. ``auto`` begins with the default way, sees no length before an answer has
ended, and predicts with other seeds.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

from emulated_ways import emulated_rows, lengths_of
from figures import Row, at_least, print_rows

from edgepipe.backend.devices import parse_devices
from edgepipe.scheduler import Priority, make_policy
from edgepipe.scheduler.batch_ways import TEMPORAL, THROTTLED, WAYS
from edgepipe.simulation.batch_choice import simulate_auto
from edgepipe.simulation.imagined import Imagined, ImaginedCluster, imagine
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.simulation.workload import (
    Arrivals,
    LognormalLengths,
    Workload,
    WorkloadSpec,
    make_workload,
    named_lengths,
)
from edgepipe.store.typed_names import planned_name
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model

LINES_UNDER_WAY = 224  # lines of one batch, as gateways run it
MIXES = (
    ("4x rtx4090", "qwen2.5-32b:bf16", "1gbit,0.3ms", "azure"),
    ("4x rtx4090", "qwen2.5-32b:bf16", "1gbit,0.3ms", "sharegpt"),
    ("4x rtx4090", "qwen2.5-32b:bf16", "1gbit,0.3ms", "4096+128"),
    ("4x rtx4090", "qwen2.5-32b:bf16", "10gbit,0.1ms", "azure"),
    ("4x rtx4090", "qwen2.5-32b:bf16", "10gbit,0.1ms", "4096+128"),
    ("2x rtx4090", "qwen2.5-14b:bf16", "1gbit,0.3ms", "azure"),
    ("2x rtx4090", "qwen2.5-14b:bf16", "1gbit,0.3ms", "sharegpt"),
    ("2x rtx4090", "qwen2.5-14b:bf16", "1gbit,0.3ms", "1024+256"),
    ("2x m4max", "qwen2.5-32b:q4_k_m", "1gbit,0.3ms", "azure"),
    ("2x m4max", "qwen2.5-32b:q4_k_m", "1gbit,0.3ms", "4096+128"),
    ("4x rtx3090", "qwen2.5-32b:bf16", "300mbit,2ms", "azure"),
    ("4x rtx3090", "qwen2.5-32b:bf16", "300mbit,2ms", "128+512"),
)
RIVALS = (*WAYS, "sarathi-512", "sarathi-1024")
REQUESTS = {"sharegpt": 900, "azure": 450, "4096+128": 250, "1024+256": 500, "128+512": 700}
HYBRID = ("sarathi-512", "sarathi-1024", THROTTLED)
PAPER = "paper: up to 2.21x"
PAPER_REQUESTS, PAPER_ROWS = 2000, 1024
LEAST_OF_BEST, LEAST_OF_DEFAULT = 0.97, 1.1


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def cluster_of(mix: tuple[str, str, str, str], seed: int, *, max_running: int = 256) -> Imagined:
    devices, model, link, _ = mix
    config, weights = named_model(planned_name(model))
    return imagine(
        ImaginedCluster(
            devices=parse_devices(devices),
            config=config,
            weights=weights,
            link=parse_link(link),
            adjustments={"jitter": "0.05"},
            max_running=max_running,
            seed=seed,
        )
    )


def workload_of(lengths: str, seed: int) -> Workload:
    prompt, output = lengths_of(lengths)
    spec = WorkloadSpec(
        arrivals=Arrivals.CLOSED,
        concurrency=LINES_UNDER_WAY,
        num_requests=REQUESTS[lengths],
        prompt=prompt,
        output=output,
        priority=Priority.BATCH,
        seed=seed,
    )
    return make_workload(spec)


def rates_of(mix: tuple[str, str, str, str], seed: int) -> dict[str, float]:
    """Return output tokens per second of each way, and of ``auto``, while the ring is full."""
    run = Run(
        cluster=cluster_of(mix, seed), workload=workload_of(mix[3], seed), policy=make_policy("auto"), itl_goal_s=None
    )
    rates = {way: simulate(replace(run, batch_way=way)).steady_tokens_per_s for way in RIVALS}
    rates["auto"] = simulate_auto(run).steady_tokens_per_s
    say(f"{' '.join(mix)}, seed {seed}: " + ", ".join(f"{way} {rate:.1f}" for way, rate in rates.items()))
    return rates


def rows_of(mix: tuple[str, str, str, str], seeds: int) -> list[Row]:
    """Compare the means over the seeds."""
    every = [rates_of(mix, seed) for seed in range(11, 11 + seeds)]
    means = {way: statistics.mean(rates[way] for rates in every) for way in every[0]}
    best = max(RIVALS, key=lambda way: means[way])
    name = f"{mix[0]}, {mix[1]}, {mix[2]}, {mix[3]}: auto"
    found = [at_least(name, means["auto"], "tok/s", means[best], f"best of all: {best}", LEAST_OF_BEST)]
    if mix[3] in ("azure", "4096+128"):
        found.append(at_least(name, means["auto"], "tok/s", means[THROTTLED], THROTTLED, LEAST_OF_DEFAULT))
    return found


def paper_rows() -> list[Row]:
    """Compare phases with hybrid batches as in TD-Pipe, figure 11: four A100 and PCIe, ShareGPT's prompts below 1,024.

    Their hybrid baseline is vLLM 0.5.3, here a fixed budget with this scheduler's even shares, which theirs lacks.
    """
    mix = ("4x a100-80g", "qwen2.5-72b:bf16", "100gbit,0.05ms", "sharegpt")
    prompt, output = named_lengths("sharegpt")
    spec = WorkloadSpec(
        num_requests=PAPER_REQUESTS,
        prompt=replace(prompt, max_tokens=1024) if isinstance(prompt, LognormalLengths) else prompt,
        output=output,
        priority=Priority.BATCH,
        seed=11,
    )
    cluster = cluster_of(mix, 11, max_running=PAPER_ROWS)
    run = Run(cluster=cluster, workload=make_workload(spec), policy=make_policy("auto"), itl_goal_s=None)
    rates = {way: simulate(replace(run, batch_way=way)).output_tokens_per_s for way in (*HYBRID, TEMPORAL)}
    say(f"{' '.join(mix)}: " + ", ".join(f"{way} {rate:.1f}" for way, rate in rates.items()))
    return [
        Row(f"{mix[0]}, 70B: temporal", rates[TEMPORAL], "tok/s", rates[way], way, rates[TEMPORAL] / rates[way], PAPER)
        for way in HYBRID
    ]


def main() -> None:
    """Simulate and print one table."""
    if sys.argv[1:2] == ["emulated"]:
        rows = emulated_rows(sys.argv[2:])
        print_rows("ways, emulated", rows)
        sys.exit(any(row.met is False for row in rows))
    if sys.argv[1:] == ["paper"]:
        print_rows("ways, TD-Pipe's comparison", paper_rows())
        return
    places = [int(word) for word in sys.argv[1].split(",")] if len(sys.argv) > 1 else list(range(len(MIXES)))
    seeds = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    rows = [row for place in places for row in rows_of(MIXES[place], seeds)]
    print_rows("ways", rows)
    sys.exit(any(row.met is False for row in rows))


if __name__ == "__main__":
    main()
