"""OpenAI's two endpoints: read a request, run it and answer it. No handler blocks the event loop."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from edgepipe.gateway.access import owner_of
from edgepipe.gateway.completion_service import PreparedCompletion
from edgepipe.gateway.endpoints import Endpoint, fields
from edgepipe.gateway.protocols.answering import Answering
from edgepipe.gateway.protocols.openai.shape import ChatShape, Head, TextShape
from edgepipe.gateway.request_share import memory_of
from edgepipe.gateway.schema import BodyT, ChatBody, CompletionBody, RequestBody

_PRIORITY_HEADER = "x-edgepipe-priority"  # interactive | batch, for clients that cannot send service_tier
_ANSWER = fields(
    "id", "object", "created", "model", "choices", "usage", id="string", created="integer", choices="array"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIHandlers:
    """Handlers of OpenAI's endpoints. The routing layer turns HttpProblem and EdgepipeError into responses."""

    answering: Answering

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body = await self.answering.bodies.read(request, ChatBody)
        prepared = await self.answering.service.chat(
            _prioritised(body, request), owner=owner_of(request), memory=memory_of(request)
        )
        head = self._head("chatcmpl", body, prepared)
        shape = ChatShape(head, prepared, streams=bool(body.stream))
        return await self.answering.answer(request, prepared, shape, streams=bool(body.stream))

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body = await self.answering.bodies.read(request, CompletionBody)
        prepared = await self.answering.service.complete(
            _prioritised(body, request), owner=owner_of(request), memory=memory_of(request)
        )
        head = self._head("cmpl", body, prepared)
        return await self.answering.answer(request, prepared, TextShape(head, prepared), streams=bool(body.stream))

    def _head(self, prefix: str, body: RequestBody, prepared: PreparedCompletion) -> Head:
        return Head.of(
            body,
            prepared,
            response_id=self.answering.service.ids.new(prefix),
            created_s=int(self.answering.service.clock.wall_s()),
        )


def _prioritised(body: BodyT, request: Request) -> BodyT:
    if request.headers.get(_PRIORITY_HEADER, "").lower() == "batch":
        return body.model_copy(update={"service_tier": "batch"})
    return body


def openai_endpoints(answering: Answering) -> list[Endpoint]:
    """Return the endpoints of this protocol."""
    handlers = OpenAIHandlers(answering=answering)
    return [
        Endpoint(
            method="POST",
            path="/v1/chat/completions",
            handler=handlers.chat,
            group="OpenAI",
            summary="Continue a conversation.",
            body=ChatBody,
            answer=_ANSWER,
            streams="text/event-stream",
        ),
        Endpoint(
            method="POST",
            path="/v1/completions",
            handler=handlers.complete,
            group="OpenAI",
            summary="Continue prompts.",
            body=CompletionBody,
            answer=_ANSWER,
            streams="text/event-stream",
        ),
    ]
