"""An ``EngineHost`` whose processes are made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

from edgepipe.clock import Clock
from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.errors import EdgepipeError
from edgepipe.ids import PipelineId
from edgepipe.system import SystemClock
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import StartEngineRequest, VouchReply
from tests.support.daemon.published_state import FakeState

REQUEST = StartEngineRequest(pipeline_id=PipelineId("p"), spec=ServeSpec(model="m"))


class SlowChild:
    """A process that takes a moment to be there."""

    def __init__(self) -> None:
        self.stopping = self.killed = False
        self.sent: list[object] = []
        self.port, self.pid, self.certificate = 0, 1, b""
        self.exited = asyncio.Event()
        self.fault: EdgepipeError | None = None

    def error(self) -> EdgepipeError:
        return self.fault or EdgepipeError("it ended")

    def kill(self) -> None:
        self.killed = True
        self.exited.set()

    def send(self, command: object) -> None:
        self.sent.append(command)


def engine_host(
    tasks: asyncio.TaskGroup,
    start: Callable[..., object],
    *,
    counts: bool = True,
    on_change: Callable[[bool], None] = lambda _: None,
    nodes: Callable[[], list[NodeState]] = list,
    move_engine: Callable[[str, str], None] = lambda *_: None,
    clock: Clock | None = None,
) -> EngineHost:
    """Of node a, whose processes ``start`` makes."""

    async def nothing(*_: object) -> None:
        return

    async def stop(child: SlowChild) -> None:
        child.stopping = True
        child.exited.set()

    async def vouch_all(*_: object) -> dict[str, VouchReply]:
        return {}

    async def changes() -> AsyncGenerator[None]:
        await asyncio.Event().wait()
        yield

    return EngineHost(
        children=cast("Any", SimpleNamespace(start=start, stop=stop, wait_started=nothing)),
        setup=cast("Any", SimpleNamespace(child_settings=lambda _kind: None)),
        peers=cast("Any", SimpleNamespace(vouch_all=vouch_all, own_id="a", nodes=nodes, release=nothing)),
        replanner=cast("Any", None),
        local=FakeState(on_change=on_change, changes=changes),
        heartbeats=cast("Any", SimpleNamespace(spread=nothing)),
        tasks=tasks,
        device=cast("Any", SimpleNamespace(epoch_of=lambda _: None)),
        node=cast("Any", SimpleNamespace(ends=lambda: False)),
        book=cast("Any", SimpleNamespace(is_here=lambda _: counts, held=lambda _: None, move_engine=move_engine)),
        clock=clock or SystemClock(),
    )
