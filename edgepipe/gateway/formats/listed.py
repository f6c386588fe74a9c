"""Calls as a list of objects between marks: Granite 3, Phi-4-mini, Nemotron Nano 2.

Sources: the chat templates of granite-3.3-8b-instruct, Phi-4-mini-instruct and NVIDIA-Nemotron-Nano-9B-v2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions
from edgepipe.gateway.formats.json_calls import JsonReader, lazy_opening, object_rules, written_object
from edgepipe.gateway.tool_calls import Call


def _listed(name: str, opening: str, closing: str) -> ChatFormat:
    """Make the format of these marks; ``closing``: empty if the list's bracket is the end."""

    def rules(functions: Functions, form: CallForm) -> list[str]:
        more = r'("," " "? call)*' if form.several else ""
        group = f'" "? "[" call {more} "]"' + (f' "{closing}"' if closing else "")
        calls = object_rules(functions)
        if form.forced:
            return [f'answer: "{opening}" {group}', *calls]
        return ["answer: group | PLAIN", f"group: opening {group}", lazy_opening(opening), *calls]

    def write(calls: Sequence[Call]) -> str:
        return f"{opening}[{', '.join(map(written_object, calls))}]{closing}"

    end, separators = (closing, "[,]") if closing else ("]", "[,")
    return ChatFormat(
        name=name,
        marks=(opening, closing) if closing else (opening,),
        new_reader=lambda calls, _: JsonReader(calls, opening=opening, closing=end, separators=separators),
        call_rules=rules,
        write=write,
    )


GRANITE = replace(
    _listed("granite", "<|tool_call|>", ""),
    answer_frame=("<response>", "</response>"),
)
"""``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``"""

PHI = _listed("phi", "<|tool_call|>", "<|/tool_call|>")
"""``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>``"""

NEMOTRON_2 = _listed("nemotron-2", "<TOOLCALL>", "</TOOLCALL>")
"""``<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>``"""
