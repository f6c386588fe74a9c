"""The page's streams that need a session: a pairing window, which lasts as long as its stream, and the node's log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from edgepipe.addresses import host_and_port
from edgepipe.errors import RequestInvalid
from edgepipe.gateway.ui.topic import event
from edgepipe.link.admin_client import Admin
from edgepipe.wire.trust import (
    InviteAnswer,
    InviteAsks,
    InviteCommand,
    InviteEvent,
    InviteFailed,
    InviteJoined,
    InviteOpened,
    InviteStart,
)

CODE_S = 300
_KEY_CHARS = 8  # beginning of a node id: enough to compare by eye
_LOG_LINES = 500


class Inviting:
    """Opens one pairing window at a time; the daemon refuses a second one."""

    def __init__(self) -> None:
        self._commands: asyncio.Queue[InviteCommand] | None = None  # set while a machine waits for an answer

    async def events(self, admin: Admin, role: str) -> AsyncGenerator[bytes]:
        """Open a window and yield what happens. Closing the generator ends the window. Raises the daemon's errors."""
        commands: asyncio.Queue[InviteCommand] = asyncio.Queue()
        commands.put_nowait(InviteCommand(command=InviteStart(role=role, valid_s=CODE_S)))
        try:
            async with aclosing(admin.invite(_each(commands))) as found:
                async for each in found:
                    self._commands = commands if isinstance(each.event, InviteAsks) else None
                    yield event("invite", _json(each))
        finally:
            self._commands = None

    def answer(self, *, accept: bool) -> None:
        """Let the waiting machine in, or refuse it. Raises RequestInvalid if none waits."""
        if self._commands is None:
            raise RequestInvalid("no machine waits for an answer", next_step="invite it again")
        self._commands.put_nowait(InviteCommand(command=InviteAnswer(accept=accept)))
        self._commands = None


async def log_events(admin: Admin) -> AsyncGenerator[bytes]:
    """Yield the newest lines of the node's log, then new ones."""
    async with aclosing(admin.logs(lines=_LOG_LINES, follow=True)) as lines:
        async for line in lines:
            yield event("line", line.text)


async def _each(commands: asyncio.Queue[InviteCommand]) -> AsyncIterator[InviteCommand]:
    while True:
        yield await commands.get()


def _json(each: InviteEvent) -> dict[str, Any]:
    """Return an event as the page shows it."""
    match each.event:
        case InviteOpened() as opened:
            where = host_and_port(opened.address)[0] if opened.usual_port else opened.address
            return {"kind": "opened", "code": opened.code, "where": where, "valid_s": opened.valid_s}
        case InviteFailed() as failed:
            what, left = failed.error.what, failed.tries_left
            return {"kind": "failed", "name": failed.name, "address": failed.address, "what": what, "tries_left": left}
        case InviteAsks() as asks:
            key = asks.node_id[:_KEY_CHARS]
            return {"kind": "asks", "name": asks.name, "address": asks.address, "key": key, "seconds": asks.at_most_s}
        case InviteJoined() as joined:
            return {"kind": "joined", "name": joined.name, "role": joined.role}
