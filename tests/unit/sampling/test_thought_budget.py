"""A budget of reasoning: the closing mark comes when it is used up, and what follows stays bound."""

from __future__ import annotations

import numpy as np
import pytest

from edgepipe.errors import RequestInvalid
from edgepipe.sampling.grammar import (
    BuiltGrammar,
    GrammarState,
    GrammarTokenizer,
    check_grammar,
    json_grammar,
    lark_grammar,
    rule_of,
    with_budget,
)
from edgepipe.sampling.params import GrammarSpec
from edgepipe.sampling.thought_budget import ThoughtBudget

OPENING, CLOSING = "<think>", "</think>"
END, WORD, CLOSE, OPEN, HALF = 256, 257, 258, 259, 260
TOKENS = [*(bytes([byte]) for byte in range(256)), b"", b"word ", CLOSING.encode(), OPENING.encode(), "é".encode()[:1]]


def _encode(text: str) -> list[int]:
    return [CLOSE] if text == CLOSING else list(text.encode())


VOCABULARY = GrammarTokenizer(TOKENS, encode=_encode, end_ids=[END], special_ids=[END])
INSIDE = r"start: thought answer" + "\n" + r"thought[lazy]: /(.|\n)*<\/think>/" + "\n"
BEFORE = (
    "start: answer | thought answer\n"
    r"thought[lazy]: /\s*<think>(.|\n)*<\/think>/" + "\n"
    r"PLAIN: ANYTHING & ~/\s*<think>(.|\n)*/" + "\n"
)
NUMBER = rule_of(json_grammar({"type": "integer", "minimum": 0, "maximum": 9}), "answer") + "\n"
FREE = "answer: PLAIN\n"
ANYTHING = r"ANYTHING: /(.|\n)*/" + "\n"


def _state(text: str, most_tokens: int, *, opening: str = "", tokens: tuple[int, ...] = ()) -> GrammarState:
    budget = ThoughtBudget(most_tokens=most_tokens, opening=opening, closing=CLOSING)
    spec = with_budget(lark_grammar(text + ANYTHING), budget)
    check_grammar(spec)
    return BuiltGrammar(VOCABULARY, spec).state(tokens)


def _allowed(state: GrammarState) -> set[int]:
    bits = np.unpackbits(np.asarray(state.mask()).view(np.uint8), bitorder="little")
    return {int(token) for token in np.flatnonzero(bits[: len(TOKENS)])}


@pytest.mark.parametrize("most_tokens", [0, 1, 3])
def test_the_closing_mark_comes_after_so_many_tokens(most_tokens: int) -> None:
    state = _state(INSIDE + NUMBER, most_tokens)
    for _ in range(most_tokens):
        assert {WORD, CLOSE} <= _allowed(state)
        state.take(WORD)
    assert _allowed(state) == {CLOSE}
    state.take(CLOSE)
    assert WORD not in _allowed(state)
    assert ord("7") in _allowed(state)


def test_reasoning_that_ends_by_itself_is_not_closed_again() -> None:
    state = _state(INSIDE + "answer: ANYTHING\n", 4)
    for token in (WORD, CLOSE, *[WORD] * 9):
        assert len(_allowed(state)) > 100
        state.take(token)


def test_a_mark_that_has_begun_is_completed() -> None:
    state = _state(INSIDE + NUMBER, 3, tokens=(WORD, ord("<"), ord("/")))
    for byte in b"think>":
        assert _allowed(state) == {byte}
        state.take(byte)
    assert ord("7") in _allowed(state)


def test_a_character_is_completed_first() -> None:
    state = _state(INSIDE + NUMBER, 2, tokens=(WORD, HALF))
    assert CLOSE not in _allowed(state)
    state.take("é".encode()[1])
    assert _allowed(state) == {CLOSE}


def test_the_output_may_open_its_reasoning_or_answer_at_once() -> None:
    opened = _state(BEFORE + FREE, 1, opening=OPENING, tokens=(ord("\n"), OPEN, WORD))
    assert _allowed(opened) == {CLOSE}
    answered = _state(BEFORE + FREE, 1, opening=OPENING, tokens=(WORD, WORD, WORD))
    assert len(_allowed(answered)) > 100


@pytest.mark.parametrize("tokens", [(WORD, WORD), (WORD, WORD, CLOSE), (WORD, CLOSE)])
def test_a_state_made_of_known_tokens_goes_on_as_one_that_took_them(tokens: tuple[int, ...]) -> None:
    """As after a preemption, or on another machine."""
    state = _state(INSIDE + NUMBER, 2)
    for token in tokens:
        state.mask()
        state.take(token)
    assert _allowed(state) == _allowed(_state(INSIDE + NUMBER, 2, tokens=tokens))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"most_tokens": -1, "opening": "", "closing": "x"}',
        '{"most_tokens": 1, "opening": "", "closing": ""}',
    ],
)
def test_a_malformed_budget_of_another_gateway_is_refused(line: str) -> None:
    with pytest.raises(RequestInvalid):
        check_grammar(GrammarSpec(f"%reasoning {line}\n" + lark_grammar("start: /a/\n").text))
