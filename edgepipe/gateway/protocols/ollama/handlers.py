"""Ollama's endpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from edgepipe import __version__
from edgepipe.errors import ModelUnknown
from edgepipe.gateway.access import owner_of
from edgepipe.gateway.completion_service import CompletionService, PreparedCompletion
from edgepipe.gateway.endpoints import Endpoint, fields
from edgepipe.gateway.engine_types import RoutedModel
from edgepipe.gateway.model_facts import ModelFacts
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.answering import Answering
from edgepipe.gateway.protocols.ollama.body import OllamaBody, OllamaChatBody, OllamaGenerateBody, ShowBody
from edgepipe.gateway.protocols.ollama.shape import OllamaShape, line_pieces, time_text
from edgepipe.gateway.request_share import memory_of
from edgepipe.gateway.schema import MAX_TOKEN_ID, ChatBody, CompletionBody
from edgepipe.gateway.strict_body import BodyT, validate

_MOST_LEFT_S = 1e9  # a longer time means for ever
# The version whose API this is (the first with log-probabilities); some clients refuse older servers.
_OLLAMA_VERSION = "0.12.11"
_FOREVER = "2200-01-01T00:00:00Z"  # end of models that stay until a user stops them: Ollama's list says "Forever"
_EMBEDDINGS = "edgepipe computes no embeddings: embedding models fit one machine"
_REFUSED = {
    "/api/embed": _EMBEDDINGS,
    "/api/embeddings": _EMBEDDINGS,
    "/api/copy": "edgepipe copies no models: a model has the name of its source",
    "/api/push": "edgepipe uploads no models",
    "/api/create": "edgepipe makes no models of a Modelfile; to add a file: edgepipe models pull FILE",
    "/api/pull": "edgepipe pulls no models over HTTP; on a machine of the cluster: edgepipe models pull NAME",
    "/api/delete": "edgepipe removes no models over HTTP; on the machine that has it: edgepipe models rm NAME",
}
"""Ollama's endpoints that have no counterpart here, and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaHandlers:
    """Handlers of Ollama's endpoints."""

    answering: Answering

    @property
    def service(self) -> CompletionService:
        """The shared request path."""
        return self.answering.service

    async def chat(self, request: Request) -> Response:
        """``POST /api/chat``."""
        body = await self._read(request, OllamaChatBody)
        messages = [turn.fields(index) for index, turn in enumerate(body.messages)]
        return await self._chat(request, body, messages, tools=body.tools, chat=True)

    async def generate(self, request: Request) -> Response:
        """``POST /api/generate``: a prompt as one turn of a conversation, or raw."""
        body = await self._read(request, OllamaGenerateBody)
        if body.raw and body.prompt:
            kept_s = body.keep_s()
            name = self.service.loads.meant(body.model)
            entry = await self.service.loads.entry(name, owner=owner_of(request))
            fields = body.shared_fields(await entry.assets())
            fields |= {"model": name, "prompt": body.prompt, "response_format": body.response_format()}
            fields["logprobs"] = body.top_logprobs if body.logprobs or body.top_logprobs else None
            fields.setdefault("max_tokens", MAX_TOKEN_ID)
            prepared = await self.service.complete(
                validate(CompletionBody, fields), owner=owner_of(request), memory=memory_of(request)
            )
            prepared.keep_s = kept_s
            return await self.answering.answer(
                request, prepared, self._shape(prepared, chat=False), streams=body.stream
            )
        messages = [{"role": "user", "content": body.prompt}]
        if body.system:
            messages.insert(0, {"role": "system", "content": body.system})
        return await self._chat(request, body, messages if body.prompt else [], tools=None, chat=False)

    async def tags(self, request: Request) -> Response:
        """``GET /api/tags``."""
        cards = [_card(served, await entry.facts()) for served, entry in self.service.models.listed]
        return self.answering.answers.json({"models": cards})

    async def ps(self, request: Request) -> Response:
        """``GET /api/ps``."""
        running = [
            _card(entry.served, await entry.facts())
            | {"size_vram": entry.served.weight_bytes, "context_length": entry.served.context_length}
            | {"expires_at": self._expiry_text(entry.served)}
            for entry in self.service.models.entries
        ]
        return self.answering.answers.json({"models": running})

    async def show(self, request: Request) -> Response:
        """``POST /api/show``."""
        body = await self._read(request, ShowBody)
        entry = self.service.models.get(body.model or body.name or "")
        assets, card = await entry.assets(), _card(entry.served, await entry.facts())
        return self.answering.answers.json(
            {
                "modelfile": "",
                "parameters": "",
                "template": assets.info().get("chat_template") or "",
                "details": card["details"],
                "modified_at": card["modified_at"],
                "model_info": {
                    "general.architecture": "edgepipe",
                    "general.basename": entry.served.name,
                    "edgepipe.context_length": entry.served.context_length,
                    "edgepipe.vocab_size": assets.vocab_size,
                },
                "capabilities": ["completion", "tools"] + ["thinking"] * assets.chat.reasons,
            }
        )

    async def refuse(self, request: Request) -> Response:
        """Refuse what Ollama does to its own store of models, and embeddings."""
        path = request.url.path
        raise HttpProblem(status=400, message=f"{path}: {_REFUSED[path]}", code="unsupported")

    async def version(self, request: Request) -> Response:
        """``GET /api/version``."""
        return JSONResponse({"version": _OLLAMA_VERSION, "edgepipe": __version__})

    async def root(self, request: Request) -> Response:
        """``GET /``: this process runs. Ollama's command line asks before it sends anything else."""
        return PlainTextResponse("edgepipe is running. Its API: /docs\n")

    async def _read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """Read a body of any Content-Type: Ollama's clients send none. Requests of web pages have an Origin."""
        return await self.answering.bodies.read(request, kind, of_any_type=True)

    async def _chat(
        self,
        request: Request,
        body: OllamaBody,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        chat: bool,
    ) -> Response:
        name, kept_s = self.service.loads.meant(body.model), body.keep_s()
        if not messages and kept_s == 0:
            self._unload(name)
            return self._empty(body, "unload", chat=chat)
        entry = await self.service.loads.entry(name, owner=owner_of(request))
        name = entry.served.name
        if not messages:  # a request to load the model; it is loaded
            self.service.keep_alives.want(entry.served, kept_s)
            return self._empty(body, "load", chat=chat)
        fields = body.shared_fields(await entry.assets()) | body.chat_fields()
        fields |= {"messages": messages, "model": name, "tools": tools}
        prepared = await self.service.chat(
            validate(ChatBody, fields), owner=owner_of(request), memory=memory_of(request)
        )
        prepared.keep_s = kept_s
        return await self.answering.answer(request, prepared, self._shape(prepared, chat=chat), streams=body.stream)

    def _unload(self, name: str) -> None:
        """Unload a model. Raises ModelUnknown if it is neither served nor loadable."""
        try:
            self.service.keep_alives.want(self.service.models.get(name).served, 0.0)
        except ModelUnknown:
            if not self.service.loads.can_load(name):
                raise

    def _expiry_text(self, served: RoutedModel) -> str:
        left_s = self.service.keep_alives.left_s(served)
        return time_text(round(self.service.clock.wall_s() + left_s)) if left_s < _MOST_LEFT_S else _FOREVER

    def _empty(self, body: OllamaBody, reason: str, *, chat: bool) -> Response:
        line: dict[str, Any] = {"model": body.model, "created_at": time_text(self.service.clock.wall_s())}
        line |= {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
        line |= {"done": True, "done_reason": reason}
        if body.stream:
            return Response(b"".join(line_pieces(line)), media_type=OllamaShape.media_type)
        return JSONResponse(line)

    def _shape(self, prepared: PreparedCompletion, *, chat: bool) -> OllamaShape:
        return OllamaShape(prepared, self.service.clock, chat=chat)


def _card(served: RoutedModel, facts: ModelFacts) -> dict[str, Any]:
    return {
        "name": served.name,
        "model": served.name,
        "size": served.weight_bytes,
        "digest": served.manifest_hash,
        "modified_at": time_text(int(facts.modified_s)),
        "details": {
            "parent_model": "",
            "format": facts.format,
            "family": facts.family,
            "families": [facts.family],
            "parameter_size": facts.parameters,
            "quantization_level": facts.quantisation,
        },
    }


def ollama_endpoints(answering: Answering) -> list[Endpoint]:
    """Return the endpoints of this protocol."""
    group = "Ollama"
    ollama = OllamaHandlers(answering=answering)
    models = fields("models", models="array")
    return [
        Endpoint(
            method="POST",
            path="/api/chat",
            handler=ollama.chat,
            group=group,
            summary="Continue a conversation.",
            body=OllamaChatBody,
            answer=fields("model", "message", "done", done="boolean"),
            streams=OllamaShape.media_type,
        ),
        Endpoint(
            method="POST",
            path="/api/generate",
            handler=ollama.generate,
            group=group,
            summary="Answer a prompt.",
            body=OllamaGenerateBody,
            answer=fields("model", "response", "done", done="boolean"),
            streams=OllamaShape.media_type,
        ),
        *(
            Endpoint(
                method="DELETE" if path == "/api/delete" else "POST",
                path=path,
                handler=ollama.refuse,
                group=group,
                summary="Not supported: answers 400.",
            )
            for path in _REFUSED
        ),
        Endpoint(
            method="GET",
            path="/api/tags",
            handler=ollama.tags,
            group=group,
            summary="List the served models.",
            answer=models,
        ),
        Endpoint(
            method="GET",
            path="/api/ps",
            handler=ollama.ps,
            group=group,
            summary="List the loaded models.",
            answer=models,
        ),
        Endpoint(
            method="POST",
            path="/api/show",
            handler=ollama.show,
            group=group,
            summary="Show a model's details.",
            body=ShowBody,
            answer=fields("details", "model_info", "capabilities", details="object", capabilities="array"),
        ),
        Endpoint(
            method="GET",
            path="/api/version",
            handler=ollama.version,
            group=group,
            summary="Show the version of Ollama whose API this is.",
            answer=fields("version", version="string"),
        ),
        Endpoint(
            method="GET",
            path="/",
            handler=ollama.root,
            group=group,
            summary="Report that this gateway runs.",
            media_type="text/plain",
        ),
    ]
