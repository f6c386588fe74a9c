"""``scripts/bench ways emulated``: ``auto`` and its rivals on the runtime itself, in real time.

Nodes, engine and stages are real processes; only the devices' arithmetic is emulated. Each way serves the same requests
from the start. Requests are fewer than in the simulations, and fewer are under way, since a second takes a second.
"""

from __future__ import annotations

import asyncio
import sys
from typing import NamedTuple

from figures import Row, at_least

from edgepipe.cli.bench.cluster import EmulatedCluster
from edgepipe.cli.bench.run import BenchRun, EmulatedRun, bench_emulated
from edgepipe.scheduler import Priority
from edgepipe.scheduler.batch_ways import AUTO, TEMPORAL, THROTTLED
from edgepipe.shapes.loader import named_shape
from edgepipe.simulation.workload import (
    Arrivals,
    FixedLengths,
    LengthDistribution,
    WorkloadSpec,
    make_workload,
    named_lengths,
)
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import ServeRequest

RIVALS = (THROTTLED, "sarathi-128", TEMPORAL)  # Sarathi with the budget that is best for these mixes by simulation
LEAST_OF_BEST, LEAST_OF_DEFAULT = 0.95, 1.1


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
    "4096+128": EmulatedMix(("rtx4090",) * 4, "qwen2.5-32b", "10gbit,0.1ms", "4096+128", 96, 24, True),
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
    ways = (*RIVALS, AUTO)
    reports = asyncio.run(bench_emulated([_run(mix, way) for way in ways], _say))
    rates = {way: report.steady_tokens_per_s for way, report in zip(ways, reports, strict=True)}
    print(f"  {name}: " + ", ".join(f"{way} {rate:.1f}" for way, rate in rates.items()), file=sys.stderr, flush=True)
    best = max(RIVALS, key=lambda way: rates[way])
    title = f"{len(mix.devices)}x {mix.devices[0]}, {mix.model}, {mix.lengths}: auto"
    rows = [at_least(title, rates[AUTO], "tok/s", rates[best], f"best of all: {best}", LEAST_OF_BEST)]
    if mix.long_prompts:
        rows.append(at_least(title, rates[AUTO], "tok/s", rates[THROTTLED], THROTTLED, LEAST_OF_DEFAULT))
    return rows


def _run(mix: EmulatedMix, way: str) -> EmulatedRun:
    prompt, output = lengths_of(mix.lengths)
    spec = WorkloadSpec(
        arrivals=Arrivals.CLOSED,
        concurrency=mix.under_way,
        num_requests=mix.requests,
        prompt=prompt,
        output=output,
        priority=Priority.BATCH,
        seed=11,
    )
    cluster = EmulatedCluster(
        devices=list(mix.devices),
        model=mix.model,
        config=named_shape(mix.model),
        link=mix.link,
        settings={"jitter": "0.05"},
    )
    policy = way if way != THROTTLED else ""
    return EmulatedRun(
        run=BenchRun(workload=make_workload(spec), label=way, settings={}),
        cluster=cluster,
        serve=ServeRequest(
            options=ServeSpec(model=cluster.served_name, num_nodes=len(mix.devices), policy=policy, draft="off")
        ),
    )


def _say(step: str, ended: int, total: int) -> None:
    """Print the beginning of a run's parts, and nothing between."""
    if ended <= 1:
        print(f"  {step}: {ended} of {total} requests" if total else f"  {step}", file=sys.stderr, flush=True)
