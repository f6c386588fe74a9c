"""GGUF: what is refused before anything is allocated (M9-M14), and that what is read is what was written."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgepipe.errors import ArchitectureUnsupported, ModelInvalid
from edgepipe.spec.config import hf_config
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.gguf_file import open_gguf
from edgepipe.weights.gguf_header import read_gguf_header
from edgepipe.weights.permuted_rows import PermutedRows, unpermute_rows
from edgepipe.weights.weights import open_weights
from tests.support.models.files import (
    gguf_bytes,
    gguf_entry,
    gguf_row,
    gguf_string,
    hf_values,
    permute_rows,
    random_tensors,
    smollm2_gguf,
    write_gguf,
)
from tests.support.models.specs import first_attention, first_rope

U32, STRING, ARRAY = 4, 8, 9
HUGE = 1 << 63


def one_row(dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> tuple[bytes, ...]:
    return (gguf_row("x", dims, kind, offset),)


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


def nested(depth: int) -> bytes:
    return b"".join(array(ARRAY, 1) for _ in range(depth)) + array(U32, 0)


def align(value: int) -> tuple[bytes, ...]:
    kind, layout = (U32, "<I") if value < 1 << 32 else (10, "<Q")
    return (gguf_entry("general.alignment", kind, struct.pack(layout, value)),)


DAMAGED = {
    "empty": b"",
    "M9 magic": gguf_bytes(magic=b"GGML"),
    "M9 version 0": gguf_bytes(version=0),
    "M9 version 1": gguf_bytes(version=1),
    "M9 version 99": gguf_bytes(version=99),
    "M9 big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "M10 entries": gguf_bytes(num_entries=HUGE),
    "M10 tensors": gguf_bytes(num_rows=HUGE),
    "M10 a few too many": gguf_bytes(num_rows=1),
    "M11 string": gguf_bytes(entries=(gguf_string("k") + struct.pack("<IQ", STRING, 1 << 40),)),
    "M11 key": gguf_bytes(entries=(struct.pack("<Q", 1 << 62),)),
    "M11 array": gguf_bytes(entries=(gguf_entry("k", ARRAY, array(U32, 1 << 61)),)),
    "M11 strings": gguf_bytes(entries=(gguf_entry("k", ARRAY, array(STRING, 1 << 61)),)),
    "M11 string in array": gguf_bytes(entries=(gguf_entry("k", ARRAY, array(STRING, 1, struct.pack("<Q", HUGE))),)),
    "M11 nested": gguf_bytes(entries=(gguf_entry("k", ARRAY, nested(1000)),)),
    "M12 unaligned": gguf_bytes(rows=one_row(offset=8), data=bytes(256)),
    "M12 beyond": gguf_bytes(rows=one_row(offset=256), data=bytes(256)),
    "M12 far beyond": gguf_bytes(rows=one_row(offset=(1 << 64) - 32), data=bytes(256)),
    "M12 cut": gguf_bytes(rows=one_row(), data=bytes(127)),
    "M12 overlap": gguf_bytes(rows=(*one_row(), gguf_row("y", (32,), 0, 96)), data=bytes(512)),
    "M13 wraps": gguf_bytes(rows=one_row((1 << 32, 1 << 32, 4)), data=bytes(256)),
    "M13 wraps to small": gguf_bytes(rows=one_row((1 << 62, 4, 8)), data=bytes(256)),
    "M13 block": gguf_bytes(rows=one_row((31,), kind=8), data=bytes(256)),
    "M13 zero": gguf_bytes(rows=one_row((0,)), data=bytes(256)),
    "M13 dims": gguf_bytes(rows=one_row((1,) * 5), data=bytes(256)),
    "M13 no dims": gguf_bytes(rows=one_row(()), data=bytes(256)),
    "M14 type": gguf_bytes(rows=one_row(kind=255), data=bytes(256)),
    "M14 withdrawn type": gguf_bytes(rows=one_row(kind=4), data=bytes(256)),
    "M14 alignment 0": gguf_bytes(entries=align(0)),
    "M14 alignment 3": gguf_bytes(entries=align(3)),
    "M14 alignment 2^40": gguf_bytes(entries=align(1 << 40)),
    "M14 keys twice": gguf_bytes(entries=(gguf_entry("a", U32, bytes(4)),) * 2),
    "M14 tensors twice": gguf_bytes(rows=(*one_row(), *one_row(offset=128)), data=bytes(512)),
    "value type": gguf_bytes(entries=(gguf_entry("k", 77, b""),)),
    "key no UTF-8": gguf_bytes(entries=(gguf_string(b"\xff") + struct.pack("<II", U32, 1),)),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(DAMAGED[case])
    with pytest.raises(ModelInvalid) as caught:
        read_gguf_header(path)
    assert "model.gguf" in caught.value.what
    assert len(caught.value.lines()) >= 2


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    rows = (gguf_row("blk.0.ffn_up.weight", (8,), 0, 0), gguf_row("blk.00.ffn_up.weight", (8,), 0, 32))
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(rows=rows, data=bytes(64)))
    with pytest.raises(ModelInvalid, match="two names"):
        open_gguf(path)


def test_a_good_file_by_hand_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    entries = (gguf_entry("a", U32, struct.pack("<I", 7)), gguf_entry("b", ARRAY, array(STRING, 1, gguf_string("é"))))
    rows = (gguf_row("x", (32, 2), 8, 0), gguf_row("y", (8,), 0, 96))
    path.write_bytes(gguf_bytes(entries=entries, rows=rows, data=bytes(128)))
    header = read_gguf_header(path)
    assert header.metadata == {"a": 7, "b": ["é"]}
    assert header.tensors["x"].shape == (2, 32)
    assert header.tensors["x"].num_bytes == 68
    assert header.tensors["y"].offset == header.data_start + 96


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400), place=st.integers(0, 400), byte=st.integers(0, 255))
def test_cut_or_changed_files_fail_only_in_the_known_way(cut: int, place: int, byte: int, tmp_path: Path) -> None:
    entries = (gguf_entry("a", STRING, gguf_string("text")), gguf_entry("b", ARRAY, array(U32, 3, bytes(12))))
    good = bytearray(gguf_bytes(entries=entries, rows=(gguf_row("x", (32,), 8, 0),), data=bytes(64)))
    good[place % len(good)] = byte
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(good[: len(good) - cut % len(good)]))
    try:
        read_gguf_header(path)
    except ModelInvalid:
        pass


@given(heads=st.integers(1, 4), pairs=st.integers(1, 4), width=st.integers(1, 5))
def test_unpermuting_undoes_the_converter(heads: int, pairs: int, width: int) -> None:
    rows = 2 * heads * pairs
    tensor = np.arange(rows * width, dtype=np.uint8).reshape(rows, width)
    got = unpermute_rows(permute_rows(tensor, heads).reshape(-1), rows, heads)
    assert (got.reshape(rows, width) == tensor).all()


@given(
    heads=st.integers(1, 4),
    pairs=st.integers(1, 4),
    width=st.integers(1, 5),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_any_range_of_permuted_rows_is_that_range_of_the_whole(
    heads: int, pairs: int, width: int, bounds: tuple[float, float]
) -> None:
    rows, read_bytes = 2 * heads * pairs, 0
    tensor = np.arange(rows * width, dtype=np.uint8).reshape(rows, width)
    stored = permute_rows(tensor, heads).reshape(-1)
    start, end = sorted(round(bound * stored.size) for bound in bounds)

    def read(offset: int, num_bytes: int) -> np.ndarray:
        nonlocal read_bytes
        assert offset + num_bytes <= stored.size
        read_bytes += num_bytes
        return stored[offset : offset + num_bytes]

    got = PermutedRows(row_bytes=width, pairs=pairs).read(start, end - start, read)
    assert (got == tensor.reshape(-1)[start:end]).all()
    assert read_bytes <= 2 * (end - start + 2 * width)


def test_a_peer_that_copies_query_rows_in_pieces_costs_at_most_twice_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a megabyte at a time, of 9 MiB in Q4_K: the first byte of a piece is within a row and within a head."""
    tensor = np.random.default_rng(1).integers(0, 256, (4096, 4096 // 256 * 144), np.uint8)
    entries = (
        gguf_entry("general.architecture", STRING, gguf_string("llama")),
        gguf_entry("llama.attention.head_count", U32, struct.pack("<I", 32)),
        gguf_entry("llama.attention.head_count_kv", U32, struct.pack("<I", 32)),
    )
    path = tmp_path / "model.gguf"
    data = permute_rows(tensor, 32).tobytes()
    path.write_bytes(
        gguf_bytes(entries=entries, rows=(gguf_row("blk.0.attn_q.weight", (4096, 4096), 12, 0),), data=data)
    )
    _, files = open_gguf(path)
    name, piece, read_bytes = "model.layers.0.self_attn.q_proj.weight", 512 << 10, 0
    pread = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read_bytes
        count = pread(descriptor, buffers, offset)
        read_bytes += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    starts = range(0, len(data), piece)
    got = [files.read_range(name, start, min(piece, len(data) - start)) for start in starts]
    assert read_bytes <= 2 * len(data)
    assert np.array_equal(np.concatenate(got), tensor.reshape(-1))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_a_converter_wrote_is_read_back(architecture: str, tied: bool, tmp_path: Path) -> None:
    hf_name = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[architecture]
    config = hf_config(hf_values(architectures=[hf_name], tie_word_embeddings=tied, head_dim=16))
    tensors = random_tensors(config)
    weights = open_weights(write_gguf(tmp_path / "m.gguf", tensors, config, architecture=architecture))
    assert weights.config.architecture == architecture
    assert weights.config.tied_embeddings is tied
    assert first_attention(weights.config).qkv_bias is first_attention(config).qkv_bias
    assert first_attention(weights.config).qk_norm is first_attention(config).qk_norm
    assert first_attention(weights.config).head_dim == 16
    assert weights.config.eos_token_ids == (2,)
    assert set(weights.infos) == set(tensors)
    for name, tensor in tensors.items():
        assert np.allclose(as_float32(weights.read(name)), tensor, rtol=1 / 256, atol=0), name


def test_quantised_query_rows_move_as_whole_blocks(tmp_path: Path) -> None:
    import gguf

    config = hf_config(hf_values())
    tensors = random_tensors(config)
    weights = open_weights(write_gguf(tmp_path / "m.gguf", tensors, config, scheme="Q8_0"))
    name = "model.layers.1.self_attn.k_proj.weight"
    raw = weights.read(name)
    assert (raw.info.scheme, raw.info.shape, raw.info.rounded) == ("Q8_0", (16, 32), True)
    assert (raw.data == gguf.quants.quantize(tensors[name], gguf.GGMLQuantizationType.Q8_0).reshape(-1)).all()
    assert (weights.read_range(name, 10, 100) == raw.data[10:110]).all()


def test_norms_keep_all_bits_of_the_file(tmp_path: Path) -> None:
    config = hf_config(hf_values())
    tensors = random_tensors(config)
    norms = [name for name in tensors if name.endswith("norm.weight")]
    weights = open_weights(write_gguf(tmp_path / "m.gguf", tensors, config))
    for name in norms:
        assert (as_float32(weights.read(name)) == tensors[name].astype(np.float32)).all(), name
    assert norms


def test_llama3_factors_become_factors_per_pair(tmp_path: Path) -> None:
    config = hf_config(hf_values())
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    path = write_gguf(tmp_path / "m.gguf", random_tensors(config), config, extra={"rope_freqs.weight": factors})
    rope = first_rope(open_weights(path).config)
    assert rope.scaling == "longrope"
    assert rope.attention_factor == 1.0
    assert rope.short_factor == rope.long_factor == (1.0, 2.0, 4.0, 8.0)


def test_a_truncated_file_is_an_error_when_a_tensor_is_read(tmp_path: Path) -> None:
    config = hf_config(hf_values())
    path = write_gguf(tmp_path / "m.gguf", random_tensors(config), config)
    weights = open_weights(path)
    last = list(weights.infos)[-1]  # GGUFWriter keeps the order
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(ModelInvalid, match="shorter"):
        weights.read(last)


def test_other_architectures_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(entries=(gguf_entry("general.architecture", STRING, gguf_string("starcoder2")),)))
    with pytest.raises(ArchitectureUnsupported) as caught:
        open_weights(path)
    assert "llama, " in caught.value.fact
    assert "qwen2/3/" in caught.value.fact
    assert len(caught.value.lines()) == 3


def test_the_real_header_is_read(tmp_path: Path) -> None:
    metadata = read_gguf_header(smollm2_gguf(tmp_path)).metadata
    assert metadata["llama.block_count"] == 30
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) == 49152
