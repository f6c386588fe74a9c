"""When another placement is searched, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import named_device
from edgepipe.backend.expert_reads import ExpertShare, skewed_shares
from edgepipe.daemon.files.models import LocalModel
from edgepipe.daemon.serving.capacity import stages_of
from edgepipe.daemon.serving.replan_watch import ReplanWatch
from edgepipe.daemon.serving.replanning import Avoided, Known, Replanner, demand_of, placed_of
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.planner.cluster import Cluster
from edgepipe.planner.forecast import Ring
from edgepipe.planner.layer_profile import LayerProfile, Point
from edgepipe.planner.placement import NodeRoom, Placed
from edgepipe.planner.profiles import Links, Machine, MeasuredSpeed, Speed, TableSpeed
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.facts import LayerRange, Slice, make_slices
from edgepipe.testing.clock import FakeClock
from edgepipe.units import parse_link
from edgepipe.wire.engines import Advice, EngineState, ServeSpec, StageState
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import PlanMade
from tests.support.daemon.published_state import FakeState

SHAPE = named_shape("qwen2.5-7b")
PIPELINE = "p"


class World:
    """Machines a, b, ... (all M4 Max), a model over some of them, and the watch that looks at it."""

    config, room_bytes = SHAPE, 17 * 10**9

    def __init__(self, *counts: int, moves: bool = False) -> None:
        self.clock = FakeClock()
        self.nodes = [NodeId("ab"[i]) for i in range(len(counts))]
        self.advice: Advice | None = None
        self.moved: list[ServeSpec] = []
        self.measured: list[str] = []
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        slices = make_slices([LayerRange(e - n, e) for e, n in zip(ends, counts, strict=True)], self.config.num_layers)
        stages = stages_of(
            [Placed(node_id=node_id, part=part) for node_id, part in zip(self.nodes, slices, strict=True)]
        )
        self.spec = ServeSpec(model="m", stages=stages, throughput=True, moves=moves)
        self._news = asyncio.Event()
        self.slower = 1.0  # stage b, than planned
        self.searches = 0
        self.shares: tuple[ExpertShare, ...] = ()  # that the engine has seen
        self.to_avoid = Avoided()  # of the engine
        self.draining: set[str] = set()
        self._real = Replanner(
            peers=cast("Any", SimpleNamespace(nodes=self.peer_states)),
            models=cast("Any", None),
            surveyor=cast("Any", None),
        )

    # what the watch asks of the engines
    def ready(self) -> list[tuple[str, ServeSpec]]:
        return [(PIPELINE, self.spec)]

    def avoided(self, pipeline_id: str) -> Avoided:
        return self.to_avoid

    def advise(self, pipeline_id: str, advice: Advice | None) -> None:
        self.advice = advice

    def move(self, pipeline_id: str, made: PlanMade) -> bool:
        assert made.spec is not None
        self.moved.append(made.spec)
        self.spec = made.spec
        return True

    def state_of(self, pipeline_id: str) -> EngineState:
        machines = {machine.node_id: replace(machine, speed=self.truth()) for machine in self.cluster().machines}
        placed = placed_of(self.spec)
        planned = Ring(demand_of(self.config, self.spec), placed, machines, self.cluster().links).of(2, 16)
        factors = [self.slower if stage.node_id == "b" else 1.0 for stage in placed]
        return EngineState(
            model="m",
            pipeline_id=PipelineId(PIPELINE),
            epoch=Epoch(1, EngineId("e")),
            state="ready",
            running=16,
            decode_rows=8,
            expert_shares=self.shares,
            stages=tuple(
                StageState(node_id=stage.node_id, decode_ms=1e3 * seconds * factor)
                for stage, seconds, factor in zip(placed, planned.step_s, factors, strict=True)
            ),
        )

    # and of the replanner
    def usable(self, spec: ServeSpec, *, own: str) -> frozenset[str]:
        return frozenset(self.nodes) - self.draining

    def name(self, node_id: str) -> str:
        return node_id

    def fetch_bytes(self, model: LocalModel) -> Callable[[NodeId, Sequence[Slice]], int]:
        return lambda _node_id, _slices: 0

    async def known(self, pipeline_id: str, spec: ServeSpec, *, measure: Collection[str] = ()) -> Known:
        self.measured += measure
        model = cast("Any", type("Model", (), {"config": self.config})())
        return Known(model=model, demand=demand_of(self.config, spec), cluster=self.cluster())

    def peer_states(self) -> list[NodeState]:
        return [NodeState(node_id=node_id, draining=node_id in self.draining) for node_id in self.nodes]

    async def search(self, known: Known, spec: ServeSpec, avoided: Avoided) -> tuple[Placed, ...]:
        self.searches += 1
        return await self._real.search(known, spec, avoided)

    def made(self, spec: ServeSpec, placed: tuple[Placed, ...]) -> PlanMade:
        return PlanMade(spec=replace(spec, stages=stages_of(placed)))

    def cluster(self) -> Cluster:
        speed = self.speed()
        machines = tuple(
            Machine(
                room=NodeRoom(node_id=node_id, name=node_id, free_bytes=self.room_bytes, bytes_per_weight=2),
                device="M4 Max",
                speed=speed,
            )
            for node_id in self.nodes
        )
        return Cluster(model="m", config=self.config, machines=machines, links=Links(assumed=parse_link("1gbit,0.5ms")))

    def speed(self) -> Speed:
        """The speed of each machine, as far as the cluster knows."""
        return TableSpeed(CostModel(self.config, named_device("m4max")))

    def truth(self) -> Speed:
        """The speed at which each machine runs the model."""
        return self.speed()

    async def changes(self) -> AsyncIterator[None]:
        while True:
            yield
            await self._news.wait()
            self._news.clear()

    async def after(self, seconds: float) -> None:
        """Time passes, something is told, and what that starts ends."""
        self.clock.advance(seconds)
        self._news.set()
        for _ in range(20):
            await asyncio.sleep(0)
        searches = [task for task in asyncio.all_tasks() if task.get_name().startswith("replan:")]
        if searches:
            await asyncio.wait(searches)

    async def __aenter__(self) -> World:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        watch = ReplanWatch(
            engines=cast("Any", self),
            replanner=cast("Any", self),
            clock=self.clock,
            local=FakeState(changes=self.changes),
            tasks=self._tasks,
        )
        self._running = self._tasks.create_task(watch.run())
        await self.after(0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._running.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def minutes(self, count: float) -> None:
        for _ in range(round(12 * count)):
            await self.after(5.0)


async def test_a_ring_as_planned_gets_no_advice() -> None:
    async with World(15, 13) as world:
        await world.minutes(2)
        assert world.advice is None
        assert world.moved == []


async def test_a_machine_that_stays_slow_is_told_of_once_it_has_for_a_while() -> None:
    async with World(15, 13) as world:
        world.slower = 2.0
        await world.after(15)
        await world.after(20)
        assert world.advice is None, "it was slow for a moment only"
        await world.minutes(1)
        assert world.advice is not None
        assert world.advice.gain > 0.05
        assert world.advice.why.startswith("stage b takes")
        assert world.moved == [], "nobody asked for that"


async def test_a_node_that_is_drained_is_never_advised() -> None:
    async with World(28) as world:
        world.nodes.append(NodeId("b"))
        await world.after(1)
        assert world.advice is not None
        assert "b:" in world.advice.plan
        world.draining.add("b")
        await world.after(1)
        assert world.advice is None
    async with World(14, 14) as world:
        world.draining.add("a")
        world.slower = 2.0
        await world.minutes(2)
        assert world.advice is None or "a:" not in world.advice.plan


async def test_times_that_waver_while_other_programs_run_get_no_advice() -> None:
    async with World(15, 13) as world:
        for round_ in range(60):
            world.slower = (2.0, 70.0, 5.0, 33.0)[round_ % 4]
            await world.after(5)
        assert world.advice is None
        assert world.searches == 0


async def test_a_short_disturbance_is_nobodys_business() -> None:
    async with World(15, 13) as world:
        for _ in range(6):
            world.slower = 2.0
            await world.after(20)
            world.slower = 1.0
            await world.after(20)
        assert world.advice is None


async def test_a_machine_that_joins_is_measured_and_told_of() -> None:
    async with World(28) as world:
        world.nodes.append(NodeId("b"))
        await world.after(1)
        assert world.measured == ["b"]
        assert world.advice is not None
        assert world.advice.why == "b can be used now", "it may have been here before: draining, starting, avoided"
        assert "b:" in world.advice.plan


async def test_what_the_engine_leaves_alone_is_looked_at_when_it_does_no_longer() -> None:
    async with World(28, moves=True) as world:
        world.to_avoid = Avoided(nodes=frozenset("b"))
        world.nodes.append(NodeId("b"))
        await world.minutes(0.5)
        assert not world.moved
        world.to_avoid = Avoided(links=frozenset({(NodeId("a"), NodeId("b"))}))
        await world.after(1)
        assert [stage.node_id for stage in placed_of(world.moved[0])] == ["b", "a"], "in the order that works"


async def test_stages_move_by_themselves_where_that_was_asked_for_and_then_rest() -> None:
    async with World(15, 13, moves=True) as world:
        world.slower = 2.0
        await world.minutes(1.5)
        assert len(world.moved) == 1
        assert world.advice is None
        world.slower = 0.5
        await world.minutes(1.5)
        assert len(world.moved) == 1, "it rests after a move"
        assert world.advice is not None


class MixtureWorld(World):
    """A mixture whose probe read few experts, since its choices are skewed. The running model chooses evenly."""

    config, room_bytes = named_shape("qwen3-30b-a3b"), 70 * 10**9

    def __init__(self, *counts: int, moves: bool = False) -> None:
        super().__init__(*counts, moves=moves)
        self._cost = CostModel(self.config, named_device("m4max"))

    def speed(self) -> Speed:
        skewed = skewed_shares(128, 8, 1.5)
        read = {each.tokens: each.share for each in skewed}
        sheet = TableSpeed(self._cost, expert_shares=skewed)
        steps = {size: StepWork.of_rows([0] * size, [1] * size, logit_rows=0) for size in (1, 4, 16, 64)}
        profile = LayerProfile(
            base_s=0.0,
            decode=tuple(
                Point(size, float(sheet.parts(work).layer_s.mean()), read.get(size, 0.0))
                for size, work in steps.items()
            ),
            prefill=(Point(128, 1e-2),),
            head=(Point(1, 1e-4),),
            kv_token_s=0.0,
            decode_context=0,
        )
        return MeasuredSpeed(profile, self._cost)

    def truth(self) -> Speed:
        return self.speed().with_expert_shares(EVEN)


EVEN = skewed_shares(128, 8, 0.0)


async def test_experts_that_the_engine_has_counted_explain_the_time_of_its_steps() -> None:
    async with MixtureWorld(25, 23) as world:
        world.shares = EVEN
        await world.minutes(3)
        assert world.searches == 0
        assert world.advice is None


async def test_experts_counted_late_cost_a_search_or_two_and_no_move() -> None:
    async with MixtureWorld(25, 23, moves=True) as world:
        await world.minutes(1.5)
        assert world.searches == 1, "the steps are slower than planned, nobody knows why"
        world.shares = EVEN
        await world.minutes(2)
        assert world.searches == 2, "the first correction is taken back"
        for index in range(24):  # means of running steps waver
            world.shares = tuple(replace(each, share=each.share * (0.97 + 0.03 * (index % 2))) for each in EVEN)
            await world.minutes(0.5)
        assert world.searches == 2
        assert world.moved == []
        assert world.advice is None


async def test_a_machine_that_is_slow_for_other_reasons_is_still_told_of() -> None:
    async with MixtureWorld(25, 23) as world:
        world.shares = EVEN
        world.slower = 2.0
        await world.minutes(1.5)
        assert world.advice is not None
        assert world.advice.why.startswith("stage b takes")
        searches = world.searches
        await world.minutes(3)
        assert world.searches == searches, "the same difference is told once"
