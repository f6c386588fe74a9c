"""Bodies of Anthropic's endpoints, and their conversion to the common form (``gateway/schema.py``)."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, Field, model_validator

from edgepipe.gateway.leniency import Note
from edgepipe.gateway.other_fields import ANTHROPIC, RefusedFields
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.anthropic.blocks import AnthropicMessage, Block, Blocks, instructions
from edgepipe.gateway.raw_fields import MAX_SCHEMA_CHARS, MAX_TOOLS, MAX_TOOLS_CHARS, JsonSize
from edgepipe.gateway.schema import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOKEN_ID,
    ChatBody,
    LongText,
    StopString,
    Text,
    TokenLimit,
    TokenLimitFromZero,
)
from edgepipe.gateway.strict_body import StrictBody, WithoutNulls, misfit, validate
from edgepipe.gateway.tool_choice import MAX_NAME_CHARS
from edgepipe.safe_text import one_line

_MAX_BLOCKS = 8192  # bound on all turns together
_OWN_TOOLS = (None, "custom")  # types of tools that the client runs itself


def _only_text(blocks: list[Block]) -> list[Block]:
    if any(block.type != "text" for block in blocks):
        raise ValueError("only blocks of type 'text' are supported")
    return blocks


def _bounded(turns: list[AnthropicMessage]) -> list[AnthropicMessage]:
    if sum(turn.num_blocks for turn in turns) > _MAX_BLOCKS:
        raise ValueError(f"they have more than {_MAX_BLOCKS} blocks together")
    if turns[-1].role == "assistant":
        raise ValueError("the last turn must not be the assistant's: no answer continues a text of the client")
    return turns


class Tool(WithoutNulls):
    """A function that the client runs; tools of another type are left out."""

    type: Text | None = None
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    description: LongText | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def is_own(self) -> bool:
        """Whether the client runs it."""
        return self.type in _OWN_TOOLS

    @model_validator(mode="after")
    def _has_schema(self) -> Tool:
        if self.is_own and self.input_schema is None:
            raise misfit("input_schema", f"the tool '{one_line(self.name[:64])}': input_schema is required")
        return self

    def fields(self) -> dict[str, Any]:
        """Return the tool in OpenAI's flat form."""
        given = {"description": self.description, "parameters": self.input_schema, "strict": self.strict}
        kept = {name: value for name, value in given.items() if value is not None}
        return {"type": "function", "name": self.name, **kept}


def _few(tools: list[Tool]) -> list[Tool]:
    if (size := sum(len(json.dumps(tool.input_schema or {})) for tool in tools)) > MAX_TOOLS_CHARS:
        raise ValueError(f"they are too large: {size} characters of JSON, at most {MAX_TOOLS_CHARS} can be used")
    return tools


class ToolChoiceBody(WithoutNulls):
    """The client's choice of tools for the answer."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_name(self) -> ToolChoiceBody:
        if self.type == "tool" and self.name is None:
            raise misfit("name", "name is required for a tool_choice of type 'tool'")
        return self

    def value(self) -> str | dict[str, Any]:
        """Return OpenAI's ``tool_choice``."""
        if self.type == "tool":
            return {"type": "function", "name": self.name}
        return "required" if self.type == "any" else self.type


class OutputFormat(WithoutNulls):
    """Form of the answer."""

    type: Literal["json_schema"]
    # A body that another process checked has the name of the attribute.
    schema_: Annotated[
        dict[str, Any], Field(validation_alias=AliasChoices("schema", "schema_")), JsonSize(MAX_SCHEMA_CHARS)
    ]


class OutputConfig(WithoutNulls):
    """Form of the answer, and the effort of the reasoning before it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ThinkingConfig(WithoutNulls):
    """Whether the model reasons, and whether the answer has the reasoning."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: TokenLimitFromZero | None = None
    display: Literal["summarized", "omitted"] | None = None

    def fields(self) -> dict[str, Any]:
        """Return OpenAI's fields."""
        kind = self.type if self.type in ("enabled", "disabled") else "adaptive"
        budget = {} if self.budget_tokens is None else {"budget_tokens": self.budget_tokens}
        return {"thinking": {"type": kind, **budget}}

    @property
    def is_shown(self) -> bool:
        """Whether the answer has the reasoning."""
        return self.type != "disabled" and self.display != "omitted"


class CountBody(StrictBody):
    """``POST /v1/messages/count_tokens``."""

    refused: ClassVar[RefusedFields] = ANTHROPIC
    spelt: ClassVar[bool] = True

    model: Text | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_bounded)]
    system: Annotated[Blocks, AfterValidator(_only_text)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_few)] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    def chat(self) -> ChatBody:
        """Return the body in the common form. Raises HttpProblem with the fields of this body."""
        try:
            return validate(ChatBody, self.chat_fields())
        except HttpProblem as problem:
            raise self.renamed(problem) from problem

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of OpenAI's body; those without a value are missing."""
        system = instructions(self.system or ())
        messages = [{"role": "system", "content": system}] if system else []
        messages += [message for turn in self.messages for message in turn.messages()]
        fields: dict[str, Any] = {"model": self.model, "messages": messages, "tools": self._own_tools()}
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.value()
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None:
            fields |= self.thinking.fields()
        if self.output_config is not None:
            fields |= self._output_fields(self.output_config)
        return {name: value for name, value in fields.items() if value is not None}

    def _output_fields(self, config: OutputConfig) -> dict[str, Any]:
        reasons = self.thinking is None or self.thinking.type != "disabled"
        fields: dict[str, Any] = {"reasoning_effort": config.effort} if reasons else {}
        if config.format is not None:
            schema = {"name": "format", "schema": config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def _own_tools(self) -> list[dict[str, Any]] | None:
        return [tool.fields() for tool in self.tools or () if tool.is_own] or None

    def notes(self) -> list[Note]:
        """Return what was left out of the request, for the log."""
        kinds = [tool.type for tool in self.tools or () if not tool.is_own]
        return [
            Note("server tools", f"a tool of type '{one_line(str(kind)[:64])}' was left out: no server runs it")
            for kind in kinds
        ]

    def renamed(self, problem: HttpProblem) -> HttpProblem:
        """Return a problem of the common form with this body's name of the field."""
        words = (problem.param or "").split(".")
        if words[0] == "tools" and len(words) > 1:
            own = [place for place, tool in enumerate(self.tools or ()) if tool.is_own]
            place = own[int(words[1])] if words[1].isdigit() and int(words[1]) < len(own) else words[1]
            words = ["tools", str(place), *("input_schema" if word == "parameters" else word for word in words[2:])]
        elif words[0] == "response_format":
            words = ["output_config", "format", *words[2:]]
        elif words[0] in ("reasoning_effort", "stop"):
            words = [{"reasoning_effort": "output_config.effort", "stop": "stop_sequences"}[words[0]]]
        problem.param = ".".join(words) or None
        return problem


class MessagesBody(CountBody):
    """``POST /v1/messages``."""

    max_tokens: TokenLimit
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] | None = None  # 0 and -1: all
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None

    def chat_fields(self) -> dict[str, Any]:
        """See CountBody."""
        fields = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_k", "top_p")}
        given = {name: value for name, value in fields.items() if value is not None}
        return super().chat_fields() | given | ({"stop": self.stop_sequences} if self.stop_sequences else {})

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer has blocks with the model's reasoning."""
        return self.thinking is not None and self.thinking.is_shown
