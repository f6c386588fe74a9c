"""Tools of the Responses API as functions of the common form, and the way back (PURE).

A namespace is a group of tools: the model sees ``NAMESPACE__NAME``. A custom tool takes free text: the model sees a
function with the text ``input``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from edgepipe.gateway.leniency import Note
from edgepipe.gateway.problems import HttpProblem, bad_request
from edgepipe.gateway.protocols.responses.items import flat_name
from edgepipe.safe_text import one_line

_INPUT_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_MAX_SHOWN = 64  # characters of a client's word in a message
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """How a client names a tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTools:
    """The tools of a request in the common form."""

    tools: list[Fields] = field(default_factory=list[Fields])
    places: list[str] = field(default_factory=list[str])  # the field of each tool, such as ``tools.3.tools.0``
    forms: dict[str, ToolForm] = field(default_factory=dict[str, ToolForm])  # keys are names in the common form
    left_out: set[str] = field(default_factory=set[str])  # types of tools without a function
    notes: list[Note] = field(default_factory=list[Note])

    def form(self, name: str) -> ToolForm:
        """Return how the client names a tool."""
        return self.forms.get(name) or ToolForm(name=name)


def flat_tools(tools: Sequence[Fields]) -> FlatTools:
    """Convert tools. Types that no function can stand for are left out. Raises HttpProblem for malformed ones."""
    flat = FlatTools()
    for place, tool, namespace in _each(tools):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            shown = _short(kind)
            flat.left_out.add(shown)
            flat.notes.append(Note(f"left out {shown}", f"a tool of type '{shown}' was left out: no function is in it"))
            continue
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise bad_request("a tool needs a name", param=f"{place}.name")
        form = ToolForm(name=name, namespace=namespace, custom=kind == "custom")
        flat.forms[flat_name(name, namespace)] = form
        flat.tools.append({"type": "function", "function": _function(tool, form)})
        flat.places.append(place)
    return flat


def _each(tools: Sequence[Fields]) -> Iterator[tuple[str, Fields, str | None]]:
    """Yield the place, the fields and the namespace of every tool."""
    for index, tool in enumerate(tools):
        place = f"tools.{index}"
        if tool.get("type") != "namespace":
            yield place, tool, None
            continue
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name:
            raise bad_request("a namespace needs a name", param=f"{place}.name")
        if not isinstance(inner, list):
            raise bad_request("a namespace needs a list of tools", param=f"{place}.tools")
        for at, each in enumerate(cast("list[object]", inner)):
            if not isinstance(each, Mapping):
                raise bad_request("a tool must be an object", param=f"{place}.tools.{at}")
            yield f"{place}.tools.{at}", cast("Fields", each), name


def _function(tool: Fields, form: ToolForm) -> Fields:
    name = flat_name(form.name, form.namespace)
    if not form.custom:
        return {key: tool[key] for key in _FUNCTION_FIELDS if tool.get(key) is not None} | {"name": name}
    texts = [tool.get("description"), _grammar_text(tool.get("format"))]
    description = "\n\n".join(text for text in texts if isinstance(text, str) and text)
    return {"name": name, "description": description, "parameters": _INPUT_SCHEMA}


def _grammar_text(given: object) -> str:
    """Describe the grammar of a custom tool's input. No grammar binds the input."""
    fields = cast("Fields", given) if isinstance(given, Mapping) else dict[str, Any]()
    definition, syntax = fields.get("definition"), fields.get("syntax")
    if fields.get("type") != "grammar" or not isinstance(definition, str):
        return ""
    return f"The input follows this grammar ({_short(syntax)}):\n{definition}"


def flat_choice(choice: str | Fields | None) -> str | Fields | None:
    """Convert ``tool_choice`` to the common form. Raises HttpProblem for the choice of a tool that was left out."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") == "allowed_tools":
        listed: object = choice.get("tools")
        given = cast("list[object]", listed) if isinstance(listed, list) else []
        named = [cast("Fields", each) for each in given if isinstance(each, Mapping)]
        tools = [_named(each) for each in named if each.get("type") in ("function", "custom")]
        if named and not tools:
            raise _left_out(named[0])
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    if choice.get("type") in ("function", "custom"):
        return _named(choice)
    raise _left_out(choice)


def _named(choice: Fields) -> Fields:
    name, namespace = choice.get("name"), choice.get("namespace")
    if not isinstance(name, str):
        raise bad_request("tool_choice must name a tool", param="tool_choice.name")
    known = namespace if isinstance(namespace, str) else None
    return {"type": "function", "function": {"name": flat_name(name, known)}}


def _left_out(choice: Fields) -> HttpProblem:
    text = f"tool_choice asks for a tool of type '{_short(choice.get('type'))}', which no model here can call"
    return bad_request(text, param="tool_choice", code="unsupported_parameter")


def _short(value: object) -> str:
    return one_line(str(value)[:_MAX_SHOWN])
