"""Runs of a bench, on the running cluster or on emulated clusters that it starts and stops."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from edgepipe.cli.bench.client import connected
from edgepipe.cli.bench.cluster import EmulatedCluster, emulated_cluster, node_names
from edgepipe.cli.serve import layers_of
from edgepipe.errors import ModelUnknown, PeerClosed
from edgepipe.link.admin_client import Admin
from edgepipe.simulation.report import RunFacts, RunReport, make_report
from edgepipe.simulation.workload import FixedLengths, Workload, WorkloadSpec, make_workload
from edgepipe.store.typed_names import meant_names
from edgepipe.wire.common import Hello

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgepipe.wire.engines import EngineState
    from edgepipe.wire.nodes import ClusterStatus
    from edgepipe.wire.serving import ServeRequest

OnProgress = Callable[[str, int, int], None]
"""(current step, ended requests, all requests; 0 if unknown)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One run of a bench."""

    workload: Workload
    label: str
    settings: Mapping[str, str]  # settings that the report shows


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRun:
    """A run and its emulated cluster."""

    run: BenchRun
    cluster: EmulatedCluster
    serve: ServeRequest


async def bench_emulated(runs: Sequence[EmulatedRun], on_progress: OnProgress) -> list[RunReport]:
    """Do all runs in order; consecutive runs with equal clusters share one. Raises the error of a cluster or a run."""
    reports: list[RunReport] = []
    for cluster, group in groupby(runs, key=lambda each: each.cluster):
        on_progress(f"starting {len(cluster.devices)} nodes", 0, 0)
        async with emulated_cluster(cluster) as admin:
            async for report in runs_on(admin, list(group), on_progress):
                reports.append(report)
    return reports


async def bench_served(admin: Admin, runs: Sequence[BenchRun], model: str, on_progress: OnProgress) -> list[RunReport]:
    """Do runs on a model that the cluster serves already. Raises ModelUnknown."""
    status = await admin.status()
    engine = _served(status, model)
    return [await _measure(admin, engine, run, on_progress) for run in runs]


async def runs_on(admin: Admin, runs: Sequence[EmulatedRun], on_progress: OnProgress) -> AsyncIterator[RunReport]:
    """Do runs on one emulated cluster; each run loads the model again. Raises the error of a run."""
    for each in runs:
        on_progress(_titled("loading the model", each.run), 0, 0)
        engine = await serve_model(admin, each.serve)
        devices = dict(zip(node_names(len(each.cluster.devices)), each.cluster.devices, strict=True))
        yield await _measure(admin, engine, each.run, on_progress, devices=devices)
        await admin.stop_model("")


async def serve_model(admin: Admin, request: ServeRequest) -> EngineState:
    """Serve the model. Return its engine when ready. Raises the node's error."""
    async for event in admin.serve(request):
        if event.engines:
            return event.engines[0]
    raise PeerClosed("the node ended before the model was ready", next_step="see 'edgepipe logs'")


async def _measure(
    admin: Admin,
    engine: EngineState,
    run: BenchRun,
    on_progress: OnProgress,
    *,
    devices: Mapping[str, str] | None = None,
) -> RunReport:
    """Do one run. ``devices``: short device names by node, as in a simulation."""
    status = await admin.status()
    hello = Hello(role="gateway", node_id=status.node_id, node_name="bench", cluster_id=status.cluster_id)
    title, total = _titled("measuring", run), len(run.workload.requests)
    num_stages = len(engine.stages)
    async with admin.act_as_gateway() as security, connected(engine, hello, security) as client:
        await client.run(_warm_up(), num_stages=num_stages)
        started_s = time.perf_counter()
        measured = await client.run(
            run.workload, num_stages=num_stages, on_progress=lambda ended, _: on_progress(title, ended, total)
        )
    num_blocks = _num_blocks(await admin.status(), engine)
    facts = RunFacts(
        label=run.label,
        settings=run.settings,
        stage_names=tuple(
            f"{stage.node_name} {(devices or {}).get(stage.node_name, stage.device)} {layers_of(stage)}"
            for stage in engine.stages
        ),
        num_blocks=num_blocks,
        preemptions=measured.preemptions,
        real_s=time.perf_counter() - started_s,
    )
    return make_report(facts, measured.requests, measured.steps)


def _num_blocks(status: ClusterStatus, engine: EngineState) -> int:
    """Return the size of an engine's KV pool, which its first report as ready may lack."""
    reported = (each.num_blocks for each in status.engines if each.pipeline_id == engine.pipeline_id)
    return max(reported, default=engine.num_blocks)


def _warm_up() -> Workload:
    """Run once without measuring, to warm up connections, buffers and code paths."""
    few = FixedLengths(tokens=8)
    return make_workload(WorkloadSpec(num_requests=2, prompt=few, output=few, seed=1))


def _served(status: ClusterStatus, model: str) -> EngineState:
    ready = [engine for engine in status.engines if engine.state == "ready"]
    named = {name: engine for engine in ready for name in (*engine.names, engine.model)}
    chosen = [named[name] for name in meant_names(model, named)] if model else ready
    if len({engine.model for engine in chosen}) == 1:
        return chosen[0]
    names = ", ".join(sorted({engine.model for engine in ready})) or "none"
    raise ModelUnknown(
        f"the model '{model}' is not served" if model else "not exactly one model is served",
        fact=f"served: {names}",
        next_step="edgepipe bench --model NAME, or edgepipe serve MODEL first",
    )


def _titled(title: str, run: BenchRun) -> str:
    return f"{title}: {run.label}" if run.label else title
