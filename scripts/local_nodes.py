"""Real nodes for benchmarks: what ``edgepipe node start`` starts, on 127.0.0.1, and streams of token ids."""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from anyio.from_thread import start_blocking_portal
from rest import await_rest

from edgepipe.cli.admin import connect
from edgepipe.cli.local_cluster import LocalCluster, NodeToStart, local_cluster
from edgepipe.cli.options import DEGRADED_EXIT
from edgepipe.daemon.device.spare import SETTLED_S
from edgepipe.ids import RequestId
from edgepipe.link.admin_client import Admin
from edgepipe.link.channels import make_channel
from edgepipe.sampling import SamplingParams
from edgepipe.wire.codec import from_wire
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.engines import EngineTrace, StepTrace
from edgepipe.wire.requests import Submission, command_to_wire
from edgepipe.wire.v1.engine_pb2 import GatewayMessage, TraceEngine
from edgepipe.wire.v1.engine_pb2_grpc import EngineStub

START_S = 90.0
ANSWER_S = 300.0
_STARTS_S = 0.5  # until a process that is started shows processor time
_LAST_TIMINGS_S = 0.3  # stages tell of a step within a tenth of a second
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that runs."""

    name: str
    data_dir: Path
    pid: int
    http_port: int

    def edgepipe(self, *arguments: str) -> str:
        """Run a command against this node and give its output."""
        command = [sys.executable, "-P", "-m", "edgepipe.cli", *arguments, "--data-dir", str(self.data_dir)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        if done.returncode not in (0, DEGRADED_EXIT):
            raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr}")
        return done.stdout

    def status(self) -> dict[str, Any]:
        """What ``edgepipe status --json`` says."""
        return json.loads(self.edgepipe("status", "--json"))

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """The daemon and its children by kind."""
        children = [(child["kind"], psutil.Process(child["pid"])) for child in self.status()["children"]]
        return [("daemon", psutil.Process(self.pid)), *children]


@contextmanager
def running_nodes(
    count: int, *, models_dir: Path, threads: int, backends: Sequence[str] = ("torch",), link: str = ""
) -> Iterator[list[Node]]:
    """``count`` nodes that have found each other; stopped at the end. ``link``: emulated between them."""
    plan = LocalCluster(
        cluster=f"bench-{secrets.token_hex(4)}",
        nodes=[NodeToStart(name=f"n{index}", backend=backends[index % len(backends)]) for index in range(count)],
        models_dir=models_dir,
        threads=threads,
        link=link,
    )
    with start_blocking_portal() as portal, ExitStack() as stack:
        started = stack.enter_context(portal.wrap_async_context_manager(local_cluster(plan)))
        nodes = [
            Node(name=one.plan.name, data_dir=one.data_dir, pid=one.process.pid, http_port=one.http_port)
            for one in started
        ]
        await_idle(nodes[0], count)
        yield nodes


def await_idle(node: Node, count: int) -> None:
    """Until so many nodes are known to this one, each with a device that can be measured."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        members = node.status()["members"]
        idle = [m for m in members if any(d.get("state") == "idle" for d in m["node"].get("devices", []))]
        if len(idle) >= count:
            return
        time.sleep(0.2)
    raise RuntimeError("the nodes did not find each other")


def settle() -> None:
    """Wait until the processes that this one has started rest.

    Some seconds after a model is served, each node starts another stage process to have it at hand. That start takes
    one to five seconds of processor time, which a measurement would count.
    """
    time.sleep(SETTLED_S + _STARTS_S)
    await_rest(within_s=START_S)


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


def complete(node: Node, prompts: Sequence[list[int]], **settings: Any) -> list[Answer]:
    """Send all prompts at once to the engine, as a gateway does, and note when each token comes; see ``complete_at``.

    The door is left out on purpose: HTTP and JSON for every token would take the cores that the stages are measured on.
    """
    return asyncio.run(_complete(node.data_dir, prompts, settings))


