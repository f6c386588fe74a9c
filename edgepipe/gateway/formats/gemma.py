"""Gemma 4's calls and reasoning. Source: https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4.

Arguments are objects whose keys are bare and whose strings are between ``<|"|>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions, Reasoning
from edgepipe.gateway.formats.json_calls import any_call, free_start, lazy_opening, overlap
from edgepipe.gateway.formats.literal_rules import NUMBER_RULES, Literals
from edgepipe.gateway.formats.named import BracketedArguments, NamedReader
from edgepipe.gateway.tool_call_json import CallNews
from edgepipe.gateway.tool_calls import Call

_OPENING, _CLOSING, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_HEAD = re.compile(r"\s*call:\s*([A-Za-z0-9_.-]{1,64})\s*(?=\{)")
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ENDS = {"{": "}", "[": "]"}


class GemmaArguments(BracketedArguments[str]):
    """Turns the arguments of one call into JSON; see ``named.Arguments``."""

    def __init__(self, calls: CallNews) -> None:
        super().__init__(calls)
        self._quoted = ""  # the mark that ends the current string
        self._escaped = False  # the next character of a JSON string is escaped
        self._bare: list[str] = []  # a key, a number or a word
        self._is_key = False
        self._wants_value = False  # the next word is a key's value

    def _read(self, text: str, at: int) -> int | None:
        """See BracketedArguments."""
        if self._quoted == _QUOTE:
            return self._string(text, at)
        if self._quoted:
            self._json_string(text[at])
            return at + 1
        if text[at] == "<" and len(text) - at < len(_QUOTE) and _QUOTE.startswith(text[at:]):
            return None
        if text.startswith(_QUOTE, at):
            self._open_string(_QUOTE)
            return at + len(_QUOTE)
        self._sign(text[at])
        return at + 1

    def _string(self, text: str, at: int) -> int | None:
        found = text.find(_QUOTE, at)
        end = found if found >= 0 else len(text) - overlap(text, at, _QUOTE)
        self._say(json.dumps(text[at:end], ensure_ascii=False)[1:-1])
        if found < 0:
            return end if end > at else None
        self._say('"')
        self._quoted = ""
        return found + len(_QUOTE)

    def _open_string(self, mark: str) -> None:
        self._end_bare()
        self._say('"')
        self._quoted, self._wants_value = mark, False

    def _json_string(self, char: str) -> None:
        if char == '"' and not self._escaped:
            self._quoted = ""
        self._escaped = char == "\\" and not self._escaped
        self._say(char if char >= " " else json.dumps(char)[1:-1])

    def _sign(self, char: str) -> None:
        """Take a character outside strings."""
        if char in _ENDS:
            self._end_bare()
            self._open.append(char)
            self._say(char)
            self._is_key, self._wants_value = char == "{", False
        elif char in "}]" or char == ",":
            self._end_bare()
            if self._wants_value:
                self._say("null")
            self._say(", " if char == "," else _ENDS[self._open.pop()])
            self._is_key, self._wants_value = char == "," and self._open[-1] == "{", False
        elif char == ":" and self._is_key:
            self._end_bare()
            self._say(": ")
            self._is_key, self._wants_value = False, True
        elif char == '"' and not self._bare:
            self._open_string(char)
        elif self._bare or not char.isspace():
            self._bare.append(char)

    def _end_bare(self) -> None:
        word, self._bare = "".join(self._bare).strip(), []
        if word:
            is_literal = not self._is_key and _LITERAL.fullmatch(word)
            self._say(word if is_literal else json.dumps(word, ensure_ascii=False))
            self._wants_value = False


def _reader(calls: CallNews, functions: Functions) -> NamedReader:
    return NamedReader(calls, functions, opening=_OPENING, head=_HEAD, closings=(_CLOSING,), arguments=GemmaArguments)


def _rules(functions: Functions, form: CallForm) -> list[str]:
    """Bind names, keys and types. Keys have the alphabet's order, as the model's template writes them."""
    calls = [
        f"call_{index}: {_quoted('call:' + name)} {_LITERALS.object_rule(schema, schema)}"
        for index, (name, schema) in enumerate(functions.items())
    ]
    calls.insert(0, any_call(len(calls)))
    calls += [
        'any: string | number | "true" | "false" | "null" | object | "[" (any ("," any)*)? "]"',
        'object: "{" (pair ("," pair)*)? "}"',
        'pair: (KEY | string) ":" any',
        r"KEY: /[A-Za-z0-9_.$ -]{1,64}/",
        f"string: {_quoted(_QUOTE)} text",
        f"text[lazy]: ANYTHING {_quoted(_QUOTE)}",
        *NUMBER_RULES,
    ]
    body = f"call {_quoted(_CLOSING)}"
    if form.forced:
        again = "forced+" if form.several else "forced"
        return [f"answer: {again}", f"forced: {_quoted(_OPENING)} {body}", *calls]
    return [free_start("tag", several=form.several), f"tag: opening {body}", lazy_opening(_OPENING), *calls]


def _write(calls: Sequence[Call]) -> str:
    return "".join(f"{_OPENING}call:{call.name}{_written(call.arguments)}{_CLOSING}" for call in calls)


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, object]", value).items()
        return "{" + ",".join(f"{name}:{_written(each)}" for name, each in sorted(pairs)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, cast("list[object]", value))) + "]"
    return json.dumps(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_LITERALS = Literals(
    comma='","',
    key=lambda name: _quoted(f"{name}:"),
    fixed=lambda value: _quoted(_written(value)),
    kinds={
        "string": "string",
        "number": "number",
        "integer": "integer",
        "boolean": '"true" | "false"',
        "null": '"null"',
        "array": '"[" (any ("," any)*)? "]"',
        "object": "object",
    },
    sorts=True,
)


GEMMA4 = ChatFormat(
    name="gemma4",
    marks=(_OPENING, _CLOSING, _QUOTE),
    new_reader=_reader,
    call_rules=_rules,
    write=_write,
    reasoning=Reasoning("<|channel>", "<channel|>", label="thought", anywhere=True),
)
"""``<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>``, and ``<|channel>thought`` for reasoning."""
