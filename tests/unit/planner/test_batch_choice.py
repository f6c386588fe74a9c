"""The choice of a way to fill a batch's steps: from sketches of the ring, with the batch's own lengths."""

from __future__ import annotations

import pytest

from edgepipe.backend.cost import StepWork
from edgepipe.engine.way_child import answer, question_for
from edgepipe.scheduler import Priority, make_policy
from edgepipe.scheduler.batch_ways import THROTTLED, WAYS
from edgepipe.scheduler.lengths import Lengths
from edgepipe.scheduler.pacing import RingTimes
from edgepipe.shapes.loader import named_shape
from edgepipe.simulation.batch_choice import (
    ChoiceFacts,
    ChoiceTimes,
    RingSketch,
    choose_way,
    predicted_rate,
    simulate_auto,
    sketch_ring,
)
from edgepipe.simulation.imagined import Imagined, ImaginedCluster, imagine
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.simulation.workload import Arrivals, FixedLengths, WorkloadSpec, make_workload
from edgepipe.units import parse_link


def cluster(device: str = "rtx4090", *, link: str = "1gbit,0.3ms", kv_tokens: int = 0) -> Imagined:
    return imagine(
        ImaginedCluster(
            devices=[device] * 2,
            config=named_shape("qwen2.5-7b"),
            link=parse_link(link),
            adjustments={"jitter": "0"},
            kv_tokens=kv_tokens,
        )
    )


def sketched(imagined: Imagined) -> RingSketch:
    sketch = sketch_ring(imagined.ring.times())
    assert sketch is not None
    return sketch


def facts(imagined: Imagined, lengths: tuple[Lengths, ...]) -> ChoiceFacts:
    return ChoiceFacts(
        ring=sketched(imagined),
        num_blocks=imagined.limits.num_blocks,
        block_size=imagined.limits.block_size,
        context_length=imagined.limits.context_length,
        max_running=imagined.limits.max_running,
        lengths=lengths,
        sequences=64,
        micro_batches=2,
    )


DECODES = [StepWork.of_rows((700,) * rows, (1,) * rows, logit_rows=rows) for rows in (1, 7, 20, 100)]
CHUNKS = [
    StepWork.of_rows((position,), (tokens,), logit_rows=1) for position in (0, 3000) for tokens in (50, 300, 2000)
]
MIXED = [StepWork.of_rows((900, *[700] * 12), (tokens, *[1] * 12), logit_rows=13) for tokens in (40, 500)]


@pytest.mark.parametrize("device", ["rtx4090", "m4max"])
@pytest.mark.parametrize("work", [*DECODES, *CHUNKS, *MIXED], ids=str)
def test_a_sketched_device_takes_as_long_as_the_device(device: str, work: StepWork) -> None:
    imagined = cluster(device)
    for sketch, stage in zip(sketched(imagined).devices, imagined.ring.stages, strict=True):
        mixed = work in MIXED  # the logits of many rows are simplified
        assert sketch.step_s(work) == pytest.approx(stage.step_s(work), rel=0.2 if mixed else 0.12)


def test_a_sketched_link_takes_as_long_as_the_link() -> None:
    imagined = cluster()
    times = imagined.ring.times()
    assert sketched(imagined).upload_token_s[0] * 777 == pytest.approx(times.uploads[0](777))
    assert sketched(imagined).latency_s == pytest.approx(times.latency_s())


def test_a_ring_whose_times_are_not_known_has_no_sketch() -> None:
    assert sketch_ring(RingTimes([[lambda _: 0.0]], [], lambda: 0.0)) is None


@pytest.mark.parametrize("way", [THROTTLED, "sarathi-128", "temporal"])
def test_the_prediction_is_near_what_the_whole_cluster_gives(way: str) -> None:
    imagined = cluster(kv_tokens=30_000)
    workload = make_workload(
        WorkloadSpec(
            arrivals=Arrivals.CLOSED,
            concurrency=64,
            num_requests=200,
            prompt=FixedLengths(tokens=1200),
            output=FixedLengths(tokens=100),
            priority=Priority.BATCH,
        )
    )
    run = Run(cluster=imagined, workload=workload, policy=make_policy(THROTTLED), itl_goal_s=None, batch_way=way)
    predicted = predicted_rate(facts(imagined, (Lengths(1200, 100),)), way)
    assert predicted == pytest.approx(simulate(run).steady_tokens_per_s, rel=0.15)


def test_the_fastest_way_is_taken_and_equal_ones_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = dict.fromkeys(WAYS, 100.0)
    monkeypatch.setattr("edgepipe.simulation.batch_choice.predicted_rate", lambda _, way: rates[way])
    known = facts(cluster(), (Lengths(100, 10),))
    assert choose_way(known, "temporal")[0] == "temporal"
    rates["sarathi-64"] = 101.0
    assert choose_way(known, "temporal")[0] == "temporal", "one per cent is chance"
    rates["sarathi-64"] = 110.0
    assert choose_way(known, "temporal")[0] == "sarathi-64"


def test_the_child_gets_the_same_facts_and_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    known, seen = facts(cluster(), (Lengths(100, 10), Lengths(7, 3))), list[ChoiceFacts]()

    def spied(asked: ChoiceFacts, way: str) -> float:
        seen.append(asked)
        return float(len(way))

    monkeypatch.setattr("edgepipe.simulation.batch_choice.predicted_rate", spied)
    assert b'"way": "sarathi-128"' in answer(question_for(known, THROTTLED))
    assert set(seen) == {known}


def test_choices_become_rarer_and_are_a_minute_apart() -> None:
    times = ChoiceTimes()
    assert not times.due(num_ended=23, now_s=5.0)
    assert times.due(num_ended=24, now_s=5.0)
    times.note(num_ended=24, now_s=5.0)
    assert not times.due(num_ended=95, now_s=500.0)
    assert not times.due(num_ended=100, now_s=64.0)
    assert times.due(num_ended=100, now_s=65.0)


@pytest.mark.long
def test_auto_leaves_the_default_way_where_another_is_clearly_faster() -> None:
    imagined = cluster(link="300mbit,2ms", kv_tokens=30_000)
    workload = make_workload(
        WorkloadSpec(
            arrivals=Arrivals.CLOSED,
            concurrency=48,
            num_requests=320,
            prompt=FixedLengths(tokens=1200),
            output=FixedLengths(tokens=60),
            priority=Priority.BATCH,
        )
    )
    run = Run(cluster=imagined, workload=workload, policy=make_policy("auto"), itl_goal_s=None)
    auto = simulate_auto(run).steady_tokens_per_s
    assert auto > 1.05 * simulate(run).steady_tokens_per_s
