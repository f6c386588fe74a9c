"""Routes and the guards before them: who may ask (Host, Origin), and errors in one shape for everything."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgepipe.errors import EdgepipeError, ModelUnknown
from edgepipe.gateway.door import Door
from edgepipe.gateway.problems import HttpProblem, from_error

logger = logging.getLogger(__name__)
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def make_app(door: Door, *, host_names: Iterable[str] = ()) -> ASGIApp:
    """The ASGI application. ``host_names``: names and addresses besides loopback's under which it may be asked."""
    routes = [
        Route("/v1/chat/completions", door.chat, methods=["POST"]),
        Route("/v1/completions", door.complete, methods=["POST"]),
        Route("/v1/models", door.list_models, methods=["GET"]),
        Route("/v1/models/{id:path}", door.one_model, methods=["GET"]),
        Route("/health", door.health, methods=["GET"]),
        Route("/ready", door.ready, methods=["GET"]),
    ]
    allowed = LOOPBACK_NAMES | {name.lower() for name in host_names}
    return Starlette(
        routes=routes,
        middleware=[Middleware(_Guard, allowed=allowed)],
        exception_handlers={
            HttpProblem: _show_problem,
            EdgepipeError: _show_error,
            HTTPException: _show_http,
            Exception: _show_bug,
        },
    )


class _Guard:
    """Refuses requests that a foreign web page may have caused: Host and Origin must name this machine, always."""

    def __init__(self, app: ASGIApp, *, allowed: frozenset[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        problem = self._problem(headers)
        app = self._app if problem is None else _response(problem)
        await app(scope, receive, send)

    def _problem(self, headers: list[tuple[str, str]]) -> HttpProblem | None:
        hosts = [value for name, value in headers if name == "host"]
        if len(hosts) != 1 or host_name(hosts[0]) not in self._allowed:
            return HttpProblem(
                status=421, message="this server does not answer for that Host", code="misdirected_request"
            )
        for name, value in headers:
            if name == "origin" and host_name(value.partition("://")[2]) not in self._allowed:
                return HttpProblem(status=403, message="this Origin may not ask here", code="origin_not_allowed")
        return None


def host_name(value: str) -> str | None:
    """The name in a Host header, lower case, without its port; None if it is malformed."""
    name, colon, port = value.strip().lower().rpartition(":")
    if not colon or value.endswith("]"):
        return value.strip().lower()
    return name if port.isascii() and port.isdigit() else None


def _response(problem: HttpProblem) -> Response:
    return JSONResponse(problem.body(), status_code=problem.status, headers=dict(problem.headers))


async def _show_problem(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HttpProblem)
    return _response(exc)


async def _show_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, EdgepipeError)
    return _response(from_error(exc, param="model" if isinstance(exc, ModelUnknown) else None))


async def _show_http(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code, "http_error")
    text = f"{request.method} {request.url.path[:200]}: {exc.detail}"
    return _response(HttpProblem(status=exc.status_code, message=text, code=code, headers=exc.headers or {}))


async def _show_bug(request: Request, exc: Exception) -> Response:
    problem = HttpProblem(status=500, message="edgepipe made a mistake; its log has the details", code="internal_error")
    return _response(problem)
