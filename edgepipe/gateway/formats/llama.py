"""Llama 3's calls: the whole answer is JSON, perhaps after a mark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions
from edgepipe.gateway.formats.json_calls import JsonReader, any_call, written_object
from edgepipe.gateway.tool_calls import Call
from edgepipe.sampling.grammar import json_rule

_MARK = "<|python_tag|>"


def _rules(functions: Functions, form: CallForm) -> list[str]:
    calls = ['calls: call ("; " call)*' if form.several else "calls: call", any_call(len(functions))]
    calls += [f"call_{index}: {json_rule(_object(*function))}" for index, function in enumerate(functions.items())]
    if form.forced:
        return ["answer: calls", *calls]
    plain = r"SAID: PLAIN & /([^{](.|\n)*)?/"
    opening = f"opening[lazy]: SAID {json.dumps(_MARK)}"
    return ["answer: calls | marked | SAID", "marked: opening calls", opening, plain, *calls]


def _object(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a call. Text would not do: it would hide other JSON that begins alike.

    References in ``parameters`` are relative to ``$id``.
    """
    properties = {"name": {"const": name}, "parameters": {"$id": f"function:{name}", **parameters}}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _write(calls: Sequence[Call]) -> str:
    return "; ".join(written_object(call, key="parameters") for call in calls)


LLAMA = ChatFormat(
    name="llama",
    marks=(_MARK,),
    new_reader=lambda calls, functions: JsonReader(
        calls, opening=_MARK, separators=";", at_start=True, names=functions
    ),
    call_rules=_rules,
    write=_write,
)
"""``{"name": ..., "parameters": {...}}`` as the whole answer, perhaps after ``<|python_tag|>``."""
