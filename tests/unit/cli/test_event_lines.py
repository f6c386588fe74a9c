"""Lines of event streams, and gateways that send none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from edgepipe.cli import sse
from edgepipe.cli.sse import ChatClient, event_lines
from edgepipe.errors import NodeUnreachable


async def test_only_newlines_end_lines_wherever_the_bytes_are_cut() -> None:
    text = 'data: {"text": "one\u0085two\u2028three\u2029"}\n\n: a note\r\ndata: [DONE]'
    data = text.encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 7):
            yield data[start : start + 7]

    found = [line async for line in event_lines(httpx.Response(200, content=pieces()))]
    assert found == ['data: {"text": "one\u0085two\u2028three\u2029"}', "", ": a note", "data: [DONE]"]


async def test_a_gateway_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "_LOOK_S", 0.1)
    over = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(10), ChatClient(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(NodeUnreachable, match="the gateway does not answer"):
                await client.models()
            assert await client.sampling("tiny") == {}
        over.set()
