"""Generated requests against a real node: whatever HTTP brings, no epoch ends, no error is ours, and afterwards no KV
block is held. A failure prints the smallest body that shows it."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPResponse
from pathlib import Path
from typing import cast

import pytest

from edgepipe.backend.types import StageSettings
from edgepipe.wire.engines import EngineState, ServeSpec
from tests.support.gateways.http_calls import BODIES, Call, drawn_calls, named_field, smaller
from tests.support.models.for_nodes import pull_emulated
from tests.support.processes.nodes import Node, Nodes, idle

AT_ONCE = 24
BATCH = 500  # calls between two checks of the engine
ANSWER_S = 60.0
SETTLE_S = 10.0  # until the last cancelled request has left the engine
MAX_TRIES = 150  # to make a failing body smaller
CONTEXT = 512


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node that serves ``tiny`` with so little KV that requests wait for one another."""
    nodes = Nodes(folder=tmp_path, cluster=f"test-{tmp_path.name}-{id(tmp_path)}")
    pull_emulated(tmp_path / "a" / "models", tmp_path / "tiny")
    started = await nodes.start("a", discovery=False)
    await started.until(lambda status: idle(status, 1))
    await started.serve(
        "tiny", options=ServeSpec(model="tiny", settings=StageSettings(context_length=CONTEXT), kv_tokens=4 * CONTEXT)
    )
    async with asyncio.timeout(20):
        while (await exchange(started, Call("/v1/completions", {"prompt": "hi"}))).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    yield started
    await nodes.end()


@pytest.mark.parametrize(
    ("count", "number"), [(240, 1), pytest.param(6000, 2, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
async def test_no_request_harms_the_engine_and_every_error_is_the_clients(node: Node, count: int, number: int) -> None:
    calls = drawn_calls(count, number=number)
    statuses: Counter[int] = Counter()
    for start in range(0, count, BATCH):
        batch = calls[start : start + BATCH]
        before = await settled(node)
        complaints = await complaints_of(node, batch, statuses)
        if complaints or harm(before, await settled(node)):
            pytest.fail(await explained(node, batch, complaints))
    assert min(statuses[200], statuses[400]) > count / 5, statuses


def test_every_field_of_every_body_is_generated() -> None:
    for body, fields in BODIES.items():
        assert set(fields) == set(body.model_fields), body.__name__


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; status 0: nothing, for a client that left before."""

    status: int
    text: str = ""
    retry_after: bool = False


async def exchange(node: Node, call: Call) -> Answer:
    """Send a request and read the answer as far as its client stays. Raises TimeoutError."""
    payload = json.dumps(call.body).encode()
    head = f"POST {call.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    sent = payload[: len(payload) // 2] if call.stays == "half sent" else payload
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", node.http_port)
        try:
            writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + sent)
            await writer.drain()
            if call.stays == "read":
                return parsed(await reader.read())
            if call.stays == "first part":
                await reader.read(1)
            return Answer(0)
        finally:
            writer.close()


def parsed(data: bytes) -> Answer:
    """An HTTP response that ends with its connection."""
    response = HTTPResponse(cast("socket.socket", _Received(data)))
    response.begin()
    return Answer(response.status, response.read().decode(), response.getheader("Retry-After") is not None)


@dataclass(frozen=True, slots=True)
class _Received:
    """What http.client takes for a socket."""

    data: bytes

    def makefile(self, mode: str) -> io.BytesIO:
        """The bytes to read."""
        return io.BytesIO(self.data)


async def complaint_of(node: Node, call: Call, statuses: Counter[int]) -> str:
    """What is wrong with the answer to a request; empty if nothing is."""
    try:
        answer = await exchange(node, call)
    except TimeoutError:
        return f"no answer in {ANSWER_S:.0f} s"
    statuses[answer.status] += 1
    shown = f"{answer.status} {answer.text[-600:]}"
    match answer.status:
        case 0 | 404:
            return ""
        case 200:
            return shown if '{"error"' in answer.text else ""
        case 400:
            return "" if named_field(answer.text, call.body) else f"no field is named: {shown}"
        case 429 | 503:
            return "" if answer.retry_after else f"no Retry-After: {shown}"
        case _:
            return shown


async def complaints_of(node: Node, calls: Sequence[Call], statuses: Counter[int]) -> list[tuple[Call, str]]:
    """Send many requests over some connections at once; those with a bad answer, and what is wrong with it."""
    found: list[tuple[Call, str]] = []
    left = iter(calls)

    async def work() -> None:
        for call in left:
            if complaint := await complaint_of(node, call, statuses):
                found.append((call, complaint))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(work())
    return found


async def settled(node: Node) -> EngineState:
    """The engine once it holds nothing, or after ``SETTLE_S``."""
    try:
        async with asyncio.timeout(SETTLE_S):
            while not _rests(engine := (await node.status()).engines[0]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        engine = (await node.status()).engines[0]
    return engine


def _rests(engine: EngineState) -> bool:
    return engine.state == "ready" and not (engine.running or engine.waiting or _held(engine))


def _held(engine: EngineState) -> int:
    return engine.num_blocks - engine.free_blocks


def harm(before: EngineState, after: EngineState) -> str:
    """What requests between two looks at the engine did to it; empty if nothing."""
    if after.epoch.counter != before.epoch.counter:
        return f"the epoch ended: {before.epoch.counter} became {after.epoch.counter}"
    if (after.running, after.waiting) != (0, 0) or _held(after) > _held(before):
        return f"{after.running} sequences run, {after.waiting} wait, {_held(after)} KV blocks are held"
    return ""


async def fault_of(node: Node, call: Call) -> str:
    """What a request does wrong that is sent alone; empty if nothing."""
    before = await settled(node)
    complaint = await complaint_of(node, call, Counter())
    return harm(before, await settled(node)) or complaint


async def explained(node: Node, calls: Sequence[Call], complaints: Sequence[tuple[Call, str]]) -> str:
    """The smallest request that is at fault when sent alone, else the answers that were bad."""
    for call in [*(call for call, _ in complaints), *calls]:
        if fault := await fault_of(node, call):
            least = await reduced(node, call)
            return f"{least}\n{await fault_of(node, least) or fault}"
    return "only together:\n" + "\n".join(f"{call}\n{complaint}" for call, complaint in complaints)


async def reduced(node: Node, call: Call) -> Call:
    """A request that is at fault, too, and of which nothing more can be left out."""
    tries = MAX_TRIES
    candidates = smaller(call.body)
    while (body := next(candidates, None)) is not None and (tries := tries - 1):
        less = replace(call, body=body)
        if await fault_of(node, less):
            call, candidates = less, smaller(body)
    return call
