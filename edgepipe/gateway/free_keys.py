"""Finds objects in a JSON schema whose keys the schema does not list (PURE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

_BINDING = frozenset({"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"})
_OBJECT = frozenset({"properties", "patternProperties", "additionalProperties", "minProperties"})
_IN_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties")


def has_free_keys(schema: Mapping[str, Any]) -> bool:
    """Return whether a value of the schema may have an object with keys of its own; True in doubt."""
    left: list[object] = [schema]
    while left:
        node = left.pop()
        if node is True:
            return True
        if not isinstance(node, dict):
            continue
        fields = cast("dict[str, Any]", node)
        if _is_free(fields):
            return True
        left += [each for key in _IN_SCHEMAS if isinstance(fields.get(key), list) for each in fields[key]]
        left += [each for key in _BY_NAME if isinstance(fields.get(key), dict) for each in fields[key].values()]
        left += [fields[key] for key in _SINGLE if key in fields]
    return False


def _is_free(node: Mapping[str, Any]) -> bool:
    kinds = node.get("type")
    is_object = "object" in (cast("list[object]", kinds) if isinstance(kinds, list) else [kinds])
    if is_object or _OBJECT & node.keys():
        return node.get("additionalProperties") is not False or "patternProperties" in node
    return not _BINDING & node.keys()
