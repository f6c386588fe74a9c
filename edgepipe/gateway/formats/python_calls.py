"""Calls written as Python: LFM2's and OLMo 3's.

Sources: the chat templates of LFM2-1.2B, LFM2.5-1.2B-Instruct and Olmo-3.1-32B-Instruct. Values are literals of Python
or JSON; nothing is evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from edgepipe.gateway.formats.chat_format import CallForm, ChatFormat, Functions
from edgepipe.gateway.formats.json_calls import any_call, lazy_opening
from edgepipe.gateway.formats.literal_rules import NUMBER_RULES, Literals
from edgepipe.gateway.formats.named import NamedReader
from edgepipe.gateway.formats.python_literals import PythonArguments
from edgepipe.gateway.tool_call_json import CallNews
from edgepipe.gateway.tool_calls import Call

_NAME = r"([A-Za-z0-9_.-]{1,64})"
_KEY = r"""[^\s=,()"'\[\]{}][^=,()"'\[\]{}]{0,127}"""  # a key; templates also write keys that Python would not take
_ANY, _QUOTES = r"(?:[^{0}\\]|\\.)*", "\"'"
_QUOTED_KEY = "|".join(rf"{quote}{_ANY.format(quote)}{quote}\s*" for quote in _QUOTES)
_QUOTED_BEGUN = "|".join(rf"{quote}{_ANY.format(quote)}\\?(?:{quote}\s*)?" for quote in _QUOTES)
_HEAD = re.compile(
    rf"[\s\[]*{_NAME}\s*\((?=\s*(?:\)|(?:{_KEY}|{_QUOTED_KEY})=|\*\*\s*\{{))",
    re.DOTALL,
)
_HEAD_BEGUN = re.compile(rf"{_NAME}\s*(?:\(\s*(?:{_KEY}|{_QUOTED_BEGUN})?)?", re.DOTALL)
_BARE_KEY = re.compile(r"""[^\s=,()"'\[\]{}*\\]([^=,()"'\[\]{}\n\r\\]{0,62}[^\s=,()"'\[\]{}\\])?""")

_PYTHON_WORDS = {True: "True", False: "False", None: "None"}
_JSON_WORDS = {True: "true", False: "false", None: "null"}


def _format(name: str, *, opening: str, closing: str, brackets: str, between: str, python: bool) -> ChatFormat:
    """Make a format.

    brackets    around the calls of a group
    between     two calls
    python      the model writes Python's words, else JSON's; both are read
    """

    def reader(calls: CallNews, functions: Functions) -> NamedReader:
        return NamedReader(
            calls,
            functions,
            opening=opening,
            head=_HEAD,
            closings=(closing,),
            separators="[],",
            begun=_HEAD_BEGUN,
            arguments=PythonArguments,
        )

    def rules(functions: Functions, form: CallForm) -> list[str]:
        more = f"({_quoted(between)} call)*" if form.several else ""
        before, after = (f"{_quoted(bracket)} " for bracket in brackets) if brackets else ("", "")
        group = f"{before}call {more} {after}{_quoted(closing)}"
        if form.forced:
            return [f"answer: {_quoted(opening)} {group}", *_call_rules(functions)]
        return ["answer: group | PLAIN", f"group: opening {group}", lazy_opening(opening), *_call_rules(functions)]

    def write(calls: Sequence[Call]) -> str:
        before, after = brackets or ("", "")
        return f"{opening}{before}{between.join(_written_call(call, python=python) for call in calls)}{after}{closing}"

    return ChatFormat(
        name=name,
        marks=(opening, closing),
        new_reader=reader,
        call_rules=rules,
        write=write,
    )


def _call_rules(functions: Functions) -> list[str]:
    calls = [
        f"call_{index}: {_quoted(name + '(')} {_arguments_rule(schema)} {_quoted(')')}"
        for index, (name, schema) in enumerate(functions.items())
    ]
    return [
        any_call(len(calls)),
        *calls,
        'any: STRING | number | "True" | "true" | "False" | "false" | "None" | "null" | object | array',
        'array: "[" (any (COMMA any)*)? "]"',
        'object: "{" (pair (COMMA pair)*)? "}"',
        'pair: STRING ":" " "? any',
        "argument: NAME any",
        r"NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}=/",
        r"COMMA: /, ?/",
        f"STRING: {' | '.join(map(_string_rule, _QUOTES))}",
        *NUMBER_RULES,
    ]


def _string_rule(quote: str) -> str:
    """Return the regular expressions of a string between single quotes, and between three of them."""
    other = rf"[^{quote}\\]|\\(.|\n)"
    return rf"/{quote}({other})*{quote}/ | /{3 * quote}({quote}?{quote}?({other}))*{3 * quote}/"


def _arguments_rule(schema: Mapping[str, Any]) -> str:
    return _LITERALS.members(schema, schema, 0, key=lambda name: _quoted(f"{_written_key(name)}="), pair="argument")


def _fixed(value: object) -> str:
    texts = dict.fromkeys((_written(value, python=True), _written(value, python=False)))
    if isinstance(value, str) and not {"'", "\\"} & set(value):
        texts[f"'{value}'"] = None
    return " | ".join(map(_quoted, texts))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_LITERALS = Literals(
    comma="COMMA",
    key=lambda name: f'({_quoted(_quoted(name))} | {_quoted(repr(name))}) ":" " "?',
    fixed=_fixed,
    kinds={
        "string": "STRING",
        "number": "number",
        "integer": "integer",
        "boolean": '"True" | "true" | "False" | "false"',
        "null": '"None" | "null"',
        "array": "array",
        "object": "object",
    },
)


def _written_call(call: Call, *, python: bool) -> str:
    arguments = (f"{_written_key(name)}={_written(value, python=python)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def _written_key(name: str) -> str:
    """Return a name as the templates write it: without quotes, unless only these show where it ends."""
    return name if _BARE_KEY.fullmatch(name) else _quoted(name)


def _written(value: object, *, python: bool) -> str:
    if value is None or isinstance(value, bool):
        return (_PYTHON_WORDS if python else _JSON_WORDS)[value]
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, object]", value).items()
        return "{" + ", ".join(f"{_quoted(name)}: {_written(each, python=python)}" for name, each in pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_written(each, python=python) for each in cast("list[object]", value)) + "]"
    return json.dumps(value, ensure_ascii=False)


LFM2 = _format(
    "lfm2",
    opening="<|tool_call_start|>",
    closing="<|tool_call_end|>",
    brackets="[]",
    between=", ",
    python=True,
)
"""``<|tool_call_start|>[name(key="text", other=True), ...]<|tool_call_end|>``"""

OLMO = _format(
    "olmo",
    opening="<function_calls>",
    closing="</function_calls>",
    brackets="",
    between="\n",
    python=False,
)
"""``<function_calls>name(key="text", other=true)``, one call a line, ``</function_calls>``"""
