"""The Responses API: create a response, read and delete stored ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgepipe.gateway.access import owner_of
from edgepipe.gateway.completion_service import PreparedCompletion
from edgepipe.gateway.endpoints import Endpoint, fields
from edgepipe.gateway.json_pieces import TextParts
from edgepipe.gateway.problems import HttpProblem, bad_request
from edgepipe.gateway.protocols.answering import Answering, prioritised
from edgepipe.gateway.protocols.responses.body import Asked, ResponsesBody, asked, own_param
from edgepipe.gateway.protocols.responses.items import InputItem
from edgepipe.gateway.protocols.responses.output import Output, OutputItem
from edgepipe.gateway.protocols.responses.shape import ResponseHead, ResponsesShape
from edgepipe.gateway.protocols.responses.stored import ResponseStore, StoredResponse
from edgepipe.gateway.request_share import memory_of

_MAX_LISTED = 100  # items of one page
_LISTED = 20  # items of a page if the client does not say
_RESPONSE = fields("id", "object", "status", "output", id="string", object="string", output="array")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesHandlers:
    """Handlers of ``/v1/responses``."""

    answering: Answering
    store: ResponseStore = field(default_factory=ResponseStore)

    async def create(self, request: Request) -> Response:
        """``POST /v1/responses``."""
        body = await self.answering.bodies.read(request, ResponsesBody)
        owner = owner_of(request)
        earlier: Sequence[InputItem] = ()
        if body.previous_response_id is not None:
            earlier = self.store.earlier(owner, body.previous_response_id, now_s=self._now_s())
        wanted = asked(body, earlier)
        prepared = await self._prepare(request, wanted)
        self.answering.service.notes.tell(prepared.completion.model, wanted.tools.notes)
        new_id = self.answering.service.ids.new("resp").removeprefix("resp-")
        head = ResponseHead(
            response_id=f"resp_{new_id}",
            created_s=int(self.answering.service.clock.wall_s()),
            echo=_echo(body, prepared),
        )

        def keep(response: dict[str, Any], items: Sequence[OutputItem]) -> None:
            stored = StoredResponse(
                body=cast("dict[str, Any]", _joined(response)),
                given=(*earlier, *body.input),
                output=tuple(item.as_input() for item in items),
            )
            self.store.keep(owner, head.response_id, stored, now_s=self._now_s())

        shape = ResponsesShape(
            head,
            prepared,
            Output(suffix=new_id, form=wanted.tools.form),
            now_s=self.answering.service.clock.wall_s,
            on_end=keep if body.store else _forget,
        )
        return await self.answering.answer(request, prepared, shape, streams=body.stream)

    async def retrieve(self, request: Request) -> Response:
        """``GET /v1/responses/{id}``."""
        if request.query_params.get("stream") == "true":
            raise bad_request("stored responses are not streamed", param="stream", code="unsupported_parameter")
        return self.answering.answers.json(self._stored(request).body)

    async def delete(self, request: Request) -> Response:
        """``DELETE /v1/responses/{id}``."""
        response_id = request.path_params["id"]
        self.store.delete(owner_of(request), response_id, now_s=self._now_s())
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """``GET /v1/responses/{id}/input_items``: the newest first, unless ``order`` is ``asc``."""
        given, query = self._stored(request).given, request.query_params
        items = [item.shown(f"item_{place}") for place, item in enumerate(given)]
        if _one_of(query.get("order", "desc"), "order", ("asc", "desc")) == "desc":
            items.reverse()
        start = 0
        if (after := query.get("after")) is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise bad_request("after must be the id of an item", param="after")
            start = places[0] + 1
        page = items[start : start + _limit(query.get("limit"))]
        body = {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
            "has_more": start + len(page) < len(items),
        }
        return self.answering.answers.json(body)

    async def embeddings(self, request: Request) -> Response:
        """``POST /v1/embeddings``: not supported."""
        raise no_embeddings()

    def _stored(self, request: Request) -> StoredResponse:
        return self.store.get(owner_of(request), request.path_params["id"], now_s=self._now_s())

    def _now_s(self) -> float:
        return self.answering.service.clock.monotonic_s()

    async def _prepare(self, request: Request, wanted: Asked) -> PreparedCompletion:
        """Prepare the request. Its problems name the fields of this API."""
        try:
            return await self.answering.service.chat(
                prioritised(wanted.chat, request), owner=owner_of(request), memory=memory_of(request)
            )
        except HttpProblem as problem:
            problem.param = own_param(problem.param, wanted.tools.places)
            raise


def no_embeddings() -> HttpProblem:
    """Build the problem of requests for embeddings."""
    text = "edgepipe computes no embeddings: embedding models fit one machine, so any local server of them will do"
    return HttpProblem(status=400, message=text, code="unsupported")


def _forget(response: dict[str, Any], items: Sequence[OutputItem]) -> None:
    """Store nothing: the request has ``store: false``."""


def _echo(body: ResponsesBody, prepared: PreparedCompletion) -> dict[str, Any]:
    """Return what the request set, and the values in use where it set none."""
    sampling = prepared.completion.requests[0].sampling
    form = body.text.format if body.text is not None and body.text.format else {"type": "text"}
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {
        "model": prepared.completion.model,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "flex" if body.service_tier in ("flex", "batch") else "default",
        "store": body.store,
        "temperature": sampling.temperature,
        "text": {"format": form},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "top_p": sampling.top_p,
        "user": body.user,
    }


def _joined(value: object) -> object:
    """Return a body with its texts joined."""
    if isinstance(value, TextParts):
        return "".join(value.parts)
    if isinstance(value, dict):
        return {name: _joined(each) for name, each in cast("dict[str, object]", value).items()}
    return [_joined(each) for each in cast("list[object]", value)] if isinstance(value, list) else value


def _one_of(value: str, name: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise bad_request(f"{name} must be {' or '.join(allowed)}", param=name)
    return value


def _limit(text: str | None) -> int:
    if text is None:
        return _LISTED
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MAX_LISTED):
        raise bad_request(f"limit must be 1 to {_MAX_LISTED}", param="limit")
    return int(text)


def responses_endpoints(answering: Answering) -> list[Endpoint]:
    """Return the endpoints of this protocol."""
    handlers, group = ResponsesHandlers(answering=answering), "Responses"
    return [
        Endpoint(
            method="POST",
            path="/v1/responses",
            handler=handlers.create,
            group=group,
            summary="Answer a conversation of items.",
            body=ResponsesBody,
            answer=_RESPONSE,
            streams=ResponsesShape.media_type,
        ),
        Endpoint(
            method="GET",
            path="/v1/responses/{id}",
            handler=handlers.retrieve,
            group=group,
            summary="Show a stored response.",
            answer=_RESPONSE,
        ),
        Endpoint(
            method="DELETE",
            path="/v1/responses/{id}",
            handler=handlers.delete,
            group=group,
            summary="Forget a stored response.",
            answer=fields("id", "object", "deleted", deleted="boolean"),
        ),
        Endpoint(
            method="GET",
            path="/v1/responses/{id}/input_items",
            handler=handlers.input_items,
            group=group,
            summary="List the items of a stored response's prompt.",
            answer=fields("object", "data", "has_more", data="array", has_more="boolean"),
            query=("limit", "order", "after"),
        ),
        Endpoint(
            method="POST",
            path="/v1/embeddings",
            handler=handlers.embeddings,
            group="OpenAI",
            summary="Not supported: answers 400.",
        ),
    ]
