"""Repairs of calls and their results. PURE.

Each function returns new turns and leaves the given ones as they are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from edgepipe.text.conversations.roles import Turn

WriteCalls = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]
"""Writes calls, each a name and arguments, as the model would."""

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


def calls_of(turn: Turn) -> list[dict[str, Any]]:
    """Return the calls of a turn."""
    return cast("list[dict[str, Any]]", turn.get("tool_calls") or [])


def with_arguments(turns: Sequence[Turn], *, as_text: bool, wrap: bool) -> list[Turn]:
    """Write the arguments of calls as JSON text, or put those that are no object into one (``wrap``)."""

    def changed(value: object) -> object:
        if as_text:
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return _object(value) if wrap else value

    return [_with_calls(turn, changed) for turn in turns]


def _with_calls(turn: Turn, change: Callable[[object], object]) -> Turn:
    if not calls_of(turn):
        return turn
    functions = [(call, cast("dict[str, Any]", call["function"])) for call in calls_of(turn)]
    changed = [
        call | {"function": function | {"arguments": change(function["arguments"])}} for call, function in functions
    ]
    return turn | {"tool_calls": changed}


def one_call_each(turns: Sequence[Turn]) -> list[Turn]:
    """Give each call a turn of its own, with its result behind it."""
    kept: list[Turn] = []
    place = 0
    while place < len(turns):
        turn = turns[place]
        place += 1
        if len(calls_of(turn)) < 2:
            kept.append(turn)
            continue
        results = results_from(turns, place)
        place += len(results)
        kept += _alternating(turn, results)
    return kept


def _alternating(turn: Turn, results: Sequence[Turn]) -> list[Turn]:
    kept: list[Turn] = []
    left, calls = list(results), calls_of(turn)
    for number, call in enumerate(calls):
        first = turn if number == 0 else {"role": "assistant", "content": None}
        kept.append(first | {"tool_calls": [call]})
        own = [result for result in left if call["id"] and result.get("tool_call_id") == call["id"]]
        named = {other["id"] for other in calls[number + 1 :]}
        free = [result for result in left if result.get("tool_call_id") not in named or not result.get("tool_call_id")]
        if chosen := (own or free)[:1]:
            kept += chosen
            left = [result for result in left if result is not chosen[0]]
    return [*kept, *left]


def results_from(turns: Sequence[Turn], start: int) -> list[Turn]:
    """Return the results in a row from a place on."""
    end = start
    while end < len(turns) and turns[end]["role"] == "tool":
        end += 1
    return list(turns[start:end])


def results_in_order(turns: Sequence[Turn]) -> list[Turn]:
    """Put results in the order of their calls: templates that write or count no ids pair both by their places."""
    kept: list[Turn] = []
    while len(kept) < len(turns):
        turn = turns[len(kept)]
        results = results_from(turns, len(kept) + 1)
        places = {call["id"]: place for place, call in enumerate(calls_of(turn))}
        if places and all(result.get("tool_call_id") in places for result in results):
            results.sort(key=lambda result: places[result["tool_call_id"]])
        kept += [turn, *results]
    return kept


def with_ids(turns: Sequence[Turn], *, named: bool) -> list[Turn]:
    """Give calls and their results other ids: nine letters and digits, or ``functions.NAME:PLACE`` (``named``)."""
    kept: list[Turn] = []
    known: dict[str, str] = {}
    for turn in turns:
        calls = calls_of(turn)
        if calls:
            changed: list[dict[str, Any]] = []
            for number, call in enumerate(calls):
                known[call["id"]] = f"functions.{call['function']['name']}:{number}" if named else short_id(call["id"])
                changed.append(call | {"id": known[call["id"]]})
            turn = turn | {"tool_calls": changed}
        if turn["role"] == "tool":
            former = str(turn.get("tool_call_id") or "")
            turn = turn | {"tool_call_id": known.get(former) or (former if named else short_id(former))}
        kept.append(turn)
    return kept


def short_id(known: str) -> str:
    return known if _SHORT_ID.fullmatch(known) else hashlib.sha256(known.encode(errors="replace")).hexdigest()[:9]


def calls_as_text(turns: Sequence[Turn], write: WriteCalls, *, only_beside_text: bool = False) -> list[Turn]:
    """Write calls into the text of their turns; ``only_beside_text``: of turns that have text."""
    return [
        _called(turn, write) if calls_of(turn) and (turn["content"] or not only_beside_text) else turn for turn in turns
    ]


def _called(turn: Turn, write: WriteCalls) -> Turn:
    functions = [cast("dict[str, Any]", call["function"]) for call in calls_of(turn)]
    text = write([(one["name"], _object(one["arguments"])) for one in functions]) if functions else ""
    rest = {name: value for name, value in turn.items() if name != "tool_calls"}
    return rest | {"content": "\n".join(filter(None, (turn["content"], text)))}


def _object(arguments: object) -> Mapping[str, Any]:
    return cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {"arguments": arguments}


def results_in_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Move results into the turn of their calls, with the names of the functions."""
    kept: list[Turn] = []
    for turn in turns:
        calls = calls_of(kept[-1]) if kept else []
        if turn["role"] != "tool" or not calls:
            kept.append(turn)
            continue
        answers = cast("list[Any]", kept[-1].get("tool_responses", []))
        names = {call["id"]: call["function"]["name"] for call in calls}
        in_order = calls[min(len(answers), len(calls) - 1)]["function"]["name"]
        name = turn.get("name") or names.get(turn.get("tool_call_id", ""), in_order)
        kept[-1] = kept[-1] | {"tool_responses": [*answers, {"name": name, "response": turn["content"] or ""}]}
    return kept


def results_as_users(turns: Sequence[Turn], *, only_lone: bool = False) -> list[Turn]:
    """Write results as turns of the user, results in a row as one turn. ``only_lone``: those that follow no call."""
    kept: list[Turn] = []
    of_results = in_calls = False
    for turn in turns:
        in_calls = bool(calls_of(turn)) or (in_calls and turn["role"] == "tool")
        is_result = turn["role"] == "tool" and not (only_lone and in_calls)
        text = f"<tool_response>\n{turn['content'] or ''}\n</tool_response>"
        if is_result and of_results:
            kept[-1] = kept[-1] | {"content": f"{kept[-1]['content']}\n{text}"}
        else:
            kept.append({"role": "user", "content": text} if is_result else turn)
        of_results = is_result
    return kept


def with_call_content(turns: Sequence[Turn], content: str | None) -> list[Turn]:
    """Give turns with calls and without text the content that the template expects."""
    return [turn | {"content": content} if calls_of(turn) and not turn["content"] else turn for turn in turns]


def texts_before_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Put the text beside calls into a turn before that of the calls."""
    kept: list[Turn] = []
    for turn in turns:
        if calls_of(turn) and turn["content"]:
            kept.append({"role": "assistant", "content": turn["content"]})
            turn = turn | {"content": None}
        kept.append(turn)
    return kept


def texts_as_reasoning(turns: Sequence[Turn], field: str) -> list[Turn]:
    """Join the text beside calls to their reasoning."""
    return [
        turn | {field: f"{turn[field]}\n{turn['content']}", "content": None}
        if calls_of(turn) and turn["content"] and turn.get(field)
        else turn
        for turn in turns
    ]
