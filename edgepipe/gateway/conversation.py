"""Writes a conversation as a model's chat template expects it, and finds out what a template expects.

Templates differ in how they want tools, calls, results of tools and reasoning. What a template does not know is written
into the turns' text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from edgepipe.gateway.formats.chat_format import ChatFormat
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.gateway.formats.hermes import HERMES
from edgepipe.gateway.schema import Message
from edgepipe.gateway.tool_calls import Call

Turn = dict[str, Any]

_TOOL_ROLE = re.compile(r"[=!]=\s*['\"]tool['\"]|['\"]tool['\"]\s*[,\]]")
_TOOLS_OF_SYSTEM = re.compile(r"message(?:\.tools\b|\[['\"]tools['\"]\])")
_THINKING_FIELD = re.compile(r"\w(?:\.thinking\b|\[['\"]thinking['\"]\])")
_DEVELOPER_ROLE = re.compile(r"['\"]developer['\"]")
_ALTERNATES = re.compile(r"roles must alternate")
_SYSTEM_FIRST = re.compile(r"ystem message must be at the beginning")
_SHORT_IDS = re.compile(r"length\s*[!=]=\s*9\b")
_READ_AS_OBJECT = re.compile(r"(?:arguments|args)['\"]?\]?\s*(?:\|\s*(?:tojson|items)|is mapping|is string|\.items)")
_ITERATED_ARGUMENTS = re.compile(r"(?:arguments|args)['\"]?\]?\s*(?:\|\s*items|\.items)")
_JOINED_ARGUMENTS = re.compile(r"\+\s*[\w.\[\]'\"]*arguments['\"]?\]?\s*(?:\+|-?\}\})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """What a chat template can do, by its text."""

    chat: ChatFormat
    knows_tools: bool = True  # it shows tools to the model
    knows_calls: bool = True  # it writes calls of earlier turns
    knows_results: bool = True  # it writes turns of the role ``tool``
    knows_developer: bool = True  # it names the role ``developer``; others leave such turns out
    alternates: bool = False  # it refuses two turns of the user in a row
    system_first: bool = False  # it refuses turns of the system after others, or leaves them out
    tools_in_system: bool = False  # it takes tools as JSON text in the field ``tools`` of the system's turn
    results_in_calls: bool = False  # it takes results as ``tool_responses`` in the turn of their calls
    arguments_as_text: bool = False  # it joins arguments to text, so they must be JSON text
    arguments_by_name: bool = False  # it writes arguments one by one, so they must be an object
    thinking_field: bool = False  # it takes reasoning as ``thinking``
    short_ids: bool = False  # it refuses ids of calls that are not nine letters and digits
    switches: frozenset[str] = frozenset()  # keywords that turn reasoning on or off
    shortens: bool = False  # the keyword ``low_effort`` shortens reasoning (Nemotron 3)


_SYSTEM_ROLES = ("system", "developer")
_SWITCHES = ("enable_thinking", "thinking")


def template_traits(source: str) -> TemplateTraits:
    """Return the traits of a template, or of all templates of a model joined."""
    knows_tools = "tools" in source
    chat = detect_format(source)
    alternates = bool(_ALTERNATES.search(source))
    in_system = bool(_TOOLS_OF_SYSTEM.search(source)) and not re.search(r"(?<![.'\"\w])tools\b", source)
    return TemplateTraits(
        chat=chat,
        knows_tools=knows_tools,
        knows_calls="tool_calls" in source,
        knows_results=(
            in_system or "tool_responses" in source or chat.has_tool_turns or bool(_TOOL_ROLE.search(source))
        ),
        knows_developer=bool(_DEVELOPER_ROLE.search(source)),
        alternates=alternates,
        system_first=alternates or chat.has_channels or bool(_SYSTEM_FIRST.search(source)),
        tools_in_system=in_system,
        results_in_calls="tool_responses" in source and not re.search(r"[=!]=\s*['\"]tool['\"]", source),
        arguments_as_text=bool(_JOINED_ARGUMENTS.search(source)) and not _READ_AS_OBJECT.search(source),
        arguments_by_name=bool(_ITERATED_ARGUMENTS.search(source)),
        thinking_field=bool(_THINKING_FIELD.search(source)),
        short_ids=bool(_SHORT_IDS.search(source)),
        switches=frozenset(word for word in _SWITCHES if re.search(rf"\b{word}\b", source)),
        shortens=bool(re.search(r"\blow_effort\b", source)),
    )


def template_turns(
    messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], traits: TemplateTraits
) -> list[Turn]:
    """Return the turns for a template with these traits. Tools that it does not take otherwise are in the turns."""
    turns = [_turn(message) for message in messages]
    if not traits.knows_developer:
        turns = [turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in turns]
    turns = _with_one_system(turns, later=traits.system_first)
    if traits.chat.has_channels:
        turns = [part for place, turn in enumerate(turns) for part in _one_call_each(turn, turns[place + 1 :])]
    elif traits.thinking_field:
        turns = [
            turn | {"thinking": turn["reasoning_content"]} if "reasoning_content" in turn else turn for turn in turns
        ]
    if traits.short_ids:
        _shorten_ids(turns)
    if not traits.knows_calls:
        _write_calls(turns, traits.chat)
    elif traits.arguments_as_text:
        for call in _calls_of(turns):
            if not isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    elif traits.arguments_by_name:
        for call in _calls_of(turns):
            if isinstance(text := call["function"]["arguments"], str):  # a call that was cut off, say
                call["function"]["arguments"] = {"arguments": text}
    if traits.results_in_calls:
        turns = _results_in_calls(turns)
    elif not traits.knows_results:
        turns = _results_as_users(turns)
    if traits.alternates:
        turns = _joined_users(turns)
    if tools and traits.tools_in_system:
        turns = _with_system(turns)
        turns[0]["tools"] = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    elif tools and not traits.knows_tools:
        turns = _with_system(turns)
        told = f"{turns[0]['content']}\n\n{tool_instructions(tools, traits.chat)}"
        turns[0]["content"] = told.lstrip("\n")
    return turns


def template_keywords(given: Mapping[str, Any], effort: str | None, traits: TemplateTraits) -> dict[str, Any]:
    """Return the keywords of a template. ``effort`` is a request's ``reasoning_effort``; ``none``: no reasoning."""
    keywords = dict(given)
    if effort is not None:
        known = {"none": "low", "minimal": "low", "xhigh": "high"} if traits.chat.has_channels else {}
        keywords.setdefault("reasoning_effort", known.get(effort, effort))
        if traits.shortens and effort in ("minimal", "low"):
            keywords.setdefault("low_effort", True)
    switch = keywords.get("enable_thinking", False if effort == "none" else None)
    for name in traits.switches if switch is not None else ():
        keywords.setdefault(name, switch)
    return keywords


