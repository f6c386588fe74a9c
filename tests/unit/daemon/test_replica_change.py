"""From running pipelines to another layout: the order of the steps, and which pipelines are never touched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.daemon.serving.free_machines import SETTLED_S, FreeMachines
from edgepipe.daemon.serving.replica_change import (
    EndPipeline,
    MovePipeline,
    Nodes,
    ReplicaChange,
    RunningPipeline,
    StartPipeline,
    change_to,
)
from edgepipe.ids import PipelineId

MACHINES = "abcdefgh"


@st.composite
def layouts(draw: st.DrawFn) -> list[Nodes]:
    """Groups that share no machine; some machines are in none."""
    owners = draw(st.lists(st.integers(-1, 4), min_size=len(MACHINES), max_size=len(MACHINES)))
    groups = [
        frozenset(name for name, each in zip(MACHINES, owners, strict=True) if each == owner) for owner in range(5)
    ]
    return [group for group in groups if group] or [frozenset("a")]


@st.composite
def pipelines(draw: st.DrawFn) -> list[RunningPipeline]:
    """Running ones: the first at place 1, the others wherever earlier changes left them."""
    groups = draw(layouts())
    places = draw(st.lists(st.integers(2, 9), min_size=len(groups) - 1, max_size=len(groups) - 1, unique=True))
    return [running(place, group) for place, group in zip([1, *places], groups, strict=True)]


def running(place: int, nodes: Nodes | str) -> RunningPipeline:
    return RunningPipeline(pipeline_id=PipelineId(f"p{place}"), place=place, nodes=frozenset(nodes))


def follow(now: list[RunningPipeline], groups: list[Nodes], change: ReplicaChange) -> dict[str, Nodes]:
    """Take the steps; return the machines of each pipeline at the end. Fails where a step is not possible."""
    used: dict[str, Nodes] = {each.pipeline_id: each.nodes for each in now}
    places = {each.place for each in now}
    for step in change.steps:
        match step:
            case EndPipeline():
                assert step.pipeline_id != "p1", "the first one's record says which pipelines count"
                del used[step.pipeline_id]
            case MovePipeline():
                others = [nodes for key, nodes in used.items() if key != step.pipeline_id]
                assert not any(nodes & groups[step.group] for nodes in others), "a machine has one pipeline at a time"
                used[step.pipeline_id] = groups[step.group]
            case StartPipeline():
                assert not any(nodes & groups[step.group] for nodes in used.values())
                assert step.place not in places, "each record has a place of its own"
                places.add(step.place)
                used[f"new{step.place}"] = groups[step.group]
        assert used, "one always answers"
    return used


@given(now=pipelines(), groups=layouts())
def test_any_layout_is_reached_and_what_has_its_machines_stays(now: list[RunningPipeline], groups: list[Nodes]) -> None:
    change = change_to(now, groups)
    used = follow(now, groups, change)
    assert sorted(map(sorted, used.values())) == sorted(map(sorted, groups))
    touched = {step.pipeline_id for step in change.steps if not isinstance(step, StartPipeline)}
    assert not touched & change.kept.keys()
    for each in now:
        if each.nodes in groups and (each.place == 1 or now[0].nodes in groups):
            assert each.pipeline_id in change.kept
        if each.pipeline_id in change.groups:
            assert used[each.pipeline_id] == groups[change.groups[each.pipeline_id]]
    assert len(change.steps) <= len(now) + 2 * len(groups)


@given(now=pipelines())
def test_the_same_layout_takes_no_step(now: list[RunningPipeline]) -> None:
    assert change_to(now, [each.nodes for each in now]).steps == ()


def steps(now: str, groups: str) -> str:
    """The steps as text. Pipelines and groups are words of machines."""
    before = [running(place, nodes) for place, nodes in enumerate(now.split(), start=1)]
    words = groups.split()
    said: list[str] = []
    for step in change_to(before, [frozenset(word) for word in words]).steps:
        match step:
            case EndPipeline():
                said.append(f"end {step.pipeline_id}")
            case MovePipeline():
                said.append(f"{step.pipeline_id} to {words[step.group]}")
            case StartPipeline():
                said.append(f"start {words[step.group]}")
    return ", ".join(said)


@pytest.mark.parametrize(
    ("now", "groups", "expected"),
    [
        ("a", "a b c", "start b, start c"),
        ("a b c", "a c", "end p2"),
        ("abcd", "ab cd", "p1 to ab, start cd"),
        ("ab cd", "abcd", "end p2, p1 to abcd"),
        ("a b", "b", "end p2, p1 to b"),
        ("ab cd", "ac bd", "end p2, p1 to ac, start bd"),
        ("a b", "c d", "p1 to c, start d, end p2"),
    ],
)
def test_what_is_in_the_way_ends_first_and_the_rest_last(now: str, groups: str, expected: str) -> None:
    assert steps(now, groups) == expected


def test_a_free_machine_is_tried_once_when_it_has_settled() -> None:
    watch = FreeMachines()
    free = frozenset("b")
    assert watch.look({"m": free}, 0.0) == []
    assert watch.wake_at_s == SETTLED_S
    assert watch.look({"m": free}, SETTLED_S) == ["m"]
    assert watch.wake_at_s is None
    assert watch.look({"m": free}, 99.0) == []
    assert watch.look({"m": frozenset()}, 100.0) == []
    assert watch.look({"m": free}, 101.0) == [], "it came back, and settles first"
    assert watch.look({"m": free}, 101.0 + SETTLED_S) == ["m"]
    assert watch.look({"m": frozenset("bc")}, 200.0) == []
    assert watch.look({"m": frozenset("bc")}, 200.0 + SETTLED_S) == ["m"], "one more machine"


def test_a_model_that_cannot_grow_now_is_tried_when_it_can_again() -> None:
    watch = FreeMachines()
    watch.look({"m": frozenset("b")}, 0.0)
    assert watch.look({}, 5.0) == []
    assert watch.wake_at_s is None
    assert watch.look({"m": frozenset("b")}, SETTLED_S) == [], "its pipelines changed meanwhile"
    assert watch.look({"m": frozenset("b")}, 2 * SETTLED_S) == ["m"]
    watch.forget(frozenset())
    assert watch.look({"m": frozenset("b")}, 50.0) == []
    assert watch.wake_at_s == 50.0 + SETTLED_S
