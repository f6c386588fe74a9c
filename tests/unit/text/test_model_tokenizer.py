"""Tokenizers: the goldens from rebuilt GGUF metadata, text that arrives in pieces, and files that are refused (M17)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from edgepipe.errors import ModelInvalid
from edgepipe.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from edgepipe.text.gguf_tokenizer import check_tokenizer_kind, special_tokens
from edgepipe.text.tokenizer import MAX_TOKENIZER_BYTES, Tokenizer, check_tokenizer
from edgepipe.weights.gguf_header import read_gguf_header
from tests.support.models.files import GOLDEN, smollm2_gguf

ITEMS = json.loads(GOLDEN.read_text())["items"]


@cache
def smollm2() -> Tokenizer:
    """Rebuilt from the real metadata, then through a file, as the store does it."""
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "tokenizer.json"
        Tokenizer.from_gguf(read_gguf_header(smollm2_gguf(Path(scratch))).metadata).save(path)
        return Tokenizer.from_file(path, vocab_size=49152)


@pytest.mark.parametrize("item", ITEMS, ids=[item["name"] for item in ITEMS])
def test_goldens(item: dict[str, Any]) -> None:
    assert smollm2().encode(item["text"], add_special=False) == item["prompt_ids"]
    assert smollm2().encode(item["text"]) == item["prompt_ids"]
    assert smollm2().decode(item["greedy_ids"], skip_special=False) == item["greedy_text"]


def test_special_tokens_and_chat_ends(tmp_path: Path) -> None:
    assert smollm2().special_ids["<|im_end|>"] == 2
    assert smollm2().end_ids((7,)) == (7, 2, 0)
    assert special_tokens(read_gguf_header(smollm2_gguf(tmp_path)).metadata)["bos_token"] == "<|im_start|>"
    ids = smollm2().encode("a<|im_end|>b")
    assert 2 in ids
    assert smollm2().decode(ids) == "ab"
    assert smollm2().decode(ids, skip_special=False) == "a<|im_end|>b"


@given(st.text(st.sampled_from("aZz 09\n\t!<|>'éñß«»—…你好字한글русский🙂🌍"), max_size=60))
def test_text_survives(text: str) -> None:
    """Of characters whose bytes this vocabulary has; a few that begin rare planes are missing in it."""
    assert smollm2().decode(smollm2().encode(text), skip_special=False) == text


@given(st.lists(st.integers(0, 49151), max_size=20))
def test_pieces_add_up_to_what_the_library_decodes(ids: list[int]) -> None:
    tokenizer = smollm2()
    detokenizer = tokenizer.detokenizer(skip_special=False)
    text = "".join(detokenizer.add(token) for token in ids) + detokenizer.finish()
    assert text == tokenizer._library.decode(ids, skip_special_tokens=False)


def test_a_character_of_several_tokens_comes_whole() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add(token) for token in ids]
    assert pieces[-1] == "🙂"
    assert set(pieces[:-1]) == {""}


def test_half_a_character_at_the_end_is_replaced() -> None:
    tokenizer = smollm2()
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.add(tokenizer.encode("🙂")[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_unknown_ids_give_nothing() -> None:
    assert smollm2().decode([10**6, -1 % 2**31]) == ""


def sentence_piece(**changes: Any) -> dict[str, object]:
    """Metadata of a tiny SentencePiece vocabulary: merges ab, then abc; every byte as fallback."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "ab",
        "abc",
        "▁ab",
    ]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 7]
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -13.0, -1.0, -2.0, -3.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(sentence_piece())
    tokens = [tokenizer._library.id_to_token(token) for token in tokenizer.encode("abc é")]
    assert tokens == ["<s>", "▁", "abc", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc é")) == "abc é"
    assert tokenizer.encode("ab", add_special=False) == [265]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_sentence_piece_without_its_leading_space() -> None:
    metadata = sentence_piece(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("abc") == [264]
    assert tokenizer.decode([265, 264]) == " ababc"


def test_the_rebuilt_sentence_piece_decodes_as_the_library(tmp_path: Path) -> None:
    Tokenizer.from_gguf(sentence_piece()).save(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    for text in ("abc ab", "é", " a  b", "🙂 c"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer._library.decode(ids) == text


def byte_level(pre: str, **changes: Any) -> dict[str, object]:
    alphabet = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = ["<|begin|>", "<|eot_id|>", *alphabet, "12", "123", "Ġa", "Ġab"]
    merges = ["1 2", "12 3", "Ġ a", "Ġa b"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        **changes,
    }


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4", "Ġab"]),
        ("llama-bpe", ["123", "4", "Ġab"]),
        ("qwen2", ["1", "2", "3", "4", "Ġab"]),
        ("gpt-2", ["123", "4", "Ġab"]),
        ("default", ["123", "4", "Ġab"]),
    ],
)
def test_pre_tokenizers_cut_digits_each_in_its_way(pre: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre))
    ids = tokenizer.encode("1234 ab", add_special=False)
    assert [tokenizer._library.id_to_token(token) for token in ids] == pieces


PIECES = {  # of "HelloWorld don't 12345\n\n"
    "gpt-2": ["HelloWorld", " don", "'t", " 12345", "\n\n"],
    "refact": ["HelloWorld", " don", "'t", " ", "1", "2", "3", "4", "5", "\n\n"],
    "command-r": ["HelloWorld", " don", "'t", " ", "1", "2", "3", "4", "5", "\n\n"],
    "dbrx": ["HelloWorld", " don", "'t", " ", "123", "45", "\n\n"],
    "glm4": ["HelloWorld", " don", "'t", " ", "123", "45", "\n\n"],
    "lfm2": ["HelloWorld", " don", "'t", " ", "123", "45", "\n\n"],
    "qwen35": ["HelloWorld", " don", "'t", " ", "1", "2", "3", "4", "5", "\n\n"],
    "gpt-4o": ["Hello", "World", " don't", " ", "123", "45", "\n\n"],
    "minimax-m2": ["Hello", "World", " don't", " ", "123", "45", "\n\n"],
    "tiny_aya": ["Hello", "World", " don't", " ", "12", "345", "\n\n"],
    "tekken": ["Hello", "World", " don", "'t", " ", "1", "2", "3", "4", "5", "\n\n"],
    "kimi-k2": ["Hello", "World", " don't", " ", "123", "45", "\n\n"],
    "deepseek-v3": ["HelloWorld", " don", "'t", " ", "123", "45", "\n\n"],
    "deepseek-llm": ["HelloWorld", " don", "'", "t", " ", "1", "2", "3", "4", "5", "\n", "\n"],
    "deepseek-coder": ["HelloWorld", " don", "'", "t", " ", "1", "2", "3", "4", "5", "\n", "\n"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_words_are_cut_as_each_model_was_trained_to(pre: str) -> None:
    assert split_by_library(pre, "HelloWorld don't 12345\n\n") == PIECES[pre]


def test_marks_belong_to_words_where_the_model_says_so() -> None:
    text = "नमस्ते"  # with vowel signs
    assert len(split_by_library("qwen35", text)) == 1
    assert len(split_by_library("qwen2", text)) > 1
    assert split_by_library("kimi-k2", "你好world") == ["你好", "world"]


@given(
    pre=st.sampled_from(sorted(PRE_TOKENIZERS)),
    text=st.text(
        st.sampled_from("aBzÉéß e\u0301 ' 's 019  \n\r\t/.,!?-_$#`<|>漢字かカ한글र्देРус🙂Ａ＃。" + "\u3000"), max_size=40
    ),
)
def test_patterns_mean_the_same_to_another_engine(pre: str, text: str) -> None:
    pieces = [text] if text else []
    for pattern in PRE_TOKENIZERS[pre].patterns:
        pieces = [part for piece in pieces for part in cut(regex.compile(pattern, regex.V1), piece)]
    assert split_by_library(pre, text) == pieces


def split_by_library(pre: str, text: str) -> list[str]:
    splits = [Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre].patterns]
    return [piece for piece, _place in Sequence(splits).pre_tokenize_str(text)]


def cut(pattern: regex.Pattern[str], text: str) -> list[str]:
    """Matches, and what is between them."""
    parts, at = [], 0
    for found in pattern.finditer(text):
        parts += [text[at : found.start()], found.group()]
        at = found.end()
    return [part for part in (*parts, text[at:]) if part]


def spaced(**changes: Any) -> dict[str, object]:
    """Metadata as of Gemma 4: merges over text whose spaces are ``▁``, also over lines; every byte as fallback."""
    own = ["▁", "a", "b", "ab", "▁ab", "\n", "\n\n", "▁▁"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *own]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 3, *[6] * 256, *[1] * len(own)],
        "tokenizer.ggml.merges": ["a b", "▁ ab", "\n \n", "▁ ▁"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        **changes,
    }


def test_merges_of_text_with_marked_spaces(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(spaced())
    check_tokenizer_kind(spaced())
    text = "ab ab  b\n\n\né"
    tokens = [tokenizer._library.id_to_token(token) for token in tokenizer.encode(text)]
    assert tokens == ["<bos>", "ab", "▁ab", "▁▁", "b", "\n\n", "\n", "<0xC3>", "<0xA9>"]
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert again.decode(again.encode(text)) == text
    assert again.decode(again.encode(" a", add_special=False)) == " a"


def test_the_begin_token_is_added_where_the_model_wants_it() -> None:
    assert Tokenizer.from_gguf(byte_level("llama-bpe")).encode("1")[0] == 0
    assert Tokenizer.from_gguf(byte_level("smollm")).encode("1")[0] != 0
    adding = byte_level("smollm", **{"tokenizer.ggml.add_bos_token": True})
    assert Tokenizer.from_gguf(adding).encode("1")[0] == 0
    assert Tokenizer.from_gguf(adding).end_ids(()) == (1,)


@pytest.mark.parametrize("kind", [None, 0, 1, 4])
@pytest.mark.parametrize("mark", ["<|im_end|>", "<end_of_turn>"])
def test_marks_of_turns_end_answers_whatever_the_type_in_the_file(
    mark: str, kind: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = byte_level("smollm")
    tokens = [*cast("list[str]", metadata["tokenizer.ggml.tokens"]), mark, "<|im_start|>", "<tool_call>"]
    kinds = [] if kind is None else [*cast("list[int]", metadata["tokenizer.ggml.token_type"]), kind, kind, kind]
    tokenizer = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds})
    end, digit = len(tokens) - 3, tokens.index("1")
    assert tokenizer.end_ids(()) == ((1, end) if mark != "<|im_end|>" else (end, 1))
    assert tokenizer.encode(f"<|im_start|>1{mark}<tool_call>", add_special=False) == [end + 1, digit, end, end + 2]
    assert tokenizer.decode([end, end + 2]) == "<tool_call>"
    assert "read as marks" in caplog.text


def test_tokens_that_the_metadata_names_are_marks() -> None:
    metadata = byte_level("smollm", **{"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.padding_token_id": -1})
    tokenizer = Tokenizer.from_gguf(metadata)
    assert set(tokenizer.special_ids.values()) == {0, 1, 5}
    assert "pad_token" not in special_tokens(metadata)


def test_an_added_mark_ends_answers_though_the_file_does_not_call_it_special(tmp_path: Path) -> None:
    path = saved(
        tmp_path / "tokenizer.json", lambda value: [token.update(special=False) for token in value["added_tokens"]]
    )
    assert Tokenizer.from_file(path).end_ids(()) == (1,)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.model": "bert"},
        {"tokenizer.ggml.pre": "unheard-of"},
        {"tokenizer.ggml.merges": ["no pair here"]},
        {"tokenizer.ggml.merges": ["x"]},
        {"tokenizer.ggml.merges": ["zz yy"]},
        {"tokenizer.ggml.tokens": []},
        {"tokenizer.ggml.tokens": [1, 2]},
        {"tokenizer.ggml.token_type": [1]},
        {"tokenizer.ggml.bos_token_id": 10**6},
    ],
)
def test_metadata_that_makes_no_tokenizer_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelInvalid):
        Tokenizer.from_gguf(byte_level("smollm", **changes))


