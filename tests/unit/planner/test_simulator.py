"""The simulator against what can be worked out by hand, and the scheduler that it shares with engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from edgepipe_emulated import EmulatedBackend

import edgepipe.engine.engine_epoch
import edgepipe.engine.micro_batches
import edgepipe.scheduler
import edgepipe.simulation.simulator
from edgepipe.backend.cost import StepWork
from edgepipe.backend.drafting import ImaginedDrafts
from edgepipe.backend.types import BackendOptions
from edgepipe.daemon.serving.spec_room import common_block_size
from edgepipe.errors import NoFeasiblePlacement, PlanInvalid
from edgepipe.planner.hosts import hop_host_s, turn_host_s
from edgepipe.scheduler import Priority, ScheduledStep, Scheduler, SchedulerLimits, make_policy
from edgepipe.shapes.loader import named_shape
from edgepipe.simulation.fast_forward import FastForwardScheduler
from edgepipe.simulation.imagined import Imagined, ImaginedCluster, imagine
from edgepipe.simulation.report import RunReport
from edgepipe.simulation.ring import RingModel, RingStage
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.simulation.workload import (
    Arrivals,
    FixedLengths,
    LengthDistribution,
    LognormalLengths,
    Workload,
    WorkloadSpec,
    make_workload,
    read_trace,
)
from edgepipe.units import LinkShape, parse_link


def ring_of(devices: Sequence[float], *, upload: float, latency: float, jitter: float = 0.0) -> Imagined:
    """Stages that take so many seconds whatever the step, and equal links, the one that closes the ring included."""

    def stage(index: int, seconds: float) -> RingStage:
        def step_s(_work: StepWork) -> float:
            return seconds

        link = LinkShape(bytes_per_s=1 / upload, one_way_s=latency)
        return RingStage(name=str(index), step_s=step_s, link=link, token_bytes=1, jitter=jitter, first_layer=index)

    return Imagined(
        ring=RingModel(stages=[stage(index, seconds) for index, seconds in enumerate(devices)]),
        limits=SchedulerLimits(num_blocks=2000, block_size=16, context_length=8192, micro_batches=len(devices)),
        row_bytes=1,
    )


def utilisation(ring: Imagined, micro_batches: int, slowest: float, *, tokens: int = 200) -> float:
    """Share of the slowest server's time that decoding uses, with one sequence per micro-batch."""
    spec = WorkloadSpec(
        arrivals=Arrivals.CLOSED,
        concurrency=micro_batches,
        num_requests=micro_batches,
        prompt=FixedLengths(tokens=1),
        output=FixedLengths(tokens=tokens),
    )
    run = Run(cluster=ring, workload=make_workload(spec), policy=make_policy("throttled"), micro_batches=micro_batches)
    return simulate(run).steady_tokens_per_s * slowest


def test_hosts_take_their_part_of_a_turn_and_none_of_a_device() -> None:
    ring = ring_of([0.1, 0.3], upload=0.01, latency=0.02)
    slow = replace(ring, ring=replace(ring.ring, stages=[replace(stage, host_s=0.005) for stage in ring.ring.stages]))
    turn_s, slow_turn_s = (0.3 / utilisation(imagined, 1, 0.3) for imagined in (ring, slow))
    assert turn_s == pytest.approx(0.1 + 0.3 + 2 * (0.01 + 0.02))
    assert slow_turn_s - turn_s == pytest.approx(hop_host_s(0.005, 1) + turn_host_s(0.005, 1))
    assert utilisation(slow, 4, 0.3) > 0.97  # others compute meanwhile


def users(
    count: int,
    *,
    requests: int = 0,
    prompt: int = 64,
    output: int = 32,
    lengths: LengthDistribution | None = None,
    **changes: object,
) -> Workload:
    fields = {
        "arrivals": Arrivals.CLOSED,
        "concurrency": count,
        "num_requests": requests or count,
        "prompt": FixedLengths(tokens=prompt),
        "output": lengths or FixedLengths(tokens=output),
    }
    return make_workload(WorkloadSpec(**{**fields, **changes}))  # type: ignore[arg-type]  # any field


def gpus(count: int = 4, *, model: str = "qwen2.5-32b", link: str = "1gbit,0.3ms", jitter: str = "0.05") -> Imagined:
    return imagine(
        ImaginedCluster(
            devices=["rtx4090"] * count,
            config=named_shape(model),
            link=parse_link(link),
            adjustments={"jitter": jitter},
        )
    )


