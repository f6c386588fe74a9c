"""Read ``tools`` and ``tool_choice``: the functions that an answer may call, as the model sees them. PURE.

One odd tool does not refuse the others. What can be mapped or left out without another meaning is, with a note for
the log. The rest is a 400 that names the tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from edgepipe.gateway.checked_schema import checked_schema
from edgepipe.gateway.closed_schema import closed_parameters
from edgepipe.gateway.formats.chat_format import CallForm, Functions
from edgepipe.gateway.leniency import Note
from edgepipe.gateway.problems import HttpProblem, bad_request
from edgepipe.gateway.raw_fields import MAX_TOOLS
from edgepipe.gateway.schema_keywords import Schema, expressible
from edgepipe.gateway.schema_repair import known_types, repaired, without_booleans
from edgepipe.gateway.shown_tools import shown_tool
from edgepipe.gateway.tool_names import ToolNames, tool_names
from edgepipe.safe_text import one_line

MAX_NAME_CHARS = 256  # longest name that a client may give
_SHOWN_CHARS = 64  # longest part of a name in a message
_ANY_OBJECT: Schema = {"type": "object"}
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "google_search", "url_context")
"""Begins the types of tools that other servers run themselves. No answer needs them."""

_FREE = CallForm(forced=False, several=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedFunction:
    """A function of the request."""

    name: str  # the client's
    place: str  # the tool's field, such as ``tools.0.function``
    fields: Mapping[str, Any]  # the function as the client sent it
    schema: Schema  # the arguments' schema, for a grammar
    strict: bool  # the schema binds or the request is refused

    def refused(self, problem: HttpProblem) -> HttpProblem:
        """Return the problem with the tool's name in its message."""
        return replace(problem, message=f"the tool '{_short(self.name)}': {problem.message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Functions that an answer may call, by the names that the model sees."""

    functions: Functions = field(default_factory=dict[str, Mapping[str, Any]])
    all_tools: Mapping[str, RequestedFunction] = field(
        default_factory=dict[str, RequestedFunction]
    )  # all functions of the request
    names: ToolNames = field(default_factory=ToolNames)
    form: CallForm = _FREE
    tools: tuple[Mapping[str, Any], ...] = ()  # the functions as the prompt shows them
    notes: tuple[Note, ...] = ()

    def with_one_call(self) -> ToolChoice:
        """Return the choice for a model whose template takes one call in a turn."""
        return replace(self, form=replace(self.form, several=False))

    def opened(self, names: Sequence[str]) -> ToolChoice:
        """Return the choice with any arguments for these functions, whose schemas cannot be grammars."""
        free = {name: _ANY_OBJECT if name in names else schema for name, schema in self.functions.items()}
        notes = tuple(_open_note(self.all_tools[name].name) for name in names)
        return replace(self, functions=free, notes=self.notes + notes)

    @property
    def has_strict(self) -> bool:
        """Whether a function that may be called is strict."""
        return any(self.all_tools[name].strict for name in self.functions if name in self.all_tools)

    def unbound(self, reason: str) -> ToolChoice:
        """Return the choice with a note that no grammar binds its calls."""
        text = f"no grammar binds the calls of {len(self.functions)} tools: {one_line(reason)}"
        return replace(self, notes=(*self.notes, Note("unbound calls", text)))


NO_TOOLS = ToolChoice()


def choose_tools(
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
) -> ToolChoice:
    """Return the functions that a request allows. Raises HttpProblem (400) with the invalid field."""
    found, notes = _read_tools(tools or ())
    names = tool_names(list(found))
    notes += [_name_note(given, mapped) for given, mapped in names.changed.items()]
    chosen, forced = _choice(tool_choice, list(found))
    several = parallel_tool_calls is not False and not _names_one(tool_choice)
    shown = list(found) if chosen else []  # all, whichever may be called: so the head of the prompt stays cached
    return ToolChoice(
        functions={names.for_model(name): found[name].schema for name in chosen},
        all_tools={names.for_model(name): tool for name, tool in found.items()},
        names=names,
        form=CallForm(forced=forced, several=several),
        tools=tuple(shown_tool(found[name].fields, names.for_model(name)) for name in shown),
        notes=tuple(notes),
    )


def _read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, RequestedFunction], list[Note]]:
    """Return the tools by the client's names, and what was left out or changed."""
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"at most {MAX_TOOLS} tools can be given", param="tools")
    found: dict[str, RequestedFunction] = {}
    notes: list[Note] = []
    for index, tool in enumerate(tools):
        if _is_hosted(tool):
            notes.append(
                Note("hosted tools", f"a tool of type '{_short(tool['type'])}' was left out: no server runs it")
            )
            continue
        read, new = _read_tool(tool, index)
        if read.name in found and found[read.name].fields != read.fields:
            raise bad_request(f"two functions are named '{_short(read.name)}'", param=f"{read.place}.name")
        if read.name in found:
            notes.append(Note("equal tools", f"the tool '{_short(read.name)}' came twice and counts once"))
            continue
        found[read.name] = read
        notes += new
    return found, notes


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(_HOSTED)


