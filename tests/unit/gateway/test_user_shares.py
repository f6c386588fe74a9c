"""One user's flood of bodies, connections, schemas, texts and prompts: what the other user gets beside it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from edgepipe.children import warm_child
from edgepipe.children.forked_job import JobCost
from edgepipe.children.user_turns import UserTurns
from edgepipe.children.warm_child import WarmChild
from edgepipe.errors import QueueFull
from edgepipe.gateway import bodies
from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.admission import AdmissionLimits
from edgepipe.gateway.bodies import BodyReader
from edgepipe.gateway.completion_service import encode
from edgepipe.gateway.connections import ConnectionLimits
from edgepipe.gateway.grammar_trial import GrammarTrial
from edgepipe.gateway.models import ModelTable
from edgepipe.gateway.schema import CompletionBody
from edgepipe.gateway.shares import Holding, memory_shares
from edgepipe.gateway.structured import GrammarCompiler
from edgepipe.sampling.grammar_trial import pack_verdict
from tests.support.gateways.fake_engine import ByteAssets, FakeEngine
from tests.support.gateways.server import Served, serving

FLOOD, OTHER = "the-key-of-a-flood", "the-key-of-another"
RULES = AccessRules.of(keys=(FLOOD, OTHER), key_on_loopback=True)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def _other(served: Served, **fields: Any) -> httpx.Response:
    body = {"prompt": "hi", "max_tokens": 2} | fields
    return await served.http.post("/v1/completions", json=body, headers=_bearer(OTHER))


async def _gauge(served: Served, name: str) -> float:
    """A gauge of the gateway, from its metrics."""
    text = (await served.http.get("/metrics", headers=_bearer(OTHER))).text
    (line,) = [line for line in text.splitlines() if line.startswith(f"edgepipe_gateway_{name} ")]
    return float(line.split()[1])


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def _unfinished(served: Served, count: int, sent: bytes, key: str = FLOOD) -> AsyncGenerator[list[Client]]:
    """Connections that have sent the same part of a request each."""
    clients = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(count)]
    head = HEAD + f"Authorization: Bearer {key}\r\n".encode()
    try:
        for _, writer in clients:
            writer.write(head + sent)
        yield clients
    finally:
        for _, writer in clients:
            writer.close()


async def _refusals(clients: list[Client], count: int) -> list[bytes]:
    """The whole answers of the first ``count`` clients that get one."""
    reads = [asyncio.create_task(reader.read()) for reader, _ in clients]
    try:
        async with asyncio.timeout(10):
            while sum(task.done() for task in reads) < count:
                await asyncio.wait([task for task in reads if not task.done()], return_when=asyncio.FIRST_COMPLETED)
            return [task.result() for task in reads if task.done()]
    finally:
        for task in reads:
            task.cancel()
        await asyncio.gather(*reads, return_exceptions=True)


def _declared(size: int) -> bytes:
    return b"Content-Length: %d\r\n\r\n" % size + b" " * (size - 1)


def _chunked(size: int) -> bytes:
    return b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % size + b" " * (size - 1)


@pytest.mark.parametrize("sent", [_declared, _chunked])
async def test_bodies_of_one_user_that_do_not_end_leave_memory_to_another(sent: Callable[[int], bytes]) -> None:
    size, most = 100_000, 1_000_000
    async with (
        serving(FakeEngine(), rules=RULES, admission=AdmissionLimits(max_bytes=most)) as served,
        _unfinished(served, 20, sent(size)) as clients,
    ):
        held = 3  # with two copies each: 600,000 of 750,000 bytes
        answers = await _refusals(clients, 20 - held)
        assert len(answers) == 20 - held
        for answer in answers:
            head, _, text = answer.partition(b"\r\n\r\n")
            assert b" 429 " in head.splitlines()[0]
            assert b"retry-after: 1" in head
            error = json.loads(text)["error"]
            assert error["code"] == "queue_full"
            assert error["message"].startswith("the body: this user's requests would need too much memory")
            assert "this user's share is 0.7 MiB now, of 1.0 MiB for all" in error["message"]
        assert await _gauge(served, "request_bytes") in (held * 2 * size, held * 2 * (size - 1))
        assert (await _other(served)).status_code == 200
        assert (await _other(served, prompt="hi", junk=" " * 80_000)).status_code == 200
        for _, writer in clients:
            writer.close()
        async with asyncio.timeout(10):
            while await _gauge(served, "request_bytes"):
                pass


async def test_a_chunked_body_that_dribbles_in_is_given_up_and_its_memory_with_it() -> None:
    async with serving(FakeEngine(), connections=ConnectionLimits(body_s=0.3)) as served:
        answer = await served.raw(HEAD + _chunked(1000))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert (await served.complete()).status_code == 200
        assert await _gauge(served, "request_bytes") == 0


async def test_the_memory_of_every_request_is_given_back() -> None:
    async with serving(FakeEngine(), rules=RULES) as served:
        assert (await _other(served)).status_code == 200
        assert (await _other(served, stream=True)).status_code == 200
        assert (await _other(served, n=0)).status_code == 400
        assert (await _other(served, junk=" " * (9 << 20))).status_code == 413
        async with asyncio.timeout(10):
            while await _gauge(served, "request_bytes"):
                pass


async def test_token_ids_of_a_body_count_until_its_request_does() -> None:
    ids = [40_000] * 20_000
    memory = memory_shares(4 << 20).holding("a")
    reader = BodyReader(models=ModelTable(), body_s=20)
    body = json.dumps({"prompt": ids}).encode()
    await reader.read(_request("a", body, memory), CompletionBody)
    assert memory.amount == 2 * len(body) + 36 * len(ids)
    with pytest.raises(QueueFull, match="too much memory"):
        await reader.read(_request("a", json.dumps({"prompt": [ids] * 4}).encode(), memory), CompletionBody)
    await reader.child.end()
    engine = FakeEngine(hold_after=1)
    async with serving(engine) as served:
        running = asyncio.create_task(served.complete([97] * 3000, junk=" " * 100_000))
        async with asyncio.timeout(10):
            await engine.submitted.wait()
            counted = await _gauge(served, "request_bytes")
        assert 64 * 3000 <= counted < 100_000 + 64 * 3000  # the body has become a request
        engine.release.set()
        assert (await running).status_code == 200


async def test_slow_bodies_on_all_connections_of_one_user_keep_no_other_out() -> None:
    limits = ConnectionLimits(max_connections=16)
    async with (
        serving(FakeEngine(), rules=RULES, connections=limits) as served,
        _unfinished(served, 16, b"Content-Length: 100\r\n\r\n{") as clients,
    ):
        answers = await _refusals(clients, 16 - 12)
        assert len(answers) == 16 - 12  # its share is three quarters
        for answer in answers:
            assert b" 429 " in answer.splitlines()[0]
            assert b"share is 12 connections now, of 16 connections for all" in answer
        for _ in range(3):
            assert (await _other(served)).status_code == 200


async def test_two_users_with_slow_bodies_leave_room_for_a_third() -> None:
    rules = AccessRules.of(keys=("one-long-key", "two-long-key", OTHER), key_on_loopback=True)
    slow = b"Content-Length: 100\r\n\r\n{"
    async with (
        serving(FakeEngine(), rules=rules, connections=ConnectionLimits(max_connections=28)) as served,
        _unfinished(served, 40, slow, "one-long-key") as first,
    ):
        assert len(await _refusals(first, 40 - 21)) == 40 - 21
        async with _unfinished(served, 40, slow, "two-long-key") as second:
            assert len(await _refusals(second, 40 - 5)) == 40 - 5
            assert (await _other(served)).status_code == 200


async def test_supervisors_are_answered_beside_a_flood_of_their_own_address() -> None:
    async with serving(FakeEngine(), connections=ConnectionLimits(max_connections=8)) as served:
        clients = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(6)]
        for _, writer in clients:
            writer.write(HEAD + b"Content-Length: 100\r\n\r\n{")
        async with asyncio.timeout(10):
            while (await served.complete()).status_code != 429:
                pass
        assert (await served.http.get("/health")).status_code == 200
        for _, writer in clients:
            writer.close()


async def test_new_connections_of_one_user_take_the_idle_ones_of_the_same_user() -> None:
    async with serving(FakeEngine(), rules=RULES, connections=ConnectionLimits(max_connections=8)) as served:
        kept, writer = await asyncio.open_connection("127.0.0.1", served.port)
        get = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {OTHER}\r\n\r\n".encode()
        writer.write(get)
        assert b"200" in await kept.readline()
        for _ in range(4):
            async with _unfinished(served, 8, b"Content-Length: 2\r\n\r\n{}") as clients:
                assert (await clients[-1][0].readline()).startswith(b"HTTP/1.1 400")
        writer.write(get)
        async with asyncio.timeout(10):
            while b"HTTP/1.1 200 OK" not in await kept.readline():
                assert not kept.at_eof()
        writer.close()


async def test_a_small_schema_waits_for_none_of_fifteen_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    go_on, all_came = asyncio.Event(), asyncio.Event()
    came: list[str] = []
    check: Callable[..., Awaitable[None]] = GrammarCompiler.check

    async def counted(self: GrammarCompiler, *given: Any) -> None:
        came.append(given[0].text)
        if len(came) == 15:
            all_came.set()
        await check(self, *given)

    async def exchange(child: Any, parts: tuple[bytes, ...], most_bytes: int) -> bytes:
        order.append(parts[1].decode())
        if "p99" not in order[-1]:
            await go_on.wait()
        return pack_verdict("", JobCost(cpu_s=0.0, peak_bytes=0))

    monkeypatch.setattr(GrammarCompiler, "check", counted)
    monkeypatch.setattr(warm_child, "_exchange", exchange)

    async def ask(served: Served, key: str, number: int) -> httpx.Response:
        schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}, "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"messages": [{"role": "user", "content": "hi"}], "response_format": form}
        return await served.http.post("/v1/chat/completions", json=body, headers=_bearer(key))

    async with serving(FakeEngine(), rules=RULES) as served, asyncio.timeout(20):
        requests = [asyncio.create_task(ask(served, FLOOD, number)) for number in range(15)]
        await all_came.wait()
        assert (await ask(served, OTHER, 99)).status_code == 200
        assert not any(request.done() for request in requests)
        go_on.set()
        assert {response.status_code for response in await asyncio.gather(*requests)} == {200}
    assert len(order) == 16


async def test_a_schema_s_user_has_a_label_that_does_not_tell_the_key() -> None:
    engine = FakeEngine()
    async with serving(engine, rules=RULES) as served:
        for key in (FLOOD, OTHER, FLOOD):
            served.http.headers.update(_bearer(key))
            assert (await served.chat(response_format={"type": "json_object"})).status_code == 200
    first, other, again = (submit.sampling.grammar_user for submit in engine.submits)
    assert first == again != other
    assert len(first) == 16
    assert first not in hashlib.sha256(FLOOD.encode()).hexdigest()


async def test_schemas_beyond_a_user_s_line_are_refused_with_their_field(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(self: GrammarTrial, grammar: object, owner: str) -> None:
        raise QueueFull(fact="64 items wait, at most 64 of one user may")

    monkeypatch.setattr(GrammarTrial, "check", full)
    async with serving(FakeEngine()) as served:
        response = await served.chat(response_format={"type": "json_object"})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["param"] == "response_format.schema"
    assert "at most 64 of one user may" in response.json()["error"]["message"]


class _Asked(WarmChild):
    """A child that notes whose question came."""

    def __init__(self) -> None:
        super().__init__("edgepipe.gateway.body_child", start_s=20)
        self.owners: list[str] = []

    async def ask(self, *parts: bytes, within_s: float, most_bytes: int, owner: str = "") -> bytes:
        self.owners.append(owner)
        return await super().ask(*parts, within_s=within_s, most_bytes=most_bytes, owner=owner)


def _request(owner: str, body: bytes, memory: Holding | None = None) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    state = {"owner": owner, "memory": memory or memory_shares(64 << 20).holding(owner)}
    return Request({"type": "http", "headers": [(b"content-type", b"application/json")], "state": state}, receive)


async def test_bodies_are_parsed_in_turns_here_and_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    child = _Asked()
    reader = BodyReader(models=ModelTable(), body_s=20, child=child)
    parse = bodies.parse_json_object

    def noted(body: bytes) -> dict[str, Any]:
        found = parse(body)
        order.append(found["prompt"])
        return found

    monkeypatch.setattr(bodies, "parse_json_object", noted)

    async def read(owner: str, size: int) -> None:
        body = json.dumps({"prompt": owner, "junk": " " * size}).encode()
        assert (await reader.read(_request(owner, body), CompletionBody)).prompt == [owner]

    await asyncio.gather(*(read("a", 20_000) for _ in range(10)), read("b", 20_000))
    assert len(order) == 11
    assert order.index("b") == 1
    await read("c", 200_000)
    assert child.owners == ["c"]
    await child.end()


class _Noted(ByteAssets):
    """Notes the texts in the order in which threads tokenise them."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.long: list[str] = []

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        self.order.append(text[0])
        return [1]

    async def encode_long(
        self, text: str, *, special_tokens: bool, at_most: int, owner: str = ""
    ) -> tuple[int, list[int]]:
        self.long.append(owner)
        return 1, [1]


