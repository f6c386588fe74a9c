"""Write a conversation as a template takes it: apply the repairs that its traits name. PURE."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgepipe.text.conversations import calls, roles
from edgepipe.text.conversations.calls import WriteCalls
from edgepipe.text.conversations.roles import Turn
from edgepipe.text.conversations.traits import TemplateTraits

Tools = Sequence[Mapping[str, Any]]

_FILLERS = {"empty user": "", "empty answer": "", "dot": "."}


@dataclass(frozen=True, slots=True)
class Wording:
    """Texts for what a template cannot write."""

    write_calls: WriteCalls
    describe_tools: Callable[[Tools], str]


@dataclass(frozen=True, slots=True)
class Fitted:
    """Variables of a template."""

    turns: list[Turn]
    tools: Tools  # the keyword ``tools``; empty: the template gets none


def fit(turns: Sequence[Turn], *, tools: Tools, traits: TemplateTraits, wording: Wording) -> Fitted:
    """Return the conversation for a template with these traits.

    Calls have arguments as the client meant them: an object, or any other value. Missing content is null.
    """
    fitted = _with_filled(turns)
    if traits.empty_answers == "dropped":
        fitted = roles.without_empty_answers(fitted)
    fitted = _with_calls(_with_systems(fitted, traits), traits, wording)
    by_keyword: Tools = ()
    if tools and traits.tools == "keyword":
        by_keyword = tools
    elif tools:
        fitted = _with_tools(fitted, tools, traits, wording)
    fitted = _with_users(fitted, traits)
    if traits.content == "parts":
        fitted = [turn | {"content": _parts(turn["content"])} for turn in fitted]
    return Fitted(fitted, by_keyword)


def _with_filled(turns: Sequence[Turn]) -> list[Turn]:
    """Leave out empty lists of calls, and fill in the missing content of turns without calls."""
    filled: list[Turn] = []
    for turn in turns:
        if not calls.calls_of(turn):
            turn = {name: value for name, value in turn.items() if name != "tool_calls"}
            turn["content"] = turn["content"] or ""
        filled.append(turn)
    return filled


def _with_calls(turns: list[Turn], traits: TemplateTraits, wording: Wording) -> list[Turn]:
    if traits.reasoning != "reasoning_content":
        turns = [_renamed(turn, traits.reasoning) for turn in turns]
    if traits.calls == "text":
        turns = calls.calls_as_text(turns, wording.write_calls)
    else:
        turns = _with_call_fields(turns, traits, wording.write_calls)
    if traits.results == "in calls":
        turns = calls.results_in_calls(turns)
    if traits.results == "user" or traits.lone_results == "user":
        turns = calls.results_as_users(turns, only_lone=traits.results != "user")
    return turns


def _with_call_fields(turns: list[Turn], traits: TemplateTraits, write: calls.WriteCalls) -> list[Turn]:
    if traits.assistants == "joined":
        turns = roles.joined_assistants(turns)
    if traits.call_text == "text":
        turns = calls.results_as_users(calls.calls_as_text(turns, write, only_beside_text=True), only_lone=True)
    turns = calls.with_arguments(turns, as_text=traits.arguments == "text", wrap=traits.odd_arguments == "wrapped")
    if traits.ids != "kept":
        turns = calls.with_ids(turns, named=traits.ids == "named")
    if traits.calls == "one each":
        turns = calls.one_call_each(turns)
    if traits.call_reasoning == "joined":
        turns = calls.texts_as_reasoning(turns, traits.reasoning)
    if traits.call_text == "own turn":
        turns = calls.texts_before_calls(turns)
    if traits.call_content != "kept":
        turns = calls.with_call_content(turns, None if traits.call_content == "null" else "")
    return turns


def _renamed(turn: Turn, name: str) -> Turn:
    if "reasoning_content" not in turn:
        return turn
    return {key: value for key, value in turn.items() if key != "reasoning_content"} | {name: turn["reasoning_content"]}


def _with_systems(turns: list[Turn], traits: TemplateTraits) -> list[Turn]:
    if traits.developer == "system":
        turns = roles.developers_as_systems(turns)
    turns = calls.results_in_order(roles.systems_after_results(turns))
    if traits.late_system == "tagged":
        turns = roles.late_systems_tagged(turns)
    return roles.one_system(turns) if traits.systems == "joined" else turns


def _with_tools(turns: list[Turn], tools: Tools, traits: TemplateTraits, wording: Wording) -> list[Turn]:
    """Put tools into the system's turn, which is added if it is missing."""
    turns = roles.with_system(turns)
    if traits.tools == "system field":
        turns[0]["tools"] = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    else:
        turns[0]["content"] = roles.joined(turns[0]["content"], wording.describe_tools(tools))
    return turns


def _with_users(turns: list[Turn], traits: TemplateTraits) -> list[Turn]:
    if traits.system == "user":
        turns = roles.system_in_user(turns)
    if traits.greeting == "after user" and roles.greets(turns):
        turns = roles.with_user(turns, "")
    if traits.no_user != "kept" and not any(turn["role"] == "user" for turn in turns):
        turns = roles.with_user(turns, _FILLERS[traits.no_user])
    if traits.users == "joined":
        turns = roles.joined_users(turns)
    if traits.assistants == "joined":
        turns = roles.joined_assistants(turns, only_texts=True)
    return roles.answered(turns, _FILLERS[traits.after_calls]) if traits.after_calls != "kept" else turns


def _parts(content: str | None) -> list[dict[str, str]] | None:
    return None if content is None else [{"type": "text", "text": content}]
