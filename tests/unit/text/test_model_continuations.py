"""What a text's pieces are together: the whole, wherever prompt and answer meet, with every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Library

from edgepipe.store.store import StoredModel
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.emulated_folder import byte_level_tokenizer

WORDS = ["▁", "▁▁", "▁Pa", "ris", "is", "▁is", "a", " ", "é", "字", "▁字"]
BYTES = [f"<0x{byte:02X}>" for byte in (0x20, 0x61, 0x80, 0xA9, 0xC3, 0xE5, 0xAD, 0x97, 0xF0, 0x9F, 0x99, 0x82, 0xFF)]
VOCABULARY = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
REPLACE, BYTE_FALLBACK = decoders.Replace("▁", " "), decoders.ByteFallback()
FUSE = decoders.Fuse()
DECODERS: dict[str, decoders.Decoder] = {
    "llama": decoders.Sequence([REPLACE, BYTE_FALLBACK, FUSE, decoders.Strip(" ", 1, 0)]),
    "two spaces": decoders.Sequence([REPLACE, BYTE_FALLBACK, FUSE, decoders.Strip(" ", 2, 0)]),
    "gemma": decoders.Sequence([REPLACE, BYTE_FALLBACK, FUSE]),
    "metaspace": decoders.Sequence([BYTE_FALLBACK, decoders.Metaspace()]),
    "metaspace, first": decoders.Sequence([BYTE_FALLBACK, decoders.Metaspace(prepend_scheme="first")]),
    "metaspace, never": decoders.Sequence([BYTE_FALLBACK, decoders.Metaspace(prepend_scheme="never")]),
}


def sentence_piece(decoder: decoders.Decoder) -> Tokenizer:
    """A small vocabulary with byte fallback."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    library = Library(models.BPE(vocab=ids, merges=[], unk_token="<unk>", byte_fallback=True))
    library.decoder = decoder
    library.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return Tokenizer(library)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "byte level":
        return Tokenizer(byte_level_tokenizer(300))
    return sentence_piece(DECODERS[kind])


def pieces(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int]) -> tuple[str, str]:
    """The prompt's text as far as it is complete, and the streamed text of what follows."""
    detokenizer = tokenizer.detokenizer(before=prompt)
    streamed = "".join([*map(detokenizer.add, output), detokenizer.finish()])
    return tokenizer.decode(prompt, finish=False), streamed


KINDS = [*DECODERS, "byte level"]
SEQUENCES = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=10)


@settings(max_examples=120)
@given(st.sampled_from(KINDS), SEQUENCES, SEQUENCES)
def test_prompt_and_streamed_answer_are_together_the_whole_text(
    kind: str, prompt: list[int], output: list[int]
) -> None:
    tokenizer = tokenizer_of(kind)
    before, streamed = pieces(tokenizer, prompt, output)
    whole = tokenizer.decode([*prompt, *output])
    assert before + streamed == whole
    if tokenizer.decode(prompt) == before:  # no character is cut
        assert whole.removeprefix(tokenizer.decode(prompt)) == streamed


@settings(max_examples=40)
@given(st.lists(st.integers(0, 49_151), max_size=12), st.integers(0, 12))
def test_the_demo_models_pieces_are_the_whole_text_too(demo_tokenizer: Tokenizer, ids: list[int], cut: int) -> None:
    assert "".join(pieces(demo_tokenizer, ids[:cut], ids[cut:])) == demo_tokenizer.decode(ids)


@pytest.fixture(scope="module")
def demo_tokenizer(demo_model: StoredModel) -> Tokenizer:
    return demo_model.tokenizer()


@pytest.mark.parametrize("text", ["é", "字🙂", "a é\n🙂", "🙂🙂"])
def test_a_text_cut_within_its_characters_is_streamed_whole(text: str) -> None:
    """Each byte is a token, so every character of several bytes is cut at every place."""
    data = text.encode()
    for cut in range(len(data) + 1):
        assert "".join(pieces(tokenizer_of("byte level"), list(data[:cut]), list(data[cut:]))) == text


ORDINARY = ["<unk>", "<s>", "</s>", "▁Pa", "ris", "is", "▁is", "a", "é", "字", "▁字", "<0x61>"]


@settings(max_examples=80)
@given(st.sampled_from(KINDS), st.lists(st.sampled_from(ORDINARY), max_size=10), st.booleans())
def test_whole_texts_are_those_of_the_library(kind: str, tokens: list[str], skip_special: bool) -> None:
    """Without bytes that are no UTF-8, and without runs of spaces, of which the library drops more than was put."""
    tokenizer, ids = tokenizer_of(kind), [VOCABULARY.index(token) for token in tokens]
    theirs = tokenizer._library.decode(ids, skip_special_tokens=skip_special)
    assert tokenizer.decode(ids, skip_special=skip_special) == theirs


def test_a_long_prompt_is_not_decoded_again_for_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("llama")
    looked_at: list[int] = []
    table = tokenizer._token_bytes
    monkeypatch.setattr(tokenizer, "_token_bytes", Noting(table, looked_at))  # a spy on the look-ups
    prompt = [1, *[VOCABULARY.index("▁is")] * 100_000, 2]
    assert tokenizer.detokenizer(before=prompt).add(VOCABULARY.index("▁Pa")) == " Pa"
    assert len(looked_at) < 8


class Noting:
    """A table that notes which tokens are looked up."""

    def __init__(self, table: Callable[[int], bytes], looked_at: list[int]) -> None:
        self._table = table
        self._looked_at = looked_at
        self.leading_spaces = 1

    def __call__(self, token: int) -> bytes:
        self._looked_at.append(token)
        return self._table(token)
