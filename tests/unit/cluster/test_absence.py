"""What people read about machines that are away."""

from __future__ import annotations

from datetime import datetime

from edgepipe.cluster.absence import absence_text, continuing_text, joined
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.wire.engines import EngineState, StageState
from edgepipe.wire.nodes import AbsentNode

EVENING = datetime(2026, 5, 4, 21, 14).timestamp()


def away(name: str, state: str, *, hours_before: float = 0.0) -> AbsentNode:
    since_us = int((EVENING - hours_before * 3600) * 1e6)
    return AbsentNode(node_id=NodeId(name), name=name, state=state, since_us=since_us)


def engine(*nodes: str, recoveries: int = 1, state: str = "ready") -> EngineState:
    return EngineState(
        model="tiny",
        pipeline_id=PipelineId("p"),
        epoch=Epoch(1, EngineId("e")),
        state=state,
        recoveries=recoveries,
        stages=tuple(StageState(node_id=NodeId(node)) for node in nodes),
    )


def test_who_is_away_since_when_and_what_goes_on() -> None:
    news = joined(absence_text([away("macbook", "asleep")], now_s=EVENING + 60), continuing_text(engine("a", "b", "a")))
    assert news == "macbook asleep since 21:14; continuing on 2 machines"


def test_another_day_has_its_name_and_many_are_counted() -> None:
    nodes = [away(f"n{index}", "dead", hours_before=index) for index in range(5)]
    text = absence_text(nodes, now_s=EVENING + 30 * 3600)
    assert text == "n0 gone since Mon 21:14, n1 gone since Mon 20:14, n2 gone since Mon 19:14, 2 more"


def test_nothing_is_said_while_nothing_is_wrong() -> None:
    assert joined(absence_text([], now_s=EVENING), continuing_text(engine("a", recoveries=0))) == ""
    assert continuing_text(engine("a", state="recovering")) == ""
    assert continuing_text(engine("a")) == "continuing on 1 machine"
