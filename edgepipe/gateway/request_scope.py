"""Gives every request an id, which its response carries, and the path of its target, before any other handler."""

from __future__ import annotations

import re
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgepipe.ids import IdSource

REQUEST_ID = b"x-request-id"
_CLIENT_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")
_ABSOLUTE = re.compile(r"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


class RequestScope:
    """Middleware that adds ``X-Request-Id`` (the client's or a new one) to responses, and reads absolute targets."""

    def __init__(self, app: ASGIApp, *, ids: IdSource) -> None:
        self._app = app
        self._ids = ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
        request_id = given if _CLIENT_ID.fullmatch(given) else self._ids.new("req").encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (REQUEST_ID, request_id)]}
            await send(message)

        await self._app(_with_path(scope), receive, send_with_id)


def _with_path(scope: Scope) -> Scope:
    """Return the scope with the path of an absolute target, as clients of proxies send it.

    The target's host overrides the Host header (RFC 9112, 3.2.2).
    """
    target = _ABSOLUTE.fullmatch(scope["path"])
    if target is None:
        return scope
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    host = target[1].encode("latin-1", "replace")
    changed: dict[str, Any] = {"path": target[2] or "/", "headers": [(b"host", host), *others]}
    changed["raw_path"] = _ABSOLUTE.sub(r"\2", scope["raw_path"].decode("latin-1")).encode("latin-1") or b"/"
    return {**scope, **changed}
