"""Part ``bodies`` of ``scripts/bench gateway``: how long one large body keeps everybody else waiting."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

from bench_foundation import stored_demo
from figures import Row, below
from local_nodes import running_nodes

HELD_MS = 20.0
_BYTES = 7 << 20  # a body may have 8 MiB
_PAUSE_S = 0.002  # between two looks


async def body_rows(full: bool) -> list[Row]:
    """SmolLM2's gateway: while it reads each body, another client asks for ``/health`` again and again."""
    model = stored_demo()
    rows: list[Row] = []
    with running_nodes(1, models_dir=model.path.parent, threads=1) as nodes:
        nodes[0].edgepipe("serve", "demo", "--context", "2048")
        port = nodes[0].http_port
        for name, path, body in _bodies():
            await _post(port, path, body)  # children start with the first
            posting = asyncio.create_task(_post(port, path, body))
            worst_s = await _worst_look(port, posting)
            told = f"/health beside {len(body) >> 20} MB of {name}, longest wait ({await posting})"
            rows.append(below(told, worst_s * 1e3, "ms", HELD_MS))
    return rows


def _bodies() -> Iterator[tuple[str, str, bytes]]:
    chat, text = "/v1/chat/completions", "/v1/completions"
    words = "the quick brown fox jumps over the lazy dog " * (_BYTES // 44)
    turn: dict[str, Any] = {"role": "user", "content": words[: 3 << 20]}
    yield "token ids", text, _json({"prompt": [7 * i % 40_000 for i in range(_BYTES // 7)]})
    yield "text", text, _json({"prompt": words})
    yield "one turn", chat, _json({"messages": [turn]})
    yield "nested junk", text, _json({"prompt": "x", "max_tokens": 1, "junk": [[]] * (_BYTES // 4)})
    yield "what is no JSON", text, b'{"prompt": [' + b"1," * (_BYTES // 2)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


async def _post(port: int, path: str, body: bytes) -> int:
    """The status."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
    for start in range(0, len(body), 1 << 18):
        writer.write(body[start : start + (1 << 18)])
        await writer.drain()
    status = int((await reader.readline()).split()[1])
    await reader.read()
    writer.close()
    return status


async def _worst_look(port: int, posting: asyncio.Task[int]) -> float:
    """Seconds; what this process itself is late by counts, too."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    worst_s = 0.0
    while not posting.done():
        began_s = time.monotonic()
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"}")
        worst_s = max(worst_s, time.monotonic() - began_s)
        await asyncio.sleep(_PAUSE_S)
    writer.close()
    return worst_s
