"""Vocabularies are compared by their tokens: sizes and special tokens may differ, other tokens may not."""

from __future__ import annotations

import pytest

from edgepipe.errors import ConfigInvalid
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.text.vocabularies import check_same_vocabulary, first_difference
from edgepipe.weights.emulated_folder import byte_level_tokenizer

OWN = {0: "<s>", 1: "a", 2: "b", 3: "ab"}


@pytest.mark.parametrize(
    "drafts",
    [OWN, OWN | {4: "[PAD4]", 5: "[PAD5]"}, {0: "<s>", 1: "a", 2: "b"}, OWN | {0: "<begin>"}],
    ids=["same", "padded", "shorter", "another special token"],
)
def test_padding_and_special_tokens_may_differ(drafts: dict[int, str]) -> None:
    assert first_difference(OWN, drafts, special={0}) is None
    assert first_difference(drafts, OWN, special={0}) is None


@pytest.mark.parametrize(
    ("drafts", "said"),
    [
        (OWN | {2: "c"}, "token 2 is 'b' in one and 'c' in the other"),
        (OWN | {3: "x" * 99}, f"token 3 is 'ab' in one and '{'x' * 24}' in the other"),
        ({0: "<s>", 9: "a"}, "they share no token"),
        ({}, "they share no token"),
    ],
)
def test_the_first_other_token_is_named(drafts: dict[int, str], said: str) -> None:
    assert first_difference(OWN, drafts, special={0}) == said


def test_real_tokenizers() -> None:
    small, large = (Tokenizer(byte_level_tokenizer(size), vocab_size=size) for size in (300, 400))
    check_same_vocabulary("large", large, "small", small)
    check_same_vocabulary("small", small, "large", large)
    with pytest.raises(ConfigInvalid, match="small cannot draft for large: its vocabulary is another one") as refused:
        check_same_vocabulary("large", large, "small", _Shifted(byte_level_tokenizer(300), vocab_size=300))
    assert refused.value.fact.startswith("large has 400 tokens, small has 300; token ")


class _Shifted(Tokenizer):
    """Its ids are one higher."""

    def tokens(self) -> dict[int, str]:
        return {token + 1: text for token, text in super().tokens().items()}
