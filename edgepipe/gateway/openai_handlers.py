"""OpenAI's two endpoints: read a request, run it, answer whole or as a stream. No handler blocks the event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from edgepipe.gateway.access import owner_of
from edgepipe.gateway.bodies import BodyReader
from edgepipe.gateway.completion_service import CompletionService, PreparedCompletion
from edgepipe.gateway.pieced import PiecedAnswers
from edgepipe.gateway.problems import from_error
from edgepipe.gateway.request_share import memory_of
from edgepipe.gateway.responses import ChatShape, GatheredChoice, Head, Shape, TextShape
from edgepipe.gateway.schema import BodyT, ChatBody, CompletionBody, RequestBody
from edgepipe.gateway.streams import EventStream, until_disconnect
from edgepipe.gateway.text import Delta
from edgepipe.gateway.turns import Turns

_PRIORITY_HEADER = "x-edgepipe-priority"  # interactive | batch, for clients that cannot send service_tier


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIHandlers:
    """Handlers of OpenAI's endpoints. The routing layer turns HttpProblem and EdgepipeError into responses."""

    service: CompletionService
    bodies: BodyReader
    answers: PiecedAnswers

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = await self.bodies.read(request, ChatBody)
        prepared = await self.service.chat(
            _prioritised(body, request), owner=owner_of(request), memory=memory_of(request)
        )
        head = self._head("chatcmpl", body, prepared)
        return await self.answer(
            request, prepared, ChatShape(head, prepared, streams=bool(body.stream)), bool(body.stream)
        )

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = await self.bodies.read(request, CompletionBody)
        prepared = await self.service.complete(
            _prioritised(body, request), owner=owner_of(request), memory=memory_of(request)
        )
        head = self._head("cmpl", body, prepared)
        return await self.answer(request, prepared, TextShape(head, prepared), bool(body.stream))

    async def answer(self, request: Request, prepared: PreparedCompletion, shape: Shape, streams: bool) -> Response:
        """Run the completion and answer in ``shape``."""
        deltas = self.service.run(prepared)
        if streams:
            return EventStream(
                _events(deltas, shape, self.answers.turns),
                opening=shape.opening(),
                on_error=lambda error: shape.error(from_error(error)),
                place=prepared.ticket,
                timeouts=self.answers.timeouts,
                turns=self.answers.turns,
                news=prepared.news,
                media_type=shape.media_type,
            )
        with ExitStack() as stack:
            stack.enter_context(prepared.ticket)
            choices = await until_disconnect(request, _gather(deltas, prepared.completion.num_choices))
            return self.answers.of(shape.whole(choices), place=stack.pop_all())

    def _head(self, prefix: str, body: RequestBody, prepared: PreparedCompletion) -> Head:
        return Head.of(
            body, prepared, response_id=self.service.ids.new(prefix), created_s=int(self.service.clock.wall_s())
        )


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


async def _events(deltas: AsyncGenerator[Delta], shape: Shape, turns: Turns) -> AsyncGenerator[bytes]:
    async with aclosing(deltas):
        async for delta in deltas:
            for place, part in enumerate(shape.delta(delta)):
                if place:
                    await turns.take()
                yield part
    yield shape.ending()
