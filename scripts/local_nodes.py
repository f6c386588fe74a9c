"""Real nodes for benchmarks: what ``edgepipe node start`` starts, on 127.0.0.1, and streams of token ids."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

START_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that runs."""

    name: str
    data_dir: Path
    process: subprocess.Popen[str]
    http_port: int

    def edgepipe(self, *arguments: str) -> str:
        """Run a command against this node and give its output."""
        command = [sys.executable, "-m", "edgepipe.cli", *arguments, "--data-dir", str(self.data_dir)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr}")
        return done.stdout

    def status(self) -> dict[str, Any]:
        """What ``edgepipe status --json`` says."""
        return json.loads(self.edgepipe("status", "--json"))

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """The daemon and its children by kind."""
        children = [(child["kind"], psutil.Process(child["pid"])) for child in self.status()["children"]]
        return [("daemon", psutil.Process(self.process.pid)), *children]


@contextmanager
def running_nodes(
    count: int, *, models_dir: Path, threads: int, backends: Sequence[str] = ("torch",)
) -> Iterator[list[Node]]:
    """``count`` nodes that have found each other; stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="edgepipe-bench-") as folder:
        cluster = Path(folder).name.lower().replace("_", "-")
        nodes: list[Node] = []
        try:
            for index in range(count):
                backend = backends[index % len(backends)]
                nodes.append(_start(Path(folder), cluster, index, models_dir, threads, backend))
            _await_members(nodes[0], count)
            yield nodes
        finally:
            for node in nodes:
                node.process.terminate()
            for node in nodes:
                node.process.wait(20)


def _start(folder: Path, cluster: str, index: int, models_dir: Path, threads: int, backend: str) -> Node:
    name, data_dir = f"n{index}", folder / str(index)
    command = [sys.executable, "-m", "edgepipe.cli", "node", "start", "--name", name, "--cluster", cluster]
    command += ["--backend", backend, "--port", "0", "--http-port", "0", "--data-dir", str(data_dir), "--json"]
    command += ["--models-dir", str(models_dir), "--threads", str(threads), "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "}\n")
    ready = json.loads("".join(lines) + "}")
    return Node(name=name, data_dir=data_dir, process=process, http_port=ready["http_port"])


def _await_members(node: Node, count: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        members = node.status()["members"]
        idle = [m for m in members if any(d.get("state") == "idle" for d in m["node"].get("devices", []))]
        if len(idle) >= count:
            return
        time.sleep(0.2)
    raise RuntimeError("the nodes did not find each other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """When the tokens of one request came, seconds on one clock."""

    started_s: float
    token_times_s: tuple[float, ...]
    token_ids: tuple[int, ...]

    @property
    def gaps_s(self) -> list[float]:
        """Time between consecutive tokens."""
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


async def _complete(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> Answer:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    times: list[float] = []
    ids: list[int] = []
    started = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            for choice in json.loads(line[6:]).get("choices", []):
                new = choice.get("token_ids") or []
                ids.extend(new)
                times.extend([now] * len(new))
    return Answer(started_s=started, token_times_s=tuple(times), token_ids=tuple(ids))


def complete(node: Node, prompts: Sequence[list[int]], *, max_tokens: int) -> list[Answer]:
    """Stream all prompts at once through the node's gateway."""

    async def work() -> list[Answer]:
        limits = httpx.Limits(max_connections=len(prompts) + 1)
        base = f"http://127.0.0.1:{node.http_port}"
        async with httpx.AsyncClient(base_url=base, timeout=300, limits=limits, trust_env=False) as client:
            return list(await asyncio.gather(*(_complete(client, prompt, max_tokens) for prompt in prompts)))

    return asyncio.run(work())


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second while every request was decoding: from the last first token to the first last one."""
    begin = max(answer.token_times_s[0] for answer in answers)
    end = min(answer.token_times_s[-1] for answer in answers)
    tokens = sum(sum(begin < t <= end for t in answer.token_times_s) for answer in answers)
    return tokens / (end - begin)


def median_gap_s(answers: Sequence[Answer]) -> float:
    """Median time between tokens, the first two gaps of each answer left out."""
    return statistics.median(gap for answer in answers for gap in answer.gaps_s[2:])
