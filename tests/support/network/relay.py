"""Reaches what listens on a lab host's own 127.0.0.1 from outside of the lab."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from tests.support.network.lan import LanHost


@asynccontextmanager
async def relay(host: LanHost, port: int) -> AsyncGenerator[int]:
    """A port of this machine's 127.0.0.1 whose connections end at ``port`` of the host's."""
    handlers: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        handlers.add(task)
        try:
            far = await host.call(partial(socket.create_connection, ("127.0.0.1", port), 5.0))
            far.setblocking(False)
            far_reader, far_writer = await asyncio.open_connection(sock=far)
            try:
                await asyncio.gather(_pass(reader, far_writer), _pass(far_reader, writer))
            finally:
                far_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # the client sees its connection break; asyncio would complain of a handler that was cancelled
        finally:
            writer.transport.abort()
            handlers.discard(task)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Bytes one way until their end, which is passed on."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
