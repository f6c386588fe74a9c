"""The calls of Kimi K2. Sources: the chat templates of Kimi-K2-Instruct and Kimi-K2-Thinking."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions
from edgepipe.gateway.formats.json_calls import any_call, lazy_opening, written_json
from edgepipe.gateway.formats.named import NamedReader
from edgepipe.gateway.tool_call_json import CallArguments, CallNews
from edgepipe.gateway.tool_calls import Call
from edgepipe.sampling.grammar import json_rule

_CALLS, _CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_HEAD = re.compile(
    rf"\s*{re.escape(_CALL)}\s*(?:functions\.)?([A-Za-z0-9_.-]{{1,64}}?)(?::[0-9]{{1,6}})?\s*"
    rf"{re.escape(_ARGUMENTS)}\s*(?={{)",
)


def _reader(calls: CallNews, functions: Functions) -> NamedReader:
    return NamedReader(
        calls,
        functions,
        opening=_CALLS,
        head=_HEAD,
        closings=(_CALL_END, _CALLS_END),
        next_call=_CALL,
        lacks_opening=True,
        arguments=CallArguments,
    )


def _rules(functions: Functions, form: CallForm) -> list[str]:
    calls = [
        f"call_{index}: {_quoted(_CALL + 'functions.' + name + ':')} /[0-9]{{1,4}}/ {_quoted(_ARGUMENTS)} "
        f"{json_rule(schema)} {_quoted(_CALL_END)}"
        for index, (name, schema) in enumerate(functions.items())
    ]
    group = f"call{'+' if form.several else ''} {_quoted(_CALLS_END)}"
    calls.insert(0, any_call(len(calls)))
    if form.forced:
        return [f"answer: {_quoted(_CALLS)} {group}", *calls]
    return ["answer: group | PLAIN", f"group: opening {group}", lazy_opening(_CALLS), *calls]


def _write(calls: Sequence[Call]) -> str:
    texts = [
        f"{_CALL}functions.{call.name}:{index}{_ARGUMENTS}{written_json(call.arguments)}{_CALL_END}"
        for index, call in enumerate(calls)
    ]
    return f"{_CALLS}{''.join(texts)}{_CALLS_END}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


KIMI = ChatFormat(
    name="kimi",
    marks=(_CALLS, _CALLS_END, _CALL, _ARGUMENTS, _CALL_END),
    new_reader=_reader,
    call_rules=_rules,
    write=_write,
)
"""``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`` in a section."""