async def test_texts_are_tokenised_in_turns() -> None:
    assets, threads = _Noted(), UserTurns()

    async def ask(owner: str, size: int) -> None:
        await encode(assets, owner * size, special_tokens=False, at_most=9, threads=threads, owner=owner)

    await asyncio.gather(*(ask("a", 10_000) for _ in range(10)), ask("b", 10_000))
    assert assets.order.index("b") == 1
    await ask("c", 200_000)
    assert assets.long == ["c"]


async def test_another_user_s_prompt_goes_before_those_of_a_flood_that_the_engine_has_not_begun() -> None:
    engine = FakeEngine(hold_after=0)
    async with serving(engine, rules=RULES, admission=AdmissionLimits(max_beginning_tokens=0)) as served:
        body = {"prompt": "flood", "max_tokens": 2}
        flood = [
            asyncio.create_task(served.http.post("/v1/completions", json=body, headers=_bearer(FLOOD)))
            for _ in range(20)
        ]
        async with asyncio.timeout(15):
            while await _gauge(served, "requests_waiting") < 16:
                pass
            other = asyncio.create_task(_other(served))
            while len(engine.submits) < 5:
                await served.http.get("/health")
            assert bytes(engine.submits[-1].prompt) == b"hi"
            engine.release.set()
            answers = [*await asyncio.gather(*flood), await other]
    assert {response.status_code for response in answers} == {200}
    assert len(engine.submits) == 21


AMOUNTS = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 40)), max_size=60)


@given(asked=AMOUNTS)
def test_users_never_hold_more_than_their_share_and_a_newcomer_always_gets_some(asked: list[tuple[str, int]]) -> None:
    shares = memory_shares(100)
    held: dict[str, int] = {}
    for owner, amount in asked:
        try:
            shares.take(owner, amount)
        except QueueFull:
            assert held.get(owner, 0) + amount > shares.share(owner)
        else:
            held[owner] = held.get(owner, 0) + amount
            assert held[owner] <= 3 * (100 - sum(held.values()))
        assert shares.held == sum(held.values()) < 100
        assert shares.share("newcomer") >= (1 if shares.held <= 98 else 0)
    for owner, amount in held.items():
        shares.add(owner, -amount)
    assert shares.held == 0
    for owner in held:
        assert shares.share(owner) == shares.share("newcomer"), "it gave all back"
        shares.take(owner, shares.share(owner))
        shares.add(owner, -shares.held)
