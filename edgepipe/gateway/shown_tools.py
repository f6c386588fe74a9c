"""Write tools for a prompt: as the client sent them, with the model's name and a well-formed schema. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from edgepipe.gateway.schema_keywords import Schema, changed_schema
from edgepipe.gateway.schema_repair import TYPES, json_type, well_formed

_FALLBACK = "string"
_NO_PARAMETERS: Schema = {"type": "object", "properties": {}}


def shown_tool(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a tool for a chat template. ``fields``: the function as the client sent it; ``name``: the model's."""
    kept = {key: value for key, value in fields.items() if value is not None and key != "type"}
    if "parameters" in fields:
        given = fields["parameters"]
        kept["parameters"] = well_formed(cast("Schema", given)) if isinstance(given, Mapping) else _NO_PARAMETERS
    return {"type": "function", "function": kept | {"name": name}}


def complete_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a shown tool with all that some templates take for granted: texts, parameters, and types of these."""
    function = cast("Mapping[str, Any]", tool["function"])
    parameters = {**_NO_PARAMETERS, **function.get("parameters", {})}
    whole = {"description": "", **function, "parameters": changed_schema(parameters, _complete)}
    return {**tool, "function": whole}


def _complete(fields: dict[str, Any]) -> dict[str, Any]:
    """Complete the parameters that an object names, and the items of a list."""
    changed: dict[str, Any] = {}
    if isinstance(fields.get("properties"), Mapping):
        named = cast("Mapping[str, Schema]", fields["properties"]).items()
        changed["properties"] = {name: {"description": "", **each, "type": _one_type(each)} for name, each in named}
    if isinstance(fields.get("items"), Mapping):
        changed["items"] = {**fields["items"], "type": _one_type(fields["items"])}
    elif fields.get("type") == "array":
        changed["items"] = {"type": _FALLBACK}
    return fields | changed


def _one_type(schema: Schema) -> str:
    """Return one type that templates know: of several the first, for an unknown one a text."""
    kind: object = schema.get("type")
    given = cast("list[object]", kind) if isinstance(kind, list) else [kind]
    kinds = [json_type(each) for each in given if isinstance(each, str)]
    return next((each for each in kinds if each in TYPES and each != "null"), _FALLBACK)
