"""Every stage busy: a ring of emulated devices over a LAN against ideal links, the simulator and other schedules.

Run as ``scripts/bench engine [--full] [PART ...]``; parts: ``lan throttling sizing model truth simulator kv``.
Nodes, stages, links, plans and engine are real processes; in the first three only the devices' arithmetic is replaced.
``--full`` runs everything at its full length on them.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

from figures import Row, at_least, at_most
from parts import run_parts

from edgepipe.backend.cost import StepWork
from edgepipe.backend.devices import parse_devices
from edgepipe.cli.bench.cluster import emulated_cluster
from edgepipe.cli.bench.run import bench_emulated
from edgepipe.cli.bench.verb import emulated_run
from edgepipe.cli.workload_options import make_workload_of
from edgepipe.scheduler import make_policy
from edgepipe.simulation.imagined import Imagined, ImaginedCluster, imagine
from edgepipe.simulation.report import RunReport
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.simulation.workload import Arrivals, LognormalLengths, Workload, WorkloadSpec, make_workload
from edgepipe.units import parse_link
from edgepipe.weights.mixes import named_model

Settings = Mapping[str, str]

RING = {"emulate": "4x rtx4090", "as-model": "qwen2.5-32b:bf16", "jitter": "0.05"}
UNEQUAL = {
    **RING,
    "emulate": "3x rtx4090, a100-40g",
    "plan": "a:0-12,b:13-25,c:26-38,d:39-63",  # the last one is the slow stage: more layers than it is faster
}
DECODE = {"workload": "fixed", "prompt-tokens": "48", "output-tokens": "128"}  # all at once: a long stretch of decode
LAN, SLOW = "1gbit,1ms", "100mbit,5ms"
LINKS = (LAN, SLOW)
CROWDS = (8, 32, 128)
MOST = 16  # micro-batches of a sweep: four per stage


def decode(ring: Settings, *, link: str, sequences: int, micro_batches: str) -> Settings:
    """So many sequences that decode side by side."""
    return {**ring, **DECODE, "link": link, "requests": str(sequences), "micro-batches": micro_batches}


def measure(*runs: Settings, workload: Workload | None = None) -> list[RunReport]:
    """Run on real nodes; runs in a row over one kind of link share them. ``workload`` replaces that of the settings."""

    def tell(what: str, done: int, total: int) -> None:
        if not total or done == total:
            print(f"  {what}", file=sys.stderr, flush=True)

    made = [emulated_run(settings, f"{settings['link']} M={settings['micro-batches']}") for settings in runs]
    if workload is not None:
        made = [replace(each, run=replace(each.run, workload=workload)) for each in made]
    reports = asyncio.run(bench_emulated(made, tell))
    for report in reports:
        if report.num_failed:
            raise RuntimeError(f"{report.num_failed} requests failed: {report.facts.label}")
    return reports


def predict(settings: Settings, workload: Workload | None = None) -> RunReport:
    """The same in the simulator."""
    return simulate(simulation(settings, workload))


def simulation(settings: Settings, workload: Workload | None = None) -> Run:
    """A run, ready for the simulator."""
    micro_batches = settings["micro-batches"]
    return Run(
        cluster=imagined(settings),
        workload=workload or make_workload_of(settings),
        policy=make_policy(settings.get("policy", "throttled")),
        micro_batches=0 if micro_batches == "auto" else int(micro_batches),
    )


@cache
def host_s() -> float:
    """What one small message costs this machine, as nodes measure it when plans are made; nothing else runs."""

    async def asked() -> float:
        run = emulated_run(decode(RING, link="ideal", sequences=1, micro_batches="4"), "what hosts add")
        async with emulated_cluster(run.cluster) as admin:
            links = (await admin.measure_links()).links
            return statistics.median(one.one_way_s for one in links if one.sender == one.receiver)

    return asyncio.run(asked())


def imagined(settings: Settings) -> Imagined:
    """The cluster of a run, for the simulator, on hosts like this one."""
    return imagine(
        ImaginedCluster(
            devices=parse_devices(settings["emulate"]),
            config=named_model(settings["as-model"])[0],
            link=parse_link(settings["link"]),
            adjustments={"jitter": settings["jitter"]},
            plan=settings.get("plan", ""),
            host_s=host_s(),
        )
    )


def bottleneck_per_s(settings: Settings, *, batch: int) -> float:
    """Tokens per second that the slowest device or link alone allows with micro-batches of that size."""
    prompt, output = int(settings["prompt-tokens"]), int(settings["output-tokens"])
    work = StepWork.of_rows([prompt + output // 2] * batch, [1] * batch, logit_rows=batch)
    stages = imagined(settings).ring.stages
    return batch / max(max(one.step_s(work), one.link.upload_s(one.token_bytes * batch)) for one in stages)


class Fixed(NamedTuple):
    """What a fixed number of micro-batches gives."""

    per_s: float
    micro_batches: int


def sweep(settings: Settings) -> list[Fixed]:
    """Every sensible fixed M in the simulator, the best first."""
    counts = range(1, min(MOST, int(settings["requests"])) + 1)
    found = [Fixed(predict({**settings, "micro-batches": str(m)}).steady_tokens_per_s, m) for m in counts]
    return sorted(found, reverse=True)


def lan_rows(full: bool) -> list[Row]:
    """A LAN against ideal links, a slow network against its bottleneck, and the runtime against the simulator."""
    ideal = decode(RING, link="ideal", sequences=96, micro_batches="6")
    lan = {**ideal, "link": LAN}
    slow = decode(RING, link=SLOW, sequences=128, micro_batches="8")
    exact = decode(RING, link=LAN, sequences=64, micro_batches="auto")
    best = sweep(exact)[0]
    exact = {**exact, "micro-batches": str(best.micro_batches)}
    exact_ideal = decode(RING, link="ideal", sequences=64, micro_batches="4")
    runs = (ideal, exact_ideal, lan, exact, slow)
    got = [report.steady_tokens_per_s for report in measure(*runs)]
    simulated = [predict(settings).steady_tokens_per_s for settings in runs]
    allowed = bottleneck_per_s(slow, batch=16)
    rows = [
        at_least(f"decode over {LAN}, 96 sequences, M=6", got[2], "tok/s", got[0], "ideal links", 0.97),
        at_least(f"decode over {SLOW}, 128 sequences, M=8", got[4], "tok/s", allowed, "its bottleneck", 0.95),
        at_least(
            f"decode over {LAN}, 64 sequences, M={best.micro_batches}", got[3], "tok/s", best.per_s, "best M", 0.93
        ),
        Row("  of ideal links with M=4", got[3], "tok/s", got[1], "ideal links", got[3] / got[1]),
    ]
    rows.append(
        Row("a small message, as nodes measure what hosts take; simulated hosts take as much", 1e3 * host_s(), "ms")
    )
    for settings, real, expected in zip(runs, got, simulated, strict=True):
        name = f"runtime, {settings['link']}, {settings['requests']} sequences, M={settings['micro-batches']}"
        rows.append(at_least(name, real, "tok/s", expected, "simulator", 0.93))
    return rows


def throttling_rows(full: bool) -> list[Row]:
    """Token throttling against one fixed budget: Poisson arrivals at 0.8 of saturation, and saturation itself."""
    settings = {**RING, "link": LAN, "micro-batches": "4"}
    pair = [{**settings, "policy": policy} for policy in ("throttled", "sarathi")]
    crowd = chats(WorkloadSpec(arrivals=Arrivals.CLOSED, concurrency=256, num_requests=800))
    most = [predict(one, crowd).steady_tokens_per_s for one in pair]
    rows = [at_least("saturated by 256 users, simulated", most[0], "tok/s", most[1], "sarathi", 0.97)]
    if full:
        real = [report.steady_tokens_per_s for report in measure(*pair, workload=crowd)]
        rows.append(at_least("saturated by 256 users", real[0], "tok/s", real[1], "sarathi", 0.97))
    rate = 0.8 * most[0] / statistics.mean(request.output_tokens for request in crowd.requests)
    many, some = (
        chats(WorkloadSpec(arrivals=Arrivals.POISSON, rate_per_s=rate, num_requests=count)) for count in (400, 180)
    )
    name = f"Poisson {rate:.1f}/s, sharegpt lengths"
    plain, other = (predict(one, many) for one in pair)
    rows += _throttled_rows(f"{name}, simulated", plain, other)
    return rows + _throttled_rows(name, *measure(*pair, workload=many if full else some))


def _throttled_rows(name: str, throttled: RunReport, sarathi: RunReport) -> list[Row]:
    deviations = throttled.step_tokens_deviation, sarathi.step_tokens_deviation
    rates = throttled.output_tokens_per_s, sarathi.output_tokens_per_s
    return [
        at_most(f"{name}: TPOT", throttled.tpot_s.mean * 1e3, "ms", sarathi.tpot_s.mean * 1e3, "sarathi", 0.65),
        at_most(f"{name}: deviation of micro-batches", deviations[0], "tokens", deviations[1], "sarathi", 0.5),
        at_least(f"{name}: throughput", rates[0], "tok/s", rates[1], "sarathi", 0.97),
    ]


def chats(spec: WorkloadSpec) -> Workload:
    """ShareGPT-like lengths without the rare very long ones, for which a whole run would wait."""
    prompt = LognormalLengths(median_tokens=148, max_tokens=1024)
    output = LognormalLengths(median_tokens=164, max_tokens=512)
    return make_workload(replace(spec, prompt=prompt, output=output, lengths_name="sharegpt", seed=3))


def sizing_rows(full: bool) -> list[Row]:
    """``auto`` against the best fixed M of 12 settings in the simulator; the best three on the runtime, of all settings
    or of two that have nothing in common."""
    rows: list[Row] = []
    ratios: list[float] = []
    for (ring_name, ring), link, crowd in product((("equal", RING), ("one slow", UNEQUAL)), LINKS, CROWDS):
        settings = decode(ring, link=link, sequences=crowd, micro_batches="auto")
        fixed = sweep(settings)
        auto = predict(settings)
        ratios.append(auto.steady_tokens_per_s / fixed[0].per_s)
        by_count = {one.micro_batches: one.per_s for one in fixed}
        others = ", ".join(f"{k}N {by_count[4 * k] / fixed[0].per_s:.2f}" for k in (1, 2, 3) if 4 * k in by_count)
        name = f"auto (M={auto.micro_batches_mean:.1f}), {ring_name}, {link}, {crowd} sequences"
        of = f"best M={fixed[0].micro_batches}; {others}"
        rows.append(at_least(name, auto.steady_tokens_per_s, "tok/s", fixed[0].per_s, of, 0.90))
        if full:
            rows.append(_confirmed(settings, fixed[:3], ring_name))
        elif (ring_name, link, crowd) in (("equal", LAN, 32), ("one slow", SLOW, 32)):
            rows.append(_confirmed({**settings, "output-tokens": "72"}, fixed[:3], ring_name))
    rows.append(at_least("auto, median of all", statistics.median(ratios), "", 1.0, "best fixed M", 0.95))
    return rows


def _confirmed(settings: Settings, fixed: list[Fixed], ring: str) -> Row:
    """Compare ``auto`` with the best of these on the runtime."""
    choices = [{**settings, "micro-batches": str(one.micro_batches)} for one in fixed]
    auto, *others = (report.steady_tokens_per_s for report in measure(settings, *choices))
    name = f"  runtime: auto, {ring}, {settings['link']}, {settings['requests']} sequences"
    tried = ", ".join(str(one.micro_batches) for one in fixed)
    return at_least(name, auto, "tok/s", max(others), f"best of M={tried}", 0.90)


def simulator_rows(full: bool) -> list[Row]:
    """How much faster than real time the simulator is; in one thread, next to whatever else runs here."""
    large = {**RING, "emulate": "8x rtx4090", "as-model": "llama-3.3-70b:bf16"}
    answers, auto = {"output-tokens": "1000"}, {"micro-batches": "auto", "output-tokens": "1000"}
    book = {"prompt-tokens": "8000", "output-tokens": "1000"}
    crowd = chats(WorkloadSpec(arrivals=Arrivals.CLOSED, concurrency=64, num_requests=400))
    stream = chats(WorkloadSpec(arrivals=Arrivals.POISSON, rate_per_s=4, num_requests=400))
    cases: list[tuple[str, Settings, int, Settings, Workload | None]] = [
        ("64 at once, 128 tokens each", RING, 64, {}, None),
        ("64 at once, 1000 tokens each", RING, 64, answers, None),
        ("64 at once, 1000 tokens each, M sized", RING, 64, auto, None),
        ("8 prompts of 8000 tokens, 1000 tokens each", RING, 8, book, None),
        ("64 users, chats", RING, 64, {}, crowd),
        ("4 chats a second", RING, 64, {}, stream),
        ("8 at once, 1000 tokens each", large, 8, answers, None),
    ]
    return [_speed(name, ring, count, more, workload) for name, ring, count, more, workload in cases]


def _speed(name: str, ring: Settings, sequences: int, more: Settings, workload: Workload | None) -> Row:
    settings = {**decode(ring, link=LAN, sequences=sequences, micro_batches="4"), **more}
    run = simulation(settings, workload)
    begun_s = time.perf_counter()
    simulated_s = simulate(run).duration_s
    taken_s = time.perf_counter() - begun_s
    name = f"simulator, {settings['as-model']}, {name}"
    return Row(name, simulated_s, "s simulated", taken_s, "s of real time", simulated_s / taken_s)


def model_rows(full: bool) -> list[Row]:
    """SmolLM2 on real torch stages."""
    from bench_foundation import stored_demo
    from real_model import real_model_rows

    return real_model_rows(stored_demo())


def truth_rows(full: bool) -> list[Row]:
    """Random load, cancellations, preemptions, prefix hits: every token right, every block back."""
    from truth import truth_rows as measured

    return measured(1_000_000 if full else 40_000)


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "lan": lan_rows,
    "throttling": throttling_rows,
    "sizing": sizing_rows,
    "model": model_rows,
    "truth": truth_rows,
    "simulator": simulator_rows,
}


if __name__ == "__main__":
    run_parts("engine", PARTS)
