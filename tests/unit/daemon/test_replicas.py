"""Several pipelines of one model: their records, and where their stages may go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from edgepipe.daemon.cluster_views import engines_away
from edgepipe.daemon.serving.capacity import stages_of
from edgepipe.daemon.serving.replanning import Replanner, demand_of
from edgepipe.daemon.serving.replica_facts import ReplicaFacts, number_of
from edgepipe.daemon.serving.serve_rules import lead
from edgepipe.daemon.serving.served_as_asked import check_served_as_asked
from edgepipe.daemon.serving.survey import Surveyor
from edgepipe.errors import AccessDenied, NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.planner.placement import Placed
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.wire.engines import EngineState, ServeSpec
from edgepipe.wire.serving import PlanWanted, ServeRequest
from tests.support.daemon.serve_books import BookNode, Shared, all_hear, node, nodes
from tests.unit.daemon.test_replanning import SHAPE, FakePeers, OneModel
from tests.unit.daemon.test_serve_book import signed

PIPELINES = (PipelineId("p1"), PipelineId("p2"))


def replica(number: int, *on: str, model: str = "tiny") -> ServeSpec:
    slices = make_slices([LayerRange(0, SHAPE.num_layers)], SHAPE.num_layers) if len(on) == 1 else ()
    stages = stages_of([Placed(node_id=NodeId(name), part=part) for name, part in zip(on, slices, strict=False)])
    return ServeSpec(
        model=model,
        manifest_hash="h",
        stages=stages,
        num_replicas=2,
        replica=number,
        replica_pipelines=PIPELINES,
    )


def both_served(folder: Path, *, owners: str = "a", members: str = "bcd") -> dict[str, BookNode]:
    """b had two pipelines of "tiny" served, on b and on c; everybody knows."""
    return world(folder, owners=owners, members=members)[1]


def world(folder: Path, *, owners: str = "a", members: str = "bcd") -> tuple[Shared, dict[str, BookNode]]:
    """``both_served``, with the keys."""
    trust, everybody = nodes(folder, owners=owners, members=members)
    for number, (pipeline, host) in enumerate(zip(PIPELINES, "bc", strict=True), start=1):
        spec = replica(number, everybody[host].node_id)
        everybody["b"].book.ask(pipeline, spec, engine_node=everybody[host].node_id)
        all_hear(everybody)
        everybody[host].book.note_served(pipeline, spec)
        for member in everybody.values():
            member.engines[everybody[host].node_id, pipeline] = "ready"
    all_hear(everybody)
    return trust, everybody


def served(member: BookNode) -> list[str]:
    return sorted(body.pipeline_id for body in member.book.served())


def test_both_are_served_until_one_stop_ends_both(tmp_path: Path) -> None:
    everybody = both_served(tmp_path)
    assert all(served(member) == ["p1", "p2"] for member in everybody.values())
    everybody["b"].book.note_stopped("tiny")
    all_hear(everybody)
    assert all(served(member) == [] for member in everybody.values())
    assert all(sorted(member.book.stopped()) == ["p1", "p2"] for member in everybody.values())


async def test_both_are_remembered_after_a_power_cut(tmp_path: Path) -> None:
    import asyncio

    trust, everybody = nodes(tmp_path, owners="a", members="b")
    a = everybody["a"]
    for number, pipeline in enumerate(PIPELINES, start=1):
        a.book.ask(pipeline, replica(number, a.node_id), engine_node=a.node_id)
        a.book.note_served(pipeline, replica(number, a.node_id))
    writing = asyncio.create_task(a.book.run())
    async with asyncio.timeout(5):
        while not (tmp_path / "a" / "served.bin").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    writing.cancel()
    again = node(trust, "a", tmp_path)
    assert served(again) == ["p1", "p2"]
    assert list(numbers(again).values()) == [1, 2]


@pytest.mark.parametrize("place", [2, 3])
def test_a_member_adds_no_pipeline_to_a_model_that_another_had_served(tmp_path: Path, place: int) -> None:
    """Gateways would send it prompts. It may claim to act for the asker, and be heard first by a node that joins."""
    trust, everybody = world(tmp_path)
    b, d = everybody["b"], everybody["d"]
    d.book._records.clear()  # d keeps to no rule
    spec = replace(replica(place, d.node_id), replica_pipelines=(*PIPELINES, PipelineId("mine")), num_replicas=3)
    d.book.ask(PipelineId("mine"), spec, engine_node=d.node_id)
    d.book.note_served("mine", spec)
    rogue = EngineState(
        model="tiny", pipeline_id=PipelineId("mine"), epoch=Epoch(1, EngineId("e")), state="ready", manifest_hash="h"
    )
    claimed = d.book.held("mine")
    assert claimed is not None
    in_its_name = signed(trust.keys["d"], replace(claimed, asker=b.node_id, version=claimed.version + 1))
    for member in (everybody["a"], b, everybody["c"]):
        member.engines[d.node_id, "mine"] = "ready"
        member.hears(d)
        member.book.merge(d.node_id, [in_its_name])
        assert served(member) == ["p1", "p2"]
        assert not member.book.binds(d.node_id, rogue)
    b.book.note_stopped("tiny")
    assert not {"p1", "p2"} & set(served(b))


def test_an_engine_s_node_does_not_say_which_replica_it_is(tmp_path: Path) -> None:
    everybody = both_served(tmp_path)
    c = everybody["c"]
    c.book.note_served("p2", replace(replica(1, c.node_id), replica_pipelines=()))
    assert c.book.held("p2") is not None
    assert served(c) == ["p1", "p2"]
    assert [body.spec.replica for body in c.book.replicas("tiny")] == [1, 2]


def test_replicas_share_further_names_and_another_model_does_not(tmp_path: Path) -> None:
    everybody = both_served(tmp_path, owners="ab", members="cd")
    everybody["a"].book.note_named("tiny", ("home",))
    all_hear(everybody)
    assert everybody["d"].book.names() == {"p1": ("home",), "p2": ("home",)}
    with pytest.raises(AccessDenied):
        everybody["d"].book.note_named("tiny", ("mine",))


def test_a_replica_takes_no_machine_of_another_one(tmp_path: Path) -> None:
    everybody = both_served(tmp_path)
    b, c = everybody["b"], everybody["c"]
    assert b.book.nodes_of_others("p1") == {c.node_id}
    assert b.book.nodes_of_others("p2") == {b.node_id}
    b.book.ask(PipelineId("q"), ServeSpec(model="other", manifest_hash="h"), engine_node=b.node_id)
    assert b.book.nodes_of_others("q") == frozenset()


async def placed_without(names: str, taken: str) -> list[str]:
    fakes = cast("Any", FakePeers(names))
    replanner = Replanner(
        peers=fakes, models=cast("Any", OneModel()), surveyor=Surveyor(fakes), taken=lambda _: frozenset(taken)
    )
    slices = make_slices([LayerRange(0, 14), LayerRange(14, 28)], SHAPE.num_layers)
    stages = stages_of([Placed(node_id=NodeId(name), part=part) for name, part in zip("ax", slices, strict=True)])
    spec = ServeSpec(model="m", stages=stages)
    assert replanner.usable(spec, own="p") == frozenset(names) - frozenset(taken)
    made = (await replanner.plan("p", PlanWanted(spec=spec))).spec
    assert made is not None
    return sorted(stage.node_id for stage in made.stages)


async def test_a_lost_stage_goes_to_no_machine_of_another_replica() -> None:
    """10 GB each hold some layers of 15 GB: x is gone, so its layers go to b or c."""
    assert await placed_without("abc", "b") == ["a", "c"]
    assert await placed_without("abc", "c") == ["a", "b"]
    with pytest.raises(NoFeasiblePlacement, match="needs about") as caught:
        await placed_without("abc", "bc")
    assert "b, c compute other replicas of the model" in caught.value.fact


def test_a_replica_is_planned_for_its_share_of_the_chats() -> None:
    spec = ServeSpec(model="m", concurrency=33)
    assert demand_of(SHAPE, spec).concurrency == 33
    assert demand_of(SHAPE, replace(spec, num_replicas=2, replica=1)).concurrency == 17


def test_a_replica_without_an_engine_is_shown_beside_the_one_that_answers(tmp_path: Path) -> None:
    everybody = both_served(tmp_path)
    engine = EngineState(model="tiny", pipeline_id=PIPELINES[0], epoch=Epoch(1, EngineId("e")), state="ready")
    book = everybody["a"].book
    (away,) = map(book.numbered, engines_away(book.served(), [engine]))
    assert (away.title, away.state) == ("tiny replica 2/2", "starting")


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"num_replicas": 1}, ""),
        ({"num_replicas": 3, "concurrency": 64}, ""),
        ({"auto_replicas": True, "concurrency": 64}, ""),
        ({"concurrency": 64}, "--concurrency auto"),
        ({"num_replicas": 3, "micro_batches": 7}, "--micro-batches auto"),
    ],
)
def test_only_the_number_of_replicas_and_their_chats_may_differ(
    tmp_path: Path, asked: dict[str, Any], refused: str
) -> None:
    everybody = both_served(tmp_path)
    held = everybody["b"].book.held("p1")
    engine = EngineState(model="tiny", pipeline_id=PIPELINES[0], epoch=Epoch(1, EngineId("e")), state="ready")
    request = ServeRequest(options=ServeSpec(model="tiny", **asked))
    if not refused:
        check_served_as_asked(request, engine, "", held)
        return
    with pytest.raises(PlanInvalid, match="served already") as caught:
        check_served_as_asked(request, engine, "", held)
    assert caught.value.fact == f"it is served with {refused}"
    assert "edgepipe stop tiny" in caught.value.next_step


def facts(*pipelines: str, **more: Any) -> ReplicaFacts:
    return ReplicaFacts(pipelines=tuple(PipelineId(each) for each in pipelines), **more)


def numbers(member: BookNode) -> dict[str, int]:
    bodies = [body for body in member.book.bodies() if not body.stopped]
    return {body.pipeline_id: number_of(body.pipeline_id, lead(bodies)) for body in bodies}


def with_third(everybody: dict[str, BookNode], *, by: str, place: int = 3) -> None:
    """A node adds pipeline p3, on d."""
    book, host = everybody[by].book, everybody["d"]
    both = facts("p1", "p2", "p3", shares={PipelineId(name): share for name, share in (("p1", 0.5), ("p3", 0.2))})
    book.note_replicas("tiny", both)
    spec = both.of(replica(place, host.node_id), PipelineId("p3"), place=place)
    book.ask(PipelineId("p3"), spec, engine_node=host.node_id)
    for member in everybody.values():
        member.engines[host.node_id, "p3"] = "ready"
    all_hear(everybody)
    host.book.note_served("p3", spec)
    all_hear(everybody)


@pytest.mark.parametrize("by", ["a", "b"])  # an owner, and the member that had the model served
def test_a_third_pipeline_counts_everywhere_and_a_first_one_goes_on_alone(tmp_path: Path, by: str) -> None:
    everybody = both_served(tmp_path)
    with_third(everybody, by=by)
    assert all(numbers(member) == {"p1": 1, "p2": 2, "p3": 3} for member in everybody.values())
    shares = {body.pipeline_id: body.spec.replica_share for body in everybody["c"].book.bodies()}
    assert shares == {"p1": 0.5, "p2": 0.0, "p3": 0.2}
    everybody[by].book.note_ended("p2")
    everybody[by].book.note_replicas("tiny", facts("p1", "p3"))
    all_hear(everybody)
    assert all(numbers(member) == {"p1": 1, "p3": 2} for member in everybody.values()), "numbers have no gap"
    assert everybody["c"].book.stopped() == ["p2"]
    everybody[by].book.note_ended("p3")
    everybody[by].book.note_replicas("tiny", facts("p1", auto=True))
    all_hear(everybody)
    for member in everybody.values():
        assert numbers(member) == {"p1": 0}
        (body,) = member.book.served()
        assert body.spec.auto_replicas
        assert demand_of(SHAPE, replace(body.spec, concurrency=40)).concurrency == 40


def test_a_single_pipeline_becomes_the_first_of_two(tmp_path: Path) -> None:
    _, everybody = nodes(tmp_path, owners="a", members="b")
    a, b = everybody["a"], everybody["b"]
    a.book.ask(
        PIPELINES[0], replace(replica(0, a.node_id), replica_pipelines=(), num_replicas=0), engine_node=a.node_id
    )
    both = facts(*PIPELINES)
    a.book.note_replicas("tiny", both)
    a.book.ask(PIPELINES[1], both.of(replica(2, b.node_id), PIPELINES[1], place=2), engine_node=b.node_id)
    all_hear(everybody)
    assert numbers(b) == {"p1": 1, "p2": 2}


def test_an_engine_keeps_the_number_of_its_record(tmp_path: Path) -> None:
    """Its spec is that of its start; what the record says since then is not lost with the engine's next report."""
    everybody = both_served(tmp_path)
    with_third(everybody, by="b")
    c = everybody["c"]
    old = replica(2, c.node_id)
    c.book.note_served("p2", replace(old, stages=(), concurrency=7))
    held = c.book.held("p2")
    assert held is not None
    assert (held.spec.num_replicas, held.spec.replica_pipelines[2:], held.spec.concurrency) == (3, ("p3",), 0)
    state = EngineState(model="tiny", pipeline_id=PIPELINES[1], epoch=Epoch(1, EngineId("e")), state="ready")
    assert c.book.numbered(state).title == "tiny replica 2/3"


