"""Llama 3's calls: the whole answer is JSON, perhaps after a mark."""

from __future__ import annotations

import json
from collections.abc import Sequence

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions
from edgepipe.gateway.formats.json_calls import JsonReader, object_rules, written_object
from edgepipe.gateway.tool_calls import Call

_MARK = "<|python_tag|>"


def _rules(functions: Functions, form: CallForm) -> list[str]:
    calls = ['calls: call ("; " call)*' if form.several else "calls: call", *object_rules(functions, key="parameters")]
    if form.forced:
        return ["answer: calls", *calls]
    plain = r"SAID: PLAIN & /([^{](.|\n)*)?/"
    opening = f"opening[lazy]: SAID {json.dumps(_MARK)}"
    return ["answer: calls | marked | SAID", "marked: opening calls", opening, plain, *calls]


def _write(calls: Sequence[Call]) -> str:
    return "; ".join(written_object(call, key="parameters") for call in calls)


LLAMA = ChatFormat(
    name="llama",
    marks=(_MARK,),
    new_reader=lambda calls, _: JsonReader(calls, opening=_MARK, separators=";", at_start=True),
    call_rules=_rules,
    write=_write,
)
"""``{"name": ..., "parameters": {...}}`` as the whole answer, perhaps after ``<|python_tag|>``."""