def served(
    cluster: Imagined, workload: Workload, *, policy: str = "throttled", micro_batches: int = 0, way: str = ""
) -> RunReport:
    run = Run(
        cluster=cluster, workload=workload, policy=make_policy(policy), micro_batches=micro_batches, batch_way=way
    )
    return simulate(run)


def test_engines_and_the_simulator_run_the_same_scheduler() -> None:
    for name in ("submit", "next_step", "retire", "cancel"):
        assert getattr(FastForwardScheduler, name) is getattr(Scheduler, name)
    assert edgepipe.engine.engine_epoch.Scheduler is edgepipe.scheduler.Scheduler
    assert edgepipe.scheduler.Scheduler.__module__ == "edgepipe.scheduler.scheduler"
    assert edgepipe.engine.micro_batches.Pacer is edgepipe.simulation.simulator.Pacer


REPEATED = {
    "all at once, M fixed": (users(20, prompt=40, output=150), 4, 0),
    "M sized while it runs": (users(9, output=200), 0, 0),
    "users with lengths of their own": (
        users(6, prompt=30, requests=30, lengths=LognormalLengths(median_tokens=40)),
        3,
        0,
    ),
    "arrivals in between": (
        make_workload(WorkloadSpec(arrivals=Arrivals.POISSON, rate_per_s=1.0, num_requests=25)),
        4,
        0,
    ),
    "a pool that is too small": (users(16, prompt=100, output=200), 4, 2048),
    "fewer than micro-batches": (users(3, output=100), 8, 0),
    "a batch in phases": (
        users(12, prompt=400, requests=40, lengths=LognormalLengths(median_tokens=80), priority=Priority.BATCH),
        0,
        4096,
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_steps_that_repeat_come_out_as_if_each_had_been_scheduled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload, micro_batches, kv_tokens = REPEATED[name]
    cluster = imagine(
        ImaginedCluster(
            devices=["rtx4090"] * 2,
            config=named_shape("qwen2.5-7b"),
            link=parse_link("1gbit,1ms,1ms"),
            adjustments={"jitter": "0.05"},
            kv_tokens=kv_tokens,
        )
    )
    planned: list[int] = []
    next_step = Scheduler.next_step

    def counted(scheduler: Scheduler) -> ScheduledStep | None:
        planned.append(1)
        return next_step(scheduler)

    monkeypatch.setattr(Scheduler, "next_step", counted)  # a spy: it counts the calls
    way = "temporal" if workload.priority is Priority.BATCH else ""
    quick = served(cluster, workload, micro_batches=micro_batches, way=way)
    calls = len(planned)
    monkeypatch.setattr(FastForwardScheduler, "steady_steps", lambda _: 0)  # without the shortcut under test
    slow = served(cluster, workload, micro_batches=micro_batches, way=way)
    assert calls < 0.9 * (len(planned) - calls), "nothing was repeated"
    assert [(step.step, step.decode_rows, step.used_blocks, step.micro_batches) for step in quick.steps] == [
        (step.step, step.decode_rows, step.used_blocks, step.micro_batches) for step in slow.steps
    ]
    for request, other in zip(quick.requests, slow.requests, strict=True):
        assert request.token_times_s == pytest.approx(other.token_times_s)
        assert (request.cached_tokens, request.error) == (other.cached_tokens, other.error)
    assert [step.stages[-1][1] for step in quick.steps] == pytest.approx([step.stages[-1][1] for step in slow.steps])
    assert quick.facts == slow.facts


@pytest.mark.parametrize(("micro_batches", "share"), [(12, 12 * 5 / 104), (20, 20 * 5 / 104), (21, 1.0), (30, 1.0)])
def test_latency_is_no_server_it_only_needs_more_micro_batches(micro_batches: int, share: float) -> None:
    ring = ring_of([5.0] * 4, upload=1.0, latency=20.0)
    assert utilisation(ring, micro_batches, 5.0) == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize(("micro_batches", "share"), [(4, 40 / 52), (5, 50 / 52), (6, 1.0)])
def test_a_lan_needs_six_micro_batches_for_four_equal_stages(micro_batches: int, share: float) -> None:
    ring = ring_of([10.0] * 4, upload=2.0, latency=1.0)
    assert utilisation(ring, micro_batches, 10.0) == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize(("micro_batches", "share"), [(2, 24 / 38), (3, 36 / 38), (4, 1.0)])
def test_a_skewed_ring_needs_fewer_micro_batches_than_stages(micro_batches: int, share: float) -> None:
    ring = ring_of([4.0, 4.0, 12.0, 6.0], upload=2.0, latency=1.0)
    assert utilisation(ring, micro_batches, 12.0) == pytest.approx(share, abs=0.005)


def test_a_slow_link_is_a_server_as_a_device_is() -> None:
    ring = ring_of([5.0] * 4, upload=8.0, latency=1.0)
    assert utilisation(ring, 12, 8.0) == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize(
    ("variation", "micro_batches", "share"),
    [(0.1, 6, 0.975), (0.1, 8, 0.991), (0.25, 6, 0.90), (0.25, 12, 0.98), (0.5, 8, 0.86)],
)
def test_jitter_costs_what_it_should(variation: float, micro_batches: int, share: float) -> None:
    ring = ring_of([10.0] * 4, upload=2.0, latency=1.0, jitter=variation)
    assert utilisation(ring, micro_batches, 10.0, tokens=600) == pytest.approx(share, abs=0.025)


def test_equal_seeds_give_equal_runs() -> None:
    cluster, workload = gpus(), users(8, requests=16)
    assert served(cluster, workload) == served(cluster, workload)


def test_every_request_gets_its_tokens_in_order_and_every_stage_takes_one_step_at_a_time() -> None:
    report = served(gpus(), users(8, requests=24), micro_batches=5)
    assert [record.output_tokens for record in report.requests] == [32] * 24
    assert all(list(record.token_times_s) == sorted(record.token_times_s) for record in report.requests)
    for index in range(4):
        spans = [step.stages[index] for step in report.steps]
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    for step in report.steps:
        assert all(before[1] <= after[0] for before, after in pairwise(step.stages))
    decodes = [step for step in report.steps if step.decode_rows]
    in_flight = [sum(other.planned_s <= step.planned_s < other.stages[-1][1] for other in decodes) for step in decodes]
    assert max(in_flight) <= 5, "steps with decodes"


def test_a_closed_loop_keeps_its_users_busy_and_no_more() -> None:
    report = served(gpus(), users(6, requests=30))
    events = sorted(
        [(record.arrival_s, 1) for record in report.requests]
        + [(record.token_times_s[-1], -1) for record in report.requests]
    )
    levels = [sum(change for _, change in events[: index + 1]) for index in range(len(events))]
    assert max(levels) <= 6
    assert report.num_requests == 30


def test_weights_are_read_for_every_micro_batch_so_that_more_of_them_can_be_slower() -> None:
    workload = users(64, output=64)
    few, many = (served(gpus(), workload, micro_batches=count).steady_tokens_per_s for count in (4, 12))
    assert few > 2 * many


def test_a_full_ring_is_as_fast_over_a_lan_as_over_ideal_links_and_slower_over_a_poor_one() -> None:
    workload = users(32)
    rates = [
        served(gpus(link=link), workload, micro_batches=5).steady_tokens_per_s
        for link in ("ideal", "1gbit,1ms", "30mbit,20ms")
    ]
    assert rates[0] == pytest.approx(rates[1], rel=0.02)
    assert rates[0] > 2 * rates[2]


def test_a_trace_and_poisson_arrivals_come_when_they_should() -> None:
    trace = served(gpus(1, model="qwen2.5-7b"), read_trace(["0, 10, 5", "30, 20, 5", "30, 10, 2"]))
    assert [record.arrival_s for record in trace.requests] == [0.0, 30.0, 30.0]
    assert trace.requests[0].token_times_s[-1] < 30.0 < trace.requests[1].token_times_s[0]
    poisson = make_workload(WorkloadSpec(arrivals=Arrivals.POISSON, rate_per_s=2.0, num_requests=10))
    report = served(gpus(), poisson)
    assert [record.arrival_s for record in report.requests] == [request.arrival_s for request in poisson.requests]
    assert report.num_failed == 0


def test_requests_that_cannot_be_served_are_counted_with_their_numbers() -> None:
    workload = read_trace(["0, 10, 5", "0, 40000, 5"])
    report = served(gpus(1, model="qwen2.5-7b"), workload)
    assert report.num_failed == 1
    assert "40000" in next(record.error for record in report.requests if record.error)


def test_a_small_pool_preempts_and_still_serves_everybody() -> None:
    cluster = imagine(
        ImaginedCluster(
            devices=["rtx4090"] * 2, config=named_shape("qwen2.5-7b"), link=parse_link("ideal"), kv_tokens=2048
        )
    )
    report = served(cluster, users(16, prompt=100, output=200))
    assert report.facts.preemptions > 0
    assert report.kv_peak > 0.9
    assert [record.output_tokens for record in report.requests] == [200] * 16


@pytest.mark.parametrize("kv", ["", "8bit", "4bit"])
def test_blocks_are_those_of_a_served_model(kv: str) -> None:
    profile = EmulatedBackend(BackendOptions(device="rtx4090")).profile()
    cluster = ImaginedCluster(
        devices=["rtx4090"], config=named_shape("qwen2.5-7b"), link=parse_link("ideal"), kv=kv, kv_tokens=2000
    )
    limits = imagine(cluster).limits
    assert limits.block_size == common_block_size([profile], kv)
    assert limits.max_tokens >= 2000, "a chat of all these tokens fits"
    assert limits.num_blocks * limits.block_size < 2000 + limits.rest_tokens + limits.block_size


def test_shared_prefixes_are_found_in_the_cache() -> None:
    workload = users(2, requests=8, prompt=16, prefix_tokens=512)
    report = served(gpus(2, model="qwen2.5-7b"), workload)
    assert report.prefix_hits > 0.5
    first, last = report.requests[0], report.requests[-1]
    assert (first.cached_tokens, last.cached_tokens) == (0, 512)


def test_throttling_gives_steadier_tokens_than_sarathi_at_the_same_load() -> None:
    workload = make_workload(
        WorkloadSpec(
            arrivals=Arrivals.POISSON,
            rate_per_s=3.0,
            num_requests=80,
            prompt=FixedLengths(tokens=400),
            output=FixedLengths(tokens=100),
        )
    )
    throttled, sarathi = (served(gpus(), workload, policy=name, micro_batches=4) for name in ("throttled", "sarathi"))
    assert throttled.step_tokens_deviation < 0.6 * sarathi.step_tokens_deviation
    assert throttled.tpot_s.mean < sarathi.tpot_s.mean


def test_auto_finds_about_what_the_best_fixed_number_gives() -> None:
    cluster, workload = gpus(link="100mbit,5ms"), users(32, output=200)
    best = max(served(cluster, workload, micro_batches=count).steady_tokens_per_s for count in range(3, 9))
    auto = served(cluster, workload)
    assert auto.steady_tokens_per_s > 0.9 * best
    assert len(auto.micro_batches) > 1


def test_layers_go_where_a_plan_says_and_a_model_that_does_not_fit_is_refused() -> None:
    shape = named_shape("qwen2.5-7b")
    cluster = ImaginedCluster(devices=["m4max", "rtx4090"], config=shape, link=parse_link("ideal"))
    assert len(imagine(cluster).ring.stages) == 2
    by_hand = ImaginedCluster(
        devices=["m4max", "rtx4090"], config=shape, link=parse_link("ideal"), plan="b:0-19,a:20-27"
    )
    assert [stage.name for stage in imagine(by_hand).ring.stages] == ["b rtx4090 0-19", "a m4max 20-27"]
    with pytest.raises(NoFeasiblePlacement):
        gpus(2, model="qwen2.5-32b")
    with pytest.raises(PlanInvalid):
        imagine(ImaginedCluster(devices=["m4max"], config=shape, link=parse_link("ideal"), plan="a:0-3"))


def _speed(drafts: str, *, chats: int = 1, model: str = "qwen2.5-32b") -> float:
    """Tokens per second of chats on four GPUs with an imagined draft model."""
    spec = users(chats, requests=chats, prompt=32, output=2000)
    run = Run(cluster=gpus(model=model, jitter="0"), workload=spec, policy=make_policy("throttled"))
    imagined = ImaginedDrafts.of(drafts) if drafts else None
    return simulate(replace(run, drafts=imagined)).steady_tokens_per_s


def test_drafts_speed_a_lone_chat_up_as_the_formula_says() -> None:
    """With rows that cost nothing: w rows give (1 - a^w) / (1 - a) tokens, and drafting takes (w - 1) * d."""
    turn_s = 1 / _speed("")
    best = max((1 - 0.7**w) / 0.3 / (turn_s + (w - 1) * 0.003) for w in range(1, 9))
    assert 0.92 * best <= _speed("0.7,3ms") <= 1.03 * best


def test_drafts_that_are_mostly_wrong_or_of_many_chats_cost_next_to_nothing() -> None:
    assert _speed("0.1,3ms") >= 0.98 * _speed("")
    plain, drafted = (_speed(drafts, chats=16, model="qwen3-30b-a3b") for drafts in ("", "0.7,0.5ms"))
    assert drafted >= 0.99 * plain
