"""The planner: how good, how fast, how right. ``scripts/bench planner [--full] [PART ...]``

Parts: ``search`` (exact against trying everything, and its time), ``splits`` (against RAM- and FLOPS-proportional
splits of 20 mixed clusters, simulated and on emulated nodes), ``right`` (predicted against measured, on emulated
clusters and a real model over unequal stages; ``right-emulated`` and ``right-real`` are its halves), ``schedules``
(the published table), ``published`` (``plan --emulate`` against decode rates that others measured). Without ``--full``
the runtime confirms a few of the clusters.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from bench_foundation import stored_demo
from figures import Row, at_least, below
from local_nodes import await_idle, complete, decode_rate, running_nodes
from parts import run_parts
from published_rates import ATTENTION, HYBRIDS, published_rows

from edgepipe.backend.devices import named_device, parse_devices
from edgepipe.backend.types import DEFAULT_SETTINGS
from edgepipe.cli.bench.cluster import emulated_cluster
from edgepipe.cli.bench.run import EmulatedRun, bench_emulated, runs_on
from edgepipe.cli.bench.verb import emulated_run
from edgepipe.cli.workload_options import make_workload_of
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.link.admin_client import Admin
from edgepipe.planner.cluster import Cluster, known_cluster
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.partition import ExactSearch, PartitionProblem
from edgepipe.planner.placement import Need, Placed, stage_bytes
from edgepipe.planner.plan import plan
from edgepipe.planner.preview import plan_text
from edgepipe.planner.profiles import Machine
from edgepipe.scheduler import make_policy
from edgepipe.shapes.loader import named_shape
from edgepipe.simulation.imagined import ImaginedCluster, imagine
from edgepipe.simulation.report import RunReport
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.units import parse_link
from edgepipe.wire.surveys import cluster_of
from tests.support.worlds.brute_force import brute_force

_CHATS = 8  # chats with the real model
SEQUENCES, PROMPT, OUTPUT = 24, 48, 96
MODEL = "qwen2.5-14b"
LINK, SLOW_LINK = "1gbit,0.5ms", "100mbit,5ms"
MIXED = (
    "rtx4090, m4max",
    "rtx4090, m4pro",
    "2x rtx4090, m2max",
    "rtx3090, m4max, m4pro",
    "rtx5090, m1max",
    "rtx4090, rtx3090, m1max",
    "a100-40g, m4max",
    "h100, rtx4090",
    "rtx5090, rtx3090, m4pro",
    "2x rtx3090, m3pro",
    "m4max, m4pro, m1pro",
    "m2max, m3max",
    "rtx4090, m1max, m2pro",
    "rtx5090, m4max, m4pro",
    "rtx3090, 2x m4pro",
    "a100-40g, rtx4090, m2max",
    "m4max, m1max, m2pro",
    "rtx4090, 2x m2pro, m4pro",
    "2x rtx4090, 2x m1max",
    "rtx5090, rtx4090, rtx3090, m4max",
)
RUNTIME = (1, 3, 10, 18)  # mixed clusters that run, unless --full: for splits
RIGHT = (0, 2, 8, 15)  # the same, for predictions


def search_rows(full: bool) -> list[Row]:
    """Exactness on small instances, time on large ones."""
    generator = np.random.default_rng(0)
    agree = 0
    for _ in range(500):
        devices, layers = int(generator.integers(1, 5)), int(generator.integers(1, 8))
        problem = _random_problem(generator, devices, layers)
        best, found = brute_force(problem), ExactSearch(devices).best(problem)
        agree += (best is None) == (found is None) and (
            best is None or found is None or math.isclose(best.cycle_s, found.cycle_s, rel_tol=1e-9)
        )
    rows = [at_least("searches that find what trying everything finds", agree, "of 500", 500, "all", 1.0)]
    rows += [
        below("plan for 8 different devices and 80 layers", _plan_s(8, "llama-3.3-70b"), "s", 0.1),
        below("plan for 16 different devices and 126 layers", _plan_s(16, "llama-3.1-405b"), "s", 2.0),
    ]
    return rows


def _random_problem(generator: np.random.Generator, devices: int, layers: int) -> PartitionProblem:
    most = generator.integers(0, layers + 1, (devices, 1)) + np.array([2, 1, 1, 0])
    if generator.random() < 0.3:
        most[:] = layers
    return PartitionProblem(
        num_layers=layers,
        micro_batches=int(generator.integers(1, 7)),
        base_s=generator.uniform(0, 1, devices),
        layer_s=generator.uniform(0.1, 2, devices),
        head_s=generator.uniform(0, 3, devices),
        most_layers=np.clip(most, 0, layers),
        upload_s=generator.uniform(0, 3, (devices, devices)),
        latency_s=generator.uniform(0, 4, (devices, devices)),
        closing_s=generator.uniform(0, 2, (devices, devices)),
    )


def _plan_s(count: int, model: str) -> float:
    """The best of five, every device another: throughput for 16 chats."""
    config = _shape(model)
    keys = ("h100", "a100-80g", "m3ultra", "m2ultra", "rtx5090", "m4max", "a100-40g", "m1ultra", "rtx4090", "m3max")
    devices = [*keys, "m1max", "m2max", "rtx3090", "m4pro", "m3pro", "m2pro"][:count]
    cluster = known_cluster(devices, config, link=parse_link(LINK))
    demand = Demand(config=config, objective=Objective.THROUGHPUT)
    times: list[float] = []
    for _ in range(5):
        started_s = time.perf_counter()
        plan(demand, cluster.machines, cluster.links)
        times.append(time.perf_counter() - started_s)
    return min(times)


def _shape(model: str) -> ModelConfig:
    if model != "llama-3.1-405b":
        return named_shape(model)
    big = named_shape("llama-3.3-70b")  # 126 layers in half the width, so that sixteen machines hold them
    return replace(big, layers=big.layers[:1] * 126)


class Split(NamedTuple):
    """One way to share out the layers of one cluster."""

    devices: str
    name: str
    text: str  # as --plan takes it


def _settings(devices: str, text: str, link: str = LINK) -> Mapping[str, str]:
    return {
        "emulate": devices,
        "devices": devices,
        "as-model": f"{MODEL}:bf16",
        "link": link,
        "jitter": "0.03",
        "plan": text,
        "workload": "fixed",
        "requests": str(SEQUENCES),
        "prompt-tokens": str(PROMPT),
        "output-tokens": str(OUTPUT),
        "micro-batches": "auto",
        "context": "1024",
    }


def _demand(config: ModelConfig) -> Demand:
    return Demand(
        config=config,
        objective=Objective.THROUGHPUT,
        concurrency=SEQUENCES,
        context_tokens=1024,
        read_tokens=PROMPT + OUTPUT // 2,
    )


def _cluster(devices: str, link: str = LINK) -> Cluster:
    return known_cluster(parse_devices(devices), named_shape(MODEL), link=parse_link(link))


def _splits(devices: str) -> list[Split]:
    """The plan's, and in proportion to memory and to FLOP/s over all machines."""
    cluster = _cluster(devices)
    demand = _demand(cluster.config)
    best = plan(demand, cluster.machines, cluster.links)
    kv_tokens = min(best.kv_tokens, demand.concurrency * demand.context_tokens)
    by_ram = {one.name: float(one.room.free_bytes) for one in cluster.machines}
    keys = parse_devices(devices)
    by_flops = {one.name: named_device(key).flops for one, key in zip(cluster.machines, keys, strict=True)}
    return [
        Split(devices, "plan", plan_text(best)),
        Split(devices, "RAM", _text(proportional(cluster, by_ram, kv_tokens))),
        Split(devices, "FLOPS", _text(proportional(cluster, by_flops, kv_tokens))),
    ]