def _read_tool(tool: Mapping[str, Any], index: int) -> tuple[RequestedFunction, list[Note]]:
    """Read a tool in OpenAI's form, or in the flat form of its newer API."""
    inner = tool.get("function")
    place = f"tools.{index}.function" if inner is not None or "name" not in tool else f"tools.{index}"
    function = tool if inner is None and "name" in tool else inner
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise bad_request(f"{_titled(tool)}only tools of type 'function' are supported", param=f"tools.{index}.type")
    fields = cast("Mapping[str, Any]", function)
    name = fields.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise bad_request(f"a function's name has 1 to {MAX_NAME_CHARS} characters", param=f"{place}.name")
    strict = fields.get("strict") is True
    schema, notes = _parameters(name, fields.get("parameters"), f"{place}.parameters", strict=strict)
    return RequestedFunction(name=name, place=place, fields=fields, schema=schema, strict=strict), notes


def _titled(tool: Mapping[str, Any]) -> str:
    """Return the beginning of a message about a tool that may have no name."""
    parts = [tool, *(cast("Mapping[str, Any]", value) for value in tool.values() if isinstance(value, Mapping))]
    name = next((part["name"] for part in parts if isinstance(part.get("name"), str)), None)
    return "" if name is None else f"the tool '{_short(name)}': "


def _parameters(name: str, given: object, param: str, *, strict: bool) -> tuple[Schema, list[Note]]:
    """Return the schema of a function's arguments, closed, as a grammar can express it."""
    given = {} if given is None or given == [] else given  # PHP writes an empty object as a list
    title = f"the tool '{_short(name)}': "
    if not isinstance(given, Mapping):
        raise bad_request(f"{title}a function's parameters are a JSON schema", param=param)
    change = _strict if strict else repaired
    schema = change(cast("Schema", given))
    kinds = schema.get("type", "object")
    if "object" not in (cast("list[object]", kinds) if isinstance(kinds, list) else [kinds]):
        raise bad_request(f"{title}a function's parameters must be of type 'object'", param=param)
    notes = [] if schema == given else [Note("repaired schemas", f"{title}its schema was repaired for a grammar")]
    try:
        return checked_schema(schema, param=param, close=closed_parameters if strict else _loose_parameters), notes
    except HttpProblem as problem:
        if strict or problem.code != "invalid_schema":
            raise replace(problem, message=f"{title}{problem.message}") from problem
        return _ANY_OBJECT, [*notes, _open_note(name)]


def _strict(schema: Schema) -> Schema:
    return known_types(without_booleans(schema))


def _loose_parameters(schema: Schema) -> Schema:
    """Close the parameters of a function that is not strict: keywords that no grammar can express do not bind.

    Clients pass on tools of servers that they do not know; one such keyword would make all tools unusable.
    """
    return closed_parameters(expressible(schema))


def _choice(tool_choice: str | Mapping[str, Any] | None, names: Sequence[str]) -> tuple[Sequence[str], bool]:
    """Return the client's names of the functions that may be called, and whether a call is required."""
    if tool_choice is None or tool_choice == "auto":
        return names, False
    if tool_choice == "none":
        return [], False
    if not names:
        raise bad_request("tool_choice is only allowed with tools of type 'function'", param="tool_choice")
    if tool_choice == "required":
        return names, True
    if not isinstance(tool_choice, str) and tool_choice.get("type") == "allowed_tools":
        return _allowed(tool_choice, names)
    name = _function_name(tool_choice)
    if name is None:
        raise bad_request(
            "tool_choice must be 'none', 'auto', 'required', name a function or list the allowed_tools",
            param="tool_choice",
        )
    return [_known(name, names)], True


def _names_one(tool_choice: str | Mapping[str, Any] | None) -> bool:
    """Return whether ``tool_choice`` names a function: the answer is then one call of it."""
    return isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function"


def _allowed(tool_choice: Mapping[str, Any], names: Sequence[str]) -> tuple[Sequence[str], bool]:
    """Return the functions of ``allowed_tools``, and whether a call is required."""
    allowed = tool_choice.get("allowed_tools")
    fields = cast("Mapping[str, Any]", allowed) if isinstance(allowed, Mapping) else dict[str, Any]()
    listed = fields.get("tools")
    wanted = [_function_name(tool) for tool in cast("list[Any]", listed)] if isinstance(listed, list) else []
    known = [_known(name, names) for name in wanted if name is not None]
    if not wanted or len(known) < len(wanted):
        text = "allowed_tools.tools must list functions like {'type': 'function', 'function': {'name': ...}}"
        raise bad_request(text, param="tool_choice.allowed_tools.tools")
    if fields.get("mode") not in ("auto", "required"):
        raise bad_request("allowed_tools.mode must be 'auto' or 'required'", param="tool_choice.allowed_tools.mode")
    return [name for name in names if name in known], fields["mode"] == "required"


def _known(name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise bad_request(f"tool_choice names '{_short(name)}', which is not among the tools", param="tool_choice")
    return name


def _function_name(value: object) -> str | None:
    """Return the name in ``{"type": "function", "function": {"name": ...}}``, or in its flat form."""
    fields = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else dict[str, Any]()
    if fields.get("type") != "function":
        return None
    function = fields.get("function", fields)
    name = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _open_note(name: str) -> Note:
    text = f"the tool '{_short(name)}' takes any arguments: its schema cannot be a grammar"
    return Note("free arguments", text)


def _name_note(given: str, mapped: str) -> Note:
    return Note("names", f"the model sees the tool '{_short(given)}' as '{mapped}'")


def _short(name: str) -> str:
    return one_line(name[:_SHOWN_CHARS])
