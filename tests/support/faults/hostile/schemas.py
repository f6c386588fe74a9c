"""Schemas and patterns of few characters that cost much to compile, and long ones."""

from __future__ import annotations

import json
import random
from typing import Any

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def answer_form(schema: dict[str, Any]) -> dict[str, Any]:
    """The value of ``response_format`` that binds an answer to a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def costly_integers(count: int, *, multiple: int = 900_000) -> dict[str, Any]:
    """Multiples within a range of nine digits: 3 s and 130 MB to build for each property."""
    return _object(
        {
            f"a{index}": {
                "type": "integer",
                "multipleOf": multiple + index,
                "minimum": -999_999_999,
                "maximum": 999_999_999,
            }
            for index in range(count)
        }
    )


def crossing_patterns(count: int) -> dict[str, Any]:
    """Texts that must match two patterns and a length: their automata multiply while the answer is written."""
    return _object(
        {
            f"a{index}": {
                "allOf": [
                    {"type": "string", "pattern": f"^.*a.{{{12 + index}}}$"},
                    {"type": "string", "pattern": f"^.*b.{{{11 + index}}}$"},
                    {"type": "string", "minLength": 200, "maxLength": 3000},
                ]
            }
            for index in range(count)
        }
    )


def chained_references(count: int) -> dict[str, Any]:
    """Definitions that each refer to the next one twice."""
    chain: dict[str, Any] = {
        f"d{index}": _object({key: {"$ref": f"#/$defs/d{index + 1}"} for key in "xy"}) for index in range(count)
    }
    return {"$defs": {**chain, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def wide_schema(chars: int, *, number: int) -> dict[str, Any]:
    """A schema of so many characters of ranges; another one for each number."""
    draw = random.Random(number)
    properties: dict[str, Any] = {}
    size = 0
    while size < chars:
        value = {"type": "number", "minimum": draw.random() * 1e-9, "maximum": draw.random() * 1e15}
        properties["".join(draw.choices(_LETTERS, k=3))] = value
        size += len(json.dumps(value)) + 10
    return {"type": "object", "properties": properties, "additionalProperties": False}


def tools(count: int, *, chars: int) -> list[dict[str, Any]]:
    """Functions whose descriptions and schemas have so many characters together."""
    each = chars // count
    return [
        {
            "type": "function",
            "function": {
                "name": f"function_{index}",
                "description": "x" * (each // 2),
                "parameters": wide_schema(max(100, each // 2 - 200), number=index),
            },
        }
        for index in range(count)
    ]


def long_string_tool(least_chars: int) -> dict[str, Any]:
    """A function whose one argument is a long text."""
    text = {"type": "string", "minLength": least_chars, "maxLength": 2 * least_chars}
    return {"type": "function", "function": {"name": "write", "strict": True, "parameters": _object({"text": text})}}


REGEXES = (
    "(a|b|ab){1,300}c(.*x.{14}){3}",
    "([a-z]{1,200}[0-9]){1,200}",
    "(.{0,300}a){200}",
    "(.*a.{18}){2}(.*b.{17}){2}",
)
"""Patterns of answers; each costs little to read and much to follow."""


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
