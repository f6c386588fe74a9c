"""Check the JSON schemas of a request before they become grammars. An invalid schema is a 400 that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import cast

from edgepipe.errors import RequestInvalid
from edgepipe.gateway.closed_schema import closed_schema, needed_parts
from edgepipe.gateway.problems import HttpProblem, bad_request
from edgepipe.gateway.raw_fields import MAX_SCHEMA_CHARS
from edgepipe.gateway.schema_keywords import Schema, without_idle


def checked_schema(schema: Schema, *, param: str, close: Callable[[Schema], Schema] = closed_schema) -> Schema:
    """Return the schema closed, without keywords that any value fits. Raises HttpProblem."""
    _check_schema(schema, param=param)
    try:
        return close(without_idle(schema))
    except RequestInvalid as exc:
        raise invalid_schema(exc, param=param) from exc


def _check_schema(schema: Schema, *, param: str) -> None:
    size = len(json.dumps(schema))
    if size > MAX_SCHEMA_CHARS:
        raise bad_request(
            f"the schema is too large: {size} characters, at most {MAX_SCHEMA_CHARS} can be used", param=param
        )
    _check_references(schema, param=param)
    if "x-guidance" in schema:
        raise bad_request("'x-guidance' is not supported", param=param)


def _check_references(schema: Schema, *, param: str) -> None:
    """Refuse a part that refers only to itself: it would not bind the output."""
    parts = {id(part): part for part in _objects(schema)}
    needs = {key: [id(other) for other in needed_parts(schema, part)] for key, part in parts.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as exc:
        references = [str(parts[key]["$ref"]) for key in exc.args[1] if "$ref" in parts[key]]
        text = f"'{references[0][:64]}' refers only to itself"
        raise bad_request(text, param=param, code="invalid_schema") from exc


def _objects(schema: Schema) -> Iterator[Schema]:
    left: list[object] = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            fields = cast("dict[str, object]", node)
            yield fields
            left.extend(fields.values())
        elif isinstance(node, list):
            left.extend(cast("list[object]", node))


def invalid_schema(error: RequestInvalid, *, param: str) -> HttpProblem:
    """Make the problem of a schema; ``param`` is the field that holds it."""
    message = ". ".join(line.rstrip(".") for line in error.lines())
    return bad_request(message, param=param, code="invalid_schema")
