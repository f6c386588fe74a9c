"""GGUF files are known by their first bytes: blobs of Ollama, names in capitals, names without a suffix."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from edgepipe.errors import ModelUnknown
from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import ModelConfig
from edgepipe.store.store import ModelStore
from edgepipe.weights.weights import open_weights
from tests.support.models.files import TOKENS, hf_values, random_tensors, write_gguf, write_split_gguf

ALL_TOKENS = TOKENS + [f"t{index}" for index in range(300 - len(TOKENS))]
BLOB = "sha256-6a0746a1ec1aef3e7ec53868f220ff6e389f6f8ef87a01d77c96807de94ca2aa"


@pytest.fixture
def config() -> ModelConfig:
    return hf_config(hf_values())


@pytest.mark.parametrize(
    ("name", "model"),
    [
        (BLOB, "llama-3.2-1b-instruct-6a0746a1"),
        (BLOB.replace("-", ":", 1), "llama-3.2-1b-instruct-6a0746a1"),
        ("UPPER.GGUF", "UPPER"),
        ("Model-1.5B", "Model-1.5B"),
        ("model.bin", "model.bin"),
    ],
)
def test_a_file_is_pulled_and_opened_whatever_its_name_is(
    tmp_path: Path, config: ModelConfig, name: str, model: str
) -> None:
    made = write_gguf(
        tmp_path / "made.gguf", random_tensors(config), config, tokens=ALL_TOKENS, title="Llama 3.2 1B Instruct"
    )
    file = made.rename(tmp_path / name)
    assert open_weights(file).config.num_layers == config.num_layers
    store = ModelStore(tmp_path / "store")
    assert store.pull(str(file)).model_id == model
    assert store.resolve(model).card.config.num_layers == config.num_layers


def test_the_parts_of_a_split_model_may_be_named_in_capitals(tmp_path: Path, config: ModelConfig) -> None:
    parts = write_split_gguf(tmp_path, config, tokens=ALL_TOKENS)
    renamed = [part.rename(part.with_name(part.name.upper())) for part in parts]
    weights = open_weights(renamed[-1])
    assert all(np.isfinite(weights.read(name).data).all() for name in weights.infos)
    store = ModelStore(tmp_path / "store")
    assert store.pull(str(renamed[1])).model_id == "TINY"
    assert store.resolve("TINY").open_weights().infos.keys() == weights.infos.keys()


@pytest.mark.parametrize("inside", [".", "blobs"])
def test_a_folder_of_ollama_s_files_names_the_models_in_it(tmp_path: Path, config: ModelConfig, inside: str) -> None:
    blobs = tmp_path / "models" / inside
    blobs.mkdir(parents=True)
    made = write_gguf(tmp_path / "made.gguf", random_tensors(config), config, title="Tiny Llama")
    made.rename(blobs / BLOB)
    (blobs / f"sha256-{1:064x}").write_text("MIT License")
    (blobs / f"sha256-{2:064x}").write_bytes(b"GGUF and nothing more")
    with pytest.raises(ModelUnknown) as caught:
        ModelStore(tmp_path / "store").pull(str(tmp_path / "models"))
    assert "sha256-6a0746a1ec1a (tiny-llama-6a0746a1," in caught.value.fact
    assert caught.value.next_step == f"edgepipe models pull {blobs.resolve() / BLOB}"


def test_a_folder_of_gguf_files_in_capitals_names_one(tmp_path: Path) -> None:
    (tmp_path / "B.GGUF").write_bytes(b"GGUF")
    with pytest.raises(ModelUnknown) as caught:
        ModelStore(tmp_path / "store").pull(str(tmp_path))
    assert caught.value.next_step == f"edgepipe models pull {tmp_path / 'B.GGUF'}"


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / BLOB).write_text("MIT License")
    with pytest.raises(ModelUnknown, match="neither a GGUF file nor a folder"):
        ModelStore(tmp_path / "store").pull(str(tmp_path / BLOB))


def test_metadata_that_contradicts_itself_is_told_once(
    tmp_path: Path, config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The token ``<end_of_turn>`` has the type of text."""
    tokens = [*ALL_TOKENS[:-1], "<end_of_turn>"]
    file = write_gguf(tmp_path / "a.gguf", random_tensors(config), config, tokens=tokens)
    caplog.set_level(logging.WARNING)
    store = ModelStore(tmp_path / "store")
    store.pull(str(file))
    assert [message for message in caplog.messages if "are read as marks" in message] == [
        "the GGUF file types 2 marks as text (<unk>, <end_of_turn>): they are read as marks"
    ]
    assert len(tokens) - 1 in store.resolve("a").card.config.eos_token_ids


def test_a_path_that_was_not_pulled_yet_says_how_to_pull_it(tmp_path: Path) -> None:
    with pytest.raises(ModelUnknown) as caught:
        ModelStore(tmp_path / "store").resolve(str(tmp_path / "UPPER.GGUF"))
    assert caught.value.next_step == f"edgepipe models pull {tmp_path / 'UPPER.GGUF'}"
