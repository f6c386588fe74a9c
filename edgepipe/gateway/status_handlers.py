"""Read-only status: served models, health, version, metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgepipe import PROTOCOL_VERSION, __version__
from edgepipe.children.user_turns import UserTurns
from edgepipe.gateway.access import owner_of
from edgepipe.gateway.metrics import CONTENT_TYPE, Metrics
from edgepipe.gateway.models import ModelTable
from edgepipe.gateway.pieced import PiecedAnswers
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.openai.shape import model_card
from edgepipe.gateway.sampling_choice import with_unsaid


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusHandlers:
    """Handlers of the status endpoints."""

    models: ModelTable
    metrics: Metrics
    answers: PiecedAnswers
    threads: UserTurns  # threads that write metrics

    async def list_models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        cards = [model_card(served, await entry.facts()) for served, entry in self.models.listed]
        return self.answers.json({"object": "list", "data": cards})

    async def one_model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``, with what holds where a request does not say."""
        if not request.path_params["id"]:
            raise HTTPException(404)
        entry = self.models.get(request.path_params["id"])
        sampling = with_unsaid((await entry.assets()).sampling)
        keywords = dict(entry.served.template_keywords)
        card = model_card(entry.served, await entry.facts())
        return JSONResponse({**card, "sampling": sampling, "template_keywords": keywords})

    async def health(self, request: Request) -> Response:
        """``GET /health``: this process runs."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """``GET /ready``: a model is served."""
        if not self.models.served:
            raise HttpProblem(status=503, message="no model is served", code="not_ready", headers={"Retry-After": "1"})
        return JSONResponse({"status": "ready"})

    async def version(self, request: Request) -> Response:
        """``GET /version``."""
        return JSONResponse({"version": __version__, "protocol": PROTOCOL_VERSION})

    async def scrape(self, request: Request) -> Response:
        """``GET /metrics``, for Prometheus."""
        async with self.threads.turn(owner_of(request)):
            text = await asyncio.to_thread(self.metrics.exposition)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})