def tool_instructions(tools: Sequence[Mapping[str, Any]], chat: ChatFormat = HERMES) -> str:
    """Describe the tools to a model whose chat template does not, and ask for calls in the model's format."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = chat.write([Call("function name", {"argument": "value"})])
    return (
        "You may call functions to answer. Their signatures stand between <tools> and </tools>:\n"
        f"<tools>\n{lines}\n</tools>\n"
        f"To call one, write its name and arguments in this form:\n{example}"
    )


def _turn(message: Message) -> Turn:
    """Convert a message for templates: missing content is empty, a call's arguments are an object, functions are tools.

    Older clients call tools "functions". Some clients call reasoning ``reasoning``.
    """
    fields = message.model_dump(exclude_none=True) | {"content": message.content or ""}
    reasoning = fields.pop("reasoning", None)
    if reasoning is not None:
        fields.setdefault("reasoning_content", reasoning)
    if message.role == "function":
        fields["role"] = "tool"
    if (function := fields.pop("function_call", None)) is not None:
        fields["tool_calls"] = [*fields.get("tool_calls", ()), {"id": "", "type": "function", "function": function}]
    for call in fields.get("tool_calls", ()):
        try:
            arguments: object = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            continue
        if isinstance(arguments, dict):
            call["function"]["arguments"] = arguments
    return fields


def _calls_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    return [call for turn in turns for call in turn.get("tool_calls", ())]


def _one_call_each(turn: Turn, later: Sequence[Turn]) -> list[Turn]:
    """Return the turn as harmony's template takes it: reasoning is ``thinking``, and a turn has one call.

    The results of several calls follow each its call.
    """
    turn = dict(turn)
    reasoning = turn.pop("reasoning_content", "")
    calls: list[dict[str, Any]] = turn.get("tool_calls") or []
    if not calls:
        return [] if turn.get("_placed") else [turn]
    if reasoning:  # the template refuses both for a call
        turn["thinking"] = "\n".join(filter(None, (reasoning, turn["content"])))
        turn["content"] = ""
    results = _results_after(later)
    turns: list[Turn] = []
    for place, call in enumerate(calls):
        first = turn if place == 0 else {"role": "assistant", "content": ""}
        turns.append(first | {"tool_calls": [call]})
        if len(calls) > 1 and place < len(results):
            named = [result for result in results if result.get("tool_call_id") == call["id"]]
            result = named[0] if named else results[place]
            turns.append({key: value for key, value in result.items() if key != "_placed"})
            result["_placed"] = True
    return turns


def _results_after(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns of results at the beginning of these turns."""
    results: list[Turn] = []
    for turn in turns:
        if turn["role"] != "tool":
            break
        results.append(turn)
    return results


