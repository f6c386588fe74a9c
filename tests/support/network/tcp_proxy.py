"""A TCP proxy on 127.0.0.1 whose connections a test can cut or stall."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class TcpProxy:
    """Passes bytes on to ``upstream``; ``flowing`` cleared stalls them, ``cut`` breaks all connections.

    With ``tls`` the way upstream is encrypted by it.
    """

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        host, port = upstream.rsplit(":", 1)
        self.address = ""
        self.connections = 0
        self.passed_bytes = 0  # towards upstream
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._upstream = (host, int(port))
        self._tls = tls
        self._writers: set[asyncio.StreamWriter] = set()
        self._cut_after: int | None = None

    def cut(self) -> None:
        """Reset every connection; new ones are accepted."""
        for writer in self._writers:
            writer.transport.abort()

    def cut_after(self, num_bytes: int) -> None:
        """Reset every connection once ``num_bytes`` more have gone upstream."""
        self._cut_after = self.passed_bytes + num_bytes

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side closes it or it is cut."""
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._upstream, ssl=self._tls)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, far_writer, count=True))
                tasks.create_task(self._pass(far_reader, writer, count=False))
        except* OSError:
            pass
        finally:
            self._writers -= both
            for end in both:
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool) -> None:
        while data := await reader.read(1 << 14):
            await self.flowing.wait()
            if count:
                self.passed_bytes += len(data)
                if self._cut_after is not None and self.passed_bytes >= self._cut_after:
                    self._cut_after = None
                    self.cut()
                    raise ConnectionResetError
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError("the other side closed")


@asynccontextmanager
async def tcp_proxy(upstream: str, *, tls: ssl.SSLContext | None = None) -> AsyncGenerator[TcpProxy]:
    """A proxy in front of ``upstream``; its connections are gone at the end."""
    proxy = TcpProxy(upstream, tls)
    handlers: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await proxy.accept(reader, writer)
        finally:
            handlers.discard(task)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy.address = f"{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.flowing.set()
        proxy.cut()
        await asyncio.gather(*handlers, return_exceptions=True)
        await server.wait_closed()
