"""Anthropic's endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgepipe.gateway.access import owner_of
from edgepipe.gateway.endpoints import Endpoint, fields
from edgepipe.gateway.engine_types import RoutedModel
from edgepipe.gateway.model_facts import ModelFacts
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.answering import Answering, prioritised
from edgepipe.gateway.protocols.anthropic.body import CountBody, MessagesBody
from edgepipe.gateway.protocols.anthropic.shape import MessagesShape
from edgepipe.gateway.request_share import memory_of

VERSION_HEADER = "anthropic-version"
"""Only clients of this API send it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnthropicHandlers:
    """Handlers of Anthropic's endpoints."""

    answering: Answering

    async def messages(self, request: Request) -> Response:
        """``POST /v1/messages``."""
        body = await self.answering.bodies.read(request, MessagesBody)
        service = self.answering.service
        try:
            chat = prioritised(body.chat(), request)
            prepared = await service.chat(chat, owner=owner_of(request), memory=memory_of(request))
        except HttpProblem as problem:
            raise body.renamed(problem) from problem
        service.notes.tell(prepared.completion.model, body.notes())
        message_id = service.ids.new("msg").replace("-", "_", 1)
        shape = MessagesShape(prepared, message_id=message_id, shows_thinking=body.shows_thinking)
        return await self.answering.answer(request, prepared, shape, streams=bool(body.stream))

    async def count_tokens(self, request: Request) -> Response:
        """``POST /v1/messages/count_tokens``: the tokens of the prompt, tools included."""
        body = await self.answering.bodies.read(request, CountBody)
        try:
            count = await self.answering.service.count_prompt_tokens(body.chat(), owner=owner_of(request))
        except HttpProblem as problem:
            raise body.renamed(problem) from problem
        return self.answering.answers.json({"input_tokens": count})


def model_info(served: RoutedModel, facts: ModelFacts) -> dict[str, Any]:
    """Describe a model in Anthropic's form."""
    created = datetime.fromtimestamp(int(facts.modified_s), UTC)
    return {
        "type": "model",
        "id": served.name,
        "display_name": served.name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": served.context_length,
        "max_tokens": served.context_length,
    }


def model_list(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return all models as one page."""
    ids = [model["id"] for model in models]
    return {
        "data": list(models),
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


def anthropic_endpoints(answering: Answering) -> list[Endpoint]:
    """Return the endpoints of this protocol."""
    handlers = AnthropicHandlers(answering=answering)
    return [
        Endpoint(
            method="POST",
            path="/v1/messages",
            handler=handlers.messages,
            group="Anthropic",
            summary="Continue a conversation.",
            body=MessagesBody,
            answer=fields("id", "type", "role", "model", "content", "usage", id="string", content="array"),
            streams="text/event-stream",
        ),
        Endpoint(
            method="POST",
            path="/v1/messages/count_tokens",
            handler=handlers.count_tokens,
            group="Anthropic",
            summary="Count the tokens of a conversation's prompt.",
            body=CountBody,
            answer=fields("input_tokens", input_tokens="integer"),
        ),
    ]
