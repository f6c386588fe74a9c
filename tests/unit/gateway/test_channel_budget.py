"""A budget of reasoning in channels: gpt-oss closes its analysis, and what follows stays bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgepipe.gateway.answer_form import answer_form
from edgepipe.gateway.formats.harmony import HARMONY
from edgepipe.gateway.schema import CompletionBody
from edgepipe.gateway.structured import GrammarCompiler, plan_output
from edgepipe.gateway.tool_choice import choose_tools
from edgepipe.sampling.grammar import BuiltGrammar, GrammarState, GrammarTokenizer, check_grammar
from edgepipe.sampling.params import GrammarSpec

MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"]
RETURN, WORD = 256, 257
TOKENS = [*(bytes([byte]) for byte in range(256)), b"", b"word ", *(mark.encode() for mark in MARKS)]
IDS = {mark: WORD + 1 + index for index, mark in enumerate(MARKS)}
END = IDS["<|end|>"]
THOUGHT = "<|channel|>analysis<|message|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"city":"Rome"}'
PREAMBLE = "<|channel|>commentary<|message|>I ask.<|end|>"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}


def encode(text: str) -> list[int]:
    """Each mark is a token, all else is bytes."""
    tokens: list[int] = []
    while text:
        mark = next((mark for mark in MARKS if text.startswith(mark)), "")
        tokens += [IDS[mark]] if mark else list(text[0].encode())
        text = text[len(mark) or 1 :]
    return tokens


VOCABULARY = GrammarTokenizer(TOKENS, encode=encode, end_ids=[RETURN], special_ids=[RETURN])


async def begun(most_tokens: int, *, form: dict[str, Any] | None = None, **tools: Any) -> GrammarState:
    """The state at the begin of an answer whose reasoning has so many tokens at most."""

    async def check(grammar: GrammarSpec, owner: str) -> None:
        check_grammar(grammar)

    plan = await plan_output(
        form=answer_form(CompletionBody(prompt=["x"], **form)) if form else None,
        choice=choose_tools(**tools),
        chat=HARMONY,
        most_thoughts=most_tokens,
        compiler=GrammarCompiler(check),
    )
    assert plan.grammar is not None
    return BuiltGrammar(VOCABULARY, plan.grammar).state()


def allowed(state: GrammarState) -> set[int]:
    bits = np.unpackbits(np.asarray(state.mask()).view(np.uint8), bitorder="little")
    return {int(token) for token in np.flatnonzero(bits[: len(TOKENS)])}


def fits(state: GrammarState, text: str) -> bool:
    """Append a text. Return whether every token of it is allowed."""
    for token in encode(text):
        if token not in allowed(state):
            return False
        state.take(token)
    return True


@pytest.mark.parametrize("most_tokens", [0, 1, 3])
@pytest.mark.parametrize("bound", [{}, {"tools": TOOLS}, {"form": FORM}, {"tools": TOOLS, "form": FORM}])
async def test_the_analysis_ends_after_so_many_tokens(most_tokens: int, bound: dict[str, Any]) -> None:
    state = await begun(most_tokens, **bound)
    assert fits(state, THOUGHT)
    for _ in range(most_tokens):
        assert {WORD, END} <= allowed(state)
        state.take(WORD)
    assert allowed(state) == {END}
    state.take(END)
    assert fits(state, f"{NEXT}<|channel|>")
    assert ord("f") in allowed(state)


@pytest.mark.parametrize("opening", [f"{THOUGHT}ab<|end|>{NEXT}", f"{THOUGHT}x<|end|>{NEXT}", ""])
async def test_what_follows_stays_bound(opening: str) -> None:
    free = await begun(2)
    assert fits(free, f"{opening}{FINAL}any text, word by word")
    assert RETURN in allowed(free)
    formed = await begun(2, form=FORM)
    assert fits(formed, f"{opening}{FINAL}")
    assert allowed(formed) == {ord("{")}
    called = await begun(2, tools=TOOLS, tool_choice="required")
    assert fits(called, f"{opening}{PREAMBLE}{NEXT}{CALL}")
    assert RETURN in allowed(called)
    assert not fits(await begun(2, tools=TOOLS, tool_choice="required"), f"{opening}{FINAL}")


@pytest.mark.parametrize("first", [f"{THOUGHT}x<|end|>", PREAMBLE])
@pytest.mark.parametrize("bound", [{}, {"tools": TOOLS}, {"form": FORM}])
async def test_a_second_analysis_would_have_no_bound(first: str, bound: dict[str, Any]) -> None:
    assert not fits(await begun(2, **bound), f"{first}{NEXT}{THOUGHT}")
