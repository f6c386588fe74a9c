"""A gateway with its HTTP port, in front of a fake engine."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from edgepipe.clock import Clock
from edgepipe.gateway.engine_link import LinkLimits
from edgepipe.gateway.models import AssetLoader
from edgepipe.gateway.service import Gateway, listen
from edgepipe.security.mutual_tls import Plaintext
from edgepipe.testing.clock import START_S
from edgepipe.wire.nodes import ClusterView
from tests.support.gateways.fake_engine import ByteAssets, FakeEngine, start_engine, view_of


class Counter:
    """Identities that count."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def new(self, prefix: str) -> str:
        return f"{prefix}-{next(self._numbers)}"


class FixedClock:
    """A clock that stands."""

    def monotonic_s(self) -> float:
        return START_S

    def wall_s(self) -> float:
        return 1_700_000_000.0


@dataclass(slots=True)
class Served:
    """What a test talks to."""

    http: httpx.AsyncClient
    engine: FakeEngine
    gateway: Gateway
    address: str  # address of the engine
    server: Any  # server of the engine
    answering: asyncio.Task[None]  # HTTP; cancelled when the node stops

    @property
    def port(self) -> int:
        """Of the gateway."""
        port = self.http.base_url.port
        assert port is not None
        return port

    async def raw(self, data: bytes) -> bytes:
        """What comes back over a bare connection until it is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        return answer

    async def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return await self.http.post("/v1/chat/completions", json={"messages": messages} | fields)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt} | fields)


@asynccontextmanager
async def serving(
    engine: FakeEngine,
    *,
    limits: LinkLimits | None = None,
    names: tuple[str, ...] = ("tiny",),
    load: AssetLoader = lambda path: ByteAssets(),
    clock: Clock | None = None,
    change: Callable[[ClusterView], ClusterView] = lambda view: view,
    **more: Any,
) -> AsyncIterator[Served]:
    """A gateway over ``engine``, asked through real HTTP on a free port. ``change``: of what its daemon tells it."""
    server, address = await start_engine(engine)
    gateway = Gateway(
        node_id="node-1",
        node_name="a",
        security=Plaintext(),
        clock=clock or FixedClock(),
        ids=Counter(),
        new_seed=lambda: 7,
        load=load,
        limits=limits or LinkLimits(resume_window_s=5),
        **more,
    )
    sock = listen(host="127.0.0.1", port=0)
    base = f"http://127.0.0.1:{sock.getsockname()[1]}"
    tasks = [asyncio.create_task(gateway.run()), asyncio.create_task(gateway.serve(sock))]
    gateway.update(change(view_of(*[address] * len(names), names=names)))
    try:
        async with httpx.AsyncClient(base_url=base, timeout=20, trust_env=False, verify=False) as http:
            yield Served(http=http, engine=engine, gateway=gateway, address=address, server=server, answering=tasks[1])
    finally:
        for task in reversed(tasks):  # the gateway must run until it has ceased to answer
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        sock.close()  # a task that is cancelled before it begins has not closed it
        await server.stop(None)


def events_of(text: str) -> list[Any]:
    """The data of server-sent events; ``[DONE]`` stays a string."""
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]
