"""Calls written as Python, in any style that Python reads, from any names and values, in any cut."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.gateway.formats.chat_format import ChatFormat
from edgepipe.gateway.formats.detect import FORMATS
from edgepipe.gateway.structured import GrammarCompiler, plan_output
from edgepipe.gateway.tool_calls import Call
from edgepipe.gateway.tool_choice import choose_tools
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import GrammarTokenizer, check_grammar
from tests.unit.gateway.test_formats import Answer, read, takes, vocabulary

__all__ = ["vocabulary"]

BY_NAME = {known.name: known for known in FORMATS}
STYLES = [BY_NAME["lfm2"], BY_NAME["olmo"]]
FUNCTIONS: Mapping[str, Any] = {"look": {}, "now": {}}


def marked(text: str) -> str:
    return f"<function_calls>{text}</function_calls>"


def answer_to(text: str, cuts: Sequence[int] = (), *, chat: ChatFormat = BY_NAME["olmo"]) -> Answer:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    return read(chat, pieces, functions=FUNCTIONS)


def arguments_of(text: str, cuts: Sequence[int] = ()) -> dict[str, Any]:
    """Arguments of the only call in the text."""
    found = answer_to(marked(text), cuts)
    assert (found.content, found.in_call) == ("", False)
    ((_, arguments),) = found.calls
    return cast("dict[str, Any]", json.loads(arguments))


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('from="Rome", to="Oslo", class="first", lambda=None', {"from": "Rome", "to": "Oslo", "class": "first"}),
        ('city name="Rome", max-price=3, $filter="a", 2nd=true', {"city name": "Rome", "max-price": 3, "$filter": "a"}),
        ('"city name"="Rome", \'a=b\' = [1], "say \\"hi\\""={}', {"city name": "Rome", "a=b": [1], 'say "hi"': {}}),
        ('**{"city name": "Rome", "x[]": 1}', {"city name": "Rome", "x[]": 1}),
        ('a=1, **{"b c": 2, **{"d": 3,}}, e=4', {"a": 1, "b c": 2, "d": 3, "e": 4}),
        ('code="""a\n"b" \\"c\\"\n""", other=1', {"code": 'a\n"b" "c"\n', "other": 1}),
        ("code='''it's '' so''', other=''''''", {"code": "it's '' so", "other": ""}),
        ("a='', b=\"\", c=''", {"a": "", "b": "", "c": ""}),
        (
            r"a='\x41\u00e9\101\0\a\v\q\8\x4', b=r'\n\'', c=Rb'\d', d=f'x'",
            {"a": "A\xe9A\0\a\v\\q\\8\\x4", "b": r"\n\'"},
        ),
        (r'a="\ud83d\ude00 \U0001f600"', {"a": "\U0001f600 \U0001f600"}),
        ("a='one' \"two\"\n 'three', b=('x'\n 'y')", {"a": "onetwothree", "b": "xy"}),
        ("a=(1), b=(1,), c=(), d=(1, (2)), e=((((5))))", {"a": 1, "b": [1], "c": [], "d": [1, 2], "e": 5}),
        (
            "a=1_000, b=0x1F, c=.5, d=5., e=+3, f=-0b11, g=1e5",
            {"a": 1000, "b": 31, "c": 0.5, "d": 5.0, "e": 3, "f": -3},
        ),
        ("a=007, b=1__0, c=0x, d=., e=10:30", {"a": "007", "b": "1__0", "c": "0x", "d": ".", "e": "10:30"}),
        ("a=[1, [True, {'b': None, 'c': (false,),},],], ", {"a": [1, [True, {"b": None, "c": [False]}]]}),
        ("\n  a = 1,\n  b={\n'c' : 2}\n", {"a": 1, "b": {"c": 2}}),
        ('a=1, "Rome", 5, [2, b=3], "c"', {"a": 1}),
    ],
)
def test_calls_as_models_write_them(written: str, arguments: Mapping[str, Any]) -> None:
    for cuts in ((), range(len(marked(f"look({written})")))):
        found = arguments_of(f"look({written})", cuts)
        assert {name: found[name] for name in arguments} == arguments


@pytest.mark.parametrize(
    "text",
    [
        'look("Rome")',
        'look("Rome", a=1)',
        "look(the moon)",
        "look(**all)",
        "look('a' 'b')",
        "look([a=1])",
        "never(a=1)",
        "look",
        "look a=1",
        "look(=1)",
    ],
)
@pytest.mark.parametrize("chat", STYLES, ids=lambda chat: chat.name)
def test_what_is_not_a_call_stays_text(chat: ChatFormat, text: str) -> None:
    opening, closing = chat.marks
    whole = f"So: {opening}{text}{closing} or {opening}"
    for cuts in ((), range(len(whole))):
        found = answer_to(whole, cuts, chat=chat)
        assert (found.content, found.calls) == (whole, ())


# any arguments, in any style

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.text("'\"\\\n r=,()[]{}:#", max_size=8)
NAMES = (
    st.from_regex(r"[A-Za-z_]{1,8}", fullmatch=True)
    | st.sampled_from(["from", "a b", "x[]", "a=b", "*", "é", ""])
    | TEXTS
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(-1e9, 1e9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


class Style:
    """Writes values as some model might: every choice that Python leaves is drawn."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def one_of(self, *texts: str) -> str:
        return self._data.draw(st.sampled_from(texts))

    def space(self) -> str:
        return self.one_of("", " ", "\n  ")

    def value(self, value: Any) -> str:
        text = self._plain(value)
        return self.one_of(text, text, f"({self.space()}{text}{self.space()})")

    def _plain(self, value: Any) -> str:
        if isinstance(value, str):
            return self.string(value)
        if isinstance(value, list):
            items = [self.value(each) for each in cast("list[object]", value)]
            if items and self._data.draw(st.booleans()):
                return f"({self._joined(items)}{',' if len(items) == 1 else self._comma()})"
            return f"[{self._joined(items)}{self._comma() if items else ''}]"
        if isinstance(value, dict):
            pairs = [
                f"{self.string(name)}{self.space()}:{self.space()}{self.value(each)}"
                for name, each in cast("dict[str, object]", value).items()
            ]
            return f"{{{self._joined(pairs)}{self._comma() if pairs else ''}}}"
        if isinstance(value, int) and not isinstance(value, bool):
            return self.one_of(str(value), f"{value:_}", hex(value))
        return self.one_of(repr(value), json.dumps(value))

    def string(self, text: str) -> str:
        quote = self.one_of("'", '"')
        escaped = text.replace("\\", "\\\\")
        triple = escaped.replace(quote, "\\" + quote) if quote in text[-1:] or 3 * quote in text else escaped
        forms = [repr(text), json.dumps(text), json.dumps(text, ensure_ascii=False), 3 * quote + triple + 3 * quote]
        if not {quote, "\\", "\n", "\r"} & set(text):
            forms.append(f"{self.one_of('r', 'R', 'u', 'f')}{quote}{text}{quote}")
        if len(text) > 1:
            forms.append(f"{text[:1]!r} {json.dumps(text[1:])}")
        return self.one_of(*forms)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        members = [self._member(each, value) for each, value in arguments.items()]
        return f"{name}({self._joined(members)}{self._comma() if members else ''})"

    def _member(self, name: str, value: Any) -> str:
        forms = [f"**{{{self.string(name)}: {self.value(value)}}}"]
        if len(name) <= 10:  # readers take a longer quoted first name for text
            forms.append(f"{json.dumps(name)}={self.value(value)}")
        if name.isidentifier():
            forms.append(f"{name}{self.space()}={self.space()}{self.value(value)}")
        return self.space() + self.one_of(*forms)

    def _joined(self, parts: list[str]) -> str:
        return self.one_of(",", ", ", " ,\n").join(parts)

    def _comma(self) -> str:
        return self.one_of("", ",", " ,\n")


