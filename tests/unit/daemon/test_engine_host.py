"""Engines that are not wanted any more while they start, and models that are looked at until somebody has them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgepipe.daemon.serving.engine_keeper import EngineKeeper
from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.daemon.serving.takeover import Vacancies
from edgepipe.errors import ModelUnknown, StaleEpoch
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.system import SystemClock
from edgepipe.wire.engines import EngineState
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import ServeBody, StartEngineRequest
from tests.support.daemon.engine_hosts import REQUEST, SlowChild, engine_host
from tests.support.daemon.published_state import FakeState
from tests.support.processes.waiting import until


@pytest.mark.parametrize("end", ["end_superseded", "stop"])
async def test_an_engine_that_ends_before_its_process_is_there_leaves_none(end: str) -> None:
    child, spawned = SlowChild(), asyncio.Event()

    async def start(*_: object) -> SlowChild:
        await spawned.wait()
        return child

    async with asyncio.TaskGroup() as tasks:
        host = engine_host(tasks, start)
        starting = tasks.create_task(host.start(REQUEST, model_config="", resuming=True))
        await asyncio.sleep(0)
        assert [state.pipeline_id for state in host.states()] == ["p"]
        if end == "end_superseded":
            host.end_superseded("p")
        else:
            await host.stop("p")
        spawned.set()
        await starting
    assert host.states() == []
    assert child.killed
    assert child.stopping
    assert not child.sent


@pytest.mark.parametrize("counts", [True, False])
async def test_an_engine_whose_stages_another_had_comes_back_where_its_record_says(counts: bool) -> None:
    """Its epoch is stale. Where the record names it, the other was none: its next process takes the stages again."""
    children: list[SlowChild] = []
    again, gone = asyncio.Event(), asyncio.Event()
    hosts: list[EngineHost] = []

    def on_change(_: bool) -> None:
        if hosts and not hosts[0].states():
            gone.set()

    async def start(*_: object) -> SlowChild:
        children.append(SlowChild())
        if len(children) == 2:
            again.set()
        return children[-1]

    async with asyncio.TaskGroup() as tasks:
        host = engine_host(tasks, start, counts=counts, on_change=on_change)
        hosts.append(host)
        await host.start(REQUEST, model_config="", resuming=True)
        children[0].fault = StaleEpoch("another engine has the stages")
        children[0].exited.set()
        if counts:
            async with asyncio.timeout(10):
                await again.wait()
            assert [state.state for state in host.states()] == ["recovering"]
        else:
            async with asyncio.timeout(10):
                await gone.wait()
            assert host.states() == []
        assert len(children) == 1 + counts
        await host.stop("p")


def engine_keeper(
    tasks: asyncio.TaskGroup, nodes: list[NodeState], *, start: Callable[..., object], adopt: Callable[..., object]
) -> EngineKeeper:
    """Of node a, which has the engine of the one served model."""

    async def changes() -> AsyncGenerator[None]:
        yield
        await asyncio.Event().wait()

    def changing() -> AsyncIterator[None]:
        return changes()

    record = ServeBody(pipeline_id=PipelineId("p"), spec=REQUEST.spec, engine_node="a", begun=True)
    book = SimpleNamespace(
        bodies=lambda: [record], is_unconfirmed=lambda _: False, renew=lambda: None, take_over=lambda _: None
    )
    peers = SimpleNamespace(
        own_id="a",
        own_drains=False,
        nodes=lambda: nodes,
        is_self=lambda node_id: node_id == "a",
        is_gone=lambda _: False,
    )
    engines = SimpleNamespace(ready=list, states=list, start=start)
    return EngineKeeper(
        book=cast("Any", book),
        engines=cast("Any", engines),
        models=cast("Any", SimpleNamespace(adopt=adopt)),
        peers=cast("Any", peers),
        proofs=cast("Any", None),
        vacancies=Vacancies(),
        clock=SystemClock(),
        timeouts=cast("Any", SimpleNamespace(gather_s=0.0, dead_max_s=6.0)),
        local=FakeState(changes=changing),
        node=cast("Any", SimpleNamespace(ends=lambda: False)),
        tasks=tasks,
        look_again_s=0.001,
    )


async def test_a_model_is_looked_at_until_somebody_has_its_engine() -> None:
    """The engine that was started here gave way to another, whose node was lost meanwhile; nothing else changes."""
    nodes = [NodeState(node_id=NodeId("a"))]
    engine = EngineState(model="m", pipeline_id=PipelineId("p"), epoch=Epoch(1, EngineId("e")), state="recovering")
    starts: list[str] = []
    done = asyncio.Event()

    async def start(request: StartEngineRequest, **_: object) -> None:
        starts.append(request.pipeline_id)
        if len(starts) == 2:
            nodes[0] = replace(nodes[0], engines=(engine,))
            done.set()

    async def adopt(*_: object, **__: object) -> SimpleNamespace:
        model = SimpleNamespace(config_json="", weights_json="", manifest_hash="h")
        model.as_placed = lambda _: model  # pyright: ignore[reportUnknownLambdaType]
        return model

    async with asyncio.TaskGroup() as tasks:
        keeper = engine_keeper(tasks, nodes, start=start, adopt=adopt)
        keeping = tasks.create_task(keeper.run())
        async with asyncio.timeout(10):
            await done.wait()
            await until(lambda: all(task.get_name() != "engine-for:p" for task in asyncio.all_tasks()))
        assert starts == ["p", "p"]
        keeping.cancel()


async def test_an_engine_whose_model_is_on_no_disk_is_tried_ever_less_often() -> None:
    """Each attempt asks every node, and leaves a line in the log."""
    tried = 0

    async def adopt(*_: object, **__: object) -> SimpleNamespace:
        nonlocal tried
        tried += 1
        raise ModelUnknown("no reachable node has the model")

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5), asyncio.TaskGroup() as tasks:
            keeper = engine_keeper(tasks, [NodeState(node_id=NodeId("a"))], start=adopt, adopt=adopt)
            tasks.create_task(keeper.run())
    assert 1 <= tried <= 10
