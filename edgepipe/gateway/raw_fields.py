"""Fields with JSON of the client's own: their size, and their schemas for the API's document."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from edgepipe.gateway.content_parts import LongText

MAX_TOOLS = 512  # several servers of tools
MAX_SCHEMA_CHARS = 64 << 10  # limit of a schema as JSON
MAX_TOOLS_CHARS = 1 << 20  # limit of all tools together as JSON


_FUNCTION_NAME = {"type": "string", "minLength": 1, "maxLength": 256}


def _function_schema(**more: Any) -> dict[str, Any]:
    """Build the schema of an object that names a function; ``more``: its optional fields."""
    function = {"type": "object", "required": ["name"], "properties": {"name": _FUNCTION_NAME, **more}}
    properties = {"type": {"const": "function"}, "function": function}
    return {"type": "object", "required": ["type", "function"], "properties": properties}


_TOOL_SCHEMA = _function_schema(
    description={"type": "string"},
    parameters={"type": "object", "description": "JSON schema of the arguments."},
)
_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _function_schema(),
        {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "required": ["mode", "tools"],
                    "properties": {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array"}},
                },
            },
        },
        {"type": "null"},
    ]
}
_FORMAT_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}},
                "schema": {"type": "object", "description": "Of a json_object."},
            },
        },
        {"type": "null"},
    ]
}
_FORM_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "json": {"type": ["object", "string"], "description": "JSON schema of the answer."},
                "regex": {"type": "string"},
                "choice": {"type": "array", "items": {"type": "string"}},
                "json_object": {"type": "boolean"},
            },
        },
        {"type": "null"},
    ]
}


@dataclass(frozen=True, slots=True)
class JsonSize:
    """Annotation that bounds the size of a value as JSON. The API's document shows the bound."""

    most_chars: int  # limit of the value as JSON

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), JSON_SIZE: self.most_chars}

    def _check(self, value: Any) -> Any:
        if value and (size := len(json.dumps(value))) > self.most_chars:
            raise ValueError(f"it is too large: {size} characters of JSON, at most {self.most_chars} can be used")
        return value


JSON_SIZE = "x-max-json-characters"
"""The keyword of ``JsonSize`` in the API's document."""


# ``structured`` and ``answer_form`` check these fields. These schemas are for the API's document.
_RawTool = Annotated[dict[str, Any], WithJsonSchema(_TOOL_SCHEMA)]
RawTools = Annotated[list[_RawTool], Field(max_length=MAX_TOOLS), JsonSize(MAX_TOOLS_CHARS)]
RawToolChoice = Annotated[str | dict[str, Any] | None, WithJsonSchema(_CHOICE_SCHEMA), JsonSize(MAX_SCHEMA_CHARS)]
RawSchema = Annotated[LongText | dict[str, Any] | None, JsonSize(2 * MAX_SCHEMA_CHARS)]  # a schema, or its text
RawForm = Annotated[dict[str, Any] | None, WithJsonSchema(_FORM_SCHEMA), JsonSize(2 * MAX_SCHEMA_CHARS)]
RawFormat = Annotated[dict[str, Any] | None, WithJsonSchema(_FORMAT_SCHEMA), JsonSize(2 * MAX_SCHEMA_CHARS)]