def saved(path: Path, change: Any = None) -> Path:
    Tokenizer.from_gguf(byte_level("smollm")).save(path)
    if change is not None:
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
    return path


def test_m17_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    for load in (Tokenizer.from_file, lambda p: check_tokenizer(p, vocab_size=10)):
        with pytest.raises(ModelInvalid, match="too large"):
            load(path)
    assert MAX_TOKENIZER_BYTES < 1 << 30


def test_m17_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    path = saved(tmp_path / "tokenizer.json")
    with pytest.raises(ModelInvalid, match="token id"):
        check_tokenizer(path, vocab_size=50)
    with pytest.raises(ModelInvalid, match="token id"):
        Tokenizer.from_file(path, vocab_size=50).encode("zzz")


def test_m17_a_pattern_that_backtracks_is_given_up(tmp_path: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
        value["pre_tokenizer"]["pretokenizers"] = [pattern, value["pre_tokenizer"]["pretokenizers"][-1]]

    path = saved(tmp_path / "tokenizer.json", change)
    with pytest.raises(ModelInvalid, match="not a usable tokenizer"):
        check_tokenizer(path, vocab_size=200)
    with pytest.raises(ModelInvalid, match="gave up"):
        Tokenizer.from_file(path).encode("a" * 100 + "!")


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value["model"]["merges"].append(["nobody", "knows"]),
        lambda value: value.update(model=3),
        lambda value: value.update(decoder={"type": "unheard of"}),
    ],
)
def test_damaged_tokenizers_are_refused(change: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "tokenizer.json", change)
    with pytest.raises(ModelInvalid):
        check_tokenizer(path, vocab_size=200)
    with pytest.raises(ModelInvalid):
        Tokenizer.from_file(path)


def test_a_deeply_nested_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(ModelInvalid):
        check_tokenizer(path, vocab_size=200)


def test_a_good_tokenizer_passes(tmp_path: Path) -> None:
    check_tokenizer(saved(tmp_path / "tokenizer.json"), vocab_size=200)


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="no tokenizer"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
