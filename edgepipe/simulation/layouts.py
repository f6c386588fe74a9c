"""Compare layouts: one long pipeline, two shorter replicas, or interleaved slices. PURE.

Two replicas split the requests: each reads its weights for half of the rows, has fewer hops, and less room for KV,
since the weights take twice the memory. Interleaved slices (Narayanan et al. 2021, section 2.2) shorten the time until
a prompt has filled the pipeline, for V times the hops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgepipe.backend.devices import named_device
from edgepipe.errors import ConfigInvalid
from edgepipe.simulation.imagined import ImaginedCluster
from edgepipe.simulation.report import RunReport, make_report
from edgepipe.simulation.workload import Workload

PIPELINE, REPLICAS, INTERLEAVED = "pipeline", "replicas", "interleaved"
LAYOUTS = (PIPELINE, REPLICAS, INTERLEAVED)
_SLICES = 2  # default V of an interleaved layout
_CLEAR = 0.03  # difference below which two layouts count as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayout:
    """Arrangement of devices that serve a model."""

    kind: str
    slices: int = _SLICES  # slices per device, if interleaved

    def __post_init__(self) -> None:
        if self.kind not in LAYOUTS:
            raise ConfigInvalid(f"no layout is called '{self.kind}'", fact=f"there are {', '.join(LAYOUTS)}")


def clusters_of(cluster: ImaginedCluster, layout: DeviceLayout) -> list[ImaginedCluster]:
    """Return the pipelines of a layout. Raises ConfigInvalid for too few devices."""
    if layout.kind == PIPELINE:
        return [cluster]
    if cluster.plan:
        raise ConfigInvalid(f"--plan does not go with --layout {layout.kind}", next_step="give one of them")
    if layout.kind == INTERLEAVED:
        return [replace(cluster, slices=layout.slices)]
    if len(cluster.devices) < 2:
        raise ConfigInvalid("two replicas need two devices or more")
    return [replace(cluster, devices=devices) for devices in halves(cluster.devices)]


def halves(devices: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split devices into two non-empty groups of about equal memory bandwidth."""
    by_speed = sorted(devices, key=lambda key: -named_device(key).bandwidth_bytes_per_s)
    groups: tuple[list[str], list[str]] = ([], [])
    rates = [0.0, 0.0]
    for key in by_speed:
        index = int(np.argmin(rates))
        groups[index].append(key)
        rates[index] += named_device(key).bandwidth_bytes_per_s
    return groups


def shares(workload: Workload, count: int) -> list[Workload]:
    """Distribute requests, and the users of a closed loop, over replicas in turn."""
    if count == 1:
        return [workload]
    users = workload.concurrency
    return [
        replace(
            workload,
            requests=workload.requests[index::count],
            concurrency=None if users is None else max(1, (users + count - 1 - index) // count),
        )
        for index in range(count)
    ]


def merged(reports: Sequence[RunReport]) -> RunReport:
    """Merge the reports of parallel runs into one."""
    requests = sorted((record for report in reports for record in report.requests), key=lambda record: record.index)
    facts = replace(
        reports[0].facts,
        stage_names=tuple(name for report in reports for name in report.facts.stage_names),
        num_blocks=sum(report.facts.num_blocks for report in reports),
        preemptions=sum(report.facts.preemptions for report in reports),
    )
    whole = make_report(facts, requests, [])
    steps = sum(report.num_steps for report in reports)
    stages = tuple(stage for report in reports for stage in report.stages)
    mean = sum(report.step_tokens_mean * report.num_steps for report in reports) / max(1, steps)
    return replace(
        whole,
        stages=stages,
        bubble=sum(stage.bubble for stage in stages) / max(1, len(stages)),
        num_steps=steps,
        step_tokens_mean=mean,
        step_tokens_deviation=max(report.step_tokens_deviation for report in reports),
        decode_rows_deviation=max(report.decode_rows_deviation for report in reports),
        micro_batches=reports[0].micro_batches,
        kv_mean=max(report.kv_mean for report in reports),
        kv_peak=max(report.kv_peak for report in reports),
    )


def verdict(named: Sequence[tuple[str, RunReport]]) -> str:
    """Say which layout gives the most tokens per second, and which the earliest first word."""
    (best, report), *others = sorted(named, key=lambda pair: -pair[1].output_tokens_per_s)
    gains = [
        f"{report.output_tokens_per_s / other.output_tokens_per_s:.2f}x the tokens per second of {name}"
        for name, other in others
        if other.output_tokens_per_s
    ]
    soonest, first = min(named, key=lambda pair: pair[1].ttft_s.p50)
    slowest = max(other.ttft_s.p50 for _, other in named)
    equal = all(other.output_tokens_per_s > report.output_tokens_per_s * (1 - _CLEAR) for _, other in others)
    rate = "all give about the same tokens per second" if equal else f"{best} gives {' and '.join(gains)}"
    if not slowest or first.ttft_s.p50 > slowest * (1 - _CLEAR):
        return f"{rate}; first words come equally soon"
    return f"{rate}; first words come soonest with {soonest}, in {first.ttft_s.p50 / slowest:.2f}x of the longest time"
