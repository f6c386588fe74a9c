"""Turns an answer's form and ``tools`` into a grammar, and checks it before the request is accepted.

``plan_output`` takes fields of the body; an invalid field is a 400 that names it. A child process compiles. The tools
of a chat also go into its prompt: through the model's template if it supports tools, else as ``tool_instructions``
before the conversation.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from edgepipe.errors import RequestInvalid
from edgepipe.gateway.answer_form import AnswerForm
from edgepipe.gateway.checked_schema import checked_schema, invalid_schema
from edgepipe.gateway.closed_schema import closed_parameters
from edgepipe.gateway.grammar_trial import GrammarTooHard
from edgepipe.gateway.problems import HttpProblem, bad_request
from edgepipe.gateway.schema import MAX_TOOLS
from edgepipe.gateway.tool_calls import ToolFormat
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import json_grammar, json_rule, lark_grammar

MAX_CACHED_GRAMMARS = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """Grammar that binds a choice's output, and the format to read it."""

    grammar: GrammarSpec | None = None  # for SamplingParams
    tools: tuple[Mapping[str, Any], ...] = ()  # tools that may be called, for the prompt
    tool_format: ToolFormat | None = None  # set: a ToolCallScanner of that format reads the text


class GrammarCompiler:
    """Checks grammars, and remembers the valid ones."""

    def __init__(self, check: Callable[[GrammarSpec], Awaitable[None]]) -> None:
        """``check`` is ``GrammarTrial.check`` or a fake of it."""
        self._check = check
        self._good: OrderedDict[str, None] = OrderedDict()

    async def check(self, grammar: GrammarSpec) -> None:
        """See GrammarTrial."""
        if grammar.text not in self._good:
            await self._check(grammar)
            self._good[grammar.text] = None
            while len(self._good) > MAX_CACHED_GRAMMARS:
                self._good.popitem(last=False)
        self._good.move_to_end(grammar.text)


async def plan_output(
    *,
    form: AnswerForm | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    tool_format: ToolFormat,
    compiler: GrammarCompiler,
) -> OutputPlan:
    """Plan the output of a request. Raises HttpProblem (400) with the invalid field."""
    functions = _functions(tools)
    chosen, forced = _choice(tool_choice, functions)
    several = parallel_tool_calls is not False and not _names_one(tool_choice)
    grammar = form.grammar if form is not None else None
    if chosen:
        if form is not None:
            raise bad_request(f"{form.field} cannot be combined with tools", param=form.field)
        grammar = _tool_grammar(chosen, tool_format, forced=forced, several=several)
    if grammar is None:
        return OutputPlan()
    param = "tools" if form is None else form.param
    try:
        await compiler.check(grammar)
    except GrammarTooHard as exc:
        raise _too_hard(param) from exc
    except RequestInvalid as exc:
        await _find_bad_tool(functions, compiler)
        raise invalid_schema(exc, param=param) from exc
    if not chosen:
        return OutputPlan(grammar=grammar)
    shown = tuple(tool for tool in tools or () if tool["function"]["name"] in chosen)
    return OutputPlan(grammar=grammar, tools=shown, tool_format=tool_format)


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a prompt that is only tokenized. Raises HttpProblem (400) with the invalid field."""
    _functions(tools)
    return tuple(tools or ())


def tool_instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """Describe the tools to a model whose chat template does not, and ask for calls in Hermes' format."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to answer. Their signatures stand between <tools> and </tools>:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, write its name and arguments as JSON between tags:\n"
        '<tool_call>\n{"name": "function name", "arguments": {"argument": "value"}}\n</tool_call>'
    )


async def _find_bad_tool(functions: Mapping[str, Mapping[str, Any]], compiler: GrammarCompiler) -> None:
    """Raise HttpProblem for the first tool whose schema alone cannot be compiled."""
    for index, schema in enumerate(functions.values()):
        param = f"tools.{index}.function.parameters"
        try:
            await compiler.check(json_grammar(schema))
        except GrammarTooHard as exc:
            raise _too_hard(param) from exc
        except RequestInvalid as exc:
            raise invalid_schema(exc, param=param) from exc


