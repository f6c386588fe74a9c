"""Counts every request against its user's share, from its header to the end of its answer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from edgepipe.errors import QueueFull
from edgepipe.gateway.access import OPEN_PATHS
from edgepipe.gateway.problems import from_error
from edgepipe.gateway.protocols.error_forms import problem_response
from edgepipe.gateway.shares import Holding, Shares


class RequestShare:
    """Middleware behind the guard. Refuses requests of an owner that has its share of connections in use.

    ``scope["state"]["memory"]`` is the request's ``Holding`` of memory, which is given back after the answer.
    """

    def __init__(self, app: ASGIApp, *, requests: Shares, memory: Shares) -> None:
        self._app = app
        self._requests = requests
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it. Supervisors' requests always pass."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        owner: str = scope["state"]["owner"]
        with self._requests.holding(owner) as connection, self._memory.holding(owner) as memory:
            try:
                connection.take(1)
            except QueueFull as exc:
                problem = from_error(exc)
                problem.headers = {**problem.headers, "Connection": "close"}
                await problem_response(problem, path=scope["path"])(scope, receive, send)
                return
            scope["state"]["memory"] = memory
            await self._app(scope, receive, send)


def memory_of(request: Request) -> Holding:
    """Return the memory that a request holds."""
    return request.scope["state"]["memory"]
