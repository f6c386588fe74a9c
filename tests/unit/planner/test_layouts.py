"""Replicas beside one long pipeline, and slices that are interleaved."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from edgepipe.backend.cost import StepWork
from edgepipe.errors import ConfigInvalid, PlanInvalid
from edgepipe.scheduler import make_policy
from edgepipe.shapes.loader import named_shape
from edgepipe.simulation.imagined import ImaginedCluster, imagine
from edgepipe.simulation.interleaved import InterleavedTraffic
from edgepipe.simulation.layouts import DeviceLayout, clusters_of, halves, merged, shares, verdict
from edgepipe.simulation.report import RunReport
from edgepipe.simulation.ring import RingTraffic
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.simulation.workload import Arrivals, FixedLengths, Workload, WorkloadSpec, make_workload
from edgepipe.units import parse_link

CLUSTER = ImaginedCluster(
    devices=("rtx4090",) * 4, config=named_shape("qwen2.5-7b"), link=parse_link("10gbit,0.1ms"), context_length=4096
)


def workload(*, prompt: int = 64, output: int = 16, requests: int = 24, users: int = 8) -> Workload:
    spec = WorkloadSpec(
        arrivals=Arrivals.CLOSED,
        num_requests=requests,
        concurrency=users,
        prompt=FixedLengths(tokens=prompt),
        output=FixedLengths(tokens=output),
    )
    return make_workload(spec)


def run(cluster: ImaginedCluster, work: Workload, *, micro_batches: int = 0) -> RunReport:
    policy = make_policy("throttled")
    return simulate(Run(cluster=imagine(cluster), workload=work, policy=policy, micro_batches=micro_batches))


def layout(kind: str, work: Workload) -> RunReport:
    clusters = clusters_of(CLUSTER, DeviceLayout(kind=kind))
    reports = [run(each, share) for each, share in zip(clusters, shares(work, len(clusters)), strict=True)]
    return reports[0] if len(reports) == 1 else merged(reports)


def test_devices_are_halved_by_speed() -> None:
    assert halves(["m4max", "rtx4090", "rtx4090", "m4pro"]) == (["rtx4090", "m4max"], ["rtx4090", "m4pro"])


def test_replicas_serve_every_request_once() -> None:
    work = workload(users=7, requests=25)
    assert [share.concurrency for share in shares(work, 2)] == [4, 3]
    both = layout("replicas", work)
    assert [request.index for request in both.requests] == list(range(25))
    assert both.output_tokens == 25 * 16
    assert len(both.stages) == 4


def test_replicas_that_had_no_step_have_no_mean() -> None:
    idle = replace(run(CLUSTER, workload(requests=1)), num_steps=0, step_tokens_mean=0.0)
    assert merged([idle, idle]).step_tokens_mean == 0


def test_interleaved_slices_share_their_device() -> None:
    ring = imagine(replace(CLUSTER, slices=2)).ring
    order = [stage.device for stage in ring.stages]
    assert order == 2 * order[:4]
    assert sorted(order[:4]) == [*"abcd"]
    report = run(replace(CLUSTER, slices=2), workload())
    by_device: dict[str, list[tuple[float, float]]] = {}
    for step in report.steps:
        for stage, span in zip(ring.stages, step.stages, strict=True):
            by_device.setdefault(stage.device, []).append(span)
    for spans in by_device.values():
        ordered = sorted(spans)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(ordered)), "two at a time"
    for index in range(len(ring.stages)):
        starts = [step.stages[index][0] for step in report.steps]
        assert starts == sorted(starts), "a step overtook another one"


def test_one_slice_per_device_is_the_plain_ring() -> None:
    plain = run(CLUSTER, workload(), micro_batches=4)
    assert run(replace(CLUSTER, slices=1), workload(), micro_batches=4).output_tokens_per_s == plain.output_tokens_per_s


def test_a_ring_whose_slices_share_no_device_has_the_times_of_a_plain_one() -> None:
    ring = imagine(CLUSTER).ring
    home = replace(ring.stages[-1], token_bytes=4, link=ring.stages[0].link)  # a sampled token goes over it
    ring = replace(ring, stages=(*ring.stages[:-1], home))
    plain, shared = RingTraffic(ring), InterleavedTraffic(ring)
    for prompt_tokens, now_s in ((2048, 0.0), (16, 0.001), (512, 1.0)):
        work = StepWork.of_rows([0], [prompt_tokens], logit_rows=1)
        for times, plain_times in zip(shared.send(work, now_s), plain.send(work, now_s), strict=True):
            assert np.allclose(times, plain_times, rtol=1e-9)


def test_interleaved_slices_pay_for_twice_the_hops() -> None:
    work = workload(prompt=2048, output=1, requests=1, users=1)
    cluster = replace(CLUSTER, link=parse_link("10gbit,20ms"))
    plain, twice = (run(replace(cluster, slices=slices), work).ttft_s.p50 for slices in (1, 2))
    assert twice > plain + 2 * 0.020


@pytest.mark.parametrize(
    ("cluster", "kind"),
    [
        (replace(CLUSTER, devices=("h100",)), "replicas"),
        (replace(CLUSTER, plan="a:0-6,b:7-13,c:14-20,d:21-27"), "replicas"),
        (CLUSTER, "ring"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(cluster: ImaginedCluster, kind: str) -> None:
    with pytest.raises(ConfigInvalid):
        clusters_of(cluster, DeviceLayout(kind=kind))


def test_more_slices_than_layers_are_refused() -> None:
    with pytest.raises(PlanInvalid):
        imagine(replace(CLUSTER, slices=9))


def test_the_verdict_names_the_faster_one() -> None:
    pipeline, two = layout("pipeline", workload()), layout("replicas", workload())
    text = verdict([("pipeline", pipeline), ("replicas", two)])
    assert text.startswith(
        "replicas gives" if two.output_tokens_per_s > pipeline.output_tokens_per_s else "pipeline gives"
    )
    assert "about the same" in verdict([("pipeline", pipeline), ("replicas", pipeline)])


def test_first_words_that_differ_by_few_percent_come_equally_soon() -> None:
    report = layout("pipeline", workload())
    late, later = (
        replace(report, ttft_s=replace(report.ttft_s, p50=report.ttft_s.p50 * factor)) for factor in (1.02, 1.25)
    )
    assert verdict([("a", late), ("b", report)]).endswith("first words come equally soon")
    assert verdict([("a", later), ("b", report)]).endswith(
        "first words come soonest with b, in 0.80x of the longest time"
    )