def _too_hard(param: str) -> HttpProblem:
    text = "this schema cannot constrain the output: compiling it takes too much work; use simpler patterns"
    return bad_request(text, param=param, code="invalid_schema")


def _functions(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the arguments, by function name."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise bad_request(f"at most {MAX_TOOLS} tools can be given", param="tools")
    found: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools or ()):
        param = f"tools.{index}.function"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            raise bad_request("only tools of type 'function' are supported", param=f"tools.{index}.type")
        fields = cast("Mapping[str, Any]", function)
        name, schema = fields.get("name"), fields.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise bad_request("a function's name has 1 to 64 letters, digits, '_' or '-'", param=f"{param}.name")
        if name in found:
            raise bad_request(f"two functions are named '{name}'", param=f"{param}.name")
        if schema is not None and not isinstance(schema, Mapping):
            raise bad_request("a function's parameters are a JSON schema", param=f"{param}.parameters")
        schema = cast("Mapping[str, Any]", schema or {})
        kinds = schema.get("type", "object")
        if "object" not in (cast("list[object]", kinds) if isinstance(kinds, list) else [kinds]):
            raise bad_request("a function's parameters must be of type 'object'", param=f"{param}.parameters")
        found[name] = checked_schema(schema, param=f"{param}.parameters", close=closed_parameters)
    return found


def _choice(
    tool_choice: str | Mapping[str, Any] | None, functions: dict[str, Mapping[str, Any]]
) -> tuple[dict[str, Mapping[str, Any]], bool]:
    """Return the functions that may be called, and whether a call is required."""
    if tool_choice is None or tool_choice == "auto":
        return functions, False
    if tool_choice == "none":
        return {}, False
    if not functions:
        raise bad_request("tool_choice is only allowed with tools", param="tool_choice")
    if tool_choice == "required":
        return functions, True
    if not isinstance(tool_choice, str) and tool_choice.get("type") == "allowed_tools":
        return _allowed(tool_choice, functions)
    name = _function_name(tool_choice)
    if name is None:
        raise bad_request(
            "tool_choice must be 'none', 'auto', 'required', name a function or list the allowed_tools",
            param="tool_choice",
        )
    return {name: _known(name, functions)}, True


def _names_one(tool_choice: str | Mapping[str, Any] | None) -> bool:
    """Return whether ``tool_choice`` names a function: the answer is then one call of it."""
    return isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function"


def _allowed(
    tool_choice: Mapping[str, Any], functions: dict[str, Mapping[str, Any]]
) -> tuple[dict[str, Mapping[str, Any]], bool]:
    """Return the functions of ``allowed_tools``, and whether a call is required."""
    allowed = tool_choice.get("allowed_tools")
    fields = cast("Mapping[str, Any]", allowed) if isinstance(allowed, Mapping) else dict[str, Any]()
    listed = fields.get("tools")
    names = [_function_name(tool) for tool in cast("list[Any]", listed)] if isinstance(listed, list) else []
    known = [name for name in names if name is not None]
    if not names or len(known) < len(names):
        text = "allowed_tools.tools must list functions like {'type': 'function', 'function': {'name': ...}}"
        raise bad_request(text, param="tool_choice.allowed_tools.tools")
    if fields.get("mode") not in ("auto", "required"):
        raise bad_request("allowed_tools.mode must be 'auto' or 'required'", param="tool_choice.allowed_tools.mode")
    chosen = {name: _known(name, functions) for name in known}
    return {name: schema for name, schema in functions.items() if name in chosen}, fields["mode"] == "required"