def proportional(cluster: Cluster, shares: Mapping[str, float], kv_tokens: int) -> Sequence[Placed]:
    """Layers in proportion to a figure, the largest first, moved on where a machine cannot hold its part beside the KV
    of so many tokens: as many as the plan has room for."""
    machines = sorted(cluster.machines, key=lambda one: -shares[one.name])
    num_layers = cluster.config.num_layers
    total = sum(shares.values())
    counts = [max(1, round(num_layers * shares[one.name] / total)) for one in machines]
    most = [
        _most_layers(cluster.config, kv_tokens, one, embedding=one is machines[0], head=one is machines[-1])
        for one in machines
    ]
    while sum(counts) != num_layers or any(count > limit for count, limit in zip(counts, most, strict=True)):
        over = [i for i, limit in enumerate(most) if counts[i] > limit]
        if over or sum(counts) > num_layers:
            counts[over[0] if over else int(np.argmax(counts))] -= 1
        else:
            able = [i for i, limit in enumerate(most) if counts[i] < limit]
            if not able:
                raise NoFeasiblePlacement("the machines do not hold the model")
            counts[max(able, key=lambda i: shares[machines[i].name] / counts[i])] += 1
    ends = np.cumsum(counts)
    ranges = [LayerRange(int(end - count), int(end)) for end, count in zip(ends, counts, strict=True)]
    slices = make_slices(ranges, num_layers)
    return [Placed(node_id=one.node_id, part=part) for one, part in zip(machines, slices, strict=True)]


