"""Random histories against the review of placements: machines come and go, answers are slow, late or missing."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any, cast

from edgepipe.backend.cost import CostModel
from edgepipe.backend.devices import named_device
from edgepipe.daemon.serving.capacity import stages_of
from edgepipe.daemon.serving.placement_review import (
    Advise,
    Cancel,
    Command,
    Event,
    FoundPlacement,
    Learn,
    Learned,
    Looked,
    Move,
    PlacementReview,
    RunningRing,
    SearchPlacement,
)
from edgepipe.daemon.serving.replanning import Known, demand_of
from edgepipe.ids import NodeId
from edgepipe.planner.cluster import Cluster
from edgepipe.planner.placement import NodeRoom, Placed
from edgepipe.planner.profiles import Links, Machine, TableSpeed
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.units import parse_link
from edgepipe.wire.engines import Advice, ServeSpec

SHAPE = named_shape("qwen2.5-7b")
NODES = tuple(NodeId(name) for name in "abc")
REST_S = 300.0


def placed(draw: random.Random, nodes: list[NodeId]) -> tuple[Placed, ...]:
    """All layers over some of the nodes."""
    chosen = draw.sample(nodes, draw.randint(1, len(nodes)))
    cuts = sorted(draw.sample(range(1, SHAPE.num_layers), len(chosen) - 1))
    bounds = zip([0, *cuts], [*cuts, SHAPE.num_layers], strict=True)
    slices = make_slices([LayerRange(start, end) for start, end in bounds], SHAPE.num_layers)
    return tuple(Placed(node_id=node, part=part) for node, part in zip(chosen, slices, strict=True))


def known(spec: ServeSpec) -> Known:
    fast, slow = (TableSpeed(CostModel(SHAPE, named_device(name))) for name in ("m4max", "m1"))
    rooms = (NodeRoom(node_id=node, name=node, free_bytes=17 * 10**9, bytes_per_weight=2) for node in NODES)
    machines = tuple(Machine(room=room, device="M4 Max", speed=slow if room.node_id == "c" else fast) for room in rooms)
    links = Links(assumed=parse_link("1gbit,0.5ms"))
    model = cast("Any", type("Model", (), {"config": SHAPE})())
    return Known(
        model=model,
        demand=demand_of(SHAPE, spec),
        cluster=Cluster(model="m", config=SHAPE, machines=machines, links=links),
    )


class World:
    """Engines p and q beside one daemon; the shell's work takes random time."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now_s = 1_000_000.0
        self.counts: Counter[str] = Counter()
        self.review = PlacementReview()
        self.rings: dict[str, RunningRing] = {}
        self.open: dict[int, Learn | SearchPlacement] = {}
        self.cancelled: dict[int, Learn | SearchPlacement] = {}
        self.advice: dict[str, Advice | None] = {}
        self.moved_s: dict[str, float] = {}

    def run(self) -> None:
        for _ in range(150):
            self.now_s += self.draw.choice((0.1, 1.0, 10.0, 60.0)) * self.draw.random()
            self.draw.choice((self.change, self.look, self.answer, self.answer, self.answer_late))()
            tasks = Counter(work.pipeline_id for work in self.open.values())
            assert all(count == 1 for count in tasks.values()), f"one task of a model at a time: {tasks}"

    def change(self) -> None:
        """An engine starts, ends, or other nodes are usable."""
        pipeline_id = self.draw.choice("pq")
        ring = self.rings.get(pipeline_id)
        usable = frozenset(self.draw.sample(NODES, self.draw.randint(1, 3)))
        if ring is None:
            spec = ServeSpec(
                model="m",
                stages=stages_of(placed(self.draw, list(NODES))),
                throughput=True,
                moves=self.draw.random() < 0.7,
            )
            self.rings[pipeline_id] = RunningRing(spec=spec, usable=usable, state=None)
        elif self.draw.random() < 0.2:
            del self.rings[pipeline_id]
            self.advice.pop(pipeline_id, None)
        else:
            self.rings[pipeline_id] = replace(ring, usable=usable)
        self.look()

    def look(self) -> None:
        self.happens(Looked())
        for work in self.open.values():
            assert work.pipeline_id in self.rings, "no work is done for an engine that is gone"
            assert work.spec.stages == self.rings[work.pipeline_id].spec.stages, "or for a placement that it has left"

    def answer(self) -> None:
        if self.open:
            self.happens(self.answered(self.open.pop(self.draw.choice(sorted(self.open)))))

    def answer_late(self) -> None:
        if self.cancelled:
            work = self.cancelled.pop(self.draw.choice(sorted(self.cancelled)))
            assert self.review.handle(self.answered(work), self.rings, self.now_s) == [], "the answer comes too late"

    def answered(self, work: Learn | SearchPlacement) -> Event:
        fails = self.draw.random() < 0.2
        if isinstance(work, Learn):
            return Learned(task=work.task, known=None if fails else known(work.spec))
        found = None if fails else placed(self.draw, list(NODES))
        return FoundPlacement(task=work.task, placed=found, fetch_bytes=lambda _node, _slices: 0)

    def happens(self, event: Event) -> None:
        for command in self.review.handle(event, self.rings, self.now_s):
            self.counts[type(command).__name__] += 1
            self.do(command)

    def do(self, command: Command) -> None:
        match command:
            case Learn():
                ring = self.rings[command.pipeline_id]
                assert command.joined <= ring.usable
                self.open[command.task] = command
            case SearchPlacement():
                self.open[command.task] = command
            case Cancel():
                self.cancelled[command.task] = self.open.pop(command.task)
            case Advise():
                self.advice[command.pipeline_id] = command.advice
            case Move():
                ring = self.rings[command.pipeline_id]
                assert ring.spec.moves, "stages move by themselves where that was asked for"
                assert self.now_s - self.moved_s.get(command.pipeline_id, 0.0) >= REST_S, "and then they rest"
                self.moved_s[command.pipeline_id] = self.now_s
                self.advice.pop(command.pipeline_id, None)
                spec = replace(ring.spec, stages=stages_of(command.placed))
                self.rings[command.pipeline_id] = replace(ring, spec=spec)


def test_whatever_happens_one_task_of_a_model_runs_and_its_stages_move_rarely() -> None:
    counts: Counter[str] = Counter()
    for seed in range(20):
        world = World(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        counts.update(world.counts)
    for what in ("Learn", "SearchPlacement", "Cancel", "Advise", "Move"):
        assert counts[what] > 5, f"histories have hardly any: {what} {counts}"
