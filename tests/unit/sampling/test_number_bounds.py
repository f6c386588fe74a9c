"""Numbers in bound answers end, also if the model would write digits for ever."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from edgepipe.gateway.answer_form import answer_form
from edgepipe.gateway.schema import CompletionBody
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import BuiltGrammar, GrammarState, GrammarTokenizer, regex_grammar

END = 256
NUMBER = {"type": "number"}


@pytest.fixture(scope="module")
def vocabulary() -> GrammarTokenizer:
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    return GrammarTokenizer(tokens, encode=lambda text: list(text.encode()), end_ids=[END], special_ids=[END])


def eager(vocabulary: GrammarTokenizer, grammar: GrammarSpec, liked: str, *, most: int = 200) -> str:
    """What a model writes that takes the first character of ``liked`` that is allowed, else any, until it may end."""
    state = BuiltGrammar(vocabulary, grammar).state()
    written = bytearray()
    while len(written) < most:
        allowed = np.flatnonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little"))
        wanted = [ord(each) for each in liked if ord(each) in allowed]
        token = wanted[0] if wanted else END if END in allowed else int(allowed[-1])
        if token == END:
            return written.decode()
        written.append(token)
        state.take(token)
    return written.decode()


def may_take(state: GrammarState, token: int) -> bool:
    return bool(np.unpackbits(state.mask().view(np.uint8), bitorder="little")[token])


def bound_to(schema: dict[str, Any]) -> GrammarSpec:
    form = answer_form(CompletionBody(prompt=["a"], guided_json=schema))
    assert form is not None
    return form.grammar


@pytest.mark.parametrize(
    ("schema", "liked", "written"),
    [
        (NUMBER, "3", "3" * 21),
        (NUMBER, "3.", "3" * 21 + ".3"),
        ({"type": "integer"}, "9", "9" * 21),
        ({"type": "integer"}, "-9", "-" + "9" * 21),
        ({"type": "number", "minimum": 0}, "7", "7" * 21),
        ({"anyOf": [NUMBER, {"type": "null"}]}, "1", "1" * 21),
        ({"type": ["number", "string"]}, "1", "1" * 21),
        ({"type": "array", "items": NUMBER, "maxItems": 2}, "[1,]", f"[{'1' * 21},{'1' * 21}]"),
    ],
)
def test_a_model_that_likes_digits_ends_its_number(
    vocabulary: GrammarTokenizer, schema: dict[str, Any], liked: str, written: str
) -> None:
    assert eager(vocabulary, bound_to(schema), liked) == written


@pytest.mark.parametrize(
    ("begun", "rest"),
    [("0.", "3" * 17), ("-12.", "3" * 15), ("0.000000", "1" * 16), ("1e", "111"), ("1.5E-", "111"), ("0.", "0" * 22)],
)
def test_fractions_and_exponents_end(vocabulary: GrammarTokenizer, begun: str, rest: str) -> None:
    state = BuiltGrammar(vocabulary, bound_to(NUMBER)).state()
    for byte in begun.encode():
        state.take(byte)
    written = ""
    while may_take(state, ord(rest[0])) and len(written) < 100:
        written += rest[0]
        state.take(ord(rest[0]))
    assert written == rest
    assert may_take(state, END)


@pytest.mark.parametrize("number", [0.1 + 0.2, 1e-7, 5e-324, 1.7976931348623157e308, -(2.0**53), 1e20, 123456.789e-5])
def test_every_number_of_javascript_can_be_written(vocabulary: GrammarTokenizer, number: float) -> None:
    text = json.dumps(number)
    state = BuiltGrammar(vocabulary, bound_to(NUMBER)).state()
    for byte in text.encode():
        assert may_take(state, byte)
        state.take(byte)
    assert may_take(state, END)


def test_numbers_within_free_objects_end(vocabulary: GrammarTokenizer) -> None:
    """As in the mode ``json_object``, whose keys and values are free."""
    form = answer_form(CompletionBody(prompt=["a"], response_format={"type": "json_object"}))
    assert form is not None
    state = BuiltGrammar(vocabulary, form.grammar).state()
    for byte in b'{"a":[true,{"b":12':
        state.take(byte)
    digits = 2
    while may_take(state, ord("5")) and digits < 100:
        state.take(ord("5"))
        digits += 1
    assert digits == 21


LONG = "12345678901234567890123456789"


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (bound_to({"const": int(LONG[:16])}), LONG[:16]),
        (bound_to({"enum": [LONG, LONG[:21], LONG[:25]]}), f'"{LONG}"'),
        (bound_to({"type": "string"}), f'"{LONG}"'),
        (bound_to({"type": "string", "pattern": "^[0-9]+$"}), f'"{LONG}"'),
        (bound_to({"type": "string", "pattern": "^[0-9]{29}$"}), f'"{LONG}"'),
        (bound_to({"type": "string", "pattern": "^[0-9]+,[0-9]+$"}), f'"{LONG},{LONG}"'),
        (bound_to({"type": "object", "additionalProperties": {"type": "null"}}), f'{{"{LONG}":null}}'),
        (regex_grammar("[0-9]+"), LONG),
    ],
)
def test_digits_that_are_no_free_number_stay_as_they_are(
    vocabulary: GrammarTokenizer, grammar: GrammarSpec, text: str
) -> None:
    state = BuiltGrammar(vocabulary, grammar).state()
    for byte in text.encode():
        assert may_take(state, byte)
        state.take(byte)
    assert may_take(state, END)


def test_a_range_may_ask_for_as_many_digits_as_it_needs(vocabulary: GrammarTokenizer) -> None:
    schema = {"type": "integer", "minimum": 10**18, "maximum": 9 * 10**18}
    assert len(eager(vocabulary, bound_to(schema), "5")) == 19
