"""Arguments that a format writes as bare text: their types come from the function's JSON schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from edgepipe.gateway.closed_schema import resolved

Schema = Mapping[str, Any]

_ALL = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_MAX_LITERAL_CHARS = 64 << 10  # parsing one takes 100 times its size
_MAX_PARTS = 64  # schemas behind references and choices of one argument
_LITERALS = {"True": True, "False": False, "None": None}  # Python's words, which some models write


def argument_schema(schema: Schema, name: str) -> Schema:
    """Return the schema of one argument; empty, which any value fits, if it is not described."""
    found = _mapping(_mapping(schema.get("properties")).get(name))
    if not found:
        found = _mapping(schema.get("additionalProperties"))
    return found


def kinds(root: Schema, schema: Schema) -> frozenset[str]:
    """Return the JSON types that an argument may have, for a schema within ``root``."""
    found: set[str] = set()
    left, seen = [schema], 0
    while left and seen < _MAX_PARTS:
        node, seen = left.pop(), seen + 1
        own = _own_kinds(node)
        choices = list(_choices(root, node)) if own is None else []
        if own is None and not choices:
            return _ALL
        found |= own or set()
        left += choices
    return frozenset(found) if not left else _ALL


def typed_json(text: str, allowed: frozenset[str]) -> str:
    """Return the JSON of an argument's text. A text that fits no other allowed type is a string.

    Halves of surrogate pairs stay escapes, so that the JSON can be encoded.
    """
    value = _parsed(text.strip())
    if not isinstance(value, str) and _kinds_of(value) & allowed:
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace").decode()
        except (TypeError, ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> object:
    """Return the value of a JSON text or of a Python literal, or the text if it is neither.

    Some templates write lists and objects as Python does, so some models do.
    """
    try:
        return cast("object", json.loads(text))
    except (ValueError, RecursionError):
        pass
    if text in _LITERALS:
        return _LITERALS[text]
    if text[:1] not in ("[", "{") or len(text) > _MAX_LITERAL_CHARS:
        return text
    try:
        return cast("object", ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def _kinds_of(value: object) -> set[str]:
    """Return the types that a JSON value fits."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    return {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}


def _own_kinds(node: Schema) -> set[str] | None:
    """Return the types that a schema itself names, None if it names none."""
    kind = node.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in cast("list[object]", kind) if isinstance(each, str)}
    values = cast("list[object]", node["enum"]) if isinstance(node.get("enum"), list) else []
    values = [node["const"]] if "const" in node else values
    if values:
        return {kind for value in values for kind in _kinds_of(value)}
    if "properties" in node:
        return {"object"}
    return None


def _choices(root: Schema, node: Schema) -> Iterator[Schema]:
    for key in ("anyOf", "oneOf", "allOf"):
        for each in cast("list[object]", node[key]) if isinstance(node.get(key), list) else ():
            yield _mapping(each)
    reference = node.get("$ref")
    if isinstance(reference, str):
        yield resolved(root, reference) or {}


def _mapping(value: object) -> Schema:
    return cast("Schema", value) if isinstance(value, Mapping) else {}
