"""Content blocks of Anthropic's messages, and the turns that they become. PURE."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from edgepipe.gateway.content_parts import MAX_PARTS
from edgepipe.gateway.schema import LongText, Text
from edgepipe.gateway.strict_body import WithoutNulls, misfit

BILLING_HEADER = "x-anthropic-billing-header:"
"""Begins a line of Claude Code's instructions that may differ in each request, so that no prompt would stay cached."""

_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
_OF_USER = ("text", "tool_result")


def _block_list(value: object) -> object:
    """Convert text to a list of one block. Return other values as they are."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_json(value: object) -> object:
    """Write a call's input as JSON text. Text is such JSON already: a checked body is checked again."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class Block(WithoutNulls):
    """A block of any type; each type has other fields."""

    type: Text
    text: LongText | None = None
    thinking: LongText | None = None
    id: Text | None = None
    name: Text | None = None
    input: Annotated[LongText | None, BeforeValidator(_as_json, json_schema_input_type=dict[str, Any])] = None
    tool_use_id: Text | None = None
    content: Blocks | None = None  # content of a result
    is_error: bool = False

    @model_validator(mode="after")
    def _has_fields(self) -> Block:
        for name in _NEEDED.get(self.type, ()):
            if getattr(self, name) is None:
                raise misfit(name, f"{name} is required for blocks of type '{self.type}'")
        return self


Blocks = Annotated[
    list[Block],
    Field(max_length=MAX_PARTS),
    BeforeValidator(_block_list, json_schema_input_type=LongText | Annotated[list[Block], Field(max_length=MAX_PARTS)]),
]
Block.model_rebuild()


class AnthropicMessage(WithoutNulls):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _knows_blocks(self) -> AnthropicMessage:
        """Refuse blocks that the model cannot read where a person gives them.

        Results of tools and earlier answers may have them: clients send the whole chat again, so it would end there.
        """
        for place, block in enumerate(self.content):
            if self.role == "assistant":
                known = block.type not in _OF_USER or block.type == "text"
            else:
                known = block.type in (_OF_USER if self.role == "user" else ("text",))
            if not known:
                text = f"blocks of type '{block.type[:40]}' are not supported in a turn of the {self.role}"
                raise misfit(f"content.{place}.type", text, kind="unsupported")
        return self

    def messages(self) -> list[dict[str, Any]]:
        """Return the turn as messages of OpenAI's form."""
        if self.role == "assistant":
            return [self._answer()]
        results = [_result(block) for block in self.content if block.type == "tool_result"]
        texts = [block.text for block in self.content if block.type == "text" and block.text]
        if not texts and results:
            return results
        return [*results, {"role": self.role, "content": "\n\n".join(texts)}]

    def _answer(self) -> dict[str, Any]:
        """Return an answer of the model. Its texts join as the model wrote them."""
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
            for block in self.content
            if block.type == "tool_use"
        ]
        message: dict[str, Any] = {"role": "assistant", "content": _joined(self.content, "text")}
        if thoughts := _joined(self.content, "thinking"):
            message["reasoning_content"] = thoughts
        return message | ({"tool_calls": calls} if calls else {})

    @property
    def num_blocks(self) -> int:
        """Number of blocks, also those of results."""
        return sum(1 + len(block.content or ()) for block in self.content)


def _joined(blocks: Sequence[Block], kind: str) -> str:
    return "".join(getattr(block, kind) for block in blocks if block.type == kind)


def _result(block: Block) -> dict[str, Any]:
    texts = [part.text or "" if part.type == "text" else _notice(part) for part in block.content or ()]
    text = "\n\n".join(filter(None, texts))
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }


def _notice(part: Block) -> str:
    return f"[a block of type '{part.type[:40]}' was left out: the model reads text only]"


def instructions(blocks: Sequence[Block]) -> str:
    """Return the text of the system's blocks, without lines that bill a request."""
    return "\n\n".join(filter(None, map(_without_billing, _texts(blocks))))


def _texts(blocks: Sequence[Block]) -> Iterator[str]:
    return (cast("str", block.text) for block in blocks)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text
