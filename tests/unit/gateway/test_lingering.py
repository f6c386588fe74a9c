"""A client that is refused while it sends its body reads why: its connection is not reset."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop

from edgepipe.gateway import connections
from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.admission import AdmissionLimits
from edgepipe.gateway.connections import ConnectionLimits, LimitedProtocol
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, serving

SIZE = 8 << 20
MOST_IN_KERNEL = 32 << 20  # what the kernel may take of a client whose data nobody reads
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
CLOSE = b"Connection: close\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
PATIENT = ConnectionLimits(linger_s=60)
SMALL = AdmissionLimits(max_bytes=1 << 20)  # too small for a body of SIZE


def _write_then_read(port: int, sent: bytes) -> bytes:
    """Send all before anything is read, as simple clients do. Raises ConnectionError if the answer is lost."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(sent)
        answer = b""
        while part := sock.recv(1 << 16):
            answer += part
    return answer


async def _refusal(served: Served, sent: bytes) -> tuple[int, str]:
    """The status and the code of the answer to a client that writes first."""
    answer = await asyncio.to_thread(_write_then_read, served.port, sent)
    head, _, text = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(text)["error"]["code"]


async def _gauge(served: Served, name: str) -> float:
    text = (await served.http.get("/metrics")).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"edgepipe_gateway_{name} "))


def _body(size: int) -> bytes:
    return b"Content-Length: %d\r\n\r\n" % size + b" " * size


async def test_a_user_without_connections_left_reads_429_after_its_body() -> None:
    engine = FakeEngine(hold_after=1)
    async with serving(engine, connections=ConnectionLimits(max_connections=4)) as served:
        running = [asyncio.create_task(served.chat()) for _ in range(3)]
        async with asyncio.timeout(10):
            while len(engine.submits) < 3:
                await asyncio.wait(running, timeout=0.01)
        assert await _refusal(served, HEAD + JSON + _body(SIZE)) == (429, "queue_full")
        engine.release.set()
        assert [(await task).status_code for task in running] == [200, 200, 200]


async def test_a_body_without_room_in_memory_reads_429() -> None:
    async with serving(FakeEngine(), admission=SMALL) as served:
        assert await _refusal(served, HEAD + JSON + _body(SIZE)) == (429, "queue_full")


@pytest.mark.parametrize("size", [SIZE + 1, 31 << 20])
async def test_a_body_that_is_too_large_reads_413(served: Served, size: int) -> None:
    assert await _refusal(served, HEAD + JSON + _body(size)) == (413, "request_too_large")


async def test_a_body_of_another_type_reads_415(served: Served) -> None:
    assert await _refusal(served, HEAD + CLOSE + _body(SIZE)) == (415, "unsupported_media_type")


async def test_a_client_without_its_key_reads_401_after_its_body() -> None:
    rules = AccessRules.of(keys=["k"], key_on_loopback=True)
    async with serving(FakeEngine(), rules=rules) as served:
        assert await _refusal(served, HEAD + JSON + CLOSE + _body(SIZE)) == (401, "invalid_api_key")


async def test_a_client_beyond_all_connections_reads_503_after_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "idle", False)
    async with serving(FakeEngine(), connections=ConnectionLimits(max_connections=1)) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        assert await _refusal(served, HEAD + JSON + _body(SIZE)) == (503, "too_many_connections")
        writer.close()


async def test_invalid_http_reads_400_after_all_it_sent(served: Served) -> None:
    assert await _refusal(served, b"\x16\x03\x01\r\n\r\n" + b"x" * SIZE) == (400, "invalid_http")


def test_the_loop_of_the_gateway_s_process_does_the_same() -> None:
    async def refused() -> tuple[int, str]:
        async with serving(FakeEngine()) as served:
            return await _refusal(served, HEAD + JSON + _body(31 << 20))

    assert uvloop.run(refused()) == (413, "request_too_large")


async def test_the_answer_comes_before_the_rest_of_the_body() -> None:
    async with serving(FakeEngine(), connections=PATIENT) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(HEAD + JSON + b"Content-Length: %d\r\n\r\n" % (SIZE + 1) + b" " * SIZE)
        async with asyncio.timeout(10):
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 413 ")
        writer.close()


