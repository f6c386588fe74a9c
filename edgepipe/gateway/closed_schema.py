"""Close the objects of a JSON schema: an object that names keys but not ``additionalProperties`` allows no other keys.

JSON Schema allows any other key, and small models invent keys. Other servers close objects, so clients expect that.
Several parts may describe one object (``allOf``, or ``anyOf`` beside ``properties``): then the parts stay open,
and the schema that joins them allows the keys of all parts. An object that names no keys stays open.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote

from edgepipe.errors import RequestInvalid
from edgepipe.gateway.schema_keywords import LISTS, MAPS, SINGLE, Schema

_MAX_STEPS = 50_000  # about 0.1 s; a schema of 64 KB whose parts refer to each other could take millions
_OPENING = ("additionalProperties", "unevaluatedProperties")
_INDEX = re.compile(r"[0-9]{1,5}")


def closed_schema(schema: Schema) -> Schema:
    """Return the schema with its objects closed. Raises RequestInvalid for too many references between its parts."""
    return _Closer(schema).copy(schema)


def closed_parameters(schema: Schema) -> Schema:
    """Return a function's parameters with their objects closed. A function without named parameters takes ``{}``.

    Raises RequestInvalid, see ``closed_schema``.
    """
    shapes = {*MAPS, *LISTS, *_OPENING, "$ref", "required", "minProperties", "enum", "const"}
    none: dict[str, Any] = {"properties": {}} if not shapes & schema.keys() else {}
    return closed_schema({**none, **schema, "type": "object"})


def resolved(root: Schema, reference: str) -> Schema | None:
    """Return the object that a JSON pointer into the schema points at (RFC 6901), or None."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    node: object = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = cast("dict[str, object]", node).get(name)
        elif isinstance(node, list) and _INDEX.fullmatch(name):
            node = next(iter(cast("list[object]", node)[int(name) :]), None)
        else:
            return None
    return _schema(node)


def needed_parts(root: Schema, node: Schema) -> Iterator[Schema]:
    """Yield the schemas by name that every value of this schema must also match."""
    yield from _list(node, "allOf")
    for key in ("anyOf", "oneOf"):
        if len(choices := list(_list(node, key))) == 1:
            yield from choices
    reference = node.get("$ref")
    if isinstance(reference, str) and (target := resolved(root, reference)) is not None:
        yield target


class _Closer:
    """Copies the schemas of one document. Nodes are known by ``id``: the document outlives the closer."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._steps = 0
        self._names: dict[int, frozenset[str]] = {}
        self._targets: dict[str, Schema | None] = {}  # schemas by reference
        self._joined: set[int] = set()  # parts of joined objects, which the joining schema closes
        left = [root]
        while left:
            node = left.pop()
            left.extend(_children(node))
            if self._joins(node):
                self._joined |= {id(part) for part in self._all_parts(node)}

    def copy(self, node: Schema) -> dict[str, Any]:
        """Copy a schema and its inner schemas, with closed objects."""
        fields = dict(node)
        for key, value in node.items():
            if key in MAPS and isinstance(value, dict):
                fields[key] = {name: self._copied(each) for name, each in cast("dict[str, object]", value).items()}
            elif key in LISTS and isinstance(value, list):
                fields[key] = [self._copied(each) for each in cast("list[object]", value)]
            elif key in SINGLE:
                fields[key] = self._copied(value)
        return self._closed(node, fields) if id(node) not in self._joined else fields

    def _copied(self, value: object) -> object:
        return value if (node := _schema(value)) is None else self.copy(node)

    def _closed(self, node: Schema, fields: dict[str, Any]) -> dict[str, Any]:
        beyond = self._joins(node) or any(id(part) in self._joined for part in self._parts(node))
        own: object = fields.get("properties", {})
        if not (beyond or "properties" in node) or self._is_open(node) or not isinstance(own, dict):
            return fields
        own = cast("dict[str, Any]", own)
        missing: dict[str, Any] = {name: {} for name in sorted(self._names_of(node) - own.keys())}
        return fields | {"properties": own | missing, "additionalProperties": False}

    def _joins(self, node: Schema) -> bool:
        """Return whether several parts of the schema describe one object."""
        parts = sum(bool(self._names_of(part)) for part in self._all_of(node))
        choices = sum(any(map(self._names_of, _list(node, key))) for key in ("anyOf", "oneOf"))
        own = bool({"properties", *_OPENING} & node.keys())
        return own + parts + choices > 1

    def _names_of(self, node: Schema) -> frozenset[str]:
        """Return the keys that a schema and its parts name."""
        if id(node) not in self._names:
            named = (_own_names(each) for each in [node, *self._all_parts(node)])
            self._names[id(node)] = frozenset().union(*named)
            self._count(len(self._names[id(node)]))
        return self._names[id(node)]

    def _is_open(self, node: Schema) -> bool:
        """Return whether the schema or a part of it sets the further keys that it allows."""
        says = {*_OPENING, "patternProperties"}
        return bool({*_OPENING} & node.keys()) or any(says & part.keys() for part in self._all_parts(node))

    def _all_parts(self, node: Schema) -> list[Schema]:
        """Return the schemas that describe the same value as this one, and their parts. Handles recursive schemas."""
        found: dict[int, Schema] = {}
        left = [*self._parts(node)]
        while left:
            part = left.pop()
            if id(part) not in found:
                found[id(part)] = part
                left.extend(self._parts(part))
        self._count(len(found))
        return list(found.values())

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise RequestInvalid(
                "this schema cannot constrain the output",
                fact="its parts have too many references to each other",
                next_step="replace references by the schemas that they refer to",
            )

    def _parts(self, node: Schema) -> Iterator[Schema]:
        """Yield the schemas by name that describe the same value as this one."""
        yield from self._all_of(node)
        for key in ("anyOf", "oneOf"):
            yield from _list(node, key)

    def _all_of(self, node: Schema) -> Iterator[Schema]:
        yield from _list(node, "allOf")
        if (target := self._target(node.get("$ref"))) is not None:
            yield target

    def _target(self, reference: object) -> Schema | None:
        if not isinstance(reference, str):
            return None
        if reference not in self._targets:
            self._targets[reference] = resolved(self._root, reference)
        return self._targets[reference]


def _own_names(node: Schema) -> set[str]:
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(properties, dict):
        return set()
    wanted = cast("list[object]", required) if isinstance(required, list) else ()
    return {*cast("dict[str, Any]", properties), *(name for name in wanted if isinstance(name, str))}


def _schema(value: object) -> Schema | None:
    return cast("Schema", value) if isinstance(value, dict) else None


def _list(node: Schema, key: str) -> Iterator[Schema]:
    value = node.get(key)
    for each in cast("list[object]", value) if isinstance(value, list) else ():
        if (schema := _schema(each)) is not None:
            yield schema


def _children(node: Schema) -> Iterator[Schema]:
    """Yield the schemas that are direct parts of this one."""
    for key in MAPS:
        for each in cast("dict[str, object]", node[key]).values() if isinstance(node.get(key), dict) else ():
            if (schema := _schema(each)) is not None:
                yield schema
    for key in LISTS:
        yield from _list(node, key)
    for key in SINGLE:
        if (schema := _schema(node.get(key))) is not None:
            yield schema
