"""OpenAI's two endpoints: read a request, run it and answer it. No handler blocks the event loop."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from edgepipe.gateway.access import owner_of
from edgepipe.gateway.completion_service import PreparedCompletion
from edgepipe.gateway.endpoints import Endpoint, fields
from edgepipe.gateway.protocols.answering import Answering, prioritised
from edgepipe.gateway.protocols.openai.shape import ChatShape, Head, TextShape
from edgepipe.gateway.protocols.shape import Shape
from edgepipe.gateway.request_share import memory_of
from edgepipe.gateway.schema import ChatBody, CompletionBody, RequestBody
from edgepipe.gateway.shares import Holding

_DETAILS_HEADER = "x-edgepipe-details"  # 1: the answer's last part names the machines that computed it
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
        return await self._answer(request, body, with_details=request.headers.get(_DETAILS_HEADER) == "1")

    async def complete(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        return await self._answer(request, await self.answering.bodies.read(request, CompletionBody))

    async def prepared(
        self, body: ChatBody | CompletionBody, *, owner: str, memory: Holding, with_details: bool = False
    ) -> tuple[PreparedCompletion, Shape]:
        """Prepare a request and the form of its answer. Raises HttpProblem, EdgepipeError.

        The caller holds the ticket of the completion at once. ``memory``: the body's; the ticket's takes its place.
        """
        service = self.answering.service
        if isinstance(body, ChatBody):
            prepared = await service.chat(body, owner=owner, memory=memory)
            head = self._head("chatcmpl", body, prepared, with_details=with_details)
            return prepared, ChatShape(head, prepared, streams=bool(body.stream))
        prepared = await service.complete(body, owner=owner, memory=memory)
        return prepared, TextShape(self._head("cmpl", body, prepared), prepared)

    async def _answer(
        self, request: Request, body: ChatBody | CompletionBody, *, with_details: bool = False
    ) -> Response:
        prepared, shape = await self.prepared(
            prioritised(body, request), owner=owner_of(request), memory=memory_of(request), with_details=with_details
        )
        return await self.answering.answer(request, prepared, shape, streams=bool(body.stream))

    def _head(
        self, prefix: str, body: RequestBody, prepared: PreparedCompletion, *, with_details: bool = False
    ) -> Head:
        return Head.of(
            body,
            prepared,
            response_id=self.answering.service.ids.new(prefix),
            created_s=int(self.answering.service.clock.wall_s()),
            with_details=with_details,
        )


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
