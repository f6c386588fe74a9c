"""Files with a head beside a tied embedding: another head is used and said once, a copy takes no memory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgepipe.errors import ModelInvalid
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.layout import EMBEDDING, HEAD
from edgepipe.spec.tensors import StoredTensor
from edgepipe.store.install import install
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.weights import Weights, open_weights
from tests.support.models.changed_gguf import Arrays, write_changed
from tests.support.models.family_files import tiny_values, write_family_folder, write_family_gguf

WARNING = "the stored lm_head differs from the embedding"


def with_head(folder: Path, change: Any = None, *, family: str = "llama") -> Path:
    """A folder whose config ties the head, and whose files hold ``change`` of the embedding as one."""
    folder.mkdir()
    write_family_folder(folder, family)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    if change is not None:
        tensors["lm_head.weight"] = change(tensors["lm_head.weight"])
    save_file(tensors, folder / "model.safetensors")
    return folder


def one_value_more(table: np.ndarray) -> np.ndarray:
    table[-1, -1] += 0.25
    return table


def heads(source: Weights) -> list[str]:
    last = source.config.num_layers - 1
    part = Slice(index=1, layers=LayerRange(last, last + 1), embedding=False, head=True)
    return [info.name for info in source.weights(part) if info.name in (EMBEDDING, HEAD)]


@pytest.mark.parametrize("family", ["llama", "granite", "gemma3"])
def test_a_head_that_differs_is_used_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str) -> None:
    folder = with_head(tmp_path / "own", one_value_more, family=family)
    source = open_weights(folder)
    assert not source.config.tied_embeddings
    assert heads(source) == [HEAD]
    raw = source.load(HEAD)
    assert isinstance(raw, StoredTensor)
    np.testing.assert_array_equal(as_float32(raw), load_file(folder / "model.safetensors")["lm_head.weight"])
    assert [record.message.count(WARNING) for record in caplog.records] == [1]


def test_it_is_said_at_the_pull_and_not_at_every_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = with_head(tmp_path / "own", one_value_more)
    install(folder, model_id="own", source="test", on_progress=lambda _progress: None)
    caplog.clear()
    assert not open_weights(folder).config.tied_embeddings
    assert not caplog.records


@pytest.mark.parametrize("change", [None, lambda table: table.astype(np.float16)], ids=["same bytes", "other type"])
def test_a_copy_of_the_embedding_stays_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any) -> None:
    caplog.set_level(logging.WARNING)
    source = open_weights(with_head(tmp_path / "copy", change))
    assert source.config.tied_embeddings
    assert heads(source) == [EMBEDDING]
    assert not caplog.records


def test_a_head_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"wrong shape: lm_head.weight \[60, 32\] instead of \[64, 32\]"):
        open_weights(with_head(tmp_path / "short", lambda table: table[:60].copy()))


def test_a_copy_in_a_gguf_file_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    source = open_weights(gguf_with_head(tmp_path / "copy.gguf", tmp_path))
    assert source.config.tied_embeddings
    assert heads(source) == [EMBEDDING]


def test_another_head_in_a_gguf_file_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tied model's file says nothing of ties: its output is the head."""
    source = open_weights(gguf_with_head(tmp_path / "own.gguf", tmp_path, one_value_more))
    assert not source.config.tied_embeddings
    assert heads(source) == [HEAD]
    assert not caplog.records


def gguf_with_head(path: Path, tmp_path: Path, change: Any = None) -> Path:
    """A tiny llama's GGUF file with an output beside the embedding."""

    def with_output(tensors: Arrays) -> Arrays:
        table = tensors["token_embd.weight"].copy()
        return tensors | {"output.weight": table if change is None else change(table)}

    return write_changed(path, write_family_gguf(tmp_path / "plain.gguf", "llama"), with_output)


@pytest.mark.parametrize("same", [True, False], ids=["a copy", "another head"])
def test_a_packed_head_of_an_mlx_folder(tmp_path: Path, *, same: bool) -> None:
    mx = pytest.importorskip("mlx.core")
    write_family_folder(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors.pop("model.embed_tokens.weight")
    for name, values in (("model.embed_tokens", table), ("lm_head", table if same else -table)):
        with mx.stream(mx.cpu):
            parts = mx.quantize(mx.array(values), group_size=32, bits=4)
        tensors |= dict(zip((f"{name}.weight", f"{name}.scales", f"{name}.biases"), map(np.array, parts), strict=True))
    save_file(tensors, tmp_path / "model.safetensors")
    values = tiny_values("llama") | {"quantization": {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    source = open_weights(tmp_path)
    assert heads(source) == [EMBEDDING if same else HEAD]
