"""Following engines until they serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from edgepipe.addresses import host_and_port
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.offers import PublishedState
from edgepipe.daemon.processes.gateway_keeper import GatewayKeeper
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.errors import ConnectTimeout, EdgepipeError, NodeUnreachable
from edgepipe.ids import Epoch, PipelineId
from edgepipe.link.shut_ports import shut_port
from edgepipe.wire.engines import EngineState
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import ServeEvent

_CONNECT_S = 3.0  # time to connect to an engine that is ready
_GATEWAY_S = 2.0  # time for this node's gateway to get a model's tokenizer from a peer


@dataclass(kw_only=True, eq=False)
class EngineFollower:
    """The engines of the cluster as this node sees them, and their progress."""

    peers: Peers
    local: PublishedState
    gateway: GatewayKeeper
    book: ServeBook

    def engines(self) -> list[tuple[NodeState, EngineState]]:
        """Return every engine of the cluster with its node, with what the records say of its model's pipelines."""
        return [(node, self.book.numbered(engine)) for node in self.peers.nodes() for engine in node.engines]

    def running(self, model: str) -> list[tuple[NodeState, EngineState]]:
        """Return the model's engines that run or start, one for each pipeline, in the order of their numbers."""
        states = ("starting", "loading", "ready", "recovering", "waiting")
        found: dict[str, tuple[NodeState, EngineState]] = {}
        for node, engine in self.engines():
            if engine.model == model and engine.state in states:
                found.setdefault(engine.pipeline_id, (node, engine))
        return sorted(found.values(), key=lambda each: each[1].replica)

    def engine_of(self, node_id: str, pipeline_id: str) -> EngineState | None:
        """Return a node's engine of a pipeline; None without one. Raises NodeUnreachable."""
        engines = (engine for engine in self.peers.node(node_id).engines if engine.pipeline_id == pipeline_id)
        return next((self.book.numbered(engine) for engine in engines), None)

    async def follow(
        self, pipelines: Sequence[tuple[str, PipelineId]], *, after: Epoch | None = None
    ) -> AsyncIterator[ServeEvent]:
        """Yield events until the engines are ready, in an epoch later than ``after`` if that is given.

        Raises an engine's error, or NodeUnreachable when its node goes.
        """
        sent: tuple[str, float] | None = None
        seen: set[str] = set()
        async for _ in self.local.watch():
            engines: list[EngineState] = []
            for node_id, pipeline_id in pipelines:
                engine = self.engine_of(node_id, pipeline_id)
                if engine is not None:
                    engines.append(engine)
                    seen.add(pipeline_id)
                elif pipeline_id in seen:
                    raise NodeUnreachable("the engine was stopped", next_step="serve the model again")
            if failed := next((engine for engine in engines if engine.state == "failed"), None):
                raise failed.error or EdgepipeError(f"the engine of {failed.title} failed")
            ready = [
                engine for engine in engines if engine.state == "ready" and (after is None or engine.epoch > after)
            ]
            if len(ready) == len(pipelines):
                with contextlib.suppress(TimeoutError):  # the engines are ready even if this node's gateway is not
                    async with asyncio.timeout(_GATEWAY_S):
                        for _, pipeline_id in pipelines:
                            await self.gateway.knows(pipeline_id)
                yield ServeEvent(message=f"{ready[-1].title} is ready", progress=1.0, engines=tuple(ready))
                return
            loading = [engine for engine in engines if engine not in ready]
            if not loading:
                continue  # their nodes have not reported them yet
            least = min(loading, key=lambda engine: engine.progress)
            message = least.message or least.state
            news = (f"replica {least.replica}: {message}" if least.replica else message, least.progress)
            if sent != news:
                sent = news
                yield ServeEvent(message=news[0], progress=news[1])

    async def no_way_to_any(self, pipelines: Sequence[tuple[str, PipelineId]]) -> ConnectTimeout | None:
        """Return why this node's gateway cannot send requests to one of the ready engines; None if it can."""
        for node_id, pipeline_id in pipelines:
            engine = self.engine_of(node_id, pipeline_id)
            if engine is not None and (error := await self._no_way_to(engine, node_id)):
                return error
        return None

    async def _no_way_to(self, engine: EngineState, node_id: str) -> ConnectTimeout | None:
        """Return why this node's gateway cannot send requests to a ready engine; None if it can."""
        host, port = host_and_port(engine.address)
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(host, int(port))
        except TimeoutError:
            own, node = self.peers.node(self.peers.own_id), self.peers.node(node_id)
            return shut_port(own.name, node.name, address=engine.address, node_address=node.address)
        except (OSError, ValueError):  # refused, or a malformed address: a node may report anything
            return None  # the gateway that sends it requests gets the error
        writer.close()
        return None
