"""``scripts/bench ways emulated``: ``auto`` and its rivals on the runtime itself, in real time.

Nodes, engine and stages are real processes; only the devices' arithmetic is emulated. Each way serves the same requests
from the start. Requests are fewer than in the simulations, and fewer are under way, since a second takes a second: a
way takes about a minute of the devices' time, a mix at most five ways. Other programs on the machine lengthen that: the
nodes' own work needs most of two cores. Rates count between the first and the last fifth of the tokens; the ring should
fill up and drain in less than a tenth of that time, and each run prints the share.

The oracle knows all lengths before the first request: it is the way that is best for them by simulation, from the
start. ``auto`` may know only the lengths of ended answers, so its first choice comes after 24 of them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import NamedTuple

import numpy as np
from figures import Row, at_least

from edgepipe.backend.devices import parse_devices
from edgepipe.cli.bench.cluster import EmulatedCluster, emulated_cluster
from edgepipe.cli.bench.run import BenchRun, EmulatedRun, runs_on
from edgepipe.scheduler import Priority
from edgepipe.scheduler.batch_ways import AUTO, TEMPORAL, THROTTLED
from edgepipe.scheduler.lengths import Lengths
from edgepipe.shapes.loader import named_shape
from edgepipe.simulation.batch_choice import ChoiceFacts, choose_way, sketch_ring
from edgepipe.simulation.imagined import ImaginedCluster, imagine
from edgepipe.simulation.report import STEADY, RunReport
from edgepipe.simulation.workload import (
    Arrivals,
    FixedLengths,
    LengthDistribution,
    Workload,
    WorkloadSpec,
    make_workload,
    named_lengths,
)
from edgepipe.units import parse_link
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import ServeRequest

RIVALS = (THROTTLED, "sarathi-128", TEMPORAL)  # Sarathi with the budget that is best for these mixes by simulation
LEAST_OF_BEST, LEAST_OF_DEFAULT, LEAST_OF_ORACLE = 0.95, 1.1, 0.95
JITTER = {"jitter": "0.05"}


class EmulatedMix(NamedTuple):
    """Devices, a model in bf16, a link, lengths, and how many requests of them."""

    devices: tuple[str, ...]
    model: str
    link: str
    lengths: str
    requests: int
    under_way: int
    long_prompts: bool  # ``auto`` is compared with the default, too


MIXES = {
    "azure": EmulatedMix(("rtx4090",) * 2, "qwen2.5-14b", "1gbit,0.3ms", "azure", 96, 32, True),
    "1024+256": EmulatedMix(("rtx4090",) * 2, "qwen2.5-14b", "1gbit,0.3ms", "1024+256", 96, 32, False),
    "4096+128": EmulatedMix(("rtx4090",) * 2, "qwen2.5-14b", "10gbit,0.1ms", "4096+128", 80, 20, True),
}


def lengths_of(text: str) -> tuple[LengthDistribution, LengthDistribution]:
    """Return the lengths of prompts and answers of a name, or of two numbers with a plus."""
    if "+" in text:
        prompt, output = (FixedLengths(tokens=int(tokens)) for tokens in text.split("+"))
        return prompt, output
    return named_lengths(text)


def emulated_rows(names: list[str]) -> list[Row]:
    """Measure mixes, by name; all without names."""
    return [row for name in names or list(MIXES) for row in _rows(name, MIXES[name])]


def _rows(name: str, mix: EmulatedMix) -> list[Row]:
    oracle = oracle_way(mix)
    further = [oracle] if mix.long_prompts and oracle not in RIVALS else []
    ways = [*RIVALS, *further, AUTO]
    rates = asyncio.run(_rates(name, mix, ways))
    best = max(RIVALS, key=lambda way: rates[way])
    title = f"{len(mix.devices)}x {mix.devices[0]}, {mix.model}, {mix.lengths}: auto"
    rows = [at_least(title, rates[AUTO], "tok/s", rates[best], f"best of all: {best}", LEAST_OF_BEST)]
    return [*rows, *_long_rows(title, rates, oracle)] if mix.long_prompts else rows


async def _rates(name: str, mix: EmulatedMix, ways: list[str]) -> dict[str, float]:
    """Measure ways in turn on one cluster. Return their output tokens per second."""
    rates: dict[str, float] = {}
    runs = [_run(mix, way) for way in ways]
    async with emulated_cluster(runs[0].cluster) as admin:
        async for report in runs_on(admin, runs, _say):
            way = ways[len(rates)]
            rates[way] = report.steady_tokens_per_s
            _print(
                f"{name}, {way}: {report.steady_tokens_per_s:.1f} tok/s, the ring not full in "
                f"{not_full(report, mix.under_way):.0%} of that time, {report.duration_s:.0f} s in all, "
                f"load {os.getloadavg()[0]:.1f}"
            )
    return rates


def _long_rows(title: str, rates: dict[str, float], oracle: str) -> list[Row]:
    """Compare with the default and with the oracle. One of the two is to be reached."""
    default = at_least(title, rates[AUTO], "tok/s", rates[THROTTLED], THROTTLED, LEAST_OF_DEFAULT)
    known = at_least(title, rates[AUTO], "tok/s", rates[oracle], f"knows all lengths: {oracle}", LEAST_OF_ORACLE)
    met = bool(default.met or known.met)
    return [
        default._replace(target=f"{default.target}, or the next", met=met),
        known._replace(target=f"{known.target}, or the last", met=met),
    ]


def oracle_way(mix: EmulatedMix) -> str:
    """Return the way that is best by simulation for the mix's devices and the lengths of all its requests."""
    cluster = imagine(
        ImaginedCluster(
            devices=parse_devices(", ".join(mix.devices)),
            config=named_shape(mix.model),
            link=parse_link(mix.link),
            adjustments=JITTER,
        )
    )
    ring = sketch_ring(cluster.ring.times())
    assert ring is not None, "the times of imagined devices are known"
    limits = cluster.limits
    facts = ChoiceFacts(
        ring=ring,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        context_length=limits.context_length,
        max_running=limits.max_running,
        lengths=tuple(Lengths(each.prompt_tokens, each.output_tokens) for each in _workload(mix).requests),
        sequences=mix.under_way,
        micro_batches=len(mix.devices),
    )
    way, rates = choose_way(facts, THROTTLED)
    _print(f"{mix.lengths}, the oracle: {way} of " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    return way


def not_full(report: RunReport, under_way: int) -> float:
    """Return the share of the counted time in which fewer requests than ``under_way`` are under way."""
    whole = [each for each in report.requests if each.token_times_s]
    tokens = np.sort(np.array([moment for each in whole for moment in each.token_times_s]))
    begin_s, end_s = (float(tokens[round(share * (len(tokens) - 1))]) for share in STEADY)
    changes = sorted([(each.arrival_s, 1) for each in whole] + [(each.token_times_s[-1], -1) for each in whole])
    lacking_s, last_s, running = 0.0, begin_s, 0
    for moment_s, change in [*changes, (end_s, 0)]:
        at_s = min(max(moment_s, begin_s), end_s)
        lacking_s += (at_s - last_s) * (running < under_way)
        last_s, running = at_s, running + change
    return lacking_s / (end_s - begin_s)


def _workload(mix: EmulatedMix) -> Workload:
    prompt, output = lengths_of(mix.lengths)
    return make_workload(
        WorkloadSpec(
            arrivals=Arrivals.CLOSED,
            concurrency=mix.under_way,
            num_requests=mix.requests,
            prompt=prompt,
            output=output,
            priority=Priority.BATCH,
            seed=11,
        )
    )


def _run(mix: EmulatedMix, way: str) -> EmulatedRun:
    cluster = EmulatedCluster(
        devices=list(mix.devices),
        model=mix.model,
        config=named_shape(mix.model),
        link=mix.link,
        settings=JITTER,
    )
    policy = way if way != THROTTLED else ""
    return EmulatedRun(
        run=BenchRun(workload=_workload(mix), label=way, settings={}),
        cluster=cluster,
        serve=ServeRequest(
            options=ServeSpec(model=cluster.served_name, num_nodes=len(mix.devices), policy=policy, draft="off")
        ),
    )


def _print(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _say(step: str, ended: int, total: int) -> None:
    """Print the beginning of a run's parts, and nothing between."""
    if ended <= 1:
        print(f"  {step}: {ended} of {total} requests" if total else f"  {step}", file=sys.stderr, flush=True)
