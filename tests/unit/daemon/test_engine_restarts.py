"""An engine that crashes again and again starts again and again, ever more rarely, here or on another node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.errors import AccessDenied, StageLost
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.wire.engines import EngineState, StagePlacement, StageState
from edgepipe.wire.nodes import NodeState
from tests.support.daemon.engine_hosts import REQUEST, SlowChild, engine_host
from tests.support.engine.virtual_ring import LoopClock, in_virtual_time

RING = ("a", "b")
SPEC = replace(REQUEST.spec, stages=tuple(StagePlacement(node_id=NodeId(name), slices=()) for name in RING))
READY = EngineState(
    model="m",
    pipeline_id=PipelineId("p"),
    epoch=Epoch(1, EngineId("e")),
    state="ready",
    stages=tuple(StageState(node_id=NodeId(name)) for name in RING),
)


@dataclass
class Machine:
    """Node a with an engine that crashes when the test says so, in virtual time."""

    nodes: list[str] = field(default_factory=lambda: ["a"])
    moves: list[str] = field(default_factory=list[str])
    denied: bool = False
    not_started: int = 0  # processes that the system will not start
    children: list[tuple[float, SlowChild]] = field(default_factory=list[tuple[float, SlowChild]])
    host: EngineHost = field(init=False)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    def run(self, story: Callable[[Machine], Awaitable[None]]) -> None:
        """Tell it, then stop the engine."""

        async def life() -> None:
            async with asyncio.TaskGroup() as tasks:
                self.host = engine_host(
                    tasks,
                    self._start,
                    nodes=lambda: [NodeState(node_id=NodeId(name)) for name in self.nodes],
                    move_engine=self._move,
                    clock=LoopClock(),
                )
                await self.host.start(replace(REQUEST, spec=SPEC), model_config="", resuming=True)
                await story(self)
                await self.host.stop("p")

        in_virtual_time(life())

    async def _start(self, *_: object) -> SlowChild:
        if self.not_started:
            self.not_started -= 1
            raise StageLost("the engine process cannot be started")
        self.children.append((asyncio.get_running_loop().time(), SlowChild()))
        self.started.set()
        return self.children[-1][1]

    def _move(self, _: str, node_id: str) -> None:
        if self.denied:
            raise AccessDenied("no owner is here")
        self.moves.append(node_id)

    @property
    def state(self) -> EngineState:
        (state,) = self.host.states()
        return state

    def serves(self) -> None:
        """Let the newest process report that it serves."""
        cast("Any", self.children[-1][1]).on_report(READY)

    async def crash(self) -> float:
        """End the newest process and wait for the next one; the pause."""
        now_s = asyncio.get_running_loop().time()
        self.started.clear()
        self.children[-1][1].exited.set()
        await self.started.wait()
        await asyncio.sleep(0)
        return round(self.children[-1][0] - now_s)


def test_an_engine_that_crashes_for_an_hour_starts_again_ever_more_rarely() -> None:
    async def story(machine: Machine) -> None:
        machine.serves()
        pauses = [await machine.crash() for _ in range(13)]
        assert pauses == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
        assert machine.state.state == "recovering"
        machine.serves()
        await asyncio.sleep(1000.0)
        assert await machine.crash() == 0, "it has served well for a while"

    Machine().run(story)


def test_requests_wait_for_a_short_pause_and_learn_the_time_of_a_long_one() -> None:
    async def story(machine: Machine) -> None:
        machine.serves()
        for _ in range(3):
            await machine.crash()
        machine.children[-1][1].exited.set()
        await asyncio.sleep(1.0)
        assert (machine.state.state, machine.state.error) == ("recovering", None)
        assert machine.state.starts_at_us
        await asyncio.sleep(4.0)
        assert not machine.state.starts_at_us
        before_s = LoopClock().wall_s()
        machine.children[-1][1].exited.set()
        await asyncio.sleep(1.0)
        assert machine.state.state == "waiting"
        assert machine.state.starts_at_us / 1e6 - before_s == 8.0
        error = machine.state.error
        assert error is not None
        assert "again and again" in error.what
        assert "it ended" in error.fact
        assert "edgepipe serve m" in error.next_step
        await asyncio.sleep(8.0)
        assert (machine.state.state, machine.state.error, machine.state.starts_at_us) == ("recovering", None, 0)

    Machine().run(story)


def test_a_person_ends_the_pause_or_the_model() -> None:
    async def story(machine: Machine) -> None:
        machine.serves()
        for _ in range(9):
            await machine.crash()
        known = len(machine.children)
        machine.children[-1][1].exited.set()
        await asyncio.sleep(1.0)
        assert machine.host.is_paused("p")
        machine.host.start_now("p")
        await asyncio.sleep(0.1)
        assert len(machine.children) == known + 1
        assert not machine.host.is_paused("p")
        machine.children[-1][1].exited.set()
        await asyncio.sleep(1.0)
        assert machine.host.is_paused("p")
        await machine.host.stop("p")
        await asyncio.sleep(1000.0)
        assert machine.host.states() == []
        assert len(machine.children) == known + 1

    Machine().run(story)


def test_an_engine_that_the_system_does_not_start_is_tried_again() -> None:
    """Memory or descriptors are short for a while. It had been given up for ever."""

    async def story(machine: Machine) -> None:
        machine.serves()
        machine.not_started = 5
        assert await machine.crash() == 0 + 1 + 2 + 4 + 8 + 16
        machine.serves()
        assert machine.state.state == "ready"

    Machine().run(story)


def test_an_engine_that_keeps_crashing_here_goes_to_the_next_node_of_its_ring() -> None:
    async def story(machine: Machine) -> None:
        machine.nodes = ["a", "b", "c"]
        machine.serves()
        assert [await machine.crash() for _ in range(3)] == [0, 1, 2]
        machine.serves()
        machine.children[-1][1].exited.set()
        await asyncio.sleep(0.1)
        assert machine.moves == ["b"], "c has no stage: it learns no prompts"
        assert machine.host.states() == []
        await machine.host.start(replace(REQUEST, spec=SPEC), model_config="", resuming=True)
        await asyncio.sleep(0.1)
        assert machine.state.starts_at_us, "it came back, as it crashed there, too: the pauses go on"
        await asyncio.sleep(4.0)
        assert machine.state.state == "recovering"
        machine.denied = True
        assert await machine.crash() == 8, "nobody believes that: it stays"

    Machine().run(story)