def _shorten_ids(turns: Sequence[Turn]) -> None:
    for call in _calls_of(turns):
        call["id"] = _short_id(call["id"])
    for turn in turns:
        if "tool_call_id" in turn:
            turn["tool_call_id"] = _short_id(turn["tool_call_id"])


def _short_id(known: str) -> str:
    return known if re.fullmatch(r"[a-zA-Z0-9]{9}", known) else hashlib.sha256(known.encode()).hexdigest()[:9]


def _write_calls(turns: Sequence[Turn], chat: ChatFormat) -> None:
    """Write the calls of turns into their text."""
    for turn in turns:
        calls = [
            Call(call["function"]["name"], call["function"]["arguments"])
            for call in turn.pop("tool_calls", ())
            if isinstance(call["function"]["arguments"], dict)
        ]
        if calls:
            turn["content"] = "\n".join(filter(None, (turn["content"], chat.write(calls))))


def _results_in_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Move results into the turn of their calls, with the names of the functions."""
    kept: list[Turn] = []
    for turn in turns:
        calls = cast("list[dict[str, Any]]", kept[-1].get("tool_calls", [])) if kept else []
        if turn["role"] != "tool" or not calls:
            kept.append(turn)
            continue
        answers = cast("list[dict[str, Any]]", kept[-1].setdefault("tool_responses", []))
        names = {call["id"]: call["function"]["name"] for call in calls}
        in_order = calls[min(len(answers), len(calls) - 1)]["function"]["name"]
        name = turn.get("name") or names.get(turn.get("tool_call_id", ""), in_order)
        answers.append({"name": name, "response": turn["content"]})
    return kept


def _results_as_users(turns: Sequence[Turn]) -> list[Turn]:
    """Write results as turns of the user, results in a row as one turn."""
    kept: list[Turn] = []
    of_results = False
    for turn in turns:
        if turn["role"] != "tool":
            kept.append(turn)
            of_results = False
            continue
        text = f"<tool_response>\n{turn['content']}\n</tool_response>"
        if of_results:
            kept[-1]["content"] += f"\n{text}"
        else:
            kept.append({"role": "user", "content": text})
        of_results = True
    return kept


def _joined_users(turns: Sequence[Turn]) -> list[Turn]:
    """Join turns of the user in a row."""
    kept: list[Turn] = []
    for turn in turns:
        if kept and turn["role"] == kept[-1]["role"] == "user":
            kept[-1] = kept[-1] | {"content": f"{kept[-1]['content']}\n\n{turn['content']}"}
        else:
            kept.append(turn)
    return kept


def _with_one_system(turns: Sequence[Turn], *, later: bool) -> list[Turn]:
    """Join the turns of the system at the beginning: templates know one. ``later``: join those after others, too."""
    systems: list[Turn] = []
    others: list[Turn] = []
    for turn in turns:
        is_system = turn["role"] in _SYSTEM_ROLES and (later or not others)
        (systems if is_system else others).append(turn)
    if len(systems) > 1:
        systems = [systems[0] | {"content": "\n\n".join(filter(None, (turn["content"] for turn in systems)))}]
    return [*systems, *others]


def _with_system(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with a turn of the system at the beginning."""
    if turns[0]["role"] in _SYSTEM_ROLES:
        return [dict(turns[0]), *turns[1:]]
    return [{"role": "system", "content": ""}, *turns]