CUTS = st.lists(st.integers(0, 1000), max_size=6)


@given(data=st.data(), arguments=ARGUMENTS, cuts=CUTS)
def test_any_arguments_in_any_style_are_read_back(
    data: st.DataObject, arguments: dict[str, Any], cuts: list[int]
) -> None:
    text = Style(data).call("look", arguments)
    assert arguments_of(text, cuts) == arguments
    assert arguments_of(text, range(len(marked(text)))) == arguments


@given(chat=st.sampled_from(STYLES), several=st.lists(ARGUMENTS, min_size=1, max_size=3), cuts=CUTS)
def test_what_a_format_writes_is_read_back(chat: ChatFormat, several: list[dict[str, Any]], cuts: list[int]) -> None:
    calls = [Call("look", arguments) for arguments in several]
    found = answer_to(chat.write(calls), cuts, chat=chat)
    assert found.content == ""
    assert [json.loads(arguments) for _, arguments in found.calls] == several


LITERALS = st.recursive(
    st.sampled_from(
        ["None", "True", "1_0", "0x1f", "-.5", "5.", "1e-3", "''", '"a"', "r'\\n'", "'\\n' 'b'", "'\\x41\\60'"]
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
        st.lists(inner, max_size=3).map(lambda parts: f"({', '.join(parts)})"),
        inner.map(lambda part: f"({part},)"),
        st.lists(inner, max_size=2).map(
            lambda parts: "{" + ", ".join(f"'{i}': {p}" for i, p in enumerate(parts)) + ",}"
        ),
        inner.map(lambda part: f"'''{part}'''" if "'''" not in part and not part.endswith("'") else part),
    ),
    max_leaves=6,
).filter(lambda text: "{,}" not in text)


