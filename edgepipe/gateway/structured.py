"""Turns an answer's form and ``tools`` into a grammar, and checks it before the request is accepted.

``plan_output`` takes what ``answer_form`` and ``tool_choice`` read; an invalid field is a 400 that names it. A child
process compiles. Where the model reasons, the grammar binds what follows the reasoning.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from edgepipe.errors import QueueFull, RequestInvalid
from edgepipe.gateway.answer_form import AnswerForm
from edgepipe.gateway.answer_reader import AnswerFormat
from edgepipe.gateway.checked_schema import invalid_schema
from edgepipe.gateway.formats.chat_format import ChatFormat, Reasoning
from edgepipe.gateway.leniency import Note
from edgepipe.gateway.problems import HttpProblem, bad_request, from_error
from edgepipe.gateway.tool_choice import NO_TOOLS, RequestedFunction, ToolChoice
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import (
    lark_grammar,
    rule_of,
    unusable_schema,
    with_budget,
    with_unique_keys,
)
from edgepipe.sampling.grammar_trial import GrammarTooHard
from edgepipe.sampling.thought_budget import ThoughtBudget

MAX_CACHED_GRAMMARS = 512  # known by their digests: all tools of several requests


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundOutput:
    """Grammar that binds a choice's output, and the way to read it."""

    grammar: GrammarSpec | None = None  # grammar for SamplingParams
    answer: AnswerFormat | None = None  # None: all text is content
    notes: tuple[Note, ...] = ()  # notes for the log


class GrammarCompiler:
    """Checks grammars, and remembers the verdicts that do not depend on this machine's speed."""

    def __init__(self, check: Callable[[GrammarSpec, str], Awaitable[None]]) -> None:
        """``check`` is ``GrammarTrial.check`` or a fake of it."""
        self._check = check
        self._known: OrderedDict[bytes, str] = OrderedDict()  # the fault by digest; empty: valid

    async def check(self, grammar: GrammarSpec, owner: str) -> None:
        """See GrammarTrial."""
        digest = hashlib.sha256(grammar.text.encode()).digest()
        if digest not in self._known:
            self._known[digest] = await self._verdict(grammar, owner)
            while len(self._known) > MAX_CACHED_GRAMMARS:
                self._known.popitem(last=False)
        self._known.move_to_end(digest)
        if fault := self._known[digest]:
            raise unusable_schema(fault)

    async def _verdict(self, grammar: GrammarSpec, owner: str) -> str:
        try:
            await self._check(grammar, owner)
        except RequestInvalid as exc:
            return exc.fact or exc.what
        return ""


class _CallsTooHard(Exception):
    """The grammar of an answer is too large, or takes too much work. ``plan_output`` handles it."""

    def __init__(self, problem: HttpProblem) -> None:
        super().__init__(problem)
        self.problem = problem


async def plan_output(
    *,
    form: AnswerForm | None = None,
    choice: ToolChoice = NO_TOOLS,
    chat: ChatFormat | None = None,
    in_reasoning: bool = False,
    most_thoughts: int | None = None,
    compiler: GrammarCompiler,
    owner: str = "",
) -> BoundOutput:
    """Plan the output of a request. Raises HttpProblem (400) with the invalid field.

    If the grammar of calls takes too much work, and the model need not call, no grammar binds the calls.

    chat           format of a conversation's answer; None for a text that continues a prompt
    in_reasoning   the prompt has opened the reasoning
    most_thoughts  tokens of reasoning, which is closed then; None: as many as the model likes
    owner          user whose grammar it is: those of several users are compiled in turns
    """
    if choice.form.forced:
        form = None  # the answer is a call
    budget = _budget(chat, most_thoughts, in_reasoning=in_reasoning)

    def bound(choice: ToolChoice) -> GrammarSpec | None:
        grammar = _grammar(form, choice, chat, in_reasoning=in_reasoning, bounds_thoughts=budget is not None)
        if grammar is not None and budget is not None:
            grammar = with_budget(grammar, budget)
        if grammar is not None and form is not None and form.has_free_keys and not choice.functions:
            grammar = _with_unique_keys(grammar, chat, in_reasoning=in_reasoning)
        return grammar

    async def checked(choice: ToolChoice) -> tuple[GrammarSpec | None, ToolChoice]:
        """Return the grammar that compiles, and the choice with free arguments for schemas that do not."""
        grammar = bound(choice)
        if grammar is not None and (bad := await _bad_tools(grammar, form, choice, chat, compiler, owner)):
            choice = choice.opened(bad)
            grammar = bound(choice)
            if grammar is not None:
                await _bad_tools(grammar, form, replace(choice, all_tools={}), chat, compiler, owner)
        return grammar, choice

    try:
        grammar, choice = await checked(choice)
    except _CallsTooHard as hard:
        if form is not None or choice.form.forced or choice.has_strict:
            raise hard.problem from hard
        choice = choice.unbound(hard.problem.message)
        grammar = bound(NO_TOOLS)
    answer: AnswerFormat | None = None
    if chat is not None and (choice.functions or chat.reasons):
        answer = AnswerFormat(chat=chat, functions=choice.functions, in_reasoning=in_reasoning, names=choice.names)
    return BoundOutput(grammar=grammar, answer=answer, notes=choice.notes)


