"""What clients do to a socket: slow, idle, broken, clever. Good ones are served beside all of them."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from edgepipe.gateway.connections import ConnectionLimits, LimitedProtocol
from edgepipe.gateway.streams import StreamTimeouts
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, events_of, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
QUICK = ConnectionLimits(max_connections=8, header_s=0.3, idle_s=30)


async def _works(served: Served) -> bool:
    return (await served.chat(max_tokens=3)).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET", GET, GET + b"X: y"])
async def test_a_header_that_is_never_finished_is_cut_off(sent: bytes) -> None:
    async with serving(FakeEngine(), connections=QUICK) as served:
        assert await served.raw(sent) == b""
        assert await _works(served)


async def test_a_later_header_has_its_deadline_too() -> None:
    async with serving(FakeEngine(), connections=QUICK) as served:
        answer = await served.raw(GET + b"\r\n" + GET)
        assert answer.count(b"HTTP/1.1 200") == 1


async def test_more_idle_connections_than_there_is_room_for_keep_nobody_out() -> None:
    limits = ConnectionLimits(max_connections=8, header_s=30)
    async with serving(FakeEngine(), connections=limits) as served:
        idle = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(60)]
        assert await _works(served)
        closed = [reader for reader, _ in idle if reader.at_eof() or reader.exception() is not None]
        assert len(closed) >= 50  # those that came first
        for _, writer in idle:
            writer.close()


async def test_with_a_user_s_share_of_connections_at_work_the_next_is_told_so() -> None:
    engine = FakeEngine(hold_after=1)
    async with serving(engine, connections=ConnectionLimits(max_connections=4)) as served:
        running = [asyncio.create_task(served.chat()) for _ in range(3)]
        async with asyncio.timeout(10):
            while len(engine.submits) < 3:
                await asyncio.wait(running, timeout=0.01)
        answer = await served.raw(GET + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"this user's share is 3 connections now, of 4 connections for all" in answer
        assert b"retry-after: 1" in answer
        engine.release.set()
        assert [(await task).status_code for task in running] == [200, 200, 200]


async def test_a_connection_beyond_all_that_work_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "idle", False)  # supervisors alone could fill them: their requests are short
    async with serving(FakeEngine(), connections=ConnectionLimits(max_connections=3)) as served:
        held = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(3)]
        answer = await served.raw(HEALTH)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_connections" in answer
        assert b"Retry-After: 1" in answer
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (GET + b"X: " + b"y" * (64 << 10) + b"\r\n\r\n", b"431"),
        (GET + b"".join(b"X-%d: y\r\n" % i for i in range(10_000)) + b"\r\n", b"431"),
        (GET + b"Authorization: Bearer " + b"x" * (1 << 20) + b"\r\n\r\n", b"431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n", b"400"),
        (b"hello\r\n\r\n", b"400"),
        (b"GET /v1/models HTTP/1.1\r\n\r\n", b"400"),
        (GET + b"Host: evil.example\r\n\r\n", b"400"),
        (b"GET /v1/models HTTP/1.0\r\n\r\n", b"421"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"421"),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", b"400"),
        (HEAD + b"Content-Length: -1\r\n\r\n{}", b"400"),
        (HEAD + b"Content-Length: 9999999999\r\n\r\n{}", b"413"),
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", b"501"),
        (GET + b"Bad Name: x\r\n\r\n", b"400"),
        (GET + b"X: a\0b\r\n\r\n", b"400"),
    ],
    ids=lambda value: repr(value[-40:]),
)
async def test_what_is_no_good_http_is_refused(served: Served, sent: bytes, status: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(sent)
    async with asyncio.timeout(10):
        line = await reader.readline()
    writer.close()
    assert line.split()[1] == status
    assert await _works(served)


async def test_an_error_before_there_is_a_request_has_the_usual_shape(served: Served) -> None:
    head, _, text = (await served.raw(b"hello\r\n\r\n")).partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert b'"code": "invalid_http"' in text


async def test_http_1_0_and_pipelined_requests_are_answered_in_order(served: Served) -> None:
    old = await served.raw(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert b" 200 OK" in old.splitlines()[0]
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = await served.raw(GET + b"\r\n" + GET + b"\r\n" + last)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.endswith(b'{"status":"ok"}')


def _post(text: bytes, *, head: bytes = HEAD) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(text) + text


OLD_HEAD = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
HEADS = {"1.1": HEAD, "close": HEAD + b"Connection: close\r\n", "1.0": OLD_HEAD}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_a_client_that_closes_its_half_gets_its_answer(head: str, stream: bytes) -> None:
    engine = FakeEngine(hold_after=0)
    async with serving(engine) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(_post(b'{"prompt": "x", "stream": ' + stream + b"}", head=HEADS[head]))
        writer.write_eof()
        async with asyncio.timeout(10):
            begun = await reader.readexactly(3 if head == "1.0" else 27)
            assert begun == (b"HTT" if head == "1.0" else b"HTTP/1.1 102 Processing\r\n\r\n")
            engine.release.set()
            answer = begun + await reader.read()
        writer.close()
        assert answer.count(b"HTTP/1.1 200 OK\r\n") == 1
        assert b'"finish_reason":"length"' in answer
        assert not engine.cancels


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/api/chat"])
async def test_a_client_that_closes_its_half_within_its_answer_gets_the_rest(path: bytes) -> None:
    engine = FakeEngine(hold_after=4)
    async with serving(engine) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        text = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": true}'
        writer.write(_post(text, head=HEAD.replace(b"/v1/completions", path)))
        async with asyncio.timeout(10):
            await reader.readuntil(b'"content":"T"')
            writer.write_eof()
            if path != b"/api/chat":
                await reader.readuntil(b": still working\n")
            engine.release.set()
            rest = await reader.read()
        writer.close()
        assert rest.endswith(b"0\r\n\r\n")
        assert not engine.cancels


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("sent", [b'{"prompt": "x"}', b'{"prompt": "x", "stream": true}'])
async def test_a_client_that_leaves_before_its_answer_begins_ends_its_request(head: str, sent: bytes) -> None:
    engine = FakeEngine(hold_after=0)
    async with serving(engine) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(_post(sent, head=HEADS[head]))
        async with asyncio.timeout(10):
            await engine.submitted.wait()
            writer.close()
            await engine.cancelled.wait()


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_leaves_within_its_answer_ends_its_request(reset: bool) -> None:
    engine = FakeEngine(hold_after=4)
    async with serving(engine) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(_post(b'{"prompt": "x", "stream": true}'))
        async with asyncio.timeout(10):
            await reader.readuntil(b'"text":"T"')
            if reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()
            await engine.cancelled.wait()


async def test_a_target_with_its_host_is_the_same_as_without(served: Served) -> None:
    for target, status in (
        (b"http://localhost/v1/models?x=1", b"200"),
        (b"HTTP://127.0.0.1:9/health", b"200"),
        (b"http://evil.example/v1/models", b"421"),
        (b"http://localhost", b"200"),
        (b"http://localhost/elsewhere", b"404"),
    ):
        answer = await served.raw(b"GET " + target + b" HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert answer.split()[1] == status, target


async def test_who_asks_for_a_websocket_is_not_told_of_our_server(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(GET + upgrade)
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()
    assert caplog.records == []


async def test_every_response_has_a_request_id(served: Served) -> None:
    ids = [(await served.http.get(path)).headers["x-request-id"] for path in ("/health", "/v1/models", "/nothing")]
    ids.append((await served.http.get("/health", headers={"host": "evil.example"})).headers["x-request-id"])
    ids.append((await served.chat(stream=True)).headers["x-request-id"])
    assert len(set(ids)) == 5
    for given, kept in (("trace-7:a.b_c", True), ("x" * 129, False), ("a b", False)):
        response = await served.http.get("/health", headers={"x-request-id": given})
        assert (response.headers["x-request-id"] == given) is kept


async def test_a_body_that_dribbles_in_is_given_up() -> None:
    async with serving(FakeEngine(), connections=ConnectionLimits(body_s=0.3)) as served:
        answer = await served.raw(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert await _works(served)


async def test_a_body_that_breaks_off_costs_nothing(served: Served) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(HEAD + b"Content-Length: 100\r\n\r\n{")
    writer.close()
    assert await _works(served)
    assert len(served.engine.submits) == 1


async def test_a_client_that_does_not_read_is_given_up_and_the_others_go_on() -> None:
    engine = FakeEngine(answer=b"x" * 4000, group=8)
    timeouts = StreamTimeouts(send_s=0.5, hold_s=0.01)
    async with serving(engine, timeouts=timeouts) as served:
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(stalled, ("127.0.0.1", served.port))
        text = b'{"prompt": "x", "max_tokens": 4000, "stream": true, "logprobs": 20}'
        request = HEAD + b"Content-Length: %d\r\n\r\n" % len(text) + text
        await loop.sock_sendall(stalled, request)
        async with asyncio.timeout(20):
            await engine.submitted.wait()
            assert await _works(served)
            while b"gateway_prompts_running 0.0" not in (await served.http.get("/metrics")).content:
                pass
        stalled.close()


async def test_silence_is_filled_with_comments_that_clients_ignore() -> None:
    engine = FakeEngine(hold_after=4)
    async with serving(engine, timeouts=StreamTimeouts(hold_s=0.05, heartbeat_s=0.05)) as served:
        request = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with served.http.stream("POST", "/v1/chat/completions", json=request) as response:
            lines: list[str] = []
            async for line in response.aiter_lines():
                lines.append(line)
                if sum(line.startswith(":") for line in lines) == 3:
                    engine.release.set()
        assert lines.count(": still working") >= 3
        assert [line for line in lines if line][-1] == "data: [DONE]"


async def test_the_role_is_sent_while_the_prompt_is_read() -> None:
    engine = FakeEngine(hold_after=0)
    async with serving(engine, timeouts=StreamTimeouts(hold_s=0.05)) as served:
        request = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with served.http.stream("POST", "/v1/chat/completions", json=request) as response:
            async with asyncio.timeout(10):
                line = await anext(response.aiter_lines())
            assert events_of(line)[0]["choices"][0]["delta"]["role"] == "assistant"
            engine.release.set()
