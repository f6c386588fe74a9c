"""Weights are read lazily and only for the wanted layers; config and weights must agree (M7); NaN is told (M21)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgepipe.errors import ModelInvalid
from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.spec.layout import layer_parameters
from edgepipe.weights.dequantise import as_bf16_bits, as_float32
from edgepipe.weights.weights import Weights, open_weights
from tests.support.models.files import hf_values, random_tensors, write_gguf, write_hf_folder

SLICES = make_slices([LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3)], 3)


def open_kind(kind: str, folder: Path, **changes: Any) -> Weights:
    if kind == "gguf":
        config = hf_config(hf_values(**changes))
        return open_weights(write_gguf(folder / "m.gguf", random_tensors(config), config, scheme="Q8_0"))
    return open_weights(write_hf_folder(folder / "m", hf_values(**changes), shards=3 if kind == "indexed" else 1))


@pytest.mark.parametrize("kind", ["single", "indexed", "gguf"])
def test_a_middle_stage_reads_its_own_layers_and_nothing_else(kind: str, tmp_path: Path) -> None:
    weights = open_kind(kind, tmp_path)
    assert weights.bytes_read == 0
    middle = weights.tensors(SLICES[1])
    assert all(info.name.startswith("model.layers.1.") for info in middle)
    for info in middle:
        weights.read(info.name)
    assert weights.bytes_read == sum(info.num_bytes for info in middle)
    assert len(middle) == 9
    values = sum(int(np.prod(info.shape)) for info in middle)
    assert values == layer_parameters(weights.config, 0)


def test_reading_a_tensor_reads_only_its_bytes_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at the system call, so that a reader which maps or reads ahead would show."""
    import os

    weights = open_kind("single", tmp_path)
    counted: list[int] = []
    real = os.preadv

    def counting(descriptor: int, buffers: Any, offset: int) -> int:
        counted.append(real(descriptor, buffers, offset))
        return counted[-1]

    monkeypatch.setattr(os, "preadv", counting)
    for info in weights.tensors(SLICES[1]):
        weights.read(info.name)
    assert sum(counted) == 4 * layer_parameters(weights.config, 0)


def test_the_ends_list_embedding_norm_and_head(tmp_path: Path) -> None:
    weights = open_kind("single", tmp_path)
    assert weights.tensors(SLICES[0])[0].name == "model.embed_tokens.weight"
    assert [info.name for info in weights.tensors(SLICES[2])][-2:] == ["model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize("kind", ["single", "gguf"])
def test_a_tied_head_is_the_embedding_once(kind: str, tmp_path: Path) -> None:
    weights = open_kind(kind, tmp_path, tie_word_embeddings=True)
    assert [info.name for info in weights.tensors(SLICES[2])][-1] == "model.embed_tokens.weight"
    (whole,) = make_slices([LayerRange(0, 3)], 3)
    names = [info.name for info in weights.tensors(whole)]
    assert names.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names


def rewrite(folder: Path, change: Any) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_m7_lists_what_is_missing_extra_and_misshapen(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")

    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.norm.weight"] = np.zeros(31, np.float32)

    rewrite(folder, change)
    with pytest.raises(ModelInvalid) as caught:
        open_weights(folder)
    assert "missing: model.layers.1.mlp.up_proj.weight" in caught.value.fact
    assert "extra: model.layers.9.mlp.up_proj.weight" in caught.value.fact
    assert "wrong shape: model.norm.weight [31] instead of [32]" in caught.value.fact


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(hf_values(num_hidden_layers=100)))
    with pytest.raises(ModelInvalid, match=r"and \d+ more"):
        open_weights(folder)


def test_leftovers_that_mean_nothing_are_ignored(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", hf_values(tie_word_embeddings=True))

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    rewrite(folder, change)
    assert open_weights(folder).config.tied_embeddings


def test_m21_weights_of_nan_load_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_hf_folder(tmp_path / "m")
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": np.full(32, np.nan, np.float32)}))
    weights = open_weights(folder)
    with caplog.at_level(logging.WARNING):
        assert np.isnan(as_float32(weights.read("model.norm.weight"))).all()
        as_bf16_bits(weights.read("model.layers.0.input_layernorm.weight"))
    assert [record.args for record in caplog.records] == [("model.norm.weight",)]


def test_an_emulated_model_has_a_config_and_no_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_values(edgepipe_emulated=True)))
    weights = open_weights(tmp_path)
    assert weights.config.num_layers == 3
    assert list(weights.tensors(SLICES[1])) == []
    with pytest.raises(ModelInvalid, match="is missing"):
        weights.read("model.norm.weight")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    for path in (tmp_path, tmp_path / "weights.bin", tmp_path / "missing"):
        with pytest.raises(ModelInvalid):
            open_weights(path)


def test_opening_weights_imports_nothing_heavy(tmp_path: Path) -> None:
    import subprocess
    import sys

    folder = write_hf_folder(tmp_path / "m")
    code = (
        "import sys; from pathlib import Path; import edgepipe.store.store; from edgepipe.weights.weights import *;"
        f"open_weights(Path({str(folder)!r}));"
        "heavy = {'tokenizers', 'gguf', 'huggingface_hub', 'jinja2', 'torch', 'mlx', 'safetensors'} & set(sys.modules);"
        "sys.exit(' '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
