"""Whether a node may be drained: decided at once, or after devices that are just starting have room or have not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgepipe.backend.types import DeviceProfile
from edgepipe.cluster.changes import Changes
from edgepipe.daemon.serving.capacity import device_is_coming, rooms_of
from edgepipe.daemon.serving.drain import DEVICE_S, Drain
from edgepipe.daemon.serving.replanning import Replanner
from edgepipe.errors import BackendUnavailable, NoFeasiblePlacement, StageLost
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.wire.engines import EngineState, ServeSpec
from edgepipe.wire.nodes import DeviceState, NodeState
from edgepipe.wire.serving import PlanMade, PlanWanted, ServeBody
from tests.support.daemon.published_state import FakeState
from tests.support.engine.virtual_ring import in_virtual_time

SPEC = ServeSpec(model="m")
NEEDED = 10**9  # bytes
PROFILE = DeviceProfile(
    backend="emulated",
    device="cpu",
    name="",
    compute_dtype="float32",
    memory_total_bytes=0,
    memory_free_bytes=0,
    bandwidth_bytes_per_s=0,
    flops=0,
)
STARTING = DeviceState(profile=PROFILE, state="starting")
IDLE = DeviceState(profile=PROFILE, state="idle", free_bytes=NEEDED)
SMALL = DeviceState(profile=PROFILE, state="idle", free_bytes=NEEDED - 1)
CRASHED = DeviceState(profile=PROFILE, state="failed", error=StageLost("the stage process ended"))
UNUSABLE = DeviceState(profile=PROFILE, state="failed", error=BackendUnavailable("CUDA is not there"))


class World:
    """Node a, which hosts the pipeline p and is drained, beside the nodes of ``devices``."""

    def __init__(self, **devices: DeviceState) -> None:
        self.devices = devices
        self.draining: set[str] = set()
        self.hosted = ["p"]
        self.plans = 0
        self.engines: dict[str, EngineState] = {}  # keys are nodes
        self.changes = Changes()
        replanner = Replanner(peers=cast("Any", self), models=cast("Any", None), surveyor=cast("Any", None))
        self.drain = Drain(
            device=cast("Any", SimpleNamespace(pipelines=lambda: self.hosted)),
            engines=cast("Any", SimpleNamespace(states=list)),
            peers=cast("Any", self),
            replanner=cast("Any", SimpleNamespace(plan=self._plan, room_changes=replanner.room_changes)),
            book=cast("Any", SimpleNamespace(served=lambda: [ServeBody(pipeline_id=PipelineId("p"), spec=SPEC)])),
            directory=cast("Any", SimpleNamespace(has_engine=lambda _pipeline_id: True)),
            local=FakeState(on_change=lambda _: self.changes.notify(), changes=self.changes.watch),
        )

    def nodes(self) -> list[NodeState]:
        own = NodeState(node_id=NodeId("a"), name="a", draining=True, devices=(IDLE,))
        others = [
            NodeState(
                node_id=NodeId(name),
                name=name,
                devices=(device,),
                draining=name in self.draining,
                engines=(self.engines[name],) if name in self.engines else (),
            )
            for name, device in self.devices.items()
        ]
        return [own, *others]

    def is_self(self, node_id: str) -> bool:
        return node_id == "a"

    def becomes(self, name: str, device: DeviceState) -> None:
        self.devices[name] = device
        self.changes.notify()

    def moves(self) -> None:
        """Let the stages move away."""
        self.hosted = []
        self.changes.notify()

    async def _plan(self, pipeline_id: str, wanted: PlanWanted) -> PlanMade:
        self.plans += 1
        rooms = [room for node in self.nodes() for room in rooms_of(node, SPEC.settings, own=frozenset((pipeline_id,)))]
        if not any(room.free_bytes >= NEEDED for room in rooms):
            raise NoFeasiblePlacement("no node can compute", fact="nodes with a backend: none")
        return PlanMade(spec=wanted.spec)


async def drained(world: World) -> float:
    """Drain the node to the end; return the seconds until it is decided that it can be. Raises what the drain does."""
    began_s = asyncio.get_running_loop().time()
    decided_s = -1.0
    async for event in world.drain.run():
        if decided_s < 0:
            decided_s = asyncio.get_running_loop().time() - began_s
            assert event.stages == ("p",)
            world.moves()
    return decided_s


def after(seconds: float, act: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, act)


def in_time(make: Callable[[], Coroutine[Any, Any, float]]) -> float:
    return in_virtual_time(make())


@pytest.mark.parametrize("now", [STARTING, CRASHED])
def test_a_drain_waits_for_a_device_that_is_starting_and_no_longer(now: DeviceState) -> None:
    world = World(b=now)

    async def run() -> float:
        for seconds in (1.0, 2.0, 3.0):
            after(seconds, world.changes.notify)  # other news: nothing new about the rooms
        after(4.0, lambda: world.becomes("b", IDLE))
        return await drained(world)

    assert in_time(run) == pytest.approx(4.0)
    assert world.plans == 3, "plans were made at once, at the first look, and when the device had started"
    assert world.drain.active


def test_a_device_with_room_is_enough_whatever_else_is_starting() -> None:
    assert in_time(lambda: drained(World(b=STARTING, c=IDLE))) == pytest.approx(0.0)


@pytest.mark.parametrize("now", [STARTING, CRASHED])
def test_a_device_that_never_starts_is_waited_for_a_bounded_time(now: DeviceState) -> None:
    world = World(b=now, c=SMALL)

    async def run() -> float:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(NoFeasiblePlacement, match="no node can compute") as refused:
            await drained(world)
        assert f"waited {DEVICE_S:.0f} s for the devices of b" in refused.value.fact
        return asyncio.get_running_loop().time() - began_s

    assert in_time(run) == pytest.approx(DEVICE_S)
    assert not world.drain.active, "it takes work again"


def test_a_device_that_has_started_without_enough_room_ends_the_wait() -> None:
    world = World(b=STARTING)

    async def run() -> float:
        after(4.0, lambda: world.becomes("b", SMALL))
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(NoFeasiblePlacement) as refused:
            await drained(world)
        assert "waited" not in refused.value.fact
        return asyncio.get_running_loop().time() - began_s

    assert in_time(run) == pytest.approx(4.0)


@pytest.mark.parametrize("now", [SMALL, UNUSABLE])
def test_a_drain_is_refused_at_once_where_waiting_cannot_help(now: DeviceState) -> None:
    async def run() -> float:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(NoFeasiblePlacement):
            await drained(World(b=now))
        return asyncio.get_running_loop().time() - began_s

    assert in_time(run) == pytest.approx(0.0)


def test_a_drain_is_refused_once_the_last_other_node_leaves_during_the_wait() -> None:
    world = World(b=STARTING)

    def leave() -> None:
        world.draining.add("b")
        world.changes.notify()

    async def run() -> float:
        after(2.0, leave)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(NoFeasiblePlacement, match="no other node"):
            await drained(world)
        return asyncio.get_running_loop().time() - began_s

    assert in_time(run) == pytest.approx(2.0)


def test_a_machine_that_sleeps_soon_does_not_wait_longer_than_it_may() -> None:
    world = World(b=STARTING)

    async def run() -> float:
        began_s = asyncio.get_running_loop().time()
        await world.drain.run_within(4.0)
        return asyncio.get_running_loop().time() - began_s

    assert in_time(run) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("device", "draining", "coming"),
    [
        (STARTING, False, True),
        (STARTING, True, False),
        (CRASHED, False, True),
        (UNUSABLE, False, False),
        (IDLE, False, False),
        (DeviceState(profile=PROFILE, state="loading"), False, False),
        (None, False, False),
    ],
)
def test_which_devices_may_have_room_within_seconds(device: DeviceState | None, draining: bool, coming: bool) -> None:
    node = NodeState(node_id=NodeId("b"), devices=(device,) if device else (), draining=draining)
    assert device_is_coming(node) == coming


async def test_before_a_stop_the_lack_of_room_is_told() -> None:
    world = World(b=SMALL)
    assert await world.drain.outlook() == (
        "no other machine can hold its work, so it ends here: no node can compute (nodes with a backend: none)"
    )
    assert world.drain.active, "it takes no more work"
    assert await World(b=IDLE).drain.outlook() == ""
    assert (await World(b=STARTING).drain.outlook()).startswith("waits for the devices of b, at most 15 s")


@pytest.mark.parametrize(
    ("model", "state", "hosted", "draining", "drains"),
    [
        ("m", "ready", False, False, True),
        ("other", "ready", False, False, False),
        ("m", "recovering", False, False, False),
        ("m", "ready", True, False, False),
        ("m", "ready", False, True, False),
    ],
)
def test_a_node_with_one_replica_may_go_while_another_one_answers_elsewhere(
    model: str, state: str, hosted: bool, draining: bool, drains: bool
) -> None:
    world = World(b=SMALL, c=SMALL)
    world.engines["b"] = EngineState(
        model=model, pipeline_id=PipelineId("q"), epoch=Epoch(1, EngineId("e")), state=state
    )
    world.draining |= {"b"} if draining else set()
    world.hosted += ["q"] if hosted else []

    async def run() -> float:
        if not drains:
            with pytest.raises(NoFeasiblePlacement):
                await anext(world.drain.run())
            return 0.0
        event = await anext(world.drain.run())
        assert event.stages == (), "its requests go on at the other replica"
        world.drain.undo()
        assert world.drain.is_needed, "it takes work again"
        return 0.0

    in_time(run)
