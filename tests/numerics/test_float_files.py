"""Float files whose values bf16 would change, computed in float32: GGUF in F16 and F32; heads beside a tied table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("mlx.core")

import torch
from edgepipe_mlx import MlxBackend
from edgepipe_torch import TorchBackend
from safetensors.numpy import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from edgepipe.backend.protocol import BackendFactory
from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.weights.gguf_file import hugging_face_name
from edgepipe.weights.weights import open_weights
from tests.support.models.changed_gguf import Arrays, write_changed
from tests.support.models.family_files import tiny_values, write_family_folder, write_family_gguf
from tests.support.numerics.harness import Logits, Pipeline

TOKENS = np.random.default_rng(5).integers(3, 64, 60).tolist()
OPTIONS = BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)
BACKENDS = pytest.mark.parametrize("kind", [TorchBackend, MlxBackend], ids=["torch", "mlx"])


def folder_of(folder: Path, family: str, tensors: Arrays) -> Path:
    """A family's folder with these tensors, which transformers opens, too."""
    (folder / "config.json").write_text(json.dumps(tiny_values(family) | {"model_type": family, "pad_token_id": 0}))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def random_tensors(folder: Path, family: str, kind: type[np.float16 | np.float32]) -> Arrays:
    """Values of a family's tensors that bf16 does not hold."""
    random = np.random.default_rng(9)
    shapes = {
        name: each.shape for name, each in load_file(write_family_folder(folder, family) / "model.safetensors").items()
    }
    near = {name: float("norm" in name) for name in shapes}
    return {
        name: (near[name] + random.standard_normal(shape) / shape[-1] ** 0.5).astype(
            kind if len(shape) > 1 else np.float32
        )
        for name, shape in shapes.items()
    }


def reference(folder: Path, kind: type[PreTrainedModel]) -> Logits:
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def assert_as(path: Path, kind: BackendFactory, expected: Logits) -> None:
    found = Pipeline.build([kind(OPTIONS)], open_weights(path), num_blocks=8).forced(TOKENS[:1], [*TOKENS[1:], 0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()


@BACKENDS
@pytest.mark.parametrize("stored", [np.float16, np.float32], ids=["F16", "F32"])
def test_a_gguf_file_of_floats_keeps_its_values(
    tmp_path: Path, stored: type[np.float16 | np.float32], kind: BackendFactory
) -> None:
    tensors = random_tensors(tmp_path, "qwen2", stored)
    folder_of(tmp_path, "qwen2", {name: each.astype(np.float32) for name, each in tensors.items()})
    expected = reference(tmp_path, Qwen2ForCausalLM)
    plain = write_family_gguf(tmp_path / "plain.gguf", "qwen2")

    def changed(named: Arrays) -> Arrays:
        return {name: tensors[hugging_face_name(name)] for name in named}

    assert_as(write_changed(tmp_path / "floats.gguf", plain, changed), kind, expected)


@BACKENDS
def test_a_head_beside_a_tied_embedding_is_the_one_of_transformers(tmp_path: Path, kind: BackendFactory) -> None:
    tensors = random_tensors(tmp_path, "llama", np.float32)
    table = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = np.roll(table, 1, axis=0) * 0.5
    assert_as(tmp_path, kind, reference(folder_of(tmp_path, "llama", tensors), LlamaForCausalLM))
