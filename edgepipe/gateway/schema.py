"""What may stand in a request, with bounds on everything (OpenAI's fields, and those that benchmarks send)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from edgepipe.gateway.problems import HttpProblem, bad_request

MAX_CHOICES = 8
MAX_PROMPTS = 64  # lm-eval sends its batch as one list
MAX_MESSAGES = 2048
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_TOKEN_ID = (1 << 32) - 1
MAX_TOKENS = (1 << 31) - 1  # the context bounds it further

# Fields of later versions: a value that changes nothing is taken, any other is refused rather than ignored.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "tools": (None, []),
    "functions": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "min_tokens": (None, 0),
    "echo": (None, False),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "audio": (None,),
}

BodyT = TypeVar("BodyT", bound="RequestBody")


def _stops(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _joined_text(value: object) -> object:
    """Content may be a list of text parts: their texts, joined."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be text or a list of text parts")
    texts: list[str] = []
    for part in cast("list[object]", value):
        fields = cast("dict[str, object]", part) if isinstance(part, dict) else dict[str, object]()
        text = fields.get("text")
        if fields.get("type") != "text" or not isinstance(text, str):
            raise ValueError("only parts like {'type': 'text', 'text': '...'} are supported")
        texts.append(text)
    return "".join(texts)


def _prompts(value: object) -> object:
    """One prompt or several, each text or token ids: always a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, token ids, or a list of either")
    items = cast("list[object]", value)
    return [items] if isinstance(items[0], int) else items


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Prompt = str | Annotated[list[TokenId], Field(min_length=1)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(_Checked):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class RequestBody(_Checked):
    """Fields that both endpoints share."""

    model: Annotated[str, Field(max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[list[StopString] | None, BeforeValidator(_stops), Field(max_length=MAX_STOPS)] = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> RequestBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is only supported equal to n")
        return self


class Message(_Checked):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_joined_text)] = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is required for role '{self.role}'")
        return self


class ChatBody(RequestBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None


class CompletionBody(RequestBody):
    """``POST /v1/completions``."""

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts), Field(min_length=1, max_length=MAX_PROMPTS)]


def validate(kind: type[BodyT], raw: Mapping[str, Any]) -> BodyT:
    """The body as a checked value. Raises HttpProblem 400 that names the first bad field."""
    for name, neutral in _NEUTRAL.items():
        value = raw.get(name)
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral):
            raise bad_request(f"'{name}' is not supported by this version", param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(raw)
    except ValidationError as exc:
        raise _problem(exc) from exc


def _problem(exc: ValidationError) -> HttpProblem:
    first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    names = [str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    param = ".".join(name for name in names if name not in ("str", "list", "int"))
    message = first["msg"].removeprefix("Value error, ")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return bad_request(f"{param}: {message}" if param else message, param=param or None, code=code)
