"""Ollama's endpoints. Each body is converted to OpenAI's form; only the form of the answers differs."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from edgepipe import __version__
from edgepipe.clock import Clock
from edgepipe.errors import ModelUnknown
from edgepipe.gateway.access import owner_of
from edgepipe.gateway.completion_service import CompletionService, PreparedCompletion
from edgepipe.gateway.engine_types import RoutedModel
from edgepipe.gateway.json_pieces import Piece, TextParts, json_parts, json_pieces, pieces
from edgepipe.gateway.logprobs import Scored, chat_logprobs
from edgepipe.gateway.model_facts import ModelFacts
from edgepipe.gateway.models import Assets
from edgepipe.gateway.openai_handlers import OpenAIHandlers
from edgepipe.gateway.other_fields import OLLAMA, SAMPLING, RefusedFields
from edgepipe.gateway.problems import HttpProblem, bad_request
from edgepipe.gateway.request_share import memory_of
from edgepipe.gateway.responses import GatheredChoice, WholeCall
from edgepipe.gateway.schema import (
    MAX_MESSAGES,
    MAX_SCHEMA_CHARS,
    MAX_TOKEN_ID,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    BodyT,
    ChatBody,
    CompletionBody,
    JsonSize,
    LongText,
    Penalty,
    RawTools,
    Stops,
    Text,
    WithoutNulls,
    misfit,
    validate,
)
from edgepipe.gateway.text import Delta
from edgepipe.gateway.tool_calls import CallDelta
from edgepipe.gateway.unloading import keep_s

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_MOST = {"temperature": 2.0, "top_p": 1.0, "min_p": 1.0}  # limits of OpenAI's body; Ollama has no highest temperature
_MOST_KEPT_S = 1e15
_MOST_LEFT_S = 1e9  # a longer time means for ever
# The version whose API this is (the first with log-probabilities); some clients refuse older servers.
_OLLAMA_VERSION = "0.12.11"
_MAX_NESTING = 100  # deepest nesting of a call's arguments that every JSON reader takes
_FOREVER = "2200-01-01T00:00:00Z"  # end of models that stay until a user stops them: Ollama's list says "Forever"


Clamped = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]


class Options(WithoutNulls):
    """Sampling options. Options of Ollama's engine have no effect.

    As in Ollama's sampler (``sample/samplers.go``, ``NewSampler``), values out of range count as the nearest possible.
    """

    refused: ClassVar[RefusedFields] = SAMPLING
    spelt: ClassVar[bool] = True

    temperature: Clamped | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None  # 0 and -1: all
    top_p: Clamped | None = None  # 0 leaves only the likeliest token
    min_p: Clamped | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stops = None
    # Values below 1 mean as many as the context allows.
    num_predict: Annotated[int, Field(ge=-2, le=(1 << 31) - 1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0

    def fields(self, own: Mapping[str, float]) -> dict[str, Any]:
        """Return fields of OpenAI's body: the given ones, else the model's defaults (``own``), else Ollama's."""
        fields: dict[str, Any] = self.model_dump(exclude={"num_predict", "repeat_penalty"}, exclude_none=True)
        if self.repeat_penalty is not None:
            fields["repetition_penalty"] = self.repeat_penalty
        for name, most in _MOST.items():
            if name in fields:
                fields[name] = min(max(fields[name], 0.0), most)
        if fields.get("top_p") == 0.0:
            fields |= {"temperature": 0.0, "top_p": 1.0}
        fields = {name: value for name, value in _DEFAULTS.items() if name not in own} | fields
        return fields | ({"max_tokens": self.num_predict} if self.num_predict and self.num_predict > 0 else {})


class CalledFunction(WithoutNulls):
    """A call in an earlier turn; its arguments are an object."""

    name: Text
    arguments: Annotated[dict[str, Any], JsonSize(MAX_SCHEMA_CHARS)] = Field(default_factory=dict[str, Any])


