"""Answers that end when the client leaves: its disconnect cancels the work, at once and not at the next write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgepipe.errors import EdgepipeError
from edgepipe.gateway.problems import HttpProblem

T = TypeVar("T")


class EventStream(Response):
    """Server-sent events. What can be refused is refused before this response is made: its status is 200."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the client leaves."""
        async with aclosing(self._events):
            await _first(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result or error. If the client leaves first, the work is cancelled and HttpProblem 499 raised."""
    result = await _first(work, request.receive)
    if result is None:
        raise HttpProblem(status=499, message="the client left", code="client_closed_request")
    return result


async def _first(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The work's result, or None if the client left before it ended. Both have ended on return."""
    async with asyncio.TaskGroup() as tasks:
        worker = tasks.create_task(_outcome(work), name="answer")
        watch = tasks.create_task(_disconnected(receive), name="watch-client")
        await asyncio.wait({worker, watch}, return_when=asyncio.FIRST_COMPLETED)
        finished = worker.done()
        worker.cancel()
        watch.cancel()
    return worker.result().get() if finished else None


class _Outcome(Generic[T]):
    """What a task came to. An expected error is carried as a value: a task group would wrap it."""

    def __init__(self, value: T | None = None, error: Exception | None = None) -> None:
        self._value, self._error = value, error

    def get(self) -> T | None:
        if self._error is not None:
            raise self._error
        return self._value


async def _outcome(work: Coroutine[Any, Any, T]) -> _Outcome[T]:
    try:
        return _Outcome(await work)
    except (EdgepipeError, HttpProblem, OSError) as exc:
        return _Outcome(error=exc)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
