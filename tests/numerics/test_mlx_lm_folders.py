"""Text-only Gemma 4 as mlx-lm writes it, floats and 4 bits: the names are read, and the logits are mlx-lm's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.core as mx
import mlx.nn as nn
from edgepipe_mlx import MlxBackend
from edgepipe_torch import TorchBackend
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import gemma4_text

from edgepipe.backend.protocol import BackendFactory
from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.weights.weights import open_weights
from tests.support.numerics.harness import Logits, Pipeline

TOKENS = np.random.default_rng(5).integers(3, 128, 40).tolist()
OPTIONS = BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)
VALUES: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
    },
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
QUANTISED = {"group_size": 32, "bits": 4}


def parameters(model: nn.Module) -> list[tuple[str, Any]]:
    """Arrays by name; tree_flatten's own type also allows names alone."""
    found: Any = tree_flatten(model.parameters())
    return found


def written(folder: Path, values: dict[str, Any], *, bits: bool) -> Logits:
    """Write a tiny random model as mlx-lm does; return its logits."""
    with mx.stream(mx.cpu):
        model = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(values))
        random = np.random.default_rng(1)
        for name, weight in parameters(model):
            near = 1.0 if weight.ndim == 1 else 0.0
            drawn = near + random.standard_normal(weight.shape) * (0.1 if near else 1.5 / weight.shape[-1] ** 0.5)
            model.update(tree_unflatten([(name, mx.array(drawn.astype(np.float32)))]))
        if bits:
            nn.quantize(model, QUANTISED["group_size"], QUANTISED["bits"])
            groups = [(name, weight) for name, weight in parameters(model) if name.endswith((".scales", ".biases"))]
            model.update(tree_unflatten([(name, each.astype(mx.float16).astype(mx.float32)) for name, each in groups]))
            values = values | {"quantization": QUANTISED, "quantization_config": QUANTISED}
        model.eval()
        logits = np.array(model(mx.array([TOKENS]))[0])
        mx.save_safetensors(str(folder / "model.safetensors"), dict(parameters(model)), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return logits


@pytest.mark.parametrize("kind", [TorchBackend, MlxBackend], ids=["torch", "mlx"])
@pytest.mark.parametrize("bits", [False, True], ids=["floats", "4 bits"])
@pytest.mark.parametrize("more", [{}, EXPERTS], ids=["dense", "experts"])
def test_text_only_gemma_4_gives_the_logits_of_mlx_lm(
    tmp_path: Path, more: dict[str, Any], *, bits: bool, kind: BackendFactory
) -> None:
    expected = written(tmp_path, VALUES | more, bits=bits)
    found = Pipeline.build([kind(OPTIONS)], open_weights(tmp_path), num_blocks=8).forced(TOKENS[:1], [*TOKENS[1:], 0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()
