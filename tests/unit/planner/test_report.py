import json

import pytest

from edgepipe.simulation.report import (
    ObservedRequest,
    RunFacts,
    StepRecord,
    make_report,
    percentiles,
    steady_rate,
)

FACTS = RunFacts(label="a", settings={"policy": "even"}, stage_names=("s0", "s1"), num_blocks=100, preemptions=2)


def request(index: int = 0, *, arrival_s: float = 1.0, times: tuple[float, ...] = (3.0, 4.0, 6.0)) -> ObservedRequest:
    return ObservedRequest(
        index=index, arrival_s=arrival_s, prompt_tokens=10, token_times_s=times, cached_tokens=4 if index else 0
    )


def step(number: int, *, start_s: float, decodes: int = 4, prefill: int = 0, m: int = 2, used: int = 10) -> StepRecord:
    return StepRecord(
        step=number,
        decode_rows=decodes,
        prefill_tokens=prefill,
        micro_batches=m,
        planned_s=start_s,
        stages=((start_s, start_s + 1.0), (start_s + 1.0, start_s + 1.5)),
        used_blocks=used,
    )


def test_times_of_requests() -> None:
    report = make_report(FACTS, [request(), request(1, arrival_s=2.0, times=(4.0, 5.0))], [])
    assert (report.ttft_s.mean, report.ttft_s.max) == (2.0, 2.0)
    assert (report.itl_s.count, report.itl_s.max) == (3, 2.0)
    assert report.tpot_s.mean == pytest.approx((1.5 + 1.0) / 2)
    assert report.output_tokens_per_s == pytest.approx(5 / 5.0)
    assert report.prefix_hits == pytest.approx(0.2)
    assert report.facts.preemptions == 2


def test_figures_of_steps() -> None:
    steps = [step(1, start_s=0.0, prefill=12, used=30), step(2, start_s=1.0), step(3, start_s=2.0, m=3)]
    report = make_report(FACTS, [request()], steps)
    assert report.stages[0].busy == pytest.approx(3.0 / 3.5)
    assert report.stages[1].busy == pytest.approx(1.5 / 3.5)
    assert report.bubble == pytest.approx(1 - 4.5 / 7)
    assert (report.stages[1].step_s, report.stages[1].bubble) == (0.5, pytest.approx(1 - 1.5 / 3.5))
    assert report.step_tokens_mean == pytest.approx(8.0)
    assert report.step_tokens_deviation == pytest.approx(32**0.5)
    assert report.micro_batches == ((0.0, 2), (2.0, 3))
    assert 2 < report.micro_batches_mean < 3
    assert (report.kv_mean, report.kv_peak) == (pytest.approx(50 / 300), pytest.approx(0.3))


def test_the_steady_rate_leaves_out_start_and_end() -> None:
    slow_ends = [0.0, *(10.0 + i * 0.1 for i in range(98)), 100.0]
    assert steady_rate([request(times=tuple(slow_ends))]) == pytest.approx(10.0)
    assert steady_rate([]) == steady_rate([request(times=(1.0,))]) == 0.0


def test_a_run_without_anything_has_figures_too() -> None:
    report = make_report(FACTS, [], [])
    assert report.output_tokens_per_s == report.prefix_hits == report.micro_batches_mean == 0.0
    assert [stage.busy for stage in report.stages] == [0.0, 0.0]
    assert percentiles([]).count == 0


def test_failed_requests_are_counted_and_do_not_count_as_done() -> None:
    failed = ObservedRequest(index=1, arrival_s=0.0, prompt_tokens=5, token_times_s=(), error="queue full")
    report = make_report(FACTS, [request(), failed], [])
    assert (report.num_requests, report.num_failed) == (2, 1)
    assert report.requests_per_s == pytest.approx(1 / 6.0)


def test_a_report_survives_json() -> None:
    report = make_report(FACTS, [request(), request(1)], [step(1, start_s=0.0), step(2, start_s=1.0)])
    values = json.loads(json.dumps(report.to_dict()))
    assert values["output_tokens_per_s"] == report.output_tokens_per_s
    assert values["ttft_s"]["mean"] == report.ttft_s.mean
    assert values["facts"]["settings"] == dict(FACTS.settings)
    assert not values.keys() & {"requests", "steps"}, "the records are long"
