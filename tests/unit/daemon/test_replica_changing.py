"""Another number of pipelines while a model is served: real book, planner and survey; made-up nodes and engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgepipe.daemon.serving.capacity import stages_of
from edgepipe.daemon.serving.engine_following import EngineFollower
from edgepipe.daemon.serving.replica_changing import ReplicaChanges
from edgepipe.daemon.serving.replica_facts import ReplicaFacts
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.daemon.serving.survey import Surveyor
from edgepipe.errors import DeviceOutOfMemory, NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.planner.placement import Placed
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.weights.weight_table import FLOATS
from edgepipe.wire.engines import EngineState, ServeSpec
from edgepipe.wire.nodes import DeviceState, NodeState, Reserved
from edgepipe.wire.serving import RebalanceRequest, ServeEvent, ServeRecord, ServeRequest, StartEngineRequest
from tests.support.daemon.published_state import FakeState
from tests.support.daemon.serve_books import lone_book
from tests.support.processes.waiting import until
from tests.unit.daemon.test_replanning import DEVICE, GB, SHAPE, SHAPE_JSON, FakePeers

MODEL: Any = SimpleNamespace(
    name="m", config=SHAPE, config_json=SHAPE_JSON, weights=FLOATS, weights_json="", manifest_hash="h", draft=None
)
MODEL.as_placed = lambda _: MODEL


class Machines(FakePeers):
    """Machines of 22 GB each: one holds the model alone."""

    def __init__(self, names: str, book: ServeBook, *, own_id: str) -> None:
        super().__init__(names)
        self.own_id = own_id
        self.book = book
        self.engines: dict[str, tuple[str, EngineState]] = {}  # node and state, by pipeline
        self.calls: list[str] = []
        self.fails: Exception | None = None  # what a start raises
        self.stalls = asyncio.Event()  # unset: engines that start do not get ready
        self.stalls.set()
        self.taken: set[str] = set()  # nodes where another model has a stage

    def node(self, node_id: str) -> NodeState:
        stages = [
            (PipelineId(pipeline_id), stage.node_id)
            for pipeline_id in self.engines
            if (body := self.book.held(pipeline_id)) is not None
            for stage in body.spec.stages
        ]
        reserved = tuple(Reserved(pipeline_id=key, num_bytes=16 * GB) for key, place in stages if place == node_id)
        if node_id in self.taken:
            reserved = (*reserved, Reserved(pipeline_id=PipelineId("other"), num_bytes=2 * GB))
        device = DeviceState(
            profile=DEVICE,
            state="serving" if reserved else "idle",
            free_bytes=22 * GB - sum(each.num_bytes for each in reserved),
            reserved=reserved,
        )
        engines = tuple(state for place, state in self.engines.values() if place == node_id)
        return replace(super().node(node_id), devices=(device,), engines=engines)

    async def start_engine(self, node_id: str, request: StartEngineRequest) -> None:
        if self.fails is not None:
            raise self.fails
        self.calls.append(f"start {''.join(sorted(stage.node_id for stage in request.spec.stages))}")
        self.runs(node_id, request.pipeline_id, state="loading")
        await self.stalls.wait()
        self.runs(node_id, request.pipeline_id)
        body = self.book.held(request.pipeline_id)
        assert body is not None
        self.book._say(replace(body, begun=True))

    def runs(self, node_id: str, pipeline_id: PipelineId, *, state: str = "ready", epoch: int = 1) -> None:
        engine = EngineState(model="m", pipeline_id=pipeline_id, epoch=Epoch(epoch, EngineId("e")), state=state)
        self.engines[pipeline_id] = (node_id, engine)

    async def stop_engine(self, node_id: str, pipeline_id: str, record: ServeRecord | None) -> None:
        assert pipeline_id in self.book.stopped(), "by then no node starts it again"
        self.calls.append(f"stop {pipeline_id}")
        self.engines.pop(pipeline_id, None)

    async def rebalance(self, node_id: str, request: RebalanceRequest) -> bool:
        self.calls.append(f"{request.pipeline_id} to {''.join(sorted(stage.node_id for stage in request.stages))}")
        body = self.book.held(request.pipeline_id)
        assert body is not None
        self.book._say(replace(body, spec=replace(body.spec, stages=request.stages)))
        self.runs(node_id, request.pipeline_id, epoch=2)
        return True


@dataclass
class World:
    """One node's changes of the model "m"."""

    changes: ReplicaChanges
    machines: Machines
    book: ServeBook
    notes: list[str] = field(default_factory=list[str])

    async def ask(self, number: int = 0, **more: Any) -> list[ServeEvent]:
        options = ServeSpec(model="m", num_replicas=number, auto_replicas=not number, **more)
        events = [event async for event in self.changes.change(ServeRequest(options=options), MODEL)]
        self.notes += [event.note for event in events if event.note]
        return events

    def pipelines(self) -> str:
        """The machines of the pipelines that count, in the order of their places."""
        bodies = [body for body in self.book.replicas("m") if body in self.book.bodies()]
        return " ".join("".join(sorted(stage.node_id for stage in body.spec.stages)) for body in bodies)


