"""The emulated model's folder: a byte-level tokenizer, a template, no weights."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2.sandbox
import pytest
from edgepipe_emulated import EmulatedBackend, emulated_model_config
from tokenizers import Tokenizer

from edgepipe.backend.types import BackendOptions
from edgepipe.errors import ModelInvalid
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.store.store import ModelStore
from edgepipe.weights.card import ModelCard
from edgepipe.weights.emulated_folder import byte_level_tokenizer, write_model_folder
from edgepipe.weights.mixes import mix_table
from edgepipe.weights.weight_table import FLOATS
from edgepipe.weights.weights import EMULATED_KEY


def test_the_folder_holds_config_tokenizer_and_template(tmp_path: Path) -> None:
    config = emulated_model_config(num_layers=5, vocab_size=300)
    write_model_folder(tmp_path / "model", config)
    found = json.loads((tmp_path / "model" / "config.json").read_text())
    assert found[EMULATED_KEY] is True
    assert (found["model_type"], found["num_hidden_layers"], found["vocab_size"]) == ("llama", 5, 300)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize("text", ["plain", "spaces  and\nlines\t", "Zürich – 東京 🙂", "\x00\x7f"])
def test_text_is_its_bytes(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_special_tokens_are_one_id_each() -> None:
    assert byte_level_tokenizer().encode("<|im_start|>a<|im_end|>").ids == [257, 97, 258]


def test_ids_above_the_bytes_are_words() -> None:
    assert byte_level_tokenizer(270).decode([72, 105, 260]) == "Hi w260"


def test_the_template_renders_chatml(tmp_path: Path) -> None:
    write_model_folder(tmp_path, emulated_model_config())
    source = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(source)
    text = template.render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_vocabulary_without_room_for_the_bytes_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="259"):
        write_model_folder(tmp_path, emulated_model_config(vocab_size=200))


def test_the_store_takes_the_folder_and_gives_back_what_was_written(tmp_path: Path) -> None:
    config = emulated_model_config(num_layers=5)
    write_model_folder(tmp_path / "made", config)
    store = ModelStore(tmp_path / "store")
    store.pull(str(tmp_path / "made"))
    (stored,) = store.list()
    assert stored.config == config
    assert stored.tokenizer().encode("Hé") == list("Hé".encode())
    backend = EmulatedBackend(BackendOptions(settings={"time_factor": "0"}))
    backend.load(make_slices([LayerRange(0, 5)], 5), stored.open_weights(), lambda _progress: None)


def test_an_emulated_model_may_have_types(tmp_path: Path) -> None:
    config = emulated_model_config(num_layers=5, hidden_size=256)
    store = ModelStore(tmp_path / "store")
    for name, mix in (("plain", ""), ("packed", "q4_k_m")):
        write_model_folder(tmp_path / name, config, mix=mix)
        store.pull(str(tmp_path / name))
    packed, plain = store.list()
    assert plain.weight_table == FLOATS
    assert packed.weight_table == mix_table(config, "q4_k_m")
    assert packed.manifest_hash != plain.manifest_hash
    assert b"mix" not in plain.card.to_json()
    assert ModelCard.from_json(packed.card.to_json()) == packed.card
    with pytest.raises(ModelInvalid):
        ModelCard.from_json(packed.card.to_json().replace(b"q4_k_m", b"q4_9_m"))
