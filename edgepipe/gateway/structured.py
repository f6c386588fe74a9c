"""Turns an answer's form and ``tools`` into a grammar, and checks it before the request is accepted.

``choose_tools`` and ``plan_output`` take fields of the body; an invalid field is a 400 that names it. A child process
compiles. The tools of a chat also go into its prompt (``conversation``). Where the model reasons, the grammar binds
what follows the reasoning.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from edgepipe.errors import QueueFull, RequestInvalid
from edgepipe.gateway.answer_form import AnswerForm
from edgepipe.gateway.answer_reader import AnswerFormat
from edgepipe.gateway.checked_schema import checked_schema, invalid_schema
from edgepipe.gateway.closed_schema import closed_parameters
from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions, Reasoning
from edgepipe.gateway.problems import HttpProblem, bad_request, from_error
from edgepipe.gateway.schema import MAX_TOOLS
from edgepipe.gateway.schema_keywords import expressible
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import json_grammar, lark_grammar, rule_of, with_budget, with_unique_keys
from edgepipe.sampling.grammar_trial import GrammarTooHard
from edgepipe.sampling.thought_budget import ThoughtBudget

MAX_CACHED_GRAMMARS = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


_FREE = CallForm(forced=False, several=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Functions that an answer may call."""

    functions: Functions = field(default_factory=dict[str, Mapping[str, Any]])
    all_functions: Functions = field(default_factory=dict[str, Mapping[str, Any]])  # of the request
    form: CallForm = _FREE
    tools: tuple[Mapping[str, Any], ...] = ()  # the functions as the prompt shows them


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """Grammar that binds a choice's output, and the way to read it."""

    grammar: GrammarSpec | None = None  # for SamplingParams
    answer: AnswerFormat | None = None  # None: all text is content


class GrammarCompiler:
    """Checks grammars, and remembers the valid ones."""

    def __init__(self, check: Callable[[GrammarSpec, str], Awaitable[None]]) -> None:
        """``check`` is ``GrammarTrial.check`` or a fake of it."""
        self._check = check
        self._good: OrderedDict[str, None] = OrderedDict()

    async def check(self, grammar: GrammarSpec, owner: str) -> None:
        """See GrammarTrial."""
        if grammar.text not in self._good:
            await self._check(grammar, owner)
            self._good[grammar.text] = None
            while len(self._good) > MAX_CACHED_GRAMMARS:
                self._good.popitem(last=False)
        self._good.move_to_end(grammar.text)


def choose_tools(
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
) -> ToolChoice:
    """Return the functions that a request allows. Raises HttpProblem (400) with the invalid field."""
    functions = _functions(tools)
    chosen, forced = _choice(tool_choice, functions)
    several = parallel_tool_calls is not False and not _names_one(tool_choice)
    return ToolChoice(
        functions=chosen,
        all_functions=functions,
        form=CallForm(forced=forced, several=several),
        tools=tuple(tool for tool in tools or () if tool["function"]["name"] in chosen),
    )


NO_TOOLS = ToolChoice()


async def plan_output(
    *,
    form: AnswerForm | None = None,
    choice: ToolChoice = NO_TOOLS,
    chat: ChatFormat | None = None,
    in_reasoning: bool = False,
    most_thoughts: int | None = None,
    compiler: GrammarCompiler,
    owner: str = "",
) -> OutputPlan:
    """Plan the output of a request. Raises HttpProblem (400) with the invalid field.

    chat           format of a conversation's answer; None for a text that continues a prompt
    in_reasoning   the prompt has opened the reasoning
    most_thoughts  tokens of reasoning, which is closed then; None: as many as the model likes
    owner          user whose grammar it is: those of several users are compiled in turns
    """
    if choice.form.forced:
        form = None  # the answer is a call
    budget = _budget(chat, most_thoughts, in_reasoning=in_reasoning)
    grammar = _grammar(form, choice, chat, in_reasoning=in_reasoning, bounds_thoughts=budget is not None)
    if grammar is not None and budget is not None:
        grammar = with_budget(grammar, budget)
    if grammar is not None and form is not None and form.has_free_keys and not choice.functions:
        grammar = _with_unique_keys(grammar, chat, in_reasoning=in_reasoning)
    if grammar is not None:
        await _check(grammar, form, choice, compiler, owner)
    answer: AnswerFormat | None = None
    if chat is not None and (choice.functions or chat.reasons):
        answer = AnswerFormat(chat=chat, functions=choice.functions, in_reasoning=in_reasoning)
    return OutputPlan(grammar=grammar, answer=answer)


