"""GGUF models in several files: read as one, pulled as one, and refused in one sentence if the files do not fit."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgepipe.errors import ModelInvalid
from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import ModelConfig
from edgepipe.store.store import ModelStore
from edgepipe.weights.gguf_file import open_gguf
from edgepipe.weights.gguf_split import gguf_in, part_name, stored_gguf
from edgepipe.weights.weights import open_weights
from tests.support.models.files import (
    TOKENS,
    gguf_bytes,
    gguf_entry,
    gguf_row,
    gguf_string,
    hf_values,
    random_tensors,
    write_gguf,
    write_split_gguf,
)

U16, I32, STRING = 2, 5, 8


@pytest.fixture
def config() -> ModelConfig:
    return hf_config(hf_values())


@pytest.mark.parametrize("metadata_alone", [False, True])
@pytest.mark.parametrize("given", [0, -1])
def test_all_parts_are_one_model(tmp_path: Path, config: ModelConfig, metadata_alone: bool, given: int) -> None:
    parts = write_split_gguf(tmp_path, config, scheme="Q8_0", metadata_alone=metadata_alone)
    whole = write_gguf(tmp_path / "whole.gguf", random_tensors(config), config, scheme="Q8_0")
    split, alone = open_weights(parts[given]), open_weights(whole)
    assert split.config == alone.config
    assert split.infos.keys() == alone.infos.keys()
    for name in alone.infos:
        assert np.array_equal(split.read(name).data, alone.read(name).data)
        assert np.array_equal(split.read_range(name, 3, 40), alone.read_range(name, 3, 40))


def test_a_split_model_is_pulled_with_all_its_parts(tmp_path: Path, config: ModelConfig) -> None:
    tokens = TOKENS + [f"t{index}" for index in range(300 - len(TOKENS))]
    parts = write_split_gguf(tmp_path, config, stem="My-Model-F32", tokens=tokens)
    store = ModelStore(tmp_path / "store")
    result = store.pull(str(parts[1]))
    assert result.model_id == "My-Model-F32"
    assert [file.name for file in result.files] == [path.name for path in parts]
    model = store.resolve("My-Model-F32")
    assert gguf_in(model.path) == model.path / "model-00001-of-00003.gguf"
    assert len(stored_gguf(entry.name for entry in model.manifest.files)) == 3
    assert len(model.manifest.tensors) == len(random_tensors(config))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert np.array_equal(model.open_weights().read(name).data.view("<f4"), random_tensors(config)[name].reshape(-1))
    assert model.tokenizer_path.is_file()


def test_the_manifest_of_a_split_model_is_that_of_the_whole_one(tmp_path: Path, config: ModelConfig) -> None:
    parts = write_split_gguf(tmp_path, config)
    whole = write_gguf(tmp_path / "whole.gguf", random_tensors(config), config)
    store = ModelStore(tmp_path / "store")
    names = [store.pull(str(path)).model_id for path in (parts[0], whole)]
    hashes = {store.resolve(name).manifest_hash for name in names}
    assert len(hashes) == 1


def cut(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-100])


def swapped(parts: list[Path]) -> None:
    first, last = parts[1].read_bytes(), parts[2].read_bytes()
    parts[1].write_bytes(last)
    parts[2].write_bytes(first)


def renumbered(key: str, value: int, *, bytes_of_value: int = 2) -> Callable[[list[Path]], None]:
    """The second part's number under ``key`` is another one."""

    def spoil(parts: list[Path]) -> None:
        data = parts[1].read_bytes()
        at = data.index(key.encode()) + len(key) + 4
        parts[1].write_bytes(data[:at] + value.to_bytes(bytes_of_value, "little") + data[at + bytes_of_value :])

    return spoil


def by_hand(*, name: str = "", architecture: str = "", tensor: str = "blk.2.ffn_down.weight") -> bytes:
    """A third part with one tensor."""
    entries = [
        gguf_entry("split.no", U16, struct.pack("<H", 2)),
        gguf_entry("split.count", U16, struct.pack("<H", 3)),
        gguf_entry("split.tensors.count", I32, struct.pack("<i", 30)),
    ]
    texts = {"general.name": name, "general.architecture": architecture}
    entries += [gguf_entry(key, STRING, gguf_string(text)) for key, text in texts.items() if text]
    return gguf_bytes(entries=tuple(entries), rows=(gguf_row(tensor, (8,), 0, 0),), data=bytes(32))


def replaced(data: bytes) -> Callable[[list[Path]], None]:
    def spoil(parts: list[Path]) -> None:
        parts[2].write_bytes(data)

    return spoil


BAD_PARTS: dict[str, tuple[Callable[[list[Path]], None], str]] = {
    "missing": (lambda parts: parts[1].unlink(), "'tiny-00002-of-00003.gguf' is missing"),
    "cut": (cut, "'tiny-00002-of-00003.gguf' is not a usable GGUF file"),
    "swapped": (swapped, "'tiny-00002-of-00003.gguf' contradicts its name"),
    "count": (renumbered("split.count", 4), "contradicts its name"),
    "number": (renumbered("split.no", 7), "contradicts its name"),
    "tensor count": (renumbered("split.tensors.count", 12, bytes_of_value=4), "belongs to another model"),
    "name": (replaced(by_hand(name="Other")), "belongs to another model"),
    "architecture": (replaced(by_hand(architecture="qwen2")), "belongs to another model"),
    "twice": (replaced(by_hand(tensor="token_embd.weight")), "are not parts of one model"),
    "too few": (replaced(by_hand()), "are not one model"),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_parts_that_do_not_fit_are_refused(case: str, tmp_path: Path, config: ModelConfig) -> None:
    parts = write_split_gguf(tmp_path, config)
    assert len(parts) == 3
    spoil, says = BAD_PARTS[case]
    spoil(parts)
    store = ModelStore(tmp_path / "store")
    for use in (open_weights, lambda path: store.pull(str(path))):
        with pytest.raises(ModelInvalid) as caught:
            use(parts[0])
        assert says in caught.value.what
        assert len(caught.value.lines()) <= 3
    assert store.list() == []


def test_a_part_that_lost_its_name_is_refused(tmp_path: Path, config: ModelConfig) -> None:
    parts = write_split_gguf(tmp_path, config)
    lost = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelInvalid, match="one part of a model that is split into 3 files"):
        open_gguf(lost)


def test_a_whole_model_with_the_name_of_a_part_is_refused(tmp_path: Path, config: ModelConfig) -> None:
    for number in (1, 2):
        write_gguf(tmp_path / f"x-0000{number}-of-00002.gguf", random_tensors(config), config)
    with pytest.raises(ModelInvalid, match="contradicts its name") as caught:
        open_gguf(tmp_path / "x-00001-of-00002.gguf")
    assert "no numbers" in caught.value.fact


@pytest.mark.parametrize("name", ["x.gguf", "x-00000-of-00002.gguf", "x-00003-of-00002.gguf", "x-00001-of-99999.gguf"])
def test_impossible_numbers_make_no_part(name: str) -> None:
    assert part_name(name) is None
