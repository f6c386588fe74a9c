"""Check the JSON schemas of a request before they become grammars. Everything wrong is a 400 that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from edgepipe.errors import RequestInvalid
from edgepipe.gateway.closed_schema import Schema, closed_schema, resolved
from edgepipe.gateway.problems import HttpProblem, bad_request
from edgepipe.gateway.schema import MAX_SCHEMA_CHARS


def checked_schema(schema: Schema, *, param: str, close: Callable[[Schema], Schema] = closed_schema) -> Schema:
    """Return the schema closed. Raises HttpProblem."""
    _check_schema(schema, param=param)
    try:
        return close(schema)
    except RequestInvalid as exc:
        raise invalid_schema(exc, param=param) from exc


def _check_schema(schema: Mapping[str, Any], *, param: str) -> None:
    size = len(json.dumps(schema))
    if size > MAX_SCHEMA_CHARS:
        raise bad_request(
            f"the schema is too large: {size} characters, at most {MAX_SCHEMA_CHARS} can be used", param=param
        )
    _check_references(schema, param=param)
    if "x-guidance" in schema:
        raise bad_request("'x-guidance' is not supported", param=param)


def _check_references(schema: Mapping[str, Any], *, param: str) -> None:
    """A reference that leads to nothing but references would bind the output to nothing at all."""
    ends: set[str] = set()  # references that are known to lead somewhere, or nowhere, which the library refuses
    for first in _references(schema):
        way: set[str] = set()
        following: object = first
        while isinstance(following, str) and following not in ends:
            if following in way:
                text = f"'{following[:64]}' refers to nothing but itself"
                raise bad_request(text, param=param, code="invalid_schema")
            way.add(following)
            target = resolved(schema, following)
            following = target.get("$ref") if target is not None else None
        ends.update(way)


def _references(schema: Mapping[str, Any]) -> Iterator[str]:
    left: list[object] = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            fields = cast("dict[str, object]", node)
            if isinstance(reference := fields.get("$ref"), str):
                yield reference
            left.extend(fields.values())
        elif isinstance(node, list):
            left.extend(cast("list[object]", node))


def invalid_schema(error: RequestInvalid, *, param: str) -> HttpProblem:
    """Make the problem of a schema, with the field that holds it."""
    message = ". ".join(line.rstrip(".") for line in error.lines())
    return bad_request(message, param=param, code="invalid_schema")
