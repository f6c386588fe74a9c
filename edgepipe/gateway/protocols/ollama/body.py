"""Bodies of Ollama's endpoints, and their conversion to the common form (``gateway/schema.py``)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from edgepipe.gateway.models import Assets
from edgepipe.gateway.other_fields import OLLAMA, SAMPLING, RefusedFields
from edgepipe.gateway.problems import bad_request
from edgepipe.gateway.raw_fields import MAX_SCHEMA_CHARS, MAX_TOOLS, JsonSize, RawTools
from edgepipe.gateway.schema import MAX_MESSAGES, MAX_TOKEN_ID, MAX_TOP_LOGPROBS, LongText, Penalty, Stops, Text
from edgepipe.gateway.strict_body import WithoutNulls, misfit
from edgepipe.gateway.unloading import keep_s

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_MOST = {"temperature": 2.0, "top_p": 1.0, "min_p": 1.0}  # limits of OpenAI's body; Ollama has no highest temperature
_MOST_KEPT_S = 1e15

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


class OllamaMessage(WithoutNulls):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: LongText = ""
    images: Annotated[list[Text], Field(max_length=0)] | None = None  # images are not supported
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_name: Text | None = None
    tool_call_id: Text | None = None
    thinking: LongText | None = None

    @model_validator(mode="after")
    def _has_result(self) -> OllamaMessage:
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

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)]
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
