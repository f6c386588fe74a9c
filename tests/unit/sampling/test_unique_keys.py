"""An object of a bound answer has no key twice, whatever tokens write it."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from edgepipe.errors import RequestInvalid
from edgepipe.gateway.free_keys import has_free_keys
from edgepipe.sampling.grammar import (
    BuiltGrammar,
    GrammarState,
    GrammarTokenizer,
    check_grammar,
    json_grammar,
    json_rule,
    lark_grammar,
    with_unique_keys,
)
from edgepipe.sampling.params import GrammarSpec

END = 256
WORDS = [
    '"a"',
    '"a":',
    ', "a": ',
    '{"a":',
    '"}',
    '":',
    '","',
    '},"a":',
    "a",
    "ab",
    '\\"',
    "</think>",
    '": {"a": 1}, "b',
]
TOKENS = [*(bytes([byte]) for byte in range(256)), b"", *(word.encode() for word in WORDS)]
VOCABULARY = GrammarTokenizer(TOKENS, encode=lambda text: list(text.encode()), end_ids=[END], special_ids=[END])
ANY = lark_grammar(f"start: {json_rule({'type': 'object'})}\n")
OBJECTS = json_grammar({"type": "object", "additionalProperties": {"type": "object"}})


def _state(text: str, spec: GrammarSpec = ANY, *, opening: str = "", closing: str = "") -> GrammarState:
    bound = with_unique_keys(spec, opening=opening, closing=closing)
    check_grammar(bound)
    return BuiltGrammar(VOCABULARY, bound).state(list(text.encode()))


def _allowed(state: GrammarState) -> set[str]:
    bits = np.unpackbits(np.asarray(state.mask()).view(np.uint8), bitorder="little")
    return {TOKENS[token].decode("latin-1") for token in np.flatnonzero(bits[: len(TOKENS)])}


@pytest.mark.parametrize(
    ("text", "allowed", "refused"),
    [
        ('{"a": 1, ', ['"'], ['"a"', '"a":']),
        ('{"a": 1, "', ["a", "ab"], []),
        ('{"a": 1, "a', ["b", "ab"], ['"', '":']),
        ('{"a": 1, "ab', ['"', '":'], []),
        ('{"a": 1', [","], [', "a": ']),
        ('{"a": ', ['"a"', '"', '{"a":'], []),  # a value, and the key of another object
        ('{"a": ["a", ', ['"a"'], []),
        ('{"b": {"a": 1}, ', ['"a":'], []),
        ('{"a": {"b": 1', ["}"], ['},"a":']),
        ('{"a\\"": 1, "a', ["b", '"', '\\"'], []),
        ('{"a": "', ['"}', "a"], []),
    ],
)
def test_keys(text: str, allowed: list[str], refused: list[str]) -> None:
    found = _allowed(_state(text))
    assert [each for each in allowed if each not in found] == []
    assert [each for each in refused if each in found] == []


def test_keys_begin_anew_after_reasoning_and_only_there() -> None:
    inside = lark_grammar(
        'start: thought answer\nthought[lazy]: /(.|\\n)*<\\/think>/\nanswer: %json {"type": "object"}\n'
    )
    thinking = _state('{"a": 1, "a', inside, closing="</think>")
    assert '"' in _allowed(thinking)
    answering = _state('{"a": 1, "a"}</think>{"a": 1, "a', inside, closing="</think>")
    assert '"' not in _allowed(answering)


@pytest.mark.parametrize("seed", range(20))
def test_outputs_by_chance_have_no_key_twice(seed: int) -> None:
    chance = random.Random(seed)
    state, text = _state("", OBJECTS), b""
    likely = [token for token, each in enumerate(TOKENS) if each and set(each) <= set(b'{}":, ab1')]
    for _ in range(120):
        bits = np.unpackbits(np.asarray(state.mask()).view(np.uint8), bitorder="little")
        allowed = [token for token in likely if bits[token]]
        if not allowed:
            break
        token = chance.choice(allowed)
        state.take(token)
        text += TOKENS[token]
    assert text

    def checked(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert len(dict(pairs)) == len(pairs), text
        return dict(pairs)

    for end in ("", "}", "1}", "1}}", '":1}', '":{}}', ":{}}", "{}}", "}}", "}}}"):
        try:
            json.loads(text.decode() + end, object_pairs_hook=checked)
        except ValueError:
            continue
        break


@pytest.mark.parametrize(
    ("schema", "free"),
    [
        ({"type": "object"}, True),
        ({}, True),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}, False),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, True),
        ({"type": "array", "items": {"type": "object"}}, True),
        ({"anyOf": [{"type": "string"}, {"patternProperties": {"^a": {"type": "null"}}}]}, True),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"enum": [1]}}}, False),
        ({"type": "string"}, False),
    ],
)
def test_which_schemas_have_keys_of_their_own(schema: dict[str, object], free: bool) -> None:
    assert has_free_keys(schema) is free


@pytest.mark.parametrize("line", ["{", "[]", '{"opening": 1, "closing": ""}'])
def test_a_malformed_line_of_another_gateway_is_refused(line: str) -> None:
    with pytest.raises(RequestInvalid):
        check_grammar(GrammarSpec(f"%unique-keys {line}\n{ANY.text}"))
