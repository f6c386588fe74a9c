"""Turn the field that binds an answer's form into a grammar.

Fields: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and ``guided_*``, llama.cpp's ``json_schema``. An
invalid field is a 400 that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from edgepipe.errors import RequestInvalid
from edgepipe.gateway.body import parse_json_object
from edgepipe.gateway.checked_schema import checked_schema, invalid_schema
from edgepipe.gateway.free_keys import has_free_keys
from edgepipe.gateway.problems import bad_request
from edgepipe.gateway.schema import MAX_REGEX_CHARS, RequestBody
from edgepipe.gateway.schema_repair import known_types
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import choice_grammar, json_grammar, regex_grammar

_JSON_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Form that binds an answer."""

    grammar: GrammarSpec
    param: str  # the request's field
    has_free_keys: bool = False  # the answer is JSON with an object whose keys the schema does not list

    @property
    def field(self) -> str:
        """The field of the body."""
        return self.param.partition(".")[0]


def answer_form(body: RequestBody) -> AnswerForm | None:
    """Return the form that a request asks for. Raises HttpProblem, also for two forms."""
    forms: list[AnswerForm] = []
    for name, read in _FIELDS.items():
        if (value := getattr(body, name)) is not None and (form := read(value, name)) is not None:
            forms.append(form)
    if len(forms) > 1:
        raise bad_request(f"{forms[1].field} cannot be combined with {forms[0].field}", param=forms[1].field)
    return forms[0] if forms else None


def _response_format(value: Mapping[str, Any], name: str) -> AnswerForm | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        return _json(_JSON_OBJECT if schema is None else schema, f"{name}.schema")
    if kind != "json_schema":
        raise bad_request(
            "response_format.type must be 'text', 'json_object' or 'json_schema'", param="response_format.type"
        )
    wrapper = value.get("json_schema")
    if not isinstance(wrapper, Mapping):
        raise bad_request("response_format.json_schema is required", param="response_format.json_schema")
    return _json(cast("Mapping[str, Any]", wrapper).get("schema"), f"{name}.json_schema.schema")


def _structured_outputs(value: Mapping[str, Any], name: str) -> AnswerForm | None:
    """Read vLLM's field: exactly one form. Refuse options of vLLM's backends unless they change nothing."""
    forms = [key for key in _STRUCTURED if value.get(key) not in (None, False)]
    for key, option in value.items():
        if key not in _STRUCTURED and key != "disable_fallback" and option not in (None, False):
            raise bad_request(
                f"'{key[:64]}' is not supported", param=f"{name}.{key[:64]}", code="unsupported_parameter"
            )
    if len(forms) != 1:
        given = " and ".join(forms) or "nothing"
        raise bad_request(f"{name} takes one of {', '.join(_STRUCTURED)}; {given} was given", param=name)
    return _STRUCTURED[forms[0]](value[forms[0]], f"{name}.{forms[0]}")


def _json(value: object, param: str) -> AnswerForm:
    """Read a schema, or its text."""
    schema = parse_json_object(value.encode(), name=param, param=param) if isinstance(value, str) else value
    if not isinstance(schema, Mapping):
        raise bad_request(f"{param} must be an object", param=param)
    checked = checked_schema(known_types(cast("Mapping[str, Any]", schema)), param=param)
    return replace(_form(json_grammar, checked, param), has_free_keys=has_free_keys(checked))


def _choice(value: object, param: str) -> AnswerForm:
    texts = cast("list[object]", value) if isinstance(value, list) else []
    known = [text for text in texts if isinstance(text, str)]
    if not known or len(known) < len(texts):
        raise bad_request(f"{param} must be a list of texts", param=param)
    return _form(choice_grammar, known, param)


def _regex(value: object, param: str) -> AnswerForm:
    if not isinstance(value, str) or len(value) > MAX_REGEX_CHARS:
        raise bad_request(f"{param} must be a text of at most {MAX_REGEX_CHARS} characters", param=param)
    return _form(regex_grammar, value, param)


def _json_object(value: object, param: str) -> AnswerForm:
    if value is not True:
        raise bad_request(f"{param} must be true or false", param=param)
    return _json(_JSON_OBJECT, param)


def _form(make: Callable[[Any], GrammarSpec], value: object, param: str) -> AnswerForm:
    try:
        return AnswerForm(make(value), param)
    except RequestInvalid as exc:
        raise invalid_schema(exc, param=param) from exc


_STRUCTURED: dict[str, Callable[[Any, str], AnswerForm]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "json_object": _json_object,
}
_FIELDS: dict[str, Callable[[Any, str], AnswerForm | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_choice": _choice,
    "guided_regex": _regex,
    "json_schema": _json,
}