def listed(value: Any) -> Any:
    """The value with lists in place of tuples."""
    if isinstance(value, (list, tuple)):
        return [listed(each) for each in cast("Sequence[object]", value)]
    return {name: listed(each) for name, each in value.items()} if isinstance(value, dict) else value  # pyright: ignore[reportUnknownVariableType]


@given(written=LITERALS, cuts=CUTS)
def test_literals_mean_what_python_says(written: str, cuts: list[int]) -> None:
    found, expected = arguments_of(f"look(a={written})", cuts)["a"], listed(ast.literal_eval(written))
    assert math.isclose(found, expected) if isinstance(expected, float) else found == expected


SCRAPS = [
    "a=",
    "a b",
    "1",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "'",
    '"',
    "'''",
    "\\",
    "\\x4",
    "\\u00",
    "r'",
    "**{",
    " ",
    "\n",
    "é",
]


@given(st.lists(st.sampled_from(SCRAPS), max_size=25), CUTS)
def test_any_text_gives_the_same_in_any_cut_and_whole_calls_are_json(pieces: list[str], cuts: list[int]) -> None:
    text = "<function_calls>look(a=1," + "".join(pieces)
    whole = answer_to(text)
    assert answer_to(text, cuts) == whole
    assert answer_to(text, range(len(text))) == whole
    for _, arguments in whole.calls[: whole.num_calls - whole.in_call]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    "piece", ["(", "((1,2,(3,)),", "a=", "'a' ", "**{", "\\", "_1", "look(a b", "'''", "<function_calls>look( "]
)
@pytest.mark.parametrize("start", ["", "<function_calls>look(a=", "<function_calls>look(a='"])
def test_long_hostile_text_is_read_in_time(start: str, piece: str) -> None:
    text = start + piece * (2**16 // len(piece))
    whole = answer_to(text)
    assert answer_to(text, range(0, len(text), 64)) == whole


# grammars

AWKWARD = {"from": "Rome", "city name": "Oslo", "x[]": ["a"], "a=b": True, 'say "hi"': None, "é": 1}


async def grammar_of(chat: ChatFormat) -> GrammarSpec | None:
    async def check(grammar: GrammarSpec, owner: str) -> None:
        check_grammar(grammar)

    schema = {"type": "object", "properties": {name: {} for name in AWKWARD}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    plan = await plan_output(
        choice=choose_tools(tools, tool_choice="required"),
        chat=chat,
        in_reasoning=False,
        compiler=GrammarCompiler(check),
    )
    return plan.grammar


@pytest.mark.parametrize("chat", STYLES, ids=lambda chat: chat.name)
async def test_grammars_take_awkward_names_and_strings_of_many_lines(
    vocabulary: GrammarTokenizer,
    chat: ChatFormat,
) -> None:
    grammar = await grammar_of(chat)
    written = chat.write([Call("look", AWKWARD)])
    assert takes(vocabulary, grammar, written) == "ends"
    ((_, arguments),) = answer_to(written, chat=chat).calls
    assert json.loads(arguments) == AWKWARD
    long = chat.write([Call("look", {"from": "VALUE"})])
    for value in ('"""a\n"b" ""c\\""""', "'''it's\n'''", '""', '""""""'):
        assert takes(vocabulary, grammar, long.replace('"VALUE"', value)) == "ends", value
    assert takes(vocabulary, grammar, long.replace('"VALUE"', '"""a"b')) == "goes on"
    assert takes(vocabulary, grammar, written.replace("city name", "town name")).startswith("refused")
