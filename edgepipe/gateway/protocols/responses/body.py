"""The body of ``POST /v1/responses``, and its conversion to the common form (``gateway/schema.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from edgepipe.gateway.content_parts import LongText
from edgepipe.gateway.other_fields import RESPONSES, RefusedFields
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.responses.items import MAX_ITEMS, InputItem, messages_of
from edgepipe.gateway.protocols.responses.tools import FlatTools, flat_choice, flat_tools
from edgepipe.gateway.raw_fields import MAX_SCHEMA_CHARS, MAX_TOOLS, MAX_TOOLS_CHARS, JsonSize
from edgepipe.gateway.schema import ChatBody, Effort, Text, TokenLimit
from edgepipe.gateway.strict_body import WithoutNulls, validate

_PARAMS = {
    "messages": "input",
    "response_format": "text.format",
    "json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
}
"""Fields of the common form, by which its errors name a field, and the fields of this one."""


def _items(value: object) -> object:
    """Convert a text to the items of one user's turn."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Items = Annotated[list[InputItem], Field(max_length=MAX_ITEMS)]
_Tool = dict[str, Any]
_MetadataText = Annotated[str, Field(max_length=512)]


class TextOptions(WithoutNulls):
    """The field ``text``: the form of the answer."""

    format: Annotated[dict[str, Any] | None, JsonSize(2 * MAX_SCHEMA_CHARS)] = None
    verbosity: Literal["low", "medium", "high"] | None = None  # no effect


class ReasoningField(WithoutNulls):
    """The field ``reasoning``."""

    effort: Effort | None = None  # none: the model does not reason
    summary: Text | None = None  # no effect: answers have the reasoning itself


class ResponsesBody(WithoutNulls):
    """``POST /v1/responses``."""

    refused: ClassVar[RefusedFields] = RESPONSES
    spelt: ClassVar[bool] = True

    model: Text | None = None
    input: Annotated[_Items, BeforeValidator(_items, json_schema_input_type=LongText | _Items)]
    instructions: LongText | None = None
    previous_response_id: Text | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: TokenLimit | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS), JsonSize(MAX_TOOLS_CHARS)] | None = None
    tool_choice: Annotated[str | dict[str, Any], JsonSize(MAX_SCHEMA_CHARS)] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningField | None = None
    service_tier: Literal["auto", "default", "priority", "flex", "batch"] | None = None
    metadata: Annotated[dict[Text, _MetadataText], Field(max_length=16)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request in the common form."""

    chat: ChatBody
    tools: FlatTools

    def renamed(self, problem: HttpProblem) -> HttpProblem:
        """Return a problem of the common form with the field of this API."""
        return replace(problem, param=own_param(problem.param, self.tools.places))


def own_param(param: str | None, places: Sequence[str] = ()) -> str | None:
    """Return this API's name of a field of the common form. ``places``: the fields of its tools."""
    first, _, rest = (param or "").partition(".")
    if first == "tools" and rest.partition(".")[0].isdigit():
        index, _, rest = rest.partition(".")
        own = [*([places[int(index)]] if int(index) < len(places) else ["tools"]), rest.removeprefix("function.")]
        return ".".join(filter(None, own))
    return _PARAMS.get(first, param)


def asked(body: ResponsesBody, earlier: Sequence[InputItem]) -> Asked:
    """Convert a body. ``earlier``: items of the responses before it. Raises HttpProblem."""
    flat = flat_tools(body.tools or ())
    messages = messages_of([*earlier, *body.input])
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": flat.tools or None,
        "tool_choice": flat_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "service_tier": body.service_tier,
        "user": body.user,
    }
    fields |= _format(body.text)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    try:
        return Asked(chat=validate(ChatBody, fields), tools=flat)
    except HttpProblem as problem:
        raise replace(problem, param=own_param(problem.param, flat.places)) from problem


def _format(given: TextOptions | None) -> dict[str, Any]:
    """Convert ``text.format``, whose schema is in the format itself."""
    form: Mapping[str, Any] = (given.format if given is not None else None) or {"type": "text"}
    if form.get("type") != "json_schema":
        return {"response_format": form}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}}
