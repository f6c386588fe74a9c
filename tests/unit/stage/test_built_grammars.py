"""A stage's compiled grammars: shared by text, and bounded in number and bytes whoever uses them."""

from __future__ import annotations

import pytest

from edgepipe.errors import StepFailed
from edgepipe.sampling.grammar import BuiltGrammar, GrammarTokenizer, json_grammar
from edgepipe.stage.built_grammars import BuiltGrammars

WORD = json_grammar({"enum": ["yes", "no"]})


@pytest.fixture(scope="module")
def vocabulary() -> GrammarTokenizer:
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    return GrammarTokenizer(tokens, encode=lambda text: list(text.encode()), end_ids=[256], special_ids=[256])


def test_the_last_used_are_kept(vocabulary: GrammarTokenizer) -> None:
    known = BuiltGrammars(max_kept=2, max_kept_bytes=100, max_bytes=1000)
    for text in "abac":
        if known.find(text) is None:
            known.add(text, BuiltGrammar(vocabulary, WORD, num_bytes=10))
    assert known.find("b") is None
    assert known.find("a") is not None
    known.add("large", BuiltGrammar(vocabulary, WORD, num_bytes=95))
    assert known.find("a") is None
    assert known.num_bytes == 95


def test_grammars_in_use_count_though_they_are_not_kept(vocabulary: GrammarTokenizer) -> None:
    known = BuiltGrammars(max_kept=1, max_kept_bytes=100, max_bytes=100)
    known.add("a", BuiltGrammar(vocabulary, WORD, num_bytes=60))
    built = known.find("a")
    assert built is not None
    used = [built.state(), built.state()]
    del built
    with pytest.raises(StepFailed, match="too much memory"):
        known.make_room(50)
    assert known.find("a") is not None, "another sequence shares it still"
    known.make_room(40)
    used.clear()
    known.make_room(100)
    assert known.num_bytes == 0


def test_a_refused_text_is_not_tried_again() -> None:
    known = BuiltGrammars(max_kept=2)
    for text in "abc":
        known.refuse(text, "too hard")
    assert known.find("a") is None
    with pytest.raises(StepFailed):
        known.find("c")


def test_a_spent_grammar_is_built_again_and_counts_while_it_is_used(vocabulary: GrammarTokenizer) -> None:
    known = BuiltGrammars()
    spent = BuiltGrammar(vocabulary, WORD, num_bytes=10)
    known.add("a", spent)
    spent.spent = True
    assert known.find("a") is None
    known.add("a", BuiltGrammar(vocabulary, WORD, num_bytes=10))
    assert known.num_bytes == 20
    del spent
    assert known.num_bytes == 10
