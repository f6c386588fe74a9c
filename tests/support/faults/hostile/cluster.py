"""Two nodes on loopback whose gateway two users share, each with a key of their own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from edgepipe_emulated import emulated_model_config  # pyright: ignore[reportMissingTypeStubs] - typed, but no room

from edgepipe.wire.engines import ServeSpec
from tests.support.faults.chaos.cluster import ChaosCluster, chaos_cluster
from tests.support.faults.hostile.bystander import Bystander
from tests.support.faults.hostile.cases import CONTEXT, MODEL
from tests.support.processes.nodes import children_of, until_answers

HOSTILE_KEY, BYSTANDER_KEY = "key-of-one-who-means-harm", "key-of-a-bystander"


@dataclass(slots=True, kw_only=True)
class SharedCluster:
    """A cluster, and the user who must not notice what another does."""

    nodes: ChaosCluster
    bystander: Bystander

    async def epoch(self) -> int:
        """Counter of the engine's epoch; 0 without an engine."""
        engines = (await self.nodes.first.status()).engines
        return max((engine.epoch.counter for engine in engines), default=0)

    async def gateway_pid(self) -> int:
        """The process of the gateway that both users ask."""
        pids = [child.pid for child in (await self.nodes.first.status()).children if child.kind == "gateway"]
        assert pids, "the gateway has ended"
        return pids[0]

    def pids(self) -> list[int]:
        """All processes of all nodes."""
        daemons = [node.process.pid for node in self.nodes.running.values()]
        return [*daemons, *(child.pid for daemon in daemons for child in children_of(daemon))]


@asynccontextmanager
async def shared_cluster(folder: Path, *, link: str = "1gbit,5ms") -> AsyncGenerator[SharedCluster]:
    """Serve the cases' model on two nodes; both kinds of the bystander's answers are known when the block begins."""
    keys = f"{HOSTILE_KEY},{BYSTANDER_KEY}"
    config = emulated_model_config(num_layers=6, context_length=CONTEXT)
    options = ServeSpec(model=MODEL, kv_tokens=2 * CONTEXT)
    async with chaos_cluster(
        folder, names=("a", "b"), plan="a:0-2,b:3-5", config=config, options=options, link=link, api_key=keys
    ) as nodes:
        await until_answers(nodes.http_port)
        bystander = Bystander(port=nodes.http_port, key=BYSTANDER_KEY)
        await bystander.learn()
        yield SharedCluster(nodes=nodes, bystander=bystander)


def memory_bytes(pids: list[int]) -> Iterator[int]:
    """Resident bytes of each process that still lives."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid).memory_info().rss
