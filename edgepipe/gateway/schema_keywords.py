"""Leave keywords out of JSON schemas: those that say nothing, and those that no grammar can express.

Keywords: JSON Schema, draft 2020-12, and earlier drafts. Grammars: what llguidance takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

Schema = Mapping[str, Any]

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
"""Keywords whose values hold schemas: by name, in a list, or one."""

_SAYS_NOTHING: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),  # the last is in Zod's records
}
_UNKNOWN = frozenset(
    "not if then else uniqueItems contains minContains maxContains dependentRequired dependentSchemas dependencies "
    "propertyNames unevaluatedProperties unevaluatedItems $dynamicRef $dynamicAnchor $recursiveRef".split()
)
_FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uri uuid unknown".split())
_PATTERN_PART = re.compile(r"\\.|\(\?(?:<?[=!]|P?<|[imsUuxR-]*[:)])?", re.DOTALL)
_KNOWN_PART = re.compile(r"\\(?:[dDwWsSnrtfvaxuUpPAz_]|[^\w<>])|\(\?(?:P?<|[imsUuxR-]*[:)])", re.DOTALL)


def without_idle(schema: Schema) -> Schema:
    """Return the schema without keywords that any value fits."""
    return changed_schema(schema, _drop_idle)


def expressible(schema: Schema) -> Schema:
    """Return a schema that grammars can express, and that every value of the given one fits."""
    return changed_schema(schema, _widen)


def changed_schema(node: Schema, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Copy a schema with a change of it and of each schema within it."""

    def copied(value: object) -> object:
        return changed_schema(cast("Schema", value), change) if isinstance(value, dict) else value

    fields = change(dict(node))
    for key, value in fields.items():
        if key in MAPS and isinstance(value, dict):
            fields[key] = {name: copied(each) for name, each in cast("dict[str, object]", value).items()}
        elif key in LISTS and isinstance(value, list):
            fields[key] = [copied(each) for each in cast("list[object]", value)]
        elif key in SINGLE:
            fields[key] = copied(value)
    return fields


def _drop_idle(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value not in _SAYS_NOTHING.get(key, ())}


def _widen(fields: dict[str, Any]) -> dict[str, Any]:
    kept = {
        key: value
        for key, value in fields.items()
        if key not in _UNKNOWN and (value is not None or key == "const") and not (key == "enum" and value == [])
    }
    if fields.get("unevaluatedProperties", False) is not False:
        kept.setdefault("additionalProperties", True)
    for name, is_known in _KNOWN_TEXTS.items():
        if isinstance(text := kept.get(name), str) and not is_known(text):
            del kept[name]
    patterns = kept.get("patternProperties")
    if isinstance(patterns, dict) and not all(map(_is_known, cast("dict[str, object]", patterns))):
        kept |= {"patternProperties": {}, "additionalProperties": True}
    if isinstance(kept.get("oneOf"), list) and "anyOf" not in kept:
        kept["anyOf"] = kept.pop("oneOf")
    if isinstance(target := kept.get("$ref"), str):
        kept["$ref"] = target.replace("/oneOf/", "/anyOf/")
    return kept


def _is_known(pattern: str) -> bool:
    """Return whether a pattern has none of the parts that grammars lack: look-around, word ends, back-references."""
    return all(_KNOWN_PART.fullmatch(part) for part in _PATTERN_PART.findall(pattern))


_KNOWN_TEXTS: Mapping[str, Callable[[str], bool]] = {
    "format": _FORMATS.__contains__,
    "pattern": _is_known,
    "$ref": lambda target: target.startswith("#"),
}
