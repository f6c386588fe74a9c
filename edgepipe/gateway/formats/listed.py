"""Granite 3's and Phi-4-mini's calls: a list of objects after a mark.

Sources: the chat templates of granite-3.3-8b-instruct and Phi-4-mini-instruct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions
from edgepipe.gateway.formats.json_calls import JsonReader, lazy_opening, object_rules, written_object
from edgepipe.gateway.tool_calls import Call

_OPENING, _CLOSING = "<|tool_call|>", "<|/tool_call|>"


def _rules(closing: str) -> Callable[[Functions, CallForm], list[str]]:
    def rules(functions: Functions, form: CallForm) -> list[str]:
        more = r'("," " "? call)*' if form.several else ""
        group = f'" "? "[" call {more} "]"' + (f' "{closing}"' if closing else "")
        calls = object_rules(functions)
        if form.forced:
            return [f'answer: "{_OPENING}" {group}', *calls]
        return ["answer: group | PLAIN", f"group: opening {group}", lazy_opening(_OPENING), *calls]

    return rules


def _write(closing: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: f"{_OPENING}[{', '.join(map(written_object, calls))}]{closing}"


GRANITE = ChatFormat(
    name="granite",
    marks=(_OPENING,),
    new_reader=lambda calls, _: JsonReader(calls, opening=_OPENING, closing="]", separators="[,"),
    call_rules=_rules(""),
    write=_write(""),
)
"""``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``"""

PHI = ChatFormat(
    name="phi",
    marks=(_OPENING, _CLOSING),
    new_reader=lambda calls, _: JsonReader(calls, opening=_OPENING, closing=_CLOSING, separators="[,]"),
    call_rules=_rules(_CLOSING),
    write=_write(_CLOSING),
)
"""``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>``"""
