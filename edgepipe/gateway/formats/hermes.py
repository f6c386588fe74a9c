"""Hermes' calls: Qwen, Hermes, SmolLM, Granite 4."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions
from edgepipe.gateway.formats.json_calls import JsonReader, free_start, lazy_opening, object_rules, written_object
from edgepipe.gateway.tool_calls import Call

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


def _rules(functions: Functions, form: CallForm) -> list[str]:
    body = rf'"\n"? call "\n"? "{_CLOSING}"'
    calls = object_rules(functions)
    if form.forced:
        more = r'("\n" tag)*' if form.several else ""
        return [f"answer: tag {more}", f'tag: "{_OPENING}" {body}', *calls]
    return [free_start("tag", several=form.several), f"tag: opening {body}", lazy_opening(_OPENING), *calls]


def _write(calls: Sequence[Call]) -> str:
    return "\n".join(f"{_OPENING}\n{written_object(call)}\n{_CLOSING}" for call in calls)


HERMES = ChatFormat(
    name="hermes",
    marks=(_OPENING, _CLOSING),
    new_reader=lambda calls, _: JsonReader(calls, opening=_OPENING, closing=_CLOSING),
    call_rules=_rules,
    write=_write,
)
"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once per call."""
