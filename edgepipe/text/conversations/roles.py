"""Repairs of roles: several turns of one role, turns of the system, missing turns of the user. PURE.

Each function returns new turns and leaves the given ones as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Turn = dict[str, Any]

SYSTEM_ROLES = ("system", "developer")


def joined(*texts: str | None) -> str:
    """Join texts with an empty line between them; leave out empty ones."""
    return "\n\n".join(text for text in texts if text)


def developers_as_systems(turns: Sequence[Turn]) -> list[Turn]:
    """Give turns of a developer the role of the system."""
    return [turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in turns]


def systems_after_results(turns: Sequence[Turn]) -> list[Turn]:
    """Move turns of the system that are between calls and their results behind these results."""
    kept: list[Turn] = []
    held: list[Turn] = []  # turns of the system since the last calls, which results may still follow
    in_calls = False
    for turn in turns:
        if turn["role"] in SYSTEM_ROLES and in_calls:
            held.append(turn)
            continue
        if turn["role"] != "tool":
            kept += held
            held, in_calls = [], bool(turn.get("tool_calls"))
        kept.append(turn)
    return kept + held


def late_systems_tagged(turns: Sequence[Turn]) -> list[Turn]:
    """Write the system's turns behind other turns as text in tags, so that what is before them stays the same.

    The text is at the end of the user's or tool's turn before it. After an assistant's turn, it is at the start of the
    user's turn behind it, or a turn of the user of its own if another turn follows.
    """
    count = num_systems(turns)
    kept = list(turns[:count])
    held: list[str] = []  # texts after an assistant's turn
    for turn in turns[count:]:
        if turn["role"] in SYSTEM_ROLES:
            text = f"<system>\n{turn['content']}\n</system>" if turn["content"] else ""
            if held or kept[-1]["role"] == "assistant":
                held += [text] if text else []
            else:
                kept[-1] = kept[-1] | {"content": joined(kept[-1]["content"], text)}
            continue
        if held and turn["role"] == "user":
            turn = turn | {"content": joined(*held, turn["content"])}
        elif held:
            kept.append({"role": "user", "content": joined(*held)})
        held = []
        kept.append(turn)
    return [*kept, {"role": "user", "content": joined(*held)}] if held else kept


def num_systems(turns: Sequence[Turn]) -> int:
    """Return the number of the system's turns at the beginning."""
    return next((place for place, turn in enumerate(turns) if turn["role"] not in SYSTEM_ROLES), len(turns))


def one_system(turns: Sequence[Turn]) -> list[Turn]:
    """Join the turns of the system at the beginning."""
    count = num_systems(turns)
    if count < 2:
        return list(turns)
    return [turns[0] | {"content": joined(*(turn["content"] for turn in turns[:count]))}, *turns[count:]]


def with_system(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with a turn of the system at the beginning."""
    if turns and turns[0]["role"] in SYSTEM_ROLES:
        return [dict(turns[0]), *turns[1:]]
    return [{"role": "system", "content": ""}, *turns]


def system_in_user(turns: Sequence[Turn]) -> list[Turn]:
    """Put the text of the system's turns at the beginning in front of the first user's text."""
    count = num_systems(turns)
    text, rest = joined(*(turn["content"] for turn in turns[:count])), list(turns[count:])
    if not text:
        return rest or [{"role": "user", "content": ""}]
    place = next((place for place, turn in enumerate(rest) if turn["role"] == "user"), None)
    if place is None or any(turn["role"] == "assistant" for turn in rest[:place]):
        return [{"role": "user", "content": text}, *rest]
    rest[place] = rest[place] | {"content": joined(text, rest[place]["content"])}
    return rest


def with_user(turns: Sequence[Turn], content: str) -> list[Turn]:
    """Add a user's turn after the system's at the beginning."""
    count = num_systems(turns)
    return [*turns[:count], {"role": "user", "content": content}, *turns[count:]]


def greets(turns: Sequence[Turn]) -> bool:
    """Return whether the first turn after the system's is no user's."""
    count = num_systems(turns)
    return count < len(turns) and turns[count]["role"] != "user"


def joined_users(turns: Sequence[Turn]) -> list[Turn]:
    """Join turns of the user in a row."""
    kept: list[Turn] = []
    for turn in turns:
        if kept and turn["role"] == kept[-1]["role"] == "user":
            kept[-1] = kept[-1] | {"content": joined(kept[-1]["content"], turn["content"])}
        else:
            kept.append(turn)
    return kept


def joined_assistants(turns: Sequence[Turn], *, only_texts: bool = False) -> list[Turn]:
    """Join turns of the assistant in a row; ``only_texts``: those without calls."""
    kept: list[Turn] = []
    for turn in turns:
        in_row = kept and turn["role"] == kept[-1]["role"] == "assistant"
        if in_row and not (only_texts and (turn.get("tool_calls") or kept[-1].get("tool_calls"))):
            kept[-1] = _both(kept[-1], turn)
        else:
            kept.append(turn)
    return kept


def _both(first: Turn, second: Turn) -> Turn:
    turn = first | second | {"content": joined(first["content"], second["content"])}
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in turn:
            turn[name] = joined(first.get(name), second.get(name))
    if "tool_calls" in turn:
        turn["tool_calls"] = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
        turn["content"] = turn["content"] or None
    return turn


def without_empty_answers(turns: Sequence[Turn]) -> list[Turn]:
    """Leave out turns of the assistant that have neither text nor calls."""
    return [turn for turn in turns if turn["role"] != "assistant" or turn["content"] or turn.get("tool_calls")]


def answered(turns: Sequence[Turn], content: str) -> list[Turn]:
    """Put an answer between calls or results and a user's turn right after them."""
    kept: list[Turn] = []
    for turn in turns:
        if kept and turn["role"] == "user" and (kept[-1]["role"] == "tool" or kept[-1].get("tool_calls")):
            kept.append({"role": "assistant", "content": content})
        kept.append(turn)
    return kept