class OllamaCall(WithoutNulls):
    """A call in an earlier turn."""

    id: Text | None = None
    function: CalledFunction


class Turn(WithoutNulls):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: LongText = ""
    images: Annotated[list[Text], Field(max_length=0)] | None = None  # images are not supported
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_name: Text | None = None
    tool_call_id: Text | None = None
    thinking: LongText | None = None

    @model_validator(mode="after")
    def _has_result(self) -> Turn:
        if self.role == "tool" and not {"content", "tool_name", "tool_call_id"} & self.model_fields_set:
            raise misfit("content", "content is required for role 'tool'")
        return self

    def fields(self, index: int) -> dict[str, Any]:
        """Return the fields of OpenAI's message."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content, "name": self.tool_name}
        fields |= {"tool_call_id": self.tool_call_id, "reasoning_content": self.thinking}
        if self.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.id or f"call_{index}_{place}",
                    "function": {"name": call.function.name, "arguments": json.dumps(call.function.arguments)},
                }
                for place, call in enumerate(self.tool_calls)
            ]
        return fields


class OllamaBody(WithoutNulls):
    """Fields of both endpoints."""

    refused: ClassVar[RefusedFields] = OLLAMA
    spelt: ClassVar[bool] = True

    model: Text
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    think: bool | Literal["low", "medium", "high"] | None = None  # passed to the chat template
    stream: bool = True
    format: Annotated[str | dict[str, Any] | None, JsonSize(MAX_SCHEMA_CHARS)] = None  # "json", or a schema
    options: Options | None = None
    keep_alive: Annotated[float, Field(ge=-_MOST_KEPT_S, le=_MOST_KEPT_S, allow_inf_nan=False)] | Text | None = None

    def keep_s(self) -> float | None:
        """Return how long the model stays after the answer (inf: for ever), None if not given. Raises HttpProblem."""
        if self.keep_alive is None:
            return None
        if isinstance(self.keep_alive, (int, float)):
            return self.keep_alive if self.keep_alive >= 0 else math.inf
        try:
            return keep_s(self.keep_alive)
        except ValueError:
            raise bad_request(
                "keep_alive must be seconds or a time such as '5m'; -1 keeps the model for ever", param="keep_alive"
            ) from None

    def response_format(self) -> dict[str, Any] | None:
        """Return the field of OpenAI's body. Raises HttpProblem."""
        if not self.format:
            return None
        if isinstance(self.format, dict):
            return {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
        if self.format != "json":
            raise bad_request("format must be 'json' or a JSON schema", param="format")
        return {"type": "json_object"}

    def shared_fields(self, assets: Assets) -> dict[str, Any]:
        """Return the options as fields of OpenAI's body."""
        return (self.options or Options()).fields(assets.sampling)

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of OpenAI's body for conversations."""
        fields: dict[str, Any] = {"logprobs": self.logprobs or self.top_logprobs > 0, "top_logprobs": self.top_logprobs}
        if isinstance(self.think, bool):
            fields["chat_template_kwargs"] = {"enable_thinking": self.think}
        elif self.think is not None:
            fields["reasoning_effort"] = self.think
        return fields | {"response_format": self.response_format()}


class OllamaChatBody(OllamaBody):
    """``POST /api/chat``."""

    messages: Annotated[list[Turn], Field(max_length=MAX_MESSAGES)]
    tools: RawTools | None = None


class OllamaGenerateBody(OllamaBody):
    """``POST /api/generate``."""

    prompt: LongText = ""
    system: LongText | None = None
    raw: bool = False  # leave the chat template out
    images: Annotated[list[Text], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> OllamaGenerateBody:
        if self.raw and self.system:
            raise misfit("system", "system is only allowed without raw: true")
        return self


class ShowBody(WithoutNulls):
    """``POST /api/show``."""

    model: Text | None = None
    name: Text | None = None  # older clients' field for ``model``


class OllamaShape:
    """Ollama's answers: lines of JSON, the last one with the numbers of the answer. ``piece``: the field with text."""

    media_type = "application/x-ndjson"

    def __init__(self, prepared: PreparedCompletion, clock: Clock, *, chat: bool) -> None:
        self._prepared = prepared
        self._clock = clock
        self._chat = chat
        self._began_s = clock.monotonic_s()
        self._first_s: float | None = None
        self._reason = "stop"
        self._calls: list[CallDelta] = []

    def whole(self, choices: Sequence[GatheredChoice]) -> Iterator[Piece]:
        """See Shape."""
        (choice,) = choices
        self._reason = choice.finish_reason
        calls = _calls_with_objects(choice.whole_calls())
        logprobs = self._logprobs(choice.scored())
        return json_pieces(self._line(choice.text, calls, choice.reasoning) | logprobs | self._numbers())

    def opening(self) -> Iterator[bytes]:
        """See Shape."""
        return iter(())

    def delta(self, delta: Delta) -> Iterable[bytes]:
        """See Shape. The last text comes with all calls, whole."""
        if self._first_s is None:
            self._first_s = self._clock.monotonic_s()
        self._reason = delta.finish_reason or self._reason
        self._calls += delta.calls
        calls: list[dict[str, Any]] = []
        if delta.finish_reason is not None and self._calls:
            calls = _calls_with_objects(GatheredChoice(calls=self._calls).whole_calls())
        logprobs = self._logprobs(Scored(delta.ids, delta.logprobs))
        has_scores = bool(logprobs) and any(map(self._prepared.assets.token_bytes, delta.ids))
        if not (delta.text or delta.reasoning or calls or has_scores):
            return ()
        return _line_pieces(self._line([delta.text], calls, [delta.reasoning]) | logprobs | {"done": False})

    def ending(self) -> bytes:
        """See Shape."""
        return b"".join(_line_pieces(self._line([], []) | self._numbers()))

    def error(self, problem: HttpProblem) -> bytes:
        """See Shape."""
        return b"".join(_line_pieces({"error": problem.message}))

    def _line(self, text: Sequence[str], calls: list[dict[str, Any]], reasoning: Sequence[str] = ()) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._prepared.completion.model,
            "created_at": _time_text(self._clock.wall_s()),
        }
        thinking = {"thinking": TextParts(reasoning)} if any(reasoning) else {}
        if not self._chat:
            return body | {"response": TextParts(text)} | thinking
        message: dict[str, Any] = {"role": "assistant", "content": TextParts(text)} | thinking
        if calls:
            message["tool_calls"] = calls
        return body | {"message": message}

    def _logprobs(self, scored: Scored) -> dict[str, Any]:
        if not self._prepared.completion.requests[0].sampling.logprobs:
            return {}
        return {"logprobs": chat_logprobs(self._prepared.assets, scored)}

    def _numbers(self) -> dict[str, Any]:
        now_s = self._clock.monotonic_s()
        first_s = now_s if self._first_s is None else self._first_s
        return {
            "done": True,
            "done_reason": "stop" if self._reason == "tool_calls" else self._reason,
            "total_duration": _ns(now_s - self._began_s),
            "load_duration": 0,
            "prompt_eval_count": self._prepared.completion.num_prompt_tokens,
            "prompt_eval_duration": _ns(first_s - self._began_s),
            "eval_count": self._prepared.counts.completion_tokens,
            "eval_duration": _ns(now_s - first_s),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaHandlers:
    """Handlers of Ollama's endpoints."""

    service: CompletionService
    handlers: OpenAIHandlers

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
            return await self.handlers.answer(request, prepared, self._shape(prepared, chat=False), body.stream)
        messages = [{"role": "user", "content": body.prompt}]
        if body.system:
            messages.insert(0, {"role": "system", "content": body.system})
        return await self._chat(request, body, messages if body.prompt else [], tools=None, chat=False)

    async def tags(self, request: Request) -> Response:
        """``GET /api/tags``."""
        cards = [_card(served, await entry.facts()) for served, entry in self.service.models.listed]
        return self.handlers.answers.json({"models": cards})

    async def ps(self, request: Request) -> Response:
        """``GET /api/ps``."""
        running = [
            _card(entry.served, await entry.facts())
            | {"size_vram": entry.served.weight_bytes, "context_length": entry.served.context_length}
            | {"expires_at": self._expiry_text(entry.served)}
            for entry in self.service.models.entries
        ]
        return self.handlers.answers.json({"models": running})

    async def show(self, request: Request) -> Response:
        """``POST /api/show``."""
        body = await self._read(request, ShowBody)
        entry = self.service.models.get(body.model or body.name or "")
        assets, card = await entry.assets(), _card(entry.served, await entry.facts())
        return self.handlers.answers.json(
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

    async def version(self, request: Request) -> Response:
        """``GET /api/version``."""
        return JSONResponse({"version": _OLLAMA_VERSION, "edgepipe": __version__})

    async def root(self, request: Request) -> Response:
        """``GET /``: this process runs. Ollama's command line asks before it sends anything else."""
        return PlainTextResponse("edgepipe is running. Its API: /docs\n")

    async def _read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """Read a body of any Content-Type: Ollama's clients send none. Requests of web pages have an Origin."""
        return await self.handlers.bodies.read(request, kind, of_any_type=True)

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
        return await self.handlers.answer(request, prepared, self._shape(prepared, chat=chat), body.stream)

    def _unload(self, name: str) -> None:
        """Unload a model. Raises ModelUnknown if it is neither served nor loadable."""
        try:
            self.service.keep_alives.want(self.service.models.get(name).served, 0.0)
        except ModelUnknown:
            if not self.service.loads.can_load(name):
                raise

    def _expiry_text(self, served: RoutedModel) -> str:
        left_s = self.service.keep_alives.left_s(served)
        return _time_text(round(self.service.clock.wall_s() + left_s)) if left_s < _MOST_LEFT_S else _FOREVER

    def _empty(self, body: OllamaBody, reason: str, *, chat: bool) -> Response:
        line: dict[str, Any] = {"model": body.model, "created_at": _time_text(self.service.clock.wall_s())}
        line |= {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
        line |= {"done": True, "done_reason": reason}
        if body.stream:
            return Response(b"".join(_line_pieces(line)), media_type=OllamaShape.media_type)
        return JSONResponse(line)

    def _shape(self, prepared: PreparedCompletion, *, chat: bool) -> OllamaShape:
        return OllamaShape(prepared, self.service.clock, chat=chat)


def _card(served: RoutedModel, facts: ModelFacts) -> dict[str, Any]:
    return {
        "name": served.name,
        "model": served.name,
        "size": served.weight_bytes,
        "digest": served.manifest_hash,
        "modified_at": _time_text(int(facts.modified_s)),
        "details": {
            "parent_model": "",
            "format": facts.format,
            "family": facts.family,
            "families": [facts.family],
            "parameter_size": facts.parameters,
            "quantization_level": facts.quantisation,
        },
    }


def _calls_with_objects(calls: Sequence[WholeCall]) -> list[dict[str, Any]]:
    """Convert calls to Ollama's form. It has arguments as an object, so incomplete or too deep ones are dropped."""
    whole: list[dict[str, Any]] = []
    for call in calls:
        with contextlib.suppress(ValueError, RecursionError):
            arguments: object = json.loads("".join(call.arguments))
            if not _is_deep(arguments):
                whole.append({"function": {"name": call.name, "arguments": arguments}})
    return whole


def _is_deep(value: object) -> bool:
    """Return whether arrays and objects are nested further than what is sure to be written and read as JSON."""
    level = [value]
    for _ in range(_MAX_NESTING):
        level = [part for each in level for part in _parts(each)]
    return bool(level)


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def _line_pieces(body: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a line in pieces."""
    return (piece.data for piece in pieces(chain(json_parts(body), ("\n",))))


def _time_text(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
