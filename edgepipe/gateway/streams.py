"""Answers that end when the client leaves: its disconnect cancels the work at once, not at the next write."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgepipe.errors import EdgepipeError
from edgepipe.gateway.models import News
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.turns import Turns
from edgepipe.safe_text import one_line

# Time from a client's end to the first comment that shows whether it has left; later comments come slower.
_PROBE_S = 0.05
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTimeouts:
    """Deadlines and intervals of a stream."""

    hold_s: float = 1.0  # wait for the first token: an error until then has an HTTP status, a later error is an event
    recovering_s: float = 2.0  # pause between comments while a model recovers
    heartbeat_s: float = 15.0  # proxies close streams after 30 to 60 s of silence
    pause_s: float = 10.0  # some clients end a stream after minutes without an event, whatever comments arrive
    send_s: float = 30.0  # a client that reads no byte for so long counts as gone


class EventStream(Response):
    """A streamed answer: events, and comments during pauses. Ends early if the client leaves or stalls.

    For a slow client only the request's log grows: the stream builds an event when the client can take it.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        opening: Iterable[bytes],
        on_error: Callable[[EdgepipeError], bytes],
        place: AbstractContextManager[object],
        timeouts: StreamTimeouts,
        turns: Turns,
        news: Callable[[], News] = News,
        pause: Callable[[], bytes] = bytes,
        media_type: str = "text/event-stream",
    ) -> None:
        """
        events    pieces of events; the last piece of an event, and no other, ends with a line break
        opening   pieces of events, sent if no event comes within ``hold_s``, else right before the first event
        on_error  the event that ends a stream after an error
        place     context that the stream holds until its end
        news      called repeatedly: the text of comments while the model recovers, and once when it continues
        pause     called after ``pause_s`` without an event: an event for clients that do not count comments, or empty
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._opening = opening
        self._on_error = on_error
        self._place = place
        self._timeouts = timeouts
        self._turns = turns
        self._news = news
        self._pause = pause
        self._heartbeat = b": still working\n\n" if media_type == "text/event-stream" else b""
        self._sent = 0
        self._num_events = 0  # sent parts of events, without comments
        self._in_event = False  # a comment would break the event
        self._opened = False  # the whole opening is sent
        self._begun = False  # the first event is sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the client leaves. Raises an error that occurs before the first byte."""
        with self._place:
            async with aclosing(self._events):
                half_closed: asyncio.Event = scope["state"]["connection"].half_closed
                await send_to_client(self._send_all(send, half_closed), scope, receive, timeouts=self._timeouts)

    async def _send_all(self, send: Send, half_closed: asyncio.Event) -> None:
        first = asyncio.ensure_future(anext(self._events, b""))
        try:
            # Without comments nothing shows whether a client has left, so such an answer begins with its first event.
            await asyncio.wait({first}, timeout=self._timeouts.hold_s if self._heartbeat else None)
            if first.done():
                first.result()  # raises its error
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_parts(send, first, half_closed)
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait({first})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_parts(self, send: Send, first: asyncio.Future[bytes], half_closed: asyncio.Event) -> None:
        beating = asyncio.create_task(self._beat(send, half_closed, first), name="heartbeat")
        try:
            for part in self._opening:
                await self._send_event(send, part)
                if self._in_event:
                    await self._turns.take()
            self._opened = True
            await self._send_event(send, await first)
            self._begun = True
            async for part in self._events:
                await self._send_event(send, part)
        except EdgepipeError as exc:
            await self._send_event(send, self._on_error(exc))
        finally:
            beating.cancel()

    async def _send_event(self, send: Send, part: bytes) -> None:
        self._num_events += 1
        await self._send(send, part)

    async def _send(self, send: Send, part: bytes) -> None:
        self._sent += 1
        if not part:
            return
        ends = part.endswith(b"\n")
        self._in_event = self._in_event or not ends
        await send_part(send, part, timeouts=self._timeouts)
        self._in_event = not ends

    async def _beat(self, send: Send, half_closed: asyncio.Event, first: asyncio.Future[bytes]) -> None:
        """Send comments while no other part was sent for a while, and sooner to a client that may have left.

        The event of a pause comes after the opening, and before no event that has been made: events are numbered.
        """
        sent, silent_s, recovering, reading = self._sent, 0.0, False, ""
        events, eventless_s = self._num_events, 0.0
        every_s, probe_s = min(self._timeouts.recovering_s, self._timeouts.heartbeat_s), _PROBE_S
        while self._heartbeat:
            if half_closed.is_set():
                await asyncio.sleep(min(probe_s, every_s))
                probe_s *= 2
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(half_closed.wait(), every_s)
            news, silent_s = self._news(), silent_s + every_s if sent == self._sent else 0.0
            eventless_s = eventless_s + every_s if events == self._num_events else 0.0
            may_pause = self._opened and (self._begun or not first.done())
            comment = b""
            if self._in_event:
                pass
            elif eventless_s >= self._timeouts.pause_s and may_pause and (event := self._pause()):
                comment, eventless_s = event, 0.0
            elif news.recovering:
                comment = _comment(f"recovering: {news.text}" if news.text else "recovering")
            elif recovering and news.text:
                comment = _comment(news.text)
            elif news.reading != reading and news.reading:
                comment = _comment(f"reading {news.reading}")
            elif silent_s >= self._timeouts.heartbeat_s or (half_closed.is_set() and silent_s):
                comment = self._heartbeat
            recovering, reading, silent_s = news.recovering, news.reading, 0.0 if comment else silent_s
            try:
                await self._send(send, comment)
            except _Stalled:
                return  # the sender of parts notices, too
            sent, events = self._sent, self._num_events


