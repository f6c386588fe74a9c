"""Mistral's calls: an array of objects, and since tokenizer version 11 a name with its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions
from edgepipe.gateway.formats.json_calls import (
    JsonReader,
    any_call,
    free_start,
    lazy_opening,
    object_rules,
    written_json,
    written_object,
)
from edgepipe.gateway.tool_call_json import CallArguments, CallNews
from edgepipe.gateway.tool_calls import Call
from edgepipe.sampling.grammar import json_rule

_MARK = "[TOOL_CALLS]"
_ARGS = "[ARGS]"
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9_-]{1,64})?\s*")
_MAX_NAMED_CHARS = 256  # a name with its id; a longer text before the arguments is no call


class MistralReader(JsonReader):
    """Reader of both formats of Mistral's models: an array of objects, and a name with its arguments."""

    def __init__(self, calls: CallNews) -> None:
        super().__init__(calls, opening="[TOOL_CALLS]", closing="]", separators="[,")
        self._name = ""

    def _group(self, text: str, at: int) -> int:
        if self._begun or not (text[at].isalnum() or text[at] == "_"):
            return super()._group(text, at)
        end = text.find(_ARGS, at, at + _MAX_NAMED_CHARS)
        if end < 0 and len(text) - at < _MAX_NAMED_CHARS:
            self._pending = text[at:]
            return len(text)
        named = _NAMED.fullmatch(text, at, end) if end >= 0 else None
        if named is None:
            self._give_back()
            return at
        self._name = named.group(1)
        self._marks.append(text[at : end + len(_ARGS)])
        self._state = self._arguments
        return end + len(_ARGS)

    def _arguments(self, text: str, at: int) -> int:
        """State: after the name."""
        if self._object is None:
            if text[at].isspace():
                self._marks.append(text[at])
                return at + 1
            if text[at] != "{":
                self._give_back()
                return at
            self.calls.begin(self._name)
            self._object = CallArguments(self.calls)
        at, ended = self._object.feed(text, at)
        return self._leave_group(at) if ended else at

    def _leave_group(self, at: int) -> int:
        self._object = None
        return super()._leave_group(at)


def _array_rules(functions: Functions, form: CallForm) -> list[str]:
    more = r'(", " call)*' if form.several else ""
    array = f'" "? "[" call {more} "]"'
    calls = object_rules(functions)
    if form.forced:
        return [f'answer: "{_MARK}" {array}', *calls]
    start = "answer: group? PLAIN" if form.several else "answer: group | PLAIN"
    return [start, f"group: opening {array}", lazy_opening(_MARK), *calls]


def _named_rules(functions: Functions, form: CallForm) -> list[str]:
    calls = [
        f"call_{index}: {json.dumps(name + _ARGS)} {json_rule(schema)}"
        for index, (name, schema) in enumerate(functions.items())
    ]
    calls.insert(0, any_call(len(calls)))
    if form.forced:
        return ["answer: tag+" if form.several else "answer: tag", f'tag: "{_MARK}" call', *calls]
    return [free_start("tag", several=form.several), "tag: opening call", lazy_opening(_MARK), *calls]


def _write_array(calls: Sequence[Call]) -> str:
    return f"{_MARK} [{', '.join(map(written_object, calls))}]"


def _write_named(calls: Sequence[Call]) -> str:
    return "".join(f"{_MARK}{call.name}{_ARGS}{written_json(call.arguments)}" for call in calls)


_MARKS = (_MARK, "[CALL_ID]", _ARGS)

MISTRAL = ChatFormat(
    name="mistral",
    marks=_MARKS,
    new_reader=lambda calls, _: MistralReader(calls),
    call_rules=_array_rules,
    write=_write_array,
)
"""``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``"""

MISTRAL_ARGS = ChatFormat(
    name="mistral-args",
    marks=_MARKS,
    new_reader=lambda calls, _: MistralReader(calls),
    call_rules=_named_rules,
    write=_write_named,
)
"""``[TOOL_CALLS]name[ARGS]{...}``, once per call."""