@pytest.mark.parametrize("by", ["c", "d"])  # a member with an engine of the model, and one without
def test_who_may_not_stop_a_model_does_not_change_its_pipelines(tmp_path: Path, by: str) -> None:
    everybody = both_served(tmp_path)
    with pytest.raises(AccessDenied):
        everybody[by].book.note_replicas("tiny", facts("p1"))
    all_hear(everybody)
    assert numbers(everybody["a"]) == {"p1": 1, "p2": 2}


def test_the_asker_changes_nothing_else_in_the_record_of_another_node_s_engine(tmp_path: Path) -> None:
    trust, everybody = world(tmp_path)
    held = everybody["b"].book.held("p2")
    assert held is not None
    moved = replace(held, spec=replace(held.spec, stages=(), num_replicas=1), version=held.version + 1)
    everybody["a"].book.merge(everybody["b"].node_id, [signed(trust.keys["b"], moved)])
    assert everybody["a"].book.held("p2") == held


def test_a_stop_that_is_refused_for_one_pipeline_stops_none(tmp_path: Path) -> None:
    everybody = both_served(tmp_path)
    with_third(everybody, by="a")  # an owner added it, so b may not stop it
    with pytest.raises(AccessDenied):
        everybody["b"].book.note_stopped("tiny")
    assert served(everybody["b"]) == ["p1", "p2", "p3"]
    everybody["a"].book.note_stopped("tiny")
    all_hear(everybody)
    assert served(everybody["b"]) == []


def test_of_two_changes_at_once_one_counts_everywhere(tmp_path: Path) -> None:
    everybody = both_served(tmp_path, owners="ab", members="cd")
    for by, name in (("a", "pa"), ("b", "pb")):
        three = facts("p1", "p2", name)
        everybody[by].book.note_replicas("tiny", three)
        spec = three.of(replica(3, everybody["d"].node_id), PipelineId(name), place=3)
        everybody[by].book.ask(PipelineId(name), spec, engine_node=everybody["d"].node_id)
    all_hear(everybody)
    seen = [numbers(member) for member in everybody.values()]
    assert seen == [{"p1": 1, "p2": 2, "pb": 3}] * 4