def _comment(text: str) -> bytes:
    """Write a comment on one line: line breaks in a name must not begin an event."""
    return f": {one_line(text)}\n\n".encode()


class _Stalled(Exception):
    """The client reads no data."""


async def send_part(send: Send, part: bytes, *, timeouts: StreamTimeouts) -> None:
    """Send a part of an answer once the client takes it. For ``send_to_client``, which handles a client that does not.

    Returns without a turn of the event loop if the client keeps up.
    """
    try:
        async with asyncio.timeout(timeouts.send_s):
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except TimeoutError:
        raise _Stalled from None


async def send_to_client(
    sending: Coroutine[Any, Any, None], scope: Scope, receive: Receive, *, timeouts: StreamTimeouts
) -> None:
    """Run ``sending`` until it ends, the client leaves, or the client reads nothing for ``send_s``."""
    try:
        await first_of(sending, receive)
    except _Stalled:
        logger.info("a client read no data for %.0f s, its request is cancelled", timeouts.send_s)
        scope["state"]["connection"].abort()
        await _disconnected(receive)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result or raise its error. If the client leaves first, cancel it and raise HttpProblem 499."""
    result = await first_of(work, request.receive)
    if result is None:
        raise HttpProblem(status=499, message="the client left", code="client_closed_request")
    return result


async def first_of(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Return the work's result, or None if the client leaves first. Both tasks have ended on return."""
    async with asyncio.TaskGroup() as tasks:
        worker = tasks.create_task(_outcome(work), name="answer")
        watch = tasks.create_task(_disconnected(receive), name="watch-client")
        await asyncio.wait({worker, watch}, return_when=asyncio.FIRST_COMPLETED)
        finished = worker.done()
        worker.cancel()
        watch.cancel()
    return worker.result().get() if finished else None


class _Outcome(Generic[T]):
    """Result or expected error of a task. The error is a value, because a task group would wrap it."""

    def __init__(self, value: T | None = None, error: Exception | None = None) -> None:
        self._value, self._error = value, error

    def get(self) -> T | None:
        if self._error is not None:
            raise self._error
        return self._value


async def _outcome(work: Coroutine[Any, Any, T]) -> _Outcome[T]:
    try:
        return _Outcome(await work)
    except (EdgepipeError, HttpProblem, OSError, _Stalled) as exc:
        return _Outcome(error=exc)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
