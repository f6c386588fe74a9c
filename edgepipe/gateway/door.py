"""OpenAI's two endpoints: read a request, run it, answer whole or as a stream. Everything waits; nothing blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgepipe.gateway.body import parse_json_object, read_body
from edgepipe.gateway.desk import Desk, Order
from edgepipe.gateway.problems import from_error
from edgepipe.gateway.responses import ChatShape, GatheredChoice, Head, Shape, TextShape
from edgepipe.gateway.schema import BodyT, ChatBody, CompletionBody, RequestBody, validate
from edgepipe.gateway.streams import EventStream, StreamTimeouts, until_disconnect
from edgepipe.gateway.text import Delta

_INLINE_BYTES = 32 << 10  # larger bodies are parsed in a thread
_PRIORITY_HEADER = "x-edgepipe-priority"  # interactive | batch, for clients that cannot send service_tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The handlers. The routing layer turns HttpProblem and EdgepipeError into responses."""

    desk: Desk
    timeouts: StreamTimeouts

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = await read_checked(request, ChatBody)
        order = await self.desk.chat(_prioritised(body, request), owner=owner_of(request))
        head = self._head("chatcmpl", body, order)
        return await self.answer(request, order, ChatShape(head, order, streams=bool(body.stream)), bool(body.stream))

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = await read_checked(request, CompletionBody)
        order = await self.desk.complete(_prioritised(body, request), owner=owner_of(request))
        head = self._head("cmpl", body, order)
        return await self.answer(request, order, TextShape(head, order), bool(body.stream))

    async def answer(self, request: Request, order: Order, shape: Shape, streams: bool) -> Response:
        """Run the order and answer in a shape."""
        deltas = self.desk.run(order)
        if streams:
            return EventStream(
                _events(deltas, shape),
                opening=shape.opening(),
                on_error=lambda error: shape.error(from_error(error)),
                place=order.ticket,
                timeouts=self.timeouts,
                news=lambda: order.entry.news,
                media_type=shape.media_type,
            )
        with order.ticket:
            choices = await until_disconnect(request, _gather(deltas, order.completion.num_choices))
        return JSONResponse(shape.whole(choices))

    def _head(self, prefix: str, body: RequestBody, order: Order) -> Head:
        return Head.of(body, order, response_id=self.desk.ids.new(prefix), created_s=int(self.desk.clock.wall_s()))


async def read_raw(request: Request) -> Mapping[str, Any]:
    """The body as a JSON object. Raises HttpProblem."""
    body = await read_body(request)
    if len(body) <= _INLINE_BYTES:
        return parse_json_object(body)
    return await asyncio.to_thread(parse_json_object, body)


async def read_checked(request: Request, kind: type[BodyT]) -> BodyT:
    """The body as a checked value. Raises HttpProblem."""
    body = await read_body(request)

    def checked() -> BodyT:
        return validate(kind, parse_json_object(body))

    return checked() if len(body) <= _INLINE_BYTES else await asyncio.to_thread(checked)


def owner_of(request: Request) -> str:
    """Whose place a request takes: a fingerprint of its key, empty without one."""
    return request.scope["state"]["owner"]


def _prioritised(body: BodyT, request: Request) -> BodyT:
    if request.headers.get(_PRIORITY_HEADER, "").lower() == "batch":
        return body.model_copy(update={"service_tier": "batch"})
    return body


async def _gather(deltas: AsyncGenerator[Delta], num_choices: int) -> list[GatheredChoice]:
    choices = [GatheredChoice() for _ in range(num_choices)]
    async with aclosing(deltas):
        async for delta in deltas:
            choices[delta.choice].add(delta)
    return choices


async def _events(deltas: AsyncGenerator[Delta], shape: Shape) -> AsyncGenerator[bytes]:
    async with aclosing(deltas):
        async for delta in deltas:
            if event := shape.delta(delta):
                yield event
    yield shape.ending()