async def _complete(data_dir: Path, prompts: Sequence[list[int]], settings: dict[str, Any]) -> list[Answer]:
    async with connect(data_dir) as admin:
        return await complete_at(admin, prompts, **settings)


async def complete_at(
    admin: Admin,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
    ignore_eos: bool = True,
    at_once: int = 0,
) -> list[Answer]:
    """Call ``complete`` for the one model that a node serves; every prompt has a seed of its own.

    ``at_once``: so many of them at a time, the next as soon as one has its answer; 0: all.
    """
    async with _engine_of(admin) as (engine, node_id), asyncio.timeout(ANSWER_S):
        return await _stream(
            engine,
            node_id,
            prompts,
            max_tokens=max_tokens,
            sampling=sampling,
            ignore_eos=ignore_eos,
            at_once=at_once or len(prompts),
        )


@asynccontextmanager
async def _engine_of(admin: Admin) -> AsyncGenerator[tuple[Any, str]]:
    """The engine of the one model that a node serves, and the id of the gateway that asks it."""
    async with admin.act_as_gateway() as security:
        status = await admin.status()
        (engine,) = status.engines
        async with make_channel(engine.address, security.to_process(engine.certificate)) as channel:
            yield EngineStub(channel), status.node_id


def steps_of(node: Node, *, after: int = 0) -> list[StepTrace]:
    """The steps beyond ``after`` that the engine of the one model served remembers, once all stages told of them."""
    return asyncio.run(_steps_of(node.data_dir, after))


async def _steps_of(data_dir: Path, after: int) -> list[StepTrace]:
    async with connect(data_dir) as admin, _engine_of(admin) as (engine, _):
        await asyncio.sleep(_LAST_TIMINGS_S)
        trace = from_wire(await engine.Trace(TraceEngine(after_step=after), timeout=START_S), EngineTrace)
        num_stages = max((len(step.spans) for step in trace.steps), default=0)
        return [step for step in trace.steps if len(step.spans) == num_stages]


async def _stream(
    engine: Any,
    node_id: str,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int,
    sampling: SamplingParams,
    ignore_eos: bool,
    at_once: int,
) -> list[Answer]:
    times: list[list[float]] = [[] for _ in prompts]
    ids: list[list[int]] = [[] for _ in prompts]
    running = len(prompts)
    call = engine.Generate(wait_for_ready=True)
    await call.write(GatewayMessage(hello=hello_to_wire(Hello(role="gateway", node_id=node_id))))
    started = time.perf_counter()

    async def submit(index: int, prompt: list[int]) -> None:
        request = Submission(
            request_id=RequestId(f"{started}-{index}"),
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            sampling=replace(sampling, seed=sampling.seed + index),
        )
        await call.write(command_to_wire(request))

    waiting = deque(enumerate(prompts))
    for _ in range(min(at_once, len(prompts))):
        await submit(*waiting.popleft())
    while running:
        event: Any = await call.read()
        now = time.perf_counter()
        for tokens in event.tokens:
            index = int(tokens.request_id.rpartition("-")[2])
            ids[index].extend(tokens.ids)
            times[index].extend([now] * len(tokens.ids))
        for ended in event.ended:
            if ended.reason not in ("length", "stop"):
                raise RuntimeError(f"a request ended early: {ended}")
            running -= 1
            if waiting:
                await submit(*waiting.popleft())
    call.cancel()
    return [
        Answer(started_s=started, token_times_s=tuple(when), token_ids=tuple(what))
        for when, what in zip(times, ids, strict=True)
    ]


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second while every request was decoding: from the last first token to the first last one."""
    begin = max(answer.token_times_s[0] for answer in answers)
    end = min(answer.token_times_s[-1] for answer in answers)
    tokens = sum(sum(begin < t <= end for t in answer.token_times_s) for answer in answers)
    return tokens / (end - begin)


def median_gap_s(answers: Sequence[Answer]) -> float:
    """Median time between tokens, the first two gaps of each answer left out."""
    return statistics.median(gap for answer in answers for gap in answer.gaps_s[2:])
