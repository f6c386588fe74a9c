import pytest

from edgepipe.errors import ConfigInvalid
from edgepipe.simulation.workload import (
    Arrivals,
    FixedLengths,
    LognormalLengths,
    WorkloadSpec,
    make_workload,
    named_lengths,
    read_trace,
)


def spec(**changes: object) -> WorkloadSpec:
    return WorkloadSpec(**{"num_requests": 200, **changes})  # type: ignore[arg-type]  # any field


def test_fixed_requests_are_all_there_at_the_start() -> None:
    workload = make_workload(spec(prompt=FixedLengths(tokens=7), output=FixedLengths(tokens=9)))
    assert {(request.arrival_s, request.prompt_tokens, request.output_tokens) for request in workload.requests} == {
        (0.0, 7, 9)
    }


def test_poisson_arrivals_keep_their_rate_and_their_order() -> None:
    workload = make_workload(spec(arrivals=Arrivals.POISSON, rate_per_s=5.0, num_requests=4000))
    times = [request.arrival_s or 0.0 for request in workload.requests]
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(5.0, rel=0.1)


def test_another_rate_keeps_the_lengths_and_another_seed_does_not() -> None:
    prompt, output = named_lengths("sharegpt")
    slow = make_workload(spec(arrivals=Arrivals.POISSON, rate_per_s=1.0, prompt=prompt, output=output))
    fast = make_workload(spec(arrivals=Arrivals.POISSON, rate_per_s=9.0, prompt=prompt, output=output))
    other = make_workload(spec(prompt=prompt, output=output, seed=1))
    lengths = [
        [(request.prompt_tokens, request.output_tokens) for request in each.requests] for each in (slow, fast, other)
    ]
    assert lengths[0] == lengths[1] != lengths[2]


def test_a_closed_loop_has_users_instead_of_times() -> None:
    workload = make_workload(spec(arrivals=Arrivals.CLOSED, concurrency=8))
    assert workload.concurrency == 8
    assert {request.arrival_s for request in workload.requests} == {None}


def test_named_lengths_have_the_medians_and_means_of_the_traces() -> None:
    def figures(name: str) -> list[tuple[float, float]]:
        prompt, output = named_lengths(name)
        drawn = make_workload(spec(num_requests=20_000, prompt=prompt, output=output)).requests
        columns = [
            sorted(request.prompt_tokens for request in drawn),
            sorted(request.output_tokens for request in drawn),
        ]
        return [(column[len(column) // 2], sum(column) / len(column)) for column in columns]

    sharegpt, azure = figures("sharegpt"), figures("azure")
    assert [median for median, _ in sharegpt] == [pytest.approx(148, rel=0.05), pytest.approx(164, rel=0.05)]
    assert azure[0][1] / sharegpt[0][1] == pytest.approx(5.21, rel=0.05)
    assert azure[1][1] / sharegpt[1][1] == pytest.approx(1.66, rel=0.05)


def test_shared_prefixes_are_the_same_ids_and_the_rest_is_not() -> None:
    workload = make_workload(spec(num_requests=6, prefix_tokens=20, num_prefixes=2, prompt=FixedLengths(tokens=30)))
    ids = [workload.prompt_ids(request, vocab_size=1000) for request in workload.requests]
    assert {len(prompt) for prompt in ids} == {50}
    assert ids[0][:20] == ids[2][:20] != ids[1][:20]
    assert len({prompt[20:] for prompt in ids}) == 6
    assert ids == [workload.prompt_ids(request, vocab_size=1000) for request in workload.requests]


def test_a_trace_is_read_with_comments_header_blanks_and_in_any_order() -> None:
    lines = ["arrival_s, prompt_tokens, output_tokens", "# an hour", "", "2.5, 10, 20", "0 7 8  # first"]
    workload = read_trace(lines)
    assert [(request.arrival_s, request.prompt_tokens, request.output_tokens) for request in workload.requests] == [
        (0.0, 7, 8),
        (2.5, 10, 20),
    ]


@pytest.mark.parametrize("line", ["1, 2", "1, 2, 3, 4", "x, 2, 3", "-1, 2, 3", "nan, 2, 3", "1, 0, 3", "1, 2.5, 3"])
def test_nonsense_in_a_trace_names_the_line_and_what_was_expected(line: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        read_trace(["0, 1, 1", line], name="day.csv")
    assert "line 2 of day.csv" in caught.value.what
    assert "arrival_s, prompt_tokens, output_tokens" in caught.value.fact


def test_workloads_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match="no requests"):
        read_trace(["# nothing"])
    with pytest.raises(ConfigInvalid, match="rate"):
        spec(arrivals=Arrivals.POISSON)
    with pytest.raises(ConfigInvalid, match="at least one user"):
        spec(arrivals=Arrivals.CLOSED)
    with pytest.raises(ConfigInvalid, match="sharegpt"):
        named_lengths("novel")
    with pytest.raises(ConfigInvalid):
        FixedLengths(tokens=0)
    with pytest.raises(ConfigInvalid):
        LognormalLengths(median_tokens=0)
    with pytest.raises(ConfigInvalid, match="file"):
        make_workload(spec(arrivals=Arrivals.TRACE))