def _known(name: str, functions: dict[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    if name not in functions:
        raise bad_request(f"tool_choice names '{name[:64]}', which is not among the tools", param="tool_choice")
    return functions[name]


def _function_name(value: object) -> str | None:
    """Return the name in ``{"type": "function", "function": {"name": ...}}``."""
    fields = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else dict[str, Any]()
    function = fields.get("function") if fields.get("type") == "function" else None
    name = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _tool_grammar(
    functions: Mapping[str, Mapping[str, Any]], kind: ToolFormat, *, forced: bool, several: bool
) -> GrammarSpec:
    """Make the grammar of calls in a format, with free text around them unless a call is required."""
    calls = [_call_rule(index, name, kind, schema) for index, (name, schema) in enumerate(functions.items())]
    rules = [*_AROUND[kind](forced=forced, several=several), "call: " + _any("call", len(calls)), *calls]
    try:
        return lark_grammar("\n".join(rules) + "\n")
    except RequestInvalid as exc:
        raise invalid_schema(exc, param="tools") from exc


def _call_rule(index: int, name: str, kind: ToolFormat, schema: Mapping[str, Any]) -> str:
    """Make the rule of one function's call. It embeds the schema whole: references are relative to the schema."""
    if kind is ToolFormat.MISTRAL_ARGS:
        return f"call_{index}: {json.dumps(name + '[ARGS]')} {json_rule(schema)}"
    key = "parameters" if kind is ToolFormat.LLAMA else "arguments"
    opening = '{"name": ' + json.dumps(name) + f', "{key}": '
    return f'call_{index}: {json.dumps(opening)} {json_rule(schema)} "}}"'


def _any(rule: str, count: int) -> str:
    return " | ".join(f"{rule}_{index}" for index in range(count))


_TEXT = r"TEXT: /(.|\n)*/"
"""Free text. It ends where a lazy ``opening`` matches; the grammar binds the text after it."""


def _start(calls: str, *, several: bool) -> str:
    """Make the start rule of an automatic choice: text with calls in it, or text that ends with a single call."""
    return f"start: {calls}* TEXT" if several else f"start: {calls} | TEXT"


def _hermes(*, forced: bool, several: bool) -> list[str]:
    body = r'"\n"? call "\n"? "</tool_call>"'
    if forced:
        more = r'("\n" tag)*' if several else ""
        return [f"start: tag {more}", f'tag: "<tool_call>" {body}']
    return [_start("tag", several=several), f"tag: opening {body}", 'opening[lazy]: TEXT "<tool_call>"', _TEXT]


def _llama(*, forced: bool, several: bool) -> list[str]:
    calls = 'calls: call ("; " call)*' if several else "calls: call"
    if forced:
        return ["start: calls", calls]
    marked = ["marked: opening calls", 'opening[lazy]: TEXT "<|python_tag|>"']
    return ["start: calls | marked | TEXT", calls, *marked, r"TEXT: /([^{](.|\n)*)?/"]


def _mistral(*, forced: bool, several: bool) -> list[str]:
    more = r'(", " call)*' if several else ""
    array = f'" "? "[" call {more} "]"'
    if forced:
        return [f'start: "[TOOL_CALLS]" {array}']
    start = "start: group? TEXT" if several else "start: group | TEXT"
    return [start, f"group: opening {array}", 'opening[lazy]: TEXT "[TOOL_CALLS]"', _TEXT]


def _mistral_args(*, forced: bool, several: bool) -> list[str]:
    if forced:
        return ["start: tag+" if several else "start: tag", 'tag: "[TOOL_CALLS]" call']
    return [_start("tag", several=several), "tag: opening call", 'opening[lazy]: TEXT "[TOOL_CALLS]"', _TEXT]


_AROUND = {
    ToolFormat.HERMES: _hermes,
    ToolFormat.LLAMA: _llama,
    ToolFormat.MISTRAL: _mistral,
    ToolFormat.MISTRAL_ARGS: _mistral_args,
}
