"""Options of ``simulate`` and ``bench`` for batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepipe.cli.workload_options import make_workload_of
from edgepipe.errors import ConfigInvalid
from edgepipe.scheduler import Priority, SarathiPolicy, make_policy
from edgepipe.simulation.report import ObservedRequest, RunFacts, StepRecord, make_report


@pytest.mark.parametrize(
    ("settings", "priority"),
    [
        ({}, Priority.INTERACTIVE),
        ({"policy": "throttled"}, Priority.INTERACTIVE),
        ({"policy": "temporal"}, Priority.BATCH),
        ({"policy": "auto"}, Priority.BATCH),
        ({"policy": "auto", "priority": "interactive"}, Priority.INTERACTIVE),
        ({"priority": "batch"}, Priority.BATCH),
    ],
    ids=str,
)
def test_requests_are_a_batch_where_the_policy_is_for_batches(settings: dict[str, str], priority: Priority) -> None:
    workload = make_workload_of({"requests": "3", **settings})
    assert workload.priority is priority
    assert ("batch requests" in workload.description) == (priority is Priority.BATCH)


def test_a_trace_is_a_batch_as_well(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0, 10, 20\n")
    assert make_workload_of({"workload": str(path), "priority": "batch"}).priority is Priority.BATCH


def test_another_priority_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="no priority is called 'urgent'"):
        make_workload_of({"priority": "urgent"})


@pytest.mark.parametrize("name", ["sarathi-0", "sarathi-4096", "sarathi-", "sarathi-many", "temporal-3"])
def test_a_budget_must_be_a_number_that_steps_can_hold(name: str) -> None:
    with pytest.raises(ConfigInvalid, match="no scheduling policy is called"):
        make_policy(name)


def test_sarathi_takes_its_budget_from_its_name() -> None:
    policy = make_policy("sarathi-96")
    assert isinstance(policy, SarathiPolicy)
    assert policy.most_prefill_tokens == 96


def test_decodes_of_a_turn_are_compared_with_one_another() -> None:
    facts = RunFacts(label="", settings={}, stage_names=("a",), num_blocks=10)
    rows = [(4, 0), (6, 0), (0, 50), (0, 50), (5, 0), (5, 0)]  # decodes and prompt tokens of steps, two to a turn
    steps = [
        StepRecord(number, decodes, prompts, 2, float(number), ((number, number + 1.0),), 5)
        for number, (decodes, prompts) in enumerate(rows)
    ]
    request = ObservedRequest(index=0, arrival_s=0.0, prompt_tokens=100, token_times_s=(1.0, 2.0))
    assert make_report(facts, [request], steps).decode_rows_deviation == pytest.approx(0.5)