async def test_a_body_that_waits_for_100_continue_is_not_asked_for_when_it_is_refused() -> None:
    async with serving(FakeEngine(), connections=PATIENT) as served:
        expecting = HEAD + JSON + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (SIZE + 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(expecting)
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 413 ")
            while await _gauge(served, "connections") > 1:  # one is of the gauge's client
                pass
        writer.close()


def _send_without_end(port: int, head: bytes, most: int) -> int:
    """Send until the connection breaks. Return the number of bytes."""
    num_bytes, piece = 0, b"%x\r\n" % (1 << 16) + b" " * (1 << 16) + b"\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        while num_bytes < most:
            sock.sendall(piece)
            num_bytes += len(piece)
    return num_bytes


@pytest.mark.parametrize("head", [HEAD + CLOSE, HEAD], ids=["close", "keep"])
async def test_a_client_that_never_stops_is_cut_off_after_so_many_bytes(head: bytes) -> None:
    limits = ConnectionLimits(linger_s=60, linger_bytes=1 << 20, header_s=60)
    async with serving(FakeEngine(), connections=limits) as served:
        most = 4 * MOST_IN_KERNEL
        assert (
            await asyncio.to_thread(_send_without_end, served.port, head, most) < limits.linger_bytes + MOST_IN_KERNEL
        )
        assert (await served.complete()).status_code == 200


async def test_a_kept_connection_is_counted_anew_for_each_request() -> None:
    limits = ConnectionLimits(max_connections=4, linger_bytes=SIZE + MOST_IN_KERNEL // 4)
    async with serving(FakeEngine(), connections=limits) as served:
        for _ in range(4):
            assert (await served.http.post("/v1/completions", content=b" " * SIZE)).status_code == 415


async def test_of_many_clients_beyond_all_connections_a_few_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "idle", False)
    monkeypatch.setattr(connections, "_MAX_LINGERING", 1)
    limits = ConnectionLimits(max_connections=1, linger_s=60, linger_bytes=1 << 40)
    async with serving(FakeEngine(), connections=limits) as served:
        clients = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2)]
        async with asyncio.timeout(10):
            assert b" 503 " in await clients[1][0].readline()
        most = 4 * MOST_IN_KERNEL
        assert await asyncio.to_thread(_send_without_end, served.port, HEAD, most) < MOST_IN_KERNEL
        clients[1][1].close()
        async with asyncio.timeout(10):
            await clients[1][1].wait_closed()
        while await asyncio.to_thread(_send_without_end, served.port, HEAD, most) < most:
            pass  # its place is free once the gateway has seen the end
        clients[0][1].close()


async def test_a_client_that_stops_and_stays_is_closed_after_a_while() -> None:
    async with (
        serving(FakeEngine(), connections=ConnectionLimits(linger_s=0.1), admission=SMALL) as served,
        _refused(served, 1),
    ):
        async with asyncio.timeout(10):
            while await _gauge(served, "connections") > 1:
                pass


@asynccontextmanager
async def _refused(served: Served, count: int) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Clients that have their answer and send the rest of their body later, if at all."""
    writers: list[asyncio.StreamWriter] = []
    try:
        async with asyncio.timeout(10):
            for _ in range(count):
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writers.append(writer)
                writer.write(HEAD + JSON + b"Content-Length: %d\r\n\r\n{" % SIZE)
                assert b" 429 " in await reader.readline()
        yield writers
    finally:
        for writer in writers:
            writer.close()


async def test_refused_clients_that_still_send_hold_no_share_and_no_connection() -> None:
    limits = ConnectionLimits(max_connections=4, linger_s=60)
    async with (
        serving(FakeEngine(), connections=limits, admission=SMALL) as served,
        _refused(served, 12),
    ):
        assert await _gauge(served, "connections") == 4  # with the gauge's client, which took a place
        assert await _gauge(served, "request_bytes") == 0
        last = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(3)]  # the user's share
        for reader, writer in last:
            writer.write(GET)
            assert b" 200 " in await reader.readline()
        for _, writer in last:
            writer.close()


async def test_bodies_that_turn_invalid_hold_nothing_while_their_clients_stay() -> None:
    limits = ConnectionLimits(max_connections=3, linger_s=60)
    async with serving(FakeEngine(), connections=limits) as served, asyncio.timeout(10):
        writers: list[asyncio.StreamWriter] = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writers.append(writer)
            writer.write(HEAD + JSON + b"Transfer-Encoding: chunked\r\n\r\n3e8\r\n" + b" " * 1000 + b"\r\nzz\r\n")
            assert b" 400 " in await reader.readline()
        assert await _gauge(served, "connections") == 3  # the gauge's client took a place
        assert await _gauge(served, "request_bytes") == 0
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("half", [True, False])
async def test_a_client_that_ends_ends_the_wait(half: bool) -> None:
    async with serving(FakeEngine(), connections=PATIENT, admission=SMALL) as served:
        async with _refused(served, 1) as (writer,):
            assert await _gauge(served, "connections") == 2
            writer.write_eof() if half else writer.close()
            async with asyncio.timeout(10):
                while await _gauge(served, "connections") > 1:
                    pass


async def test_a_gateway_that_stops_does_not_wait_for_refused_clients() -> None:
    async with serving(FakeEngine(), connections=PATIENT, admission=SMALL) as served, _refused(served, 1):
        served.answering.cancel()
        async with asyncio.timeout(2):  # below the time that running answers get
            await asyncio.wait((served.answering,))
