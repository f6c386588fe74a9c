"""Clients of real nodes: streams whose every token is held against the emulated model's oracle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from edgepipe_emulated import emulated_model_config
from edgepipe_emulated.oracle import Oracle

from edgepipe.cli.sse import event_lines
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.wire.nodes import ClusterStatus
from tests.support.processes.nodes import Node, Nodes, children_of, idle

CONFIG = emulated_model_config(num_layers=6, tied_embeddings=False)
PROMPT = (104, 101, 108, 108, 111)
SLOW = "time_factor=20"  # some 10 ms a step: a stream takes seconds


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """What the emulated model answers."""
    oracle = Oracle(CONFIG)
    oracle.append(prompt)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(oracle.next_token())
        oracle.append(tokens[-1:])
    return tokens


@dataclass(slots=True)
class Stream:
    """One streaming request."""

    prompt: Sequence[int]
    max_tokens: int
    model: str = "tiny"
    ids: list[int] = field(default_factory=list[int])
    finish: str = ""
    error: dict[str, Any] | None = None
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def run(self, http_port: int) -> None:
        """Ask and read to the end."""
        body = {
            "model": self.model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        url = f"http://127.0.0.1:{http_port}/v1/completions"
        async with (
            httpx.AsyncClient(timeout=60, verify=False) as client,
            client.stream("POST", url, json=body) as response,
        ):
            assert response.status_code == 200, await response.aread()
            async for line in event_lines(response):
                if line.startswith("data: {"):
                    await self._take(json.loads(line[6:]))

    async def has(self, count: int) -> None:
        """Until so many tokens have come."""
        async with asyncio.timeout(40), self.changed:
            await self.changed.wait_for(lambda: len(self.ids) >= count or self.finish or self.error)

    async def goes_on(self) -> None:
        """Until some more tokens have come; all so far are right. For a stream that is longer than the test."""
        await self.has(len(self.ids) + 20)
        assert self.error is None, self.error
        assert not self.finish
        assert self.ids == expected(self.prompt, len(self.ids))

    def assert_right(self) -> None:
        """Every token right, none lost or doubled, one ending."""
        assert self.error is None, self.error
        assert self.ids == expected(self.prompt, self.max_tokens)
        assert self.finish == "length"

    async def _take(self, chunk: dict[str, Any]) -> None:
        async with self.changed:
            if "error" in chunk:
                self.error = chunk["error"]
            for choice in chunk.get("choices", []):
                assert not self.finish, "something follows the ending"
                self.ids += choice.get("token_ids") or []
                self.finish = choice.get("finish_reason") or ""
            self.changed.notify_all()


async def slow_cluster(nodes: Nodes, *names: str, **flags: Any) -> list[Node]:
    """Slow nodes with ``tiny`` on the first one's disk, ready to compute and known to each other."""
    write_model_folder(nodes.folder / "tiny", CONFIG)
    ModelStore(nodes.folder / names[0] / "models").pull(str(nodes.folder / "tiny"))
    flags = {"backend_options": SLOW, **flags}
    started = await asyncio.gather(*(nodes.start(name, **flags) for name in names))
    await asyncio.gather(*(node.until(lambda status: idle(status, len(names))) for node in started))
    return list(started)


def cut_power(node: Node) -> None:
    """End the node and all its children at once."""
    family = children_of(node.process.pid)
    node.kill()
    for child in family:
        child.kill()


def children(status: ClusterStatus, kind: str) -> list[psutil.Process]:
    """The node's child processes of a kind."""
    return [psutil.Process(child.pid) for child in status.children if child.kind == kind]


def serving_stage(status: ClusterStatus) -> psutil.Process:
    """The node's stage process that listens where the engine says that its stage is."""
    ports = {stage.address.rpartition(":")[2] for engine in status.engines for stage in engine.stages}
    for process in children(status, "stage"):
        if any(
            str(connection.laddr.port) in ports
            for connection in process.net_connections("tcp")
            if connection.status == "LISTEN"
        ):
            return process
    raise AssertionError("no stage process serves")


async def answers(node: Node) -> None:
    """Until the node's gateway knows of the model."""
    await node.until(lambda status: [engine.state for engine in status.engines] == ["ready"])
    async with asyncio.timeout(20), httpx.AsyncClient(verify=False) as client:
        url = f"http://127.0.0.1:{node.http_port}/v1/models"
        while not (await client.get(url)).json()["data"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