async def _bad_tools(
    grammar: GrammarSpec,
    form: AnswerForm | None,
    choice: ToolChoice,
    chat: ChatFormat | None,
    compiler: GrammarCompiler,
    owner: str,
) -> list[str]:
    """Return the functions whose schemas keep an answer's grammar from compiling: none if it compiles.

    Raises HttpProblem (400) for a strict function and if no function is the reason, _CallsTooHard for too much work.
    """
    param = "tools" if form is None else form.param
    try:
        await compiler.check(grammar, owner)
        return []
    except GrammarTooHard as exc:
        raise _CallsTooHard(_too_hard(exc, param)) from exc
    except QueueFull as exc:
        raise from_error(exc, param=param) from exc
    except RequestInvalid as exc:
        tools = [(name, tool) for name, tool in choice.all_tools.items() if name in choice.functions]
        if bad := [name for name, tool in tools if await _is_bad(name, tool, chat, compiler, owner)]:
            return bad
        raise invalid_schema(exc, param=param) from exc


async def _is_bad(
    name: str, tool: RequestedFunction, chat: ChatFormat | None, compiler: GrammarCompiler, owner: str
) -> bool:
    """Return whether calls of a function alone cannot be compiled. Raises HttpProblem, see ``_bad_tools``."""
    alone = _grammar(None, ToolChoice(functions={name: tool.schema}), chat, in_reasoning=False)
    try:
        if alone is not None:
            await compiler.check(alone, owner)
        return False
    except GrammarTooHard as exc:
        if tool.strict:
            raise tool.refused(_too_hard(exc, f"{tool.place}.parameters")) from exc
        return True
    except QueueFull as exc:
        raise from_error(exc, param="tools") from exc
    except RequestInvalid as exc:
        if tool.strict:
            raise tool.refused(invalid_schema(exc, param=f"{tool.place}.parameters")) from exc
        return True


def _too_hard(error: GrammarTooHard, param: str) -> HttpProblem:
    text = f"this schema cannot constrain the output: {error.fact}; use simpler patterns and narrower ranges"
    return bad_request(text, param=param, code="invalid_schema")


def _with_unique_keys(grammar: GrammarSpec, chat: ChatFormat | None, *, in_reasoning: bool) -> GrammarSpec:
    """Return the grammar of a JSON answer whose objects have no key twice; unchanged if marks are around the JSON."""
    if chat is not None and (chat.has_channels or chat.frames_content):
        return grammar
    if chat is None or chat.reasoning is None:
        return with_unique_keys(grammar, opening="", closing="")
    opening = "" if in_reasoning else chat.reasoning.opening
    return with_unique_keys(grammar, opening=opening, closing=chat.reasoning.closing)


def _budget(chat: ChatFormat | None, most_tokens: int | None, *, in_reasoning: bool) -> ThoughtBudget | None:
    """Return the budget of an answer's reasoning; None if the answer has no reasoning, or no bound of it."""
    if chat is None or most_tokens is None:
        return None
    reasoning = chat.reasoning if chat.channels is None else chat.channels.thought
    if reasoning is None:
        return None
    opening = "" if in_reasoning else reasoning.opening
    return ThoughtBudget(most_tokens=most_tokens, opening=opening, closing=reasoning.closing)


def _grammar(
    form: AnswerForm | None,
    choice: ToolChoice,
    chat: ChatFormat | None,
    *,
    in_reasoning: bool,
    bounds_thoughts: bool = False,
) -> GrammarSpec | None:
    """Return the grammar of an answer: bound to a form, or with calls in it, or free after bounded reasoning.

    Raises _CallsTooHard if it is too large.

    ``bounds_thoughts``: a budget bounds its first reasoning, so it has no other.
    """
    if chat is None or (form is None and not choice.functions and not bounds_thoughts):
        return form.grammar if form is not None else None
    try:
        if form is None and not choice.functions:
            rules = [*chat.free_rules]
        elif form is None:
            rules = chat.call_rules(choice.functions, choice.form)
        elif not choice.functions and not chat.reasons:
            return form.grammar
        else:
            rules = [*chat.form_rules, rule_of(form.grammar, "form")]
            if choice.functions:
                calls = chat.call_rules(choice.functions, replace(choice.form, forced=True))
                rules = _either(called=calls, formed=rules)
        if chat.channels is not None:
            rules += chat.channels.bounded_asides if bounds_thoughts else chat.channels.asides
        bound = form is not None or choice.form.forced
        start = _start(chat.reasoning, bound=bound, in_reasoning=in_reasoning)
        return lark_grammar("\n".join([*start, *rules, r"ANYTHING: /(.|\n)*/"]) + "\n")
    except RequestInvalid as exc:
        raise _CallsTooHard(invalid_schema(exc, param="tools" if form is None else form.param)) from exc


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
