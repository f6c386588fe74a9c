"""A user who asks a gateway over bare sockets, at any pace, and keeps what came back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.gateways.http_calls import named_field

KEPT_BYTES = 64 << 10  # bytes kept of each answer; answers of hundreds of MB are read and dropped
_PIECE_BYTES = 256 << 10
_MAY_REFUSE = frozenset({400, 408, 413, 429, 431, 503})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for one request. ``status`` 0: nothing before the connection ended."""

    what: str  # the request, for people
    status: int
    text: str = ""  # the beginning of its body
    num_bytes: int = 0  # size of the whole body
    retry_after: bool = False

    def complaint(self) -> str:
        """What is wrong with the answer to a valid request; empty if nothing is."""
        shown = f"{self.what}: {self.status} {self.text[:300]}"
        if self.status == 200:
            return shown if '"type":"server_error"' in self.text.replace(" ", "") else ""
        if self.status not in _MAY_REFUSE:
            return shown
        if self.status in (429, 503):
            return "" if self.retry_after else f"no Retry-After: {shown}"
        if self.status == 400 and not named_field(self.text, {}):
            return f"no field is named: {shown}"
        return ""


@dataclass(slots=True, kw_only=True)
class User:
    """One user's connections to a gateway."""

    port: int
    key: str
    answers: list[Answer] = field(default_factory=list[Answer])
    num_asked: int = 0

    @property
    def num_left(self) -> int:
        """Requests without an answer: this user left before."""
        return self.num_asked - len(self.answers)

    async def post(self, path: str, body: Mapping[str, Any] | bytes, *, what: str = "") -> Answer:
        """Send a request and read its answer as it comes."""
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.connection() as (reader, writer):
            with contextlib.suppress(ConnectionError):  # a refusal may come before all is sent
                writer.write(self.head(path, len(payload)))
                for start in range(0, len(payload), _PIECE_BYTES):
                    writer.write(payload[start : start + _PIECE_BYTES])
                    await writer.drain()
            return await self.read(reader, what=what or path)

    async def read(self, reader: asyncio.StreamReader, *, what: str) -> Answer:
        """Read the answer to a request that was sent; keep it."""
        kept, size, status, head = b"", 0, 0, ""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while status in (0, 102):  # a client that has sent all it has to say gets interim answers
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                status = int(head.split(" ", 2)[1])
            while part := await reader.read(_PIECE_BYTES):
                kept += part[: KEPT_BYTES - len(kept)]
                size += len(part)
        text = kept.decode(errors="replace")
        retry_after = "\r\nretry-after:" in head.lower()
        answer = Answer(what=what, status=status, text=text, num_bytes=size, retry_after=retry_after)
        self.answers.append(answer)
        return answer

    @asynccontextmanager
    async def connection(
        self, *, receive_bytes: int = 0
    ) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection, closed at once with the block. ``receive_bytes``: of the kernel's buffer, 0 for the usual."""
        self.num_asked += 1
        sock = socket.socket()
        sock.setblocking(False)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
            limit = receive_bytes or _PIECE_BYTES
            reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
        except BaseException:
            sock.close()
            raise
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    def head(self, path: str, num_bytes: int) -> bytes:
        """The header of a request with a body of that many bytes."""
        return (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {num_bytes}\r\n\r\n"
        ).encode()

    def summary(self) -> dict[str, Any]:
        """How often each status came (``closed``: none, ``left``: not waited for), and what is wrong with answers."""
        statuses = Counter(str(answer.status or "closed") for answer in self.answers)
        statuses["left"] = self.num_left
        return {
            "statuses": +statuses,
            "complaints": [found for answer in self.answers if (found := answer.complaint())],
        }