def serve(world: World, words: str, *, chats: int = 64, **more: Any) -> None:
    """Pipelines p1, p2, ... on the machines of each word."""
    ids = tuple(PipelineId(f"p{number}") for number in range(1, len(words.split()) + 1))
    facts = ReplicaFacts(pipelines=ids, concurrency=chats)
    for place, (pipeline_id, word) in enumerate(zip(ids, words.split(), strict=True), start=1):
        cuts = [SHAPE.num_layers * index // len(word) for index in range(len(word) + 1)]
        slices = make_slices([LayerRange(a, b) for a, b in pairwise(cuts)], SHAPE.num_layers)
        placed = [Placed(node_id=NodeId(name), part=part) for name, part in zip(word, slices, strict=True)]
        base = ServeSpec(model="m", manifest_hash="h", stages=stages_of(placed), **more)
        world.book.ask(pipeline_id, facts.of(base, pipeline_id, place=place), engine_node=word[0])
        body = world.book.held(pipeline_id)
        assert body is not None
        world.book._say(replace(body, begun=True))
        world.machines.runs(word[0], pipeline_id)


async def changing() -> AsyncIterator[None]:
    while True:
        yield
        await asyncio.sleep(0)


@pytest.fixture
async def tasks() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as group:
        yield group


@pytest.fixture
def world(tmp_path: Path, tasks: asyncio.TaskGroup) -> World:
    book = lone_book(tmp_path)
    machines = Machines("abc", book, own_id=book._own)
    peers = cast("Any", machines)

    async def knows(_: str) -> None:
        return

    numbers: Iterable[int] = iter(range(1, 100))
    changes = ReplicaChanges(
        peers=peers,
        models=cast("Any", SimpleNamespace(adopt=_adopt)),
        ids=cast("Any", SimpleNamespace(new=lambda _: f"new{next(cast('Any', numbers))}")),
        book=book,
        surveyor=Surveyor(peers),
        follower=EngineFollower(
            peers=peers,
            local=FakeState(changes=changing),
            gateway=cast("Any", SimpleNamespace(knows=knows)),
            book=book,
        ),
        tasks=tasks,
    )
    return World(changes, machines, book)


async def _adopt(*_: object, **__: object) -> Any:
    return MODEL


async def test_more_pipelines_start_on_free_machines_and_the_first_is_not_touched(world: World) -> None:
    serve(world, "b", kv_tokens=9000)
    await world.ask(3)
    assert world.pipelines() == "b a c"
    assert sorted(world.machines.calls) == ["start a", "start c"]
    assert "m gets 3 replicas" in world.notes[0]
    assert "the one on b stays, one starts on a, one starts on c" in world.notes[0]
    bodies = [body for body in world.book.bodies() if not body.stopped]
    assert {body.spec.kv_tokens for body in bodies} == {9000}, "they are served as the first one is"
    assert sum(body.spec.replica_share for body in bodies) == pytest.approx(1)
    titles = [engine.title for _, engine in world.changes.follower.running("m")]
    assert titles == ["m replica 1/3", "m replica 2/3", "m replica 3/3"]


async def test_fewer_pipelines_stop_one_and_leave_the_others(world: World) -> None:
    serve(world, "a b c", chats=8)
    await world.ask(2)
    assert world.machines.calls == ["stop p3"]
    assert world.pipelines() == "a b"
    await world.ask(1)
    assert world.machines.calls == ["stop p3", "stop p2"]
    assert world.pipelines() == "a"
    assert [engine.title for _, engine in world.changes.follower.running("m")] == ["m"]
    assert "replica 2 on b ends" in world.notes[-1]


async def test_a_pipeline_on_all_machines_leaves_some_first(world: World) -> None:
    serve(world, "abc")
    await world.ask(2)
    first, *others = world.machines.calls
    assert first.startswith("p1 to ")
    assert [call[:5] for call in others] == ["start"]
    assert len(world.pipelines().split()) == 2


async def test_the_same_number_is_said_and_nothing_happens(world: World) -> None:
    serve(world, "a b")
    (event,) = await world.ask(2)
    assert event.note == "m has 2 replicas already"
    assert not world.machines.calls
    serve(world, "a b c")
    await world.ask()
    assert world.notes[-1] == "m has 3 replicas already, as many as give most by forecast"
    assert all(body.spec.auto_replicas for body in world.book.served()), "from now on machines that join count"
    await world.ask(3)
    assert not any(body.spec.auto_replicas for body in world.book.served())


async def test_more_than_machines_are_refused_and_nothing_changes(world: World) -> None:
    serve(world, "a b")
    with pytest.raises(NoFeasiblePlacement, match="4 replicas do not fit on 3 machines") as caught:
        await world.ask(4)
    assert caught.value.next_step.startswith("give --replicas 3")
    assert world.pipelines() == "a b"
    assert not world.machines.calls


@pytest.mark.parametrize(("more", "flag"), [({"fixed": True}, "--plan"), ({"first": "a"}, "--first")])
async def test_a_model_placed_by_hand_is_left_alone(world: World, more: dict[str, Any], flag: str) -> None:
    serve(world, "a", **more)
    with pytest.raises(PlanInvalid, match="placed by hand") as caught:
        await world.ask(2)
    assert flag in caught.value.fact


async def test_a_second_change_meanwhile_is_refused(world: World) -> None:
    serve(world, "a")
    world.machines.stalls.clear()
    first = asyncio.create_task(world.ask(2))
    await until(lambda: bool(world.machines.calls))
    for number in (1, 2, 3):
        with pytest.raises(PlanInvalid, match="the pipelines of m change already"):
            await world.ask(number)
    world.machines.stalls.set()
    await first
    assert len(world.pipelines().split()) == 2
    await world.ask(3)
    assert len(world.pipelines().split()) == 3


async def test_a_start_by_another_node_is_waited_for(world: World) -> None:
    serve(world, "a b")
    body = world.book.replicas("m")[1]
    world.book._say(replace(body, begun=False))
    with pytest.raises(PlanInvalid, match="change already") as caught:
        await world.ask(3)
    assert caught.value.fact == "one starts on b now"


async def test_another_command_s_change_wins_and_is_named(world: World) -> None:
    """Another node signed a newer record of the first pipeline, which names others."""
    serve(world, "a")
    world.machines.stalls.clear()
    asked = asyncio.create_task(world.ask(2))
    await until(lambda: bool(world.machines.calls))
    theirs = ReplicaFacts(pipelines=(PipelineId("p1"), PipelineId("theirs")))
    world.book.note_replicas("m", theirs)
    world.machines.stalls.set()
    with pytest.raises(PlanInvalid, match="another command changed the pipelines of m at the same time"):
        await asked
    held = world.book.held("p1")
    assert held is not None
    assert held.spec.replica_pipelines == theirs.pipelines


async def test_an_engine_that_does_not_start_leaves_the_others_as_they_were(world: World) -> None:
    serve(world, "a b")
    world.machines.fails = DeviceOutOfMemory("the device of c has no memory", fact="it lacks 2 GB")
    with pytest.raises(DeviceOutOfMemory) as caught:
        await world.ask(3)
    assert caught.value.fact == "it lacks 2 GB; m goes on with 2 replicas"
    assert world.pipelines() == "a b"
    assert {body.spec.num_replicas for body in world.book.served()} == {2}
    world.machines.fails = None
    await world.ask(3)
    assert world.pipelines() == "a b c"


async def test_a_caller_who_leaves_ends_what_is_not_ready(world: World) -> None:
    serve(world, "a")
    world.machines.stalls.clear()
    asked = asyncio.create_task(world.ask(2))
    await until(lambda: bool(world.machines.calls))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(lambda: len(world.machines.calls) == 2)
    assert world.machines.calls[1] == "stop new1"
    assert world.pipelines() == "a"
    assert not world.changes.is_open("m")


async def test_the_last_pipeline_that_answers_does_not_end(world: World) -> None:
    serve(world, "a b")
    del world.machines.engines["p1"]
    with pytest.raises(PlanInvalid, match="the first pipeline of m does not answer"):
        await world.ask(1)
    assert world.pipelines() == "a b"


async def test_free_machines_get_pipelines_and_those_of_other_models_none(world: World) -> None:
    serve(world, "a", chats=512)
    world.machines.taken = {"c"}
    assert await world.changes.grow("m")
    assert world.pipelines() == "a b"
    assert not await world.changes.grow("m")
    world.machines.taken = set()
    assert await world.changes.grow("m")
    assert world.pipelines() == "a b c"
    assert all(body.spec.auto_replicas for body in world.book.served())
