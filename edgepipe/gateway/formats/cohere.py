"""Command R7B's and Command A's answers: reasoning, a list of numbered calls, and content, each between marks.

Source: the chat template of c4ai-command-r7b-12-2024.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions, Reasoning
from edgepipe.gateway.formats.json_calls import JsonReader, any_call, lazy_opening, written_json
from edgepipe.gateway.tool_calls import Call
from edgepipe.sampling.grammar import json_rule

_OPENING, _CLOSING = "<|START_ACTION|>", "<|END_ACTION|>"
_AROUND_CONTENT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
_SPACES = r"/\n? {0,8}/"
_BEFORE_NUMBER = '{"tool_call_id": "'


def _after_number(name: str) -> str:
    return f'", "tool_name": {json.dumps(name, ensure_ascii=False)}, "parameters": '


def _rules(functions: Functions, form: CallForm) -> list[str]:
    more = f'("," {_SPACES} call)*' if form.several else ""
    group = f'"[" {_SPACES} call {more} {_SPACES} "]" "{_CLOSING}"'
    calls = [
        f"call_{index}: {json.dumps(_BEFORE_NUMBER)} /[0-9]{{1,4}}/ {json.dumps(_after_number(name))} "
        f'{json_rule(schema)} "}}"'
        for index, (name, schema) in enumerate(functions.items())
    ]
    calls = [any_call(len(calls)), *calls]
    if form.forced:
        return [f'answer: "{_OPENING}" {group}', *calls]
    return ["answer: group | PLAIN", f"group: opening {group}", lazy_opening(_OPENING), *calls]


def _write(calls: Sequence[Call]) -> str:
    listed = [
        f"{_BEFORE_NUMBER}{number}{_after_number(call.name)}{written_json(call.arguments)}}}"
        for number, call in enumerate(calls)
    ]
    return f"{_OPENING}[{', '.join(listed)}]{_CLOSING}"


COHERE = ChatFormat(
    name="cohere",
    marks=(_OPENING, _CLOSING, *_AROUND_CONTENT),
    new_reader=lambda calls, functions: JsonReader(
        calls,
        opening=_OPENING if functions else "",
        closing=_CLOSING,
        separators="[,]",
        dropped=_AROUND_CONTENT,
    ),
    call_rules=_rules,
    write=_write,
    frames_content=True,
    reasoning=Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>``"""
