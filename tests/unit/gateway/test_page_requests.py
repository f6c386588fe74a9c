"""What the page gets of requests and steps: only what changed, in order, on one clock."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import EdgepipeError, RequestInvalid
from edgepipe.gateway.request_ring import MOST_REQUESTS, RequestRecord, RequestRing
from edgepipe.gateway.ui.disks import disks_json
from edgepipe.gateway.ui.requests import RequestsTopic
from edgepipe.gateway.ui.steps import MOST_STEPS, NewSteps
from edgepipe.ids import NodeId
from edgepipe.spec.facts import LayerRange
from edgepipe.testing.clock import START_S
from edgepipe.wire.engines import DeviceSpan, EngineTrace, StepTrace
from edgepipe.wire.nodes import MemberState, ModelOnDisk, NodeState


def _nothing(error: EdgepipeError) -> None:
    pass


def _record(number: int, **more: Any) -> RequestRecord:
    return RequestRecord(
        request_id=f"request-{number}",
        model="tiny",
        prompt_tokens=7,
        accepted_wall_s=START_S + number,
        accepted_s=START_S,
        cancel=_nothing,
        **more,
    )


def _rows(topic: RequestsTopic) -> list[dict[str, Any]]:
    return json.loads(topic.event().split(b"data: ")[1])


def test_a_stream_gets_requests_that_changed_and_keeps_what_it_could_not_send() -> None:
    ring = RequestRing()
    topic = RequestsTopic(ring)
    first, second = _record(1), _record(2)
    ring.add(first)
    ring.add(second)
    assert topic.refresh() == 1
    assert [row["id"] for row in _rows(topic)] == ["request-2", "request-1"]
    assert topic.refresh() == 1, "nothing changed"
    first.started_s = START_S + 2
    topic.refresh()
    second.started_s, second.first_s, second.last_s, second.output_tokens = START_S, START_S + 1, START_S + 2, 5
    second.ended_s, second.end = START_S + 3, "stop"
    topic.refresh()
    rows = {row["id"]: row for row in _rows(topic)}
    assert (rows["request-1"]["state"], rows["request-1"]["queue_s"]) == ("prefill", 2)
    done = rows["request-2"]
    assert [done[name] for name in ("queue_s", "prefill_s", "decode_s", "whole_s", "itl_s")] == [0, 1, 2, 3, 0.25]


def test_a_ring_keeps_the_newest_and_those_that_run() -> None:
    ring = RequestRing()
    running = _record(0)
    ring.add(running)
    for number in range(1, MOST_REQUESTS + 50):
        ring.add(_record(number, ended_s=START_S))
    ids = [record.request_id for record in ring.records]
    assert len(ids) == MOST_REQUESTS
    assert (ids[0], ids[-1]) == (f"request-{MOST_REQUESTS + 49}", "request-0")


def test_recovery_is_counted_while_a_request_runs() -> None:
    ring = RequestRing()
    record = _record(1)
    ring.add(record)
    for is_so, now_s in ((True, 1.0), (True, 2.0), (False, 4.0), (False, 9.0)):
        ring.recovering("tiny", is_so=is_so, now_s=START_S + now_s)
        ring.recovering("other", is_so=True, now_s=START_S)
    assert record.recovery_s == 3.0


def test_only_running_requests_can_be_cancelled() -> None:
    ring, errors = RequestRing(), list[EdgepipeError]()
    record = _record(1)
    record.cancel = errors.append
    ring.add(record)
    ring.cancel("request-1")
    assert "cancelled" in errors[0].what
    record.ended_s = START_S
    for unknown in ("request-1", "request-2", "--all"):
        with pytest.raises(RequestInvalid):
            ring.cancel(unknown)


def _step(number: int, stages: int, *, offset_us: int = 0) -> StepTrace:
    spans = tuple(
        DeviceSpan(
            begin_us=number * 1000 + stage * 300 + stage * offset_us,
            end_us=number * 1000 + stage * 300 + stage * offset_us + 250,
        )
        for stage in range(stages)
    )
    return StepTrace(
        step=number,
        decode_rows=2,
        prefill_tokens=0,
        micro_batches=2,
        planned_us=number * 1000,
        used_blocks=3,
        spans=spans,
    )


@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=5))
def test_every_step_is_sent_once_and_only_when_all_stages_have_reported(late: list[set[int]]) -> None:
    """``late``: in each round, which of the ten newest steps lack a report."""
    news, sent = NewSteps(2), list[int]()
    for round_number, lacking in enumerate(late, start=1):
        last = round_number * 10
        steps = [
            _step(number, 1 if last - number in lacking else 2) for number in range(1, last + 1) if number > news.after
        ]
        found = news.take(EngineTrace(steps=tuple(steps), now_us=last * 1000, preemptions=0))
        new = [row[0] for row in found["steps"]] if found else []
        assert not {last - number for number in lacking} & set(new)
        sent += new
    final = tuple(_step(number, 2) for number in range(1, len(late) * 10 + 1) if number > news.after)
    found = news.take(EngineTrace(steps=final, now_us=0, preemptions=0))
    sent += [row[0] for row in found["steps"]] if found else []
    assert len(sent) == len(set(sent))
    assert sorted(sent) == list(range(1, len(late) * 10 + 1))


def test_steps_are_on_the_engines_clock_and_an_event_is_bounded() -> None:
    news = NewSteps(2)
    steps = tuple(_step(number, 2, offset_us=7_000_000_000) for number in range(1, 500))
    found = news.take(EngineTrace(steps=steps, now_us=1, preemptions=0))
    assert found is not None
    assert len(found["steps"]) == MOST_STEPS
    begin_first, length_first, begin_second, length_second = found["steps"][-1][6:]
    assert (length_first, length_second) == (250, 250)
    assert 0 <= begin_second - begin_first - length_first < 1000
    assert news.take(EngineTrace(steps=(), now_us=1, preemptions=0)) is None


def test_disks_name_holders_and_the_copies_of_the_rarest_part() -> None:
    def member(name: str, *models: ModelOnDisk) -> MemberState:
        return MemberState(node=NodeState(node_id=NodeId(name), name=name, models=models), self=name == "a")

    whole = ModelOnDisk(model="m", manifest_hash="f" * 64, num_bytes=90, complete=True, parts=(LayerRange(0, 10),))
    part = ModelOnDisk(model="m", manifest_hash="f" * 64, num_bytes=40, parts=(LayerRange(0, 4),))
    (row,) = disks_json([member("a", whole), member("b\u202e", part)])
    assert (row["name"], row["copies"], row["size_bytes"], row["content"]) == ("m", 1, 90, "f" * 8)
    assert row["holders"] == [
        {"name": "a", "whole": True, "bytes": 90, "self": True},
        {"name": "b\\u202e", "whole": False, "bytes": 40, "self": False},
    ]
