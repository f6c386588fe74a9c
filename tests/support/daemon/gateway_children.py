"""A GatewayKeeper with children that are objects of the test, not processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from edgepipe.daemon.processes.gateway_keeper import GatewayKeeper
from edgepipe.daemon.processes.kept_models import KeptModelsFile
from edgepipe.errors import EdgepipeError
from edgepipe.wire.children import ChildStarted, Command, Report
from edgepipe.wire.nodes import ClusterView
from edgepipe.wire.serving import ServeEvent
from tests.support.daemon.published_state import FakeState

T = TypeVar("T")


class GatewayChild:
    """What the keeper knows of one gateway process."""

    def __init__(self) -> None:
        self.stopping = False
        self.exited = asyncio.Event()
        self.sent: list[Command] = []
        self.on_report: Callable[[Report], None] = lambda _: None

    def send(self, command: Command) -> None:
        self.sent.append(command)

    def error(self) -> str:
        return "it was killed"

    def newest(self, kind: type[T]) -> T:
        """The last command of a kind."""
        return [command for command in self.sent if isinstance(command, kind)][-1]


class GatewayChildren:
    """Starts them."""

    def __init__(self) -> None:
        self.all: list[GatewayChild] = []

    async def start(self, settings: Any, tasks: asyncio.TaskGroup) -> GatewayChild:
        self.all.append(GatewayChild())
        return self.all[-1]

    async def wait_started(self, child: GatewayChild) -> ChildStarted:
        return ChildStarted(port=8117)


@dataclass(slots=True)
class Loads:
    """The loads that the keeper has begun; each lasts until the test ends it."""

    begun: list[str] = field(default_factory=list[str])
    ends: dict[str, asyncio.Future[None]] = field(default_factory=dict[str, "asyncio.Future[None]"])
    over: bool = False  # the test has ended: those that begin now end at once

    async def load(self, model: str) -> AsyncGenerator[ServeEvent]:
        self.begun.append(model)
        self.ends[model] = asyncio.get_running_loop().create_future()
        if not self.over:
            await self.ends[model]
        return
        yield  # pyright: ignore[reportUnreachable]

    async def end(self, model: str, error: EdgepipeError | None = None) -> None:
        if error is None:
            self.ends[model].set_result(None)
        else:
            self.ends[model].set_exception(error)
        await settled()


async def settled() -> None:
    """Return once all tasks have gone as far as they can without this one."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def gateway_keeper(folder: Path) -> AsyncIterator[tuple[GatewayKeeper, GatewayChildren, Loads]]:
    """A keeper whose gateway has started."""
    children, loads = GatewayChildren(), Loads()

    async def unload(model: str) -> None:
        return None

    async with asyncio.TaskGroup() as tasks:
        kept = KeptModelsFile(folder / "keep_alive.json")
        writing = tasks.create_task(kept.run())
        keeper = GatewayKeeper(
            children=cast("Any", children),
            setup=cast("Any", SimpleNamespace(child_settings=lambda *_, **__: None)),
            http_port=0,
            views=cast("Any", SimpleNamespace(for_gateway=ClusterView)),
            requested=cast("Any", SimpleNamespace(load=loads.load, unload=unload)),
            kept=kept,
            batches=cast("Any", SimpleNamespace(take=lambda _: None, forget=lambda: None)),
            local=FakeState(),
            tasks=tasks,
        )
        await keeper.start()
        yield keeper, children, loads
        writing.cancel()
        loads.over = True
        for future in loads.ends.values():
            if not future.done():
                future.set_result(None)
