"""Routes, the guard before them, and the answers to requests that no handler answers."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edgepipe.errors import EdgepipeError, ModelUnknown
from edgepipe.gateway.access import AccessRules, Guard
from edgepipe.gateway.batches.batch_handlers import batch_endpoints
from edgepipe.gateway.batches.service import BatchService
from edgepipe.gateway.bodies import BodyReader
from edgepipe.gateway.completion_service import CompletionService
from edgepipe.gateway.endpoints import Endpoint, fields
from edgepipe.gateway.key_tries import KeyTries
from edgepipe.gateway.openapi import make_document, make_page
from edgepipe.gateway.pieced import PiecedAnswers
from edgepipe.gateway.problems import HttpProblem, from_error
from edgepipe.gateway.protocols.answering import Answering
from edgepipe.gateway.protocols.anthropic.handlers import anthropic_endpoints
from edgepipe.gateway.protocols.error_forms import problem_response
from edgepipe.gateway.protocols.ollama.handlers import ollama_endpoints
from edgepipe.gateway.protocols.openai.handlers import openai_endpoints
from edgepipe.gateway.protocols.responses.handlers import responses_endpoints
from edgepipe.gateway.request_scope import RequestScope
from edgepipe.gateway.request_share import RequestShare
from edgepipe.gateway.schema import DetokenizeBody, TokenizeBody
from edgepipe.gateway.shares import Shares
from edgepipe.gateway.status_handlers import StatusHandlers
from edgepipe.gateway.tokenizing import TokenHandlers
from edgepipe.gateway.ui.page import Page
from edgepipe.gateway.ui.sessions import Sessions

logger = logging.getLogger(__name__)

_LIST = fields("object", "data", object="string", data="array")
_CARD = fields("id", "object", "created", "owned_by", id="string", created="integer")


def make_app(
    *,
    service: CompletionService,
    bodies: BodyReader,
    status_handlers: StatusHandlers,
    rules: AccessRules,
    sessions: Sessions,
    tries: KeyTries,
    answers: PiecedAnswers,
    page: Page,
    batches: BatchService,
    requests: Shares,
    memory: Shares,
) -> ASGIApp:
    """Build the ASGI application.

    requests  shares of the connections with a request in progress
    memory    shares of the memory of bodies and requests
    """
    answering = Answering(service=service, bodies=bodies, answers=answers)
    endpoints = [*_endpoints(answering, status_handlers), *batch_endpoints(batches, bodies, answers)]
    document = make_document(endpoints)
    text = json.dumps(document)

    async def openapi(request: Request) -> Response:
        return Response(text, media_type="application/json")

    async def docs(request: Request) -> Response:
        return HTMLResponse(make_page(document, host=request.headers["host"]), headers=_PAGE_HEADERS)

    text_of_root = next(each.handler for each in endpoints if each.path == "/")
    routes = [*page.routes(text=text_of_root)]
    routes += [Route(each.path, each.handler, methods=[each.method]) for each in endpoints]
    routes += [Route("/openapi.json", openapi, methods=["GET"]), Route("/docs", docs, methods=["GET"])]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Guard, rules=rules, sessions=sessions, tries=tries),
            Middleware(RequestShare, requests=requests, memory=memory),
        ],
        exception_handlers={
            HttpProblem: _show_problem,
            EdgepipeError: _show_error,
            HTTPException: _show_http([each.path for each in endpoints]),
            Exception: _show_bug,
        },
    )
    app.router.redirect_slashes = False  # many clients do not follow, and a body would be sent twice
    return RequestScope(app, ids=service.ids)


_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}


def _endpoints(answering: Answering, status_handlers: StatusHandlers) -> Sequence[Endpoint]:
    tokens = TokenHandlers(
        models=answering.service.models,
        bodies=answering.bodies,
        answers=answering.answers,
        threads=answering.service.threads,
    )
    return [
        *openai_endpoints(answering),
        *anthropic_endpoints(answering),
        *responses_endpoints(answering),
        *_models(status_handlers),
        *_status(status_handlers),
        *_tokens(tokens),
        *ollama_endpoints(answering),
    ]


def _models(status_handlers: StatusHandlers) -> list[Endpoint]:
    return [
        Endpoint(
            method="GET",
            path="/v1/models",
            handler=status_handlers.list_models,
            group="OpenAI",
            summary="List the served models.",
            answer=_LIST,
        ),
        Endpoint(
            method="GET",
            path="/v1/models/{id:path}",
            handler=status_handlers.one_model,
            group="OpenAI",
            summary="Show one model.",
            answer=_CARD,
        ),
    ]


def _status(status_handlers: StatusHandlers) -> list[Endpoint]:
    group = "Status"
    status = fields("status", status="string")
    return [
        Endpoint(
            method="GET",
            path="/health",
            handler=status_handlers.health,
            group=group,
            summary="Report that this gateway runs.",
            answer=status,
            open=True,
        ),
        Endpoint(
            method="GET",
            path="/ready",
            handler=status_handlers.ready,
            group=group,
            summary="Report whether a model is served; 503 if not.",
            answer=status,
            open=True,
        ),
        Endpoint(
            method="GET",
            path="/version",
            handler=status_handlers.version,
            group=group,
            summary="Show the versions of edgepipe and its protocol.",
            answer=fields("version", "protocol", version="string", protocol="integer"),
        ),
        Endpoint(
            method="GET",
            path="/metrics",
            handler=status_handlers.scrape,
            group=group,
            summary="Metrics for Prometheus.",
            media_type="text/plain",
        ),
    ]


def _tokens(tokens: TokenHandlers) -> list[Endpoint]:
    group = "Tokens"
    return [
        Endpoint(
            method="POST",
            path="/tokenize",
            handler=tokens.tokenize,
            group=group,
            summary="Tokenize a text or a conversation.",
            body=TokenizeBody,
            answer=fields("count", "max_model_len", "tokens", count="integer", tokens="array"),
        ),
        Endpoint(
            method="POST",
            path="/detokenize",
            handler=tokens.detokenize,
            group=group,
            summary="Convert token ids to text.",
            body=DetokenizeBody,
            answer=fields("prompt", prompt="string"),
        ),
        Endpoint(
            method="GET",
            path="/tokenizer_info",
            handler=tokens.tokenizer_info,
            group=group,
            summary="Show special tokens and the chat template.",
            answer=fields("model", model="string"),
            query=("model",),
        ),
    ]


async def _show_problem(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HttpProblem)
    return problem_response(exc, path=request.url.path)


async def _show_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, EdgepipeError)
    problem = from_error(exc, param="model" if isinstance(exc, ModelUnknown) else None)
    return problem_response(problem, path=request.url.path)


def _show_http(paths: Sequence[str]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler of requests without a route. ``paths``: of the routes."""

    async def show(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        path = request.url.path
        code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code, "http_error")
        text = f"{request.method} {path[:200]}: {exc.detail}"
        if exc.status_code == 404:
            text += ". OpenAI's and Anthropic's APIs are under /v1, Ollama's under /api; /docs lists them"
            if near := difflib.get_close_matches(f"/{path[:100].strip('/')}", paths, n=1, cutoff=0.7):
                text += f". Did you mean {near[0]}?"
        problem = HttpProblem(status=exc.status_code, message=text, code=code, headers=exc.headers or {})
        return problem_response(problem, path=path)

    return show


async def _show_bug(request: Request, exc: Exception) -> Response:
    problem = HttpProblem(
        status=500, message="internal error of edgepipe; its log has the details", code="internal_error"
    )
    return problem_response(problem, path=request.url.path)
