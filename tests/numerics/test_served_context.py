"""Longrope models answer as transformers does: short factors in a served context within the trained one, else long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.numerics.harness import Logits, Pipeline

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("mlx.core")

import torch
from edgepipe_mlx import MlxBackend
from edgepipe_torch import TorchBackend
from safetensors.torch import load_file
from transformers import Phi3Config, Phi3ForCausalLM

from edgepipe.backend.protocol import BackendFactory
from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.weights.weights import Weights, open_weights
from tests.support.models.family_files import tiny_values, write_family_folder, write_family_gguf

TRAINED = 64  # tokens, of the tiny model; its whole context has 256
PROMPT = np.random.default_rng(5).integers(3, 64, 40).tolist()
LONG_PROMPT = np.random.default_rng(6).integers(3, 64, 100).tolist()
OPTIONS = BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)
RINGS: dict[str, tuple[BackendFactory, ...]] = {
    "torch": (TorchBackend,),
    "mlx": (MlxBackend,),
    "ring": (TorchBackend, MlxBackend),
}


@pytest.fixture(scope="module", params=["folder", "gguf"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("phi3")
    write_family_folder(folder, "phi3")
    return open_weights(folder if request.param == "folder" else write_family_gguf(folder / "phi3.gguf", "phi3"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family_folder(tmp_path_factory.mktemp("reference"), "phi3")


def reference(folder: Path, tokens: list[int], *, trained: int = TRAINED) -> Logits:
    """Logits of transformers, which chooses by the length of the sequence."""
    values = {**tiny_values("phi3"), "original_max_position_embeddings": trained, "pad_token_id": 0}
    model = Phi3ForCausalLM._from_config(Phi3Config(**values), attn_implementation="eager").float().eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].numpy()


def served(weights: Weights, ring: str, tokens: list[int], *, context: int) -> Logits:
    pipeline = Pipeline.build([kind(OPTIONS) for kind in RINGS[ring]], weights.in_context(context), num_blocks=24)
    return pipeline.forced(tokens[:1], [*tokens[1:], 0], chunks=(13, 1))


def assert_equal(found: Logits, expected: Logits) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize("ring", RINGS)
def test_a_context_within_the_trained_one_has_short_factors(weights: Weights, folder: Path, ring: str) -> None:
    assert_equal(served(weights, ring, PROMPT, context=TRAINED), reference(folder, PROMPT))


@pytest.mark.parametrize("ring", RINGS)
def test_the_whole_context_has_long_factors_for_prompts_of_any_length(
    weights: Weights, folder: Path, ring: str
) -> None:
    assert_equal(served(weights, ring, LONG_PROMPT, context=256), reference(folder, LONG_PROMPT))
    assert_equal(served(weights, ring, PROMPT, context=0), reference(folder, PROMPT, trained=16))
