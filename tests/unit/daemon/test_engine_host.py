"""Engines that are not wanted any more while they start, and models that are looked at until somebody has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgepipe.daemon import engine_keeper
from edgepipe.daemon.engine_keeper import EngineKeeper
from edgepipe.daemon.engines import EngineHost
from edgepipe.daemon.system import SystemClock
from edgepipe.wire.v1 import node_pb2 as pb

REQUEST = pb.StartEngineRequest(pipeline_id="p", spec=pb.ServeSpec(model="m"))


class SlowChild:
    """A process that takes a moment to be there."""

    def __init__(self) -> None:
        self.stopping = self.killed = False
        self.sent: list[pb.ChildCommand] = []
        self.exited = asyncio.Event()

    def kill(self) -> None:
        self.killed = True
        self.exited.set()

    def send(self, command: pb.ChildCommand) -> None:
        self.sent.append(command)


@pytest.mark.parametrize("end", ["give_way", "stop"])
async def test_an_engine_that_ends_before_its_process_is_there_leaves_none(end: str) -> None:
    child, spawned = SlowChild(), asyncio.Event()

    async def start(*_: object) -> SlowChild:
        await spawned.wait()
        return child

    async def vouch_all(*_: object) -> dict[str, pb.VouchReply]:
        return {}

    async with asyncio.TaskGroup() as tasks:
        host = EngineHost(
            children=cast("Any", SimpleNamespace(start=start)),
            new_settings=cast("Any", lambda: None),
            peers=cast("Any", SimpleNamespace(vouch_all=vouch_all, own_id="a")),
            replanner=cast("Any", None),
            changes=cast("Any", None),
            spread=cast("Any", None),
            tasks=tasks,
            own_highest=lambda _: 0,
            ends=lambda: False,
            counts=lambda _: True,
            on_change=lambda _: None,
        )
        starting = tasks.create_task(host.start(REQUEST, model_config="", resuming=True))
        await asyncio.sleep(0)
        assert [state.pipeline_id for state in host.states()] == ["p"]
        if end == "give_way":
            host.give_way("p")
        else:
            await host.stop("p")
        spawned.set()
        await starting
    assert host.states() == []
    assert child.killed
    assert child.stopping
    assert not child.sent


async def test_a_model_is_looked_at_until_somebody_has_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that was started here gave way to another, whose node was lost meanwhile; nothing else changes."""
    monkeypatch.setattr(engine_keeper, "_LOOK_AGAIN_S", 0.001)
    node = pb.NodeState(node_id="a")
    starts: list[str] = []
    done = asyncio.Event()

    async def start(request: pb.StartEngineRequest, **_: object) -> None:
        starts.append(request.pipeline_id)
        if len(starts) == 2:
            node.engines.add(pipeline_id="p", state="recovering")
            done.set()

    async def adopt(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(config_json="", manifest_hash="h")

    async def changes() -> AsyncGenerator[None]:
        yield
        await asyncio.Event().wait()

    def changing() -> AsyncIterator[None]:
        return changes()

    record = pb.ServeBody(pipeline_id="p", spec=REQUEST.spec, engine_node="a")
    book = SimpleNamespace(served=lambda: [record], renew=lambda _: None, take_over=lambda _: None)
    peers = SimpleNamespace(
        own_id="a", own_drains=False, hello=None, nodes=lambda: [node], is_self=lambda node_id: node_id == "a"
    )
    engines = SimpleNamespace(ready=list, states=list, start=start)
    async with asyncio.TaskGroup() as tasks:
        keeper = EngineKeeper(
            book=cast("Any", book),
            engines=cast("Any", engines),
            models=cast("Any", SimpleNamespace(adopt=adopt, present_hash=None)),
            peers=cast("Any", peers),
            clock=SystemClock(),
            timeouts=cast("Any", SimpleNamespace(gather_s=0.0, dead_max_s=6.0)),
            changes=changing,
            ends=lambda: False,
            tasks=tasks,
        )
        keeping = tasks.create_task(keeper.run())
        async with asyncio.timeout(10):
            await done.wait()
            await asyncio.sleep(0.02)
        assert starts == ["p", "p"]
        keeping.cancel()
