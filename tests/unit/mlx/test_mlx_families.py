"""Families with layers of their own on MLX, against transformers on tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")
pytest.importorskip("torch", reason="transformers computes with torch, which is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from edgepipe_mlx import MlxBackend
from edgepipe_torch import TorchBackend
from transformers import AutoModelForCausalLM, PretrainedConfig

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.weights.weights import Weights, open_weights
from tests.support.backends.mlx_models import Chain, cpu_options, row
from tests.support.numerics.harness import Logits, Pipeline

NUM_TOKENS = 40
PIECES = [(0, 13), (13, 20), (33, 1), (34, 1), (35, 5)]  # first token, tokens
TOKENS = np.random.default_rng(3).integers(0, 131, NUM_TOKENS).tolist()
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
LATENT_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
}
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}


def sized(name: str, **changes: Any) -> Callable[[], PretrainedConfig]:
    return lambda: getattr(transformers, f"{name}Config")(**(SIZES | changes))


GEMMA4: dict[str, Any] = {
    "tie_word_embeddings": True,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 20.0,
}
CONFIGS = {
    "Qwen3 with experts": sized(
        "Qwen3Moe", head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True
    ),
    "Mixtral": sized("Mixtral", num_local_experts=8, num_experts_per_tok=2),
    "GLM-4.5": sized(
        "Glm4Moe",
        head_dim=8,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        first_k_dense_replace=1,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        use_qk_norm=True,
    ),
    "gpt-oss": sized("GptOss", head_dim=8, num_local_experts=8, num_experts_per_tok=3, sliding_window=9),
    "GLM-4.7-Flash": sized("Glm4MoeLite", **LATENT, **LATENT_EXPERTS, q_lora_rank=20),
    "DeepSeek-V2": sized(
        "DeepseekV2",
        **(LATENT | LATENT_EXPERTS | {"n_group": 4, "topk_group": 2}),
        q_lora_rank=20,
        first_k_dense_replace=1,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.7,
    ),
    "DeepSeek-V2-Lite": sized("DeepseekV2", **LATENT, **LATENT_EXPERTS, q_lora_rank=None, rope_parameters=LATENT_YARN),
    "DeepSeek-V3": sized(
        "DeepseekV3",
        **LATENT,
        **(LATENT_EXPERTS | {"n_group": 4, "topk_group": 2}),
        q_lora_rank=20,
        first_k_dense_replace=1,
        attention_bias=True,
        rope_parameters=LATENT_YARN,
    ),
    "MiniMax-M2": sized("MiniMaxM2", head_dim=8, num_local_experts=8, num_experts_per_tok=3),
    "Ministral 3": sized(
        "Ministral3",
        head_dim=8,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
    ),
    "Phi-4-mini": sized(
        "Phi3",
        partial_rotary_factor=0.75,
        original_max_position_embeddings=16,
        tie_word_embeddings=True,
        rope_scaling={"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 2.2, 2.9]},
    ),
    "Granite": sized(
        "Granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.3, attention_multiplier=0.2
    ),
    "OLMo 2": sized("Olmo2"),
    "OLMo 3": sized("Olmo3", sliding_window=9),
    "Cohere 2": sized("Cohere2", tie_word_embeddings=True, sliding_window=9, logit_scale=0.25),
    "Gemma 3": sized("Gemma3Text", tie_word_embeddings=True, head_dim=8, sliding_window=9),
    "Gemma 4": sized("Gemma4Text", **GEMMA4),
    "Gemma 4 with experts": sized(
        "Gemma4Text", **GEMMA4, enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=24
    ),
}


def torch_backend() -> Backend:
    return TorchBackend(
        BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)
    )


def mlx_backend() -> Backend:
    return MlxBackend(cpu_options())


def ring(weights: Weights, order: Sequence[Callable[[], Backend]]) -> Logits:
    """Logits of two stages with different backends."""
    pipeline = Pipeline.build([make() for make in order], weights, num_blocks=8)
    return pipeline.forced(TOKENS[:1], [*TOKENS[1:], 0], chunks=(13, 20, 1))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").float().eval()
    with torch.inference_mode():
        for key, tensor in model.state_dict().items():
            if "bias" in key or tensor.dim() == 1:
                tensor.normal_(std=0.2)
            else:
                tensor.normal_(std=1.5 / tensor.shape[-1] ** 0.5)
            if "norm" in key and name != "Gemma 3":
                tensor.add_(1.0)
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    model.save_pretrained(tmp_path)

    chain = Chain(open_weights(tmp_path), ranges=[(0, 2), (2, 3)])
    whole = chain.run(TOKENS, [row(0, NUM_TOKENS, (0, 3))])
    pieces = [chain.run(TOKENS[at : at + count], [row(at, count, (7, 1), (4, 2))]) for at, count in PIECES]
    rings = [
        ring(open_weights(tmp_path), order) for order in ((torch_backend, mlx_backend), (mlx_backend, torch_backend))
    ]
    for found in (whole, np.concatenate(pieces), *rings):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
        np.testing.assert_array_equal(found.argmax(axis=1), expected.argmax(axis=1))