def _most_layers(config: ModelConfig, kv_tokens: int, machine: Machine, *, embedding: bool, head: bool) -> int:
    need = Need(config=config, kv_tokens=kv_tokens)
    one = Slice(index=0, layers=LayerRange(0, 1), embedding=False, head=False)
    layer = stage_bytes(need, machine.room, one)
    tables = stage_bytes(need, machine.room, replace(one, embedding=embedding, head=head)) - layer
    return int((machine.room.free_bytes - tables) // layer)


def _text(placed: Sequence[Placed]) -> str:
    return ",".join(f"{one.node_id}:{one.part.layers}" for one in placed)


def _simulated(split: Split) -> float:
    settings = _settings(split.devices, split.text)
    cluster = imagine(
        ImaginedCluster(
            devices=parse_devices(split.devices),
            config=named_shape(MODEL),
            link=parse_link(settings["link"]),
            adjustments={"jitter": settings["jitter"]},
            plan=split.text,
            context_length=1024,
        )
    )
    run = Run(cluster=cluster, workload=make_workload_of(settings), policy=make_policy("throttled"))
    return simulate(run).steady_tokens_per_s


def _measured(runs: Sequence[Mapping[str, str]]) -> list[float]:
    """Steady tokens per second on emulated nodes; runs in a row over one kind of cluster share it."""
    made = [emulated_run(settings, f"{settings['emulate']} {settings['plan']}") for settings in runs]

    def tell(what: str, done: int, total: int) -> None:
        if not total or done == total:
            print(f"  {what}", file=sys.stderr, flush=True)

    return [report.steady_tokens_per_s for report in asyncio.run(bench_emulated(made, tell))]


def _mixture(devices: str) -> float:
    """How much faster the fastest machine reads than the slowest."""
    rates = [named_device(key).bandwidth_bytes_per_s for key in parse_devices(devices)]
    return max(rates) / min(rates)


def split_rows(full: bool) -> list[Row]:
    """All clusters in the simulator, some on emulated nodes."""
    rows: list[Row] = []
    gains: dict[str, list[float]] = {"RAM": [], "FLOPS": []}
    for devices in MIXED:
        planned, *others = _splits(devices)
        ours = _simulated(planned)
        for other in others:
            theirs = _simulated(other)
            gains[other.name].append(ours / theirs)
            name = f"{devices} (1:{_mixture(devices):.1f})"
            rows.append(at_least(name, ours, "tok/s", theirs, f"by {other.name}, simulated", 0.99))
    mixed = [index for index, devices in enumerate(MIXED) if _mixture(devices) >= 3]
    for name, values in gains.items():
        median = statistics.median(values[index] for index in mixed)
        rows.append(at_least(f"median of {len(mixed)} with speeds of 1:3 and more", median, "", 1, f"by {name}", 1.3))
    chosen = MIXED if full else [MIXED[index] for index in RUNTIME]
    splits = [split for devices in chosen for split in _splits(devices)]
    rates = _measured([_settings(split.devices, split.text) for split in splits])
    for index in range(0, len(splits), 3):
        for other in (1, 2):
            name, by = f"{splits[index].devices}, emulated nodes", f"by {splits[index + other].name}"
            rows.append(at_least(name, rates[index], "tok/s", rates[index + other], by, 0.97))
    return rows


class Prediction(NamedTuple):
    """What a plan said, and what came of it."""

    name: str
    predicted: float  # tok/s
    measured: float

    @property
    def error(self) -> float:
        """The prediction's error as a part of what was measured."""
        return abs(self.predicted / self.measured - 1)


def right_rows(full: bool) -> list[Row]:
    """Predicted against measured: emulated clusters with their plans, and a real model over unequal stages."""
    return _errors([*asyncio.run(_emulated_predictions(full)), *_real_predictions()])


def right_emulated_rows(full: bool) -> list[Row]:
    """Measure the part of ``right`` with emulated clusters."""
    return _errors(asyncio.run(_emulated_predictions(full)))


def right_real_rows(full: bool) -> list[Row]:
    """Measure the part of ``right`` with the real model."""
    return _errors(_real_predictions())


def _errors(found: Sequence[Prediction]) -> list[Row]:
    rows = [
        Row(one.name, one.predicted, "tok/s", one.measured, "measured", one.predicted / one.measured) for one in found
    ]
    errors = [100 * one.error for one in found]
    rows.append(below("median error", statistics.median(errors), "%", 10))
    rows.append(below("95 % of the errors", float(np.quantile(errors, 0.95)), "%", 20))
    return rows


def _tell(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


async def _emulated_predictions(full: bool) -> list[Prediction]:
    """Nodes measure their devices and links as ``edgepipe plan`` has them do; the plan is served, one chat and many."""
    found: list[Prediction] = []
    for devices in MIXED if full else [MIXED[index] for index in RIGHT]:
        for link in (LINK, SLOW_LINK):
            run = emulated_run(_settings(devices, _splits(devices)[0].text, link))
            async with emulated_cluster(run.cluster) as admin:
                survey = cluster_of(await admin.survey(MODEL, DEFAULT_SETTINGS))
                # Nodes hold a small vocabulary, since logits would cost host time; memory is the true model's.
                cluster = replace(survey, config=named_shape(MODEL))
                found += await _predictions_on(admin, cluster, run, f"{devices}, {link}")
    return found


async def _predictions_on(admin: Admin, cluster: Cluster, run: EmulatedRun, name: str) -> list[Prediction]:
    demand = _demand(cluster.config)
    planned = plan(demand, cluster.machines, cluster.links)
    kv_tokens = min(planned.kv_tokens, SEQUENCES * demand.context_tokens)
    serve = replace(run.serve, plan=plan_text(planned), options=replace(run.serve.options, kv_tokens=kv_tokens))
    found: list[Prediction] = []
    for sequences, forecast in ((1, planned.single), (SEQUENCES, planned.many)):
        settings = {**run.run.settings, **_settings(name, "", ""), "requests": str(sequences)}
        each = replace(run, serve=serve, run=replace(run.run, workload=make_workload_of(settings)))
        (report,) = [one async for one in runs_on(admin, [each], lambda *_: None)]
        chats = "1 chat" if sequences == 1 else f"{sequences} chats, M={forecast.micro_batches}"
        found.append(Prediction(f"{name}, {chats}", forecast.tokens_per_s, report.steady_tokens_per_s))
        steps = [f"{1e3 * a:.1f}/{1e3 * b.step_s:.1f}" for a, b in zip(forecast.step_s, report.stages, strict=True)]
        between_s = forecast.turn_s - sum(forecast.step_s)
        hosts_ms = [round(1e3 * cluster.links.host_s(one.node_id), 2) for one in cluster.machines]
        _tell(
            f"{found[-1].name}: {forecast.tokens_per_s:.1f}/{report.steady_tokens_per_s:.1f} tok/s, {serve.plan}, "
            f"steps {' '.join(steps)} ms, between them {1e3 * between_s:.1f}/{sum(_legs_ms(report)):.1f} ms "
            f"{[round(leg, 1) for leg in _legs_ms(report)]}, hosts {hosts_ms} ms, "
            f"M {report.micro_batches_mean:.1f} in the run"
        )
    return found


def _legs_ms(report: RunReport) -> list[float]:
    """Medians between a step's plan and its first stage, between its stages, and from the last one to the next plan."""
    planned = sorted(step.planned_s for step in report.steps)
    legs: list[list[float]] = []
    for step in report.steps:
        following = bisect.bisect_right(planned, step.stages[-1][1]) if step.stages else len(planned)
        if step.prefill_tokens or following == len(planned):
            continue
        times = [step.planned_s, *(moment for span in step.stages for moment in span), planned[following]]
        legs.append([times[i + 1] - times[i] for i in range(0, len(times), 2)])
    return [1e3 * statistics.median(leg) for leg in zip(*legs, strict=True)]


def _real_predictions() -> list[Prediction]:
    """SmolLM2 over two one-core stages of unequal size, alone and with eight chats.

    Devices are measured before and after each run, since the same step takes up to twice as long from one minute to the
    next on a machine whose memory others use; what is predicted is the mean.
    """
    found: list[Prediction] = []
    with running_nodes(2, models_dir=stored_demo().path.parent, threads=1) as nodes:
        for layers in ("n0:0-9,n1:10-29", "n0:0-20,n1:21-29"):
            flags = ("--plan", layers, "--context", "96")
            asked = ("plan", "demo", *flags, "--concurrency", str(_CHATS), "--measure", "--json")
            before = json.loads(nodes[0].edgepipe(*asked))
            nodes[0].edgepipe("serve", "demo", *flags)
            prompts = [[(7 * i + 13 * j) % 40_000 + 100 for j in range(24)] for i in range(_CHATS)]
            complete(nodes[0], prompts, max_tokens=8)
            measured: list[float] = []
            for chats in (1, _CHATS):
                rates = [decode_rate(complete(nodes[0], prompts[:chats], max_tokens=48)) for _ in range(3)]
                measured.append(statistics.median(rates))
                engine = nodes[0].status()["engines"][0]
                seen = [f"{one['step_ms']:.1f}" for one in engine["stages"]]
                _tell(f"{chats} chats: steps {' '.join(seen)} ms, M {engine['micro_batches']}")
            nodes[0].edgepipe("stop", "demo")
            await_idle(nodes[0], len(nodes))
            after = json.loads(nodes[0].edgepipe(*asked))
            for told in (before, after):
                steps = [f"{1e3 * one['step_s']:.1f}({1e3 * one['alone_s']:.1f})" for one in told["stages"]]
                _tell(f"planned: steps {' '.join(steps)} ms, M {told['micro_batches']}")
            keys = ("one_chat_tokens_per_s", "many_chats_tokens_per_s")
            for chats, key, rate in zip((1, _CHATS), keys, measured, strict=True):
                predicted = statistics.mean((before[key], after[key]))
                found.append(Prediction(f"SmolLM2, {layers}, {chats} chats", predicted, rate))
    return found


# Bubbles in per cent as published, by (micro-batches, stages) for GPipe and by slices for interleaving (P = 8, M = 32).
def published_part(full: bool) -> list[Row]:
    """What ``plan --emulate`` says of one machine against published rates."""
    return published_rows((*ATTENTION, *HYBRIDS))


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "search": search_rows,
    "splits": split_rows,
    "right": right_rows,
    "published": published_part,
}
HALVES: dict[str, Callable[[bool], list[Row]]] = {
    "right-emulated": right_emulated_rows,
    "right-real": right_real_rows,
}


if __name__ == "__main__":
    run_parts("planner", PARTS, if_named=HALVES)
