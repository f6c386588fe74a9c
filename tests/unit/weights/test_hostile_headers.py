"""Headers that lie about lengths: refused before anything of that size is read or allocated, whatever was changed."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.errors import ModelInvalid
from edgepipe.files import strict_json
from edgepipe.files.strict_json import parse_json_object
from edgepipe.spec.config import gguf_config
from edgepipe.testing.tiny_model import tiny_config
from edgepipe.text.gguf_tokenizer import rebuild_tokenizer
from edgepipe.text.template import ChatTemplate, gguf_template
from edgepipe.weights import gguf_header
from edgepipe.weights.card import ModelCard
from edgepipe.weights.gguf_file import open_gguf, read_rope_factors
from edgepipe.weights.gguf_header import MAX_HEADER_BYTES, parse_gguf_header, read_gguf_header
from edgepipe.weights.safetensors_file import parse_safetensors
from tests.support.models.files import (
    entry,
    gguf_bytes,
    gguf_entry,
    gguf_row,
    gguf_string,
    safetensors_bytes,
    smollm2_gguf,
)

U8, U32, F32, STRING, ARRAY, U64 = 0, 4, 6, 8, 9, 10
MB = 1 << 20
CLAIMED = 1 << 40  # bytes that the file says it has


@contextmanager
def at_most(num_bytes: int) -> Generator[None]:
    """Fail if more memory than that is taken meanwhile."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def sparse(path: Path, head: bytes, num_bytes: int) -> Path:
    """A file of ``num_bytes`` that takes no room on the disk; behind its head there are zeros."""
    path.write_bytes(head)
    with path.open("r+b") as file:
        file.truncate(num_bytes)
    return path


def array(key: str, kind: int, count: int, data: bytes = b"") -> bytes:
    return gguf_entry(key, ARRAY, struct.pack("<IQ", kind, count) + data)


def test_a_gguf_file_with_a_200_mb_string_in_an_array_is_refused(tmp_path: Path) -> None:
    length = struct.pack("<Q", 200 * MB)
    head = gguf_bytes(entries=(array("tokenizer.ggml.tokens", STRING, 1, length),), alignment=1)
    with at_most(4 * MB), pytest.raises(ModelInvalid, match="item of 209715200 bytes"):
        read_gguf_header(sparse(tmp_path / "model.gguf", head, 300 * MB))


