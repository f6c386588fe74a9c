"""Parts of a message's content: text in the forms of several APIs, refusals, and reasoning of earlier answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, Field

MAX_PARTS = 2048  # parts of a message's content
MAX_TEXT_CHARS = 8 << 20  # characters of one text: a body has at most as many
LongText = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]

_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_KEYS = {"thinking": "thinking", "reasoning": "text", "redacted_thinking": "data"}
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


def joined_text(value: object) -> object:
    """Join a list of parts to a text, without their reasoning. Return other values as they are.

    Raises ValueError for a part of another kind.
    """
    if not isinstance(value, list):
        return value
    parts = cast("list[object]", value)
    if len(parts) > MAX_PARTS:
        raise ValueError(f"it has more than {MAX_PARTS} parts")
    return "".join(map(_text, parts))


def with_reasoning(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a message's fields with reasoning as ``reasoning_content``, and a refusal as content if it has no other.

    Clients send reasoning back in fields of three names, or as parts of the content.
    """
    fields = dict(fields)
    given: list[str] = [fields.pop(name) for name in _REASONING_NAMES if isinstance(fields.get(name), str)]
    content = fields.get("content")
    if isinstance(content, list):
        given.append("".join(map(_reasoning, cast("list[object]", content)[:MAX_PARTS])))
    if reasoning := next(filter(None, given), ""):
        fields["reasoning_content"] = reasoning
    if not content and fields.get("role") == "assistant" and fields.get("refusal"):
        fields["content"] = fields["refusal"]
    return fields


def _text(part: object) -> str:
    fields = _fields(part)
    kind = _kind(fields)
    if kind in _REASONING_KEYS:
        return ""
    text = fields.get(_TEXT_KEYS.get(kind, ""))
    if not isinstance(text, str):
        raise ValueError("only parts like {'type': 'text', 'text': '...'} are supported" + _named(kind))
    return text


def _kind(fields: dict[str, Any]) -> str:
    """Return a part's type; clients may send anything there, also what no dictionary takes as a key."""
    kind = fields.get("type")
    return kind if isinstance(kind, str) else ""


def _named(kind: str) -> str:
    return f", not '{kind[:32]}'" if kind and kind not in _TEXT_KEYS else ""


def _reasoning(part: object) -> str:
    """Return a part's reasoning: text, or text parts as Mistral has it. Encrypted reasoning is of no use here."""
    fields = _fields(part)
    if fields.get("type") not in ("thinking", "reasoning"):
        return ""
    value = fields.get(_REASONING_KEYS[fields["type"]])
    if isinstance(value, list):
        value = "".join(
            text for each in cast("list[object]", value) if isinstance(text := _fields(each).get("text"), str)
        )
    return value if isinstance(value, str) else ""


def _fields(part: object) -> dict[str, Any]:
    return cast("dict[str, Any]", part) if isinstance(part, dict) else {}


class _Text(BaseModel):
    type: Literal["text", "input_text", "output_text"]
    text: LongText


class _Refusal(BaseModel):
    type: Literal["refusal"]
    refusal: LongText


class _Thinking(BaseModel):
    type: Literal["thinking"]
    thinking: LongText | Annotated[list[_Text], Field(max_length=MAX_PARTS)]


class _Reasoning(BaseModel):
    type: Literal["reasoning"]
    text: LongText


# The API's document shows this type.
_Parts = Annotated[list[_Text | _Refusal | _Thinking | _Reasoning], Field(max_length=MAX_PARTS)]
Content = Annotated[LongText | None, BeforeValidator(joined_text, json_schema_input_type=LongText | _Parts | None)]
