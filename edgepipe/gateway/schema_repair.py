"""Repair the JSON schemas of tools that clients pass on from others. PURE.

Clients send types of other languages, nulls, and keywords of older drafts. A keyword that says nothing valid does not
bind. A repaired schema takes every value that the given one describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from edgepipe.gateway.closed_schema import resolved
from edgepipe.gateway.schema_keywords import LISTS, MAPS, SINGLE, Schema, changed_schema

TYPES = frozenset("null boolean integer number string array object".split())
_SAME_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("str", "text", "char"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "long", "short"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double", "decimal"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("dict", "map", "mapping", "struct", "record"), "object"),
    **dict.fromkeys(("list", "tuple", "set", "sequence"), "array"),
    **dict.fromkeys(("none", "nil"), "null"),
}
"""Types of other languages that mean the same."""

_DIALECTS = ("http://json-schema.org/", "https://json-schema.org/")


def known_types(schema: Schema) -> Schema:
    """Return the schema with the types of other languages, and types in capitals, as JSON Schema names them."""
    return changed_schema(schema, _with_known_types)


def without_booleans(schema: Schema) -> Schema:
    """Return the schema with objects in place of ``true`` and ``false``, as the formats of calls expect schemas."""
    return changed_schema(schema, _without_booleans)


def well_formed(schema: Schema) -> Schema:
    """Return the schema without values that their keywords cannot have. Types may still be unknown."""
    return changed_schema(schema, _well_formed)


def repaired(schema: Schema) -> Schema:
    """Return a well-formed schema with known types. An unknown type, or a reference to nothing, takes any value."""
    whole = known_types(well_formed(schema))
    return changed_schema(whole, lambda fields: _open(whole, fields))


def json_type(name: str) -> str:
    """Return JSON Schema's name of a type, or the given one."""
    lower = name.strip().lower()
    return lower if lower in TYPES else _SAME_TYPES.get(lower, name)


def _with_known_types(fields: dict[str, Any]) -> dict[str, Any]:
    kind = fields.get("type")
    if isinstance(kind, str):
        return fields | {"type": json_type(kind)}
    if isinstance(kind, list):
        kinds = [json_type(each) if isinstance(each, str) else each for each in cast("list[object]", kind)]
        return fields | {"type": [each for place, each in enumerate(kinds) if each not in kinds[:place]]}
    return fields


def _without_booleans(fields: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for key, value in fields.items():
        if key in MAPS and isinstance(value, dict):
            named = cast("dict[str, object]", value).items()
            changed[key] = {name: _schema(each) if isinstance(each, bool) else each for name, each in named}
        elif key in LISTS and isinstance(value, list):
            changed[key] = [_schema(each) if isinstance(each, bool) else each for each in cast("list[object]", value)]
    return fields | changed


def _well_formed(fields: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in fields.items():
        if key in MAPS:
            value = _mapped(value)
        elif key in LISTS and (isinstance(value, list) or key not in SINGLE):
            value = _listed(cast("object", value))
        elif key in SINGLE and value is not None:
            value = None if isinstance(value, list) else value if isinstance(value, bool) else _schema(value)
        elif (check := _CHECKS.get(key)) is not None:
            value = check(value)
        if value is not None or key not in _KEYWORDS:
            kept[key] = value
    if kept.get("additionalProperties") is False and "required" in kept and "patternProperties" not in kept:
        kept["required"] = [name for name in kept["required"] if name in kept.get("properties", {})]
    return kept


def _mapped(value: object) -> dict[str, object] | None:
    if not isinstance(value, dict):
        return {} if value == [] else None  # PHP writes an empty object as a list
    return {name: _schema(each) for name, each in cast("dict[str, object]", value).items()}


def _listed(value: object) -> list[object] | None:
    if not isinstance(value, list) or not value:
        return None
    return [{"type": "null"} if each is None else _schema(each) for each in cast("list[object]", value)]


def _schema(value: object) -> object:
    """Return a schema for a schema's place: a type's name means the type, another value anything."""
    if isinstance(value, dict):
        return cast("object", value)
    if value is False:
        return {"not": {}}
    if isinstance(value, str) and json_type(value) in TYPES:
        return {"type": value}
    return {}


def _open(root: Schema, fields: dict[str, Any]) -> dict[str, Any]:
    kind = fields.get("type")
    kinds = cast("list[object]", kind) if isinstance(kind, list) else [kind]
    if "type" in fields and (not kinds or not TYPES.issuperset(kinds)):
        fields = {key: value for key, value in fields.items() if key != "type"}
    elif fields.get("nullable") is True and "type" in fields and "null" not in kinds:  # OpenAPI 3.0
        fields = fields | {"type": [*kinds, "null"]}
        if isinstance(values := fields.get("enum"), list) and None not in values:
            fields["enum"] = [*cast("list[object]", values), None]
    target = fields.get("$ref")
    if isinstance(target, str) and target.startswith("#") and (target == "#" or "/" in target):
        if resolved(root, target) is None:
            fields = {key: value for key, value in fields.items() if key != "$ref"}
    return fields


def _number(value: object) -> object:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def _limit(value: object) -> object:
    return value if isinstance(value, bool) else _number(value)  # booleans in drafts up to 4


def _count(value: object) -> object:
    number = _number(value)
    return int(number) if isinstance(number, (int, float)) and number >= 0 and number == int(number) else None


def _positive(value: object) -> object:
    number = _number(value)
    return number if isinstance(number, (int, float)) and number > 0 else None


def _text(value: object) -> object:
    return value if isinstance(value, str) else None


def _names(value: object) -> object:
    if not isinstance(value, list):
        return None
    return list(dict.fromkeys(each for each in cast("list[object]", value) if isinstance(each, str)))


def _values(value: object) -> object:
    return cast("object", value) if isinstance(value, list) and value else None


def _type(value: object) -> object:
    if isinstance(value, list):
        kinds = ["null" if each is None else each for each in cast("list[object]", value)]
        return kinds if kinds and all(isinstance(each, str) for each in kinds) else None
    return _text(value)


def _dialect(value: object) -> object:
    return value if isinstance(value, str) and value.startswith(_DIALECTS) else None


_CHECKS: Mapping[str, Callable[[object], object]] = {
    **dict.fromkeys(("minimum", "maximum"), _number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _limit),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _count),
    **dict.fromkeys(("format", "pattern", "$ref"), _text),
    "multipleOf": _positive,
    "required": _names,
    "enum": _values,
    "type": _type,
    "$schema": _dialect,
}
"""Return the value of a keyword, or None if the keyword cannot have it."""

_KEYWORDS = frozenset({*_CHECKS, *MAPS, *LISTS, *SINGLE})