class EndlessFile(io.RawIOBase):
    """A head, then zeros for ever; notes what was read."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        self.position = 0

    def read(self, size: int = -1, /) -> bytes:
        assert size >= 0
        data = self._head[self.position : self.position + size]
        self.position += size
        return data + bytes(size - len(data))


LIES = {
    "a string": gguf_bytes(entries=(gguf_entry("k", STRING, struct.pack("<Q", 17 * MB)),), alignment=1),
    "a string in an array": gguf_bytes(entries=(array("k", STRING, 9, struct.pack("<Q", 1 * MB)),), alignment=1),
    "strings of an array": gguf_bytes(entries=(array("k", STRING, 3_000_000),), alignment=1),
    "numbers of an array": gguf_bytes(entries=(array("k", U8, 5_000_000),), alignment=1),
    "numbers of several arrays": gguf_bytes(
        entries=tuple(array(key, U64, 3_900_000, bytes(31_200_000)) for key in "ijk"), alignment=1
    ),
    "long keys": gguf_bytes(
        num_entries=4096,
        entries=tuple(gguf_entry(f"{index:065000}", U8, b"\0") for index in range(1100)),
        alignment=1,
    ),
    "a tensor's name": gguf_bytes(rows=(struct.pack("<Q", 10_000),), alignment=1),
    "a tensor's dimensions": gguf_bytes(rows=(gguf_string("x") + struct.pack("<I", 1 << 31),), alignment=1),
    "tensors": gguf_bytes(num_rows=1 << 20, alignment=1),
    "entries": gguf_bytes(num_entries=1 << 20, alignment=1),
    "arrays of arrays": gguf_bytes(entries=(array("k", ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 99),), alignment=1),
}


@pytest.mark.parametrize("case", LIES)
def test_a_gguf_header_never_makes_more_than_its_limit_be_read(case: str) -> None:
    file = EndlessFile(LIES[case])
    with at_most(3 * MAX_HEADER_BYTES), pytest.raises(ModelInvalid) as caught:
        parse_gguf_header(file, size=CLAIMED, name="model.gguf")  # pyright: ignore[reportArgumentType]
    assert file.position <= MAX_HEADER_BYTES
    assert max(map(len, caught.value.lines())) < 500


def test_strings_of_all_arrays_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_ARRAY_STRINGS", 3)  # the real limit makes a slow test
    two = gguf_bytes(entries=(array("i", STRING, 2, bytes(16)), array("j", STRING, 1, bytes(8))))
    assert parse_gguf_header(io.BytesIO(two), size=len(two), name="model.gguf").metadata == {"i": ["", ""], "j": [""]}
    more = gguf_bytes(entries=(array("i", STRING, 2, bytes(16)), array("j", STRING, 2, bytes(16))))
    with pytest.raises(ModelInvalid, match="all arrays together"):
        parse_gguf_header(io.BytesIO(more), size=len(more), name="model.gguf")


def test_the_limits_leave_room_for_real_headers(tmp_path: Path) -> None:
    path = smollm2_gguf(tmp_path)
    assert path.stat().st_size * 20 < MAX_HEADER_BYTES
    strings = [value for value in read_gguf_header(path).metadata.values() if isinstance(value, list)]
    assert sum(map(len, strings)) * 20 < gguf_header.MAX_ARRAY_STRINGS
    assert max(len(item) for value in strings for item in value) * 20 < gguf_header.MAX_ITEM_BYTES


def test_rope_factors_as_large_as_the_file_are_not_read(tmp_path: Path) -> None:
    rows = (gguf_row("rope_freqs.weight", (50 * MB,), 0, 0),)
    path = sparse(tmp_path / "model.gguf", gguf_bytes(rows=rows), 201 * MB)
    with at_most(4 * MB), pytest.raises(ModelInvalid, match="rope factors"):
        read_rope_factors(path.parent, open_gguf(path)[0])


def test_a_chat_template_that_could_not_be_read_back_is_refused_at_once() -> None:
    with pytest.raises(ModelInvalid, match="too long"):
        gguf_template({"tokenizer.chat_template": "x" * (MB + 1)}, {})
    many = ChatTemplate(sources={str(index): "\N{SNOWMAN}" * (MB // 2) for index in range(6)})
    with pytest.raises(ModelInvalid, match="too long"):
        ModelCard(config=tiny_config(), template=many).to_json()


def test_a_sentence_piece_token_that_takes_minutes_to_cut_is_refused() -> None:
    tokens = ["<unk>", "a" * 60_000]
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0, 0.0]}
    with pytest.raises(ModelInvalid, match="tokenizer"):
        rebuild_tokenizer(metadata)


JSON_BOMBS = {
    "lists": b'{"a":[' + b"[]," * 1_500_000 + b"0]}",
    "objects": b'{"a":[' + b"{}," * 1_500_000 + b"0]}",
    "numbers": b'{"a":[' + b"0," * 2_000_000 + b"0]}",
}


@pytest.mark.parametrize("case", JSON_BOMBS)
def test_a_json_file_of_millions_of_values_is_refused_before_it_is_parsed(case: str) -> None:
    data = JSON_BOMBS[case]
    with at_most(MB), pytest.raises(ModelInvalid, match="too many values"):
        parse_json_object(data, what="the file")
    header = safetensors_bytes(data)
    with at_most(len(header) + MB), pytest.raises(ModelInvalid, match="too many values"):
        parse_safetensors(io.BytesIO(header), size=len(header), name="model.safetensors")


def good_gguf() -> bytes:
    """A tiny llama with a SentencePiece vocabulary, two tensors and rope factors."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab"]
    integers = {
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 8,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    entries = [
        gguf_entry("general.architecture", STRING, gguf_string("llama")),
        gguf_entry("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
        gguf_entry("tokenizer.ggml.model", STRING, gguf_string("llama")),
        array("tokenizer.ggml.tokens", STRING, len(tokens), b"".join(map(gguf_string, tokens))),
        array("tokenizer.ggml.scores", F32, len(tokens), struct.pack(f"<{len(tokens)}f", *range(len(tokens)))),
        array("tokenizer.ggml.token_type", 5, len(tokens), struct.pack(f"<{len(tokens)}i", 2, 3, 3, 1, 1, 1, 1, 1)),
        *(gguf_entry(key, U32, struct.pack("<I", value)) for key, value in integers.items()),
    ]
    rows = (
        gguf_row("token_embd.weight", (8, 8), 0, 0),
        gguf_row("blk.0.attn_q.weight", (8, 8), 0, 256),
        gguf_row("rope_freqs.weight", (2,), 0, 512),
    )
    return gguf_bytes(entries=tuple(entries), rows=rows, data=bytes(512) + struct.pack("<2f", 1, 1) + bytes(24))


def good_safetensors() -> bytes:
    header = {"__metadata__": {"format": "pt"}, "a": entry(0, 16), "b": entry(16, 48, shape=[2, 4])}
    return safetensors_bytes(header, bytes(48))


def take_gguf_apart(path: Path) -> None:
    """All that is done with a header before a tensor is read."""
    joined, _ = open_gguf(path)
    factors = read_rope_factors(path.parent, joined)
    gguf_config(joined.metadata, joined.shapes, factors)
    gguf_template(joined.metadata, {})
    rebuild_tokenizer(joined.metadata)


def take_safetensors_apart(path: Path) -> None:
    with path.open("rb") as file:
        parse_safetensors(file, size=path.stat().st_size, name=path.name)


FORMATS: dict[str, tuple[bytes, Callable[[Path], None]]] = {
    "gguf": (good_gguf(), take_gguf_apart),
    "safetensors": (good_safetensors(), take_safetensors_apart),
}
NUMBERS = st.sampled_from([0, 1, 2, 7, 8, 9, 255, 1 << 16, 1 << 24, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63])
CHANGES = st.one_of(
    st.tuples(st.just("byte"), st.integers(0, 1 << 12), st.integers(0, 255)),
    st.tuples(st.just("u32"), st.integers(0, 1 << 12), NUMBERS.map(lambda number: number % (1 << 32))),
    st.tuples(st.just("u64"), st.integers(0, 1 << 12), NUMBERS),
    st.tuples(st.just("cut"), st.integers(0, 1 << 12), st.integers(0, 40)),
    st.tuples(st.just("twice"), st.integers(0, 1 << 12), st.integers(1, 40)),
)


def changed(data: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    """The file with bytes or numbers overwritten, runs cut out or doubled."""
    out = bytearray(data)
    for kind, place, value in changes:
        at = place % max(1, len(out))
        if kind == "cut":
            del out[at : at + value]
        elif kind == "twice":
            out[at:at] = out[at : at + value]
        else:
            written = value.to_bytes({"byte": 1, "u32": 4, "u64": 8}[kind], "little")
            out[at : at + len(written)] = written
    return bytes(out)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_unchanged_headers_are_good(kind: str, tmp_path: Path) -> None:
    data, take_apart = FORMATS[kind]
    (tmp_path / "model").write_bytes(data)
    take_apart(tmp_path / "model")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_header_changed_anywhere_is_read_or_refused_and_never_takes_memory(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _fuzz(kind, tmp_path_factory.mktemp("fuzzed") / "model", 80)


@pytest.mark.long
@pytest.mark.parametrize("kind", FORMATS)
def test_many_headers_changed_anywhere_are_read_or_refused(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    _fuzz(kind, tmp_path_factory.mktemp("fuzzed") / "model", 3000)


def _fuzz(kind: str, path: Path, num_examples: int) -> None:
    data, take_apart = FORMATS[kind]

    @settings(max_examples=num_examples)
    @given(st.lists(CHANGES, min_size=1, max_size=4))
    def run(changes: list[tuple[str, int, int]]) -> None:
        path.write_bytes(changed(data, changes))
        with at_most(4 * MB):
            with suppress(ModelInvalid):  # and its kind ArchitectureUnsupported
                take_apart(path)

    run()


def test_the_largest_json_that_is_parsed_is_named_in_tensors() -> None:
    """A safetensors header of as many tensors as are read has fewer values than are parsed."""
    single = json.dumps({"model.layers.0.weight": entry(0, 16, shape=[2, 2])}).encode()
    values = single.count(b",") + single.count(b"[") + single.count(b"{")
    assert values * 200_000 < strict_json.MAX_VALUES