async def _check(
    grammar: GrammarSpec, form: AnswerForm | None, choice: ToolChoice, compiler: GrammarCompiler, owner: str
) -> None:
    param = "tools" if form is None else form.param
    try:
        await compiler.check(grammar, owner)
    except GrammarTooHard as exc:
        raise _too_hard(exc, param) from exc
    except QueueFull as exc:
        raise from_error(exc, param=param) from exc
    except RequestInvalid as exc:
        await _find_bad_tool(choice.all_functions, compiler, owner)
        raise invalid_schema(exc, param=param) from exc


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a prompt that is only tokenized. Raises HttpProblem (400) with the invalid field."""
    _functions(tools)
    return tuple(tools or ())


async def _find_bad_tool(functions: Mapping[str, Mapping[str, Any]], compiler: GrammarCompiler, owner: str) -> None:
    """Raise HttpProblem for the first tool whose schema alone cannot be compiled."""
    for index, schema in enumerate(functions.values()):
        param = f"tools.{index}.function.parameters"
        try:
            await compiler.check(json_grammar(schema), owner)
        except GrammarTooHard as exc:
            raise _too_hard(exc, param) from exc
        except RequestInvalid as exc:
            raise invalid_schema(exc, param=param) from exc


def _too_hard(error: GrammarTooHard, param: str) -> HttpProblem:
    text = f"this schema cannot constrain the output: {error.fact}; use simpler patterns and narrower ranges"
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
        close = closed_parameters if fields.get("strict") is True else _loose_parameters
        found[name] = checked_schema(schema, param=f"{param}.parameters", close=close)
    return found


def _loose_parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Close the parameters of a function that is not strict: keywords that no grammar can express do not bind.

    Clients pass on tools of servers that they do not know; one such keyword would make all tools unusable.
    """
    return closed_parameters(expressible(schema))


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


def _with_unique_keys(grammar: GrammarSpec, chat: ChatFormat | None, *, in_reasoning: bool) -> GrammarSpec:
    """Return the grammar of a JSON answer whose objects have no key twice; unchanged if marks are around the JSON."""
    if chat is not None and (chat.has_channels or chat.frames_content):
        return grammar
    if chat is None or chat.reasoning is None:
        return with_unique_keys(grammar, opening="", closing="")
    opening = "" if in_reasoning else chat.reasoning.opening
    return with_unique_keys(grammar, opening=opening, closing=chat.reasoning.closing)


def _budget(chat: ChatFormat | None, most_tokens: int | None, *, in_reasoning: bool) -> ThoughtBudget | None:
    """Return the budget of an answer's reasoning. Raises HttpProblem if the model's form has none."""
    if chat is None or most_tokens is None or not chat.reasons:
        return None
    if chat.reasoning is None:
        raise bad_request(
            "thinking_token_budget cannot bound reasoning in channels; send reasoning_effort",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    opening = "" if in_reasoning else chat.reasoning.opening
    return ThoughtBudget(most_tokens=most_tokens, opening=opening, closing=chat.reasoning.closing)


def _grammar(
    form: AnswerForm | None,
    choice: ToolChoice,
    chat: ChatFormat | None,
    *,
    in_reasoning: bool,
    bounds_thoughts: bool = False,
) -> GrammarSpec | None:
    """Return the grammar of an answer: bound to a form, or with calls in it, or free after bounded reasoning."""
    if chat is None or (form is None and not choice.functions and not bounds_thoughts):
        return form.grammar if form is not None else None
    try:
        if form is None and not choice.functions:
            rules = ["answer: PLAIN"]
        elif form is None:
            rules = chat.call_rules(choice.functions, choice.form)
        elif not choice.functions and not chat.reasons:
            return form.grammar
        else:
            rules = [*chat.form_rules, rule_of(form.grammar, "form")]
            if choice.functions:
                calls = chat.call_rules(choice.functions, replace(choice.form, forced=True))
                rules = _either(called=calls, formed=rules)
        bound = form is not None or choice.form.forced
        start = _start(chat.reasoning, bound=bound, in_reasoning=in_reasoning)
        return lark_grammar("\n".join([*start, *rules, r"ANYTHING: /(.|\n)*/"]) + "\n")
    except RequestInvalid as exc:
        raise invalid_schema(exc, param="tools" if form is None else form.param) from exc


def _either(**answers: Sequence[str]) -> list[str]:
    """Join the rules of several kinds of answers, by the names of these kinds."""
    start = "answer: "
    rules = [
        f"{kind}: {rule.removeprefix(start)}" if rule.startswith(start) else rule
        for kind, rules in answers.items()
        for rule in rules
    ]
    return [start + " | ".join(answers), *dict.fromkeys(rules)]


def _start(reasoning: Reasoning | None, *, bound: bool, in_reasoning: bool) -> list[str]:
    """Return the rules of the start: an answer, perhaps after reasoning. A bound answer has no other text before it."""
    gap = r"/\s{1,4}/? " if bound else ""
    plain = "PLAIN: ANYTHING"
    if reasoning is None:
        return ["start: answer", plain]
    closing = re.escape(reasoning.closing).replace("/", r"\/")
    if in_reasoning:
        return [f"start: thought {gap}answer", rf"thought[lazy]: /(.|\n)*{closing}/", plain]
    begun = rf"\s*{re.escape(reasoning.opening)}(.|\n)*"
    return [
        f"start: answer | thought {gap}answer",
        f"thought[lazy]: /{begun}{closing}/",
        f"PLAIN: ANYTHING & ~/{begun}/",
    ]
