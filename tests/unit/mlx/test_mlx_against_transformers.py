"""Every family and rope scaling that the MLX backend computes, against transformers on tiny random models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")
pytest.importorskip("torch", reason="transformers computes with torch, which is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Rope
from edgepipe.spec.layout import model_tensors
from tests.support.backends.mlx_models import Chain, Float32s, MemorySource, cpu_options, row, tiny_config
from tests.support.models.specs import first_attention, first_dense, first_rope

NUM_TOKENS = 40
LLAMA3 = Rope(
    theta=10_000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64
)
YARN = Rope(theta=10_000.0, scaling="yarn", factor=4.0, original_context=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model in our words and what Hugging Face's config says beside it."""

    name: str
    ours: dict[str, Any] = field(default_factory=dict[str, Any])
    rope: dict[str, Any] = field(default_factory=dict[str, Any])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


CASES = [
    Case(name="llama with one kv head per head", ours={"num_kv_heads": 4}),
    Case(name="llama tied", ours={"tied_embeddings": True}),
    Case(
        name="llama with biases",
        ours={"qkv_bias": True, "output_bias": True, "mlp_bias": True},
        extra={"attention_bias": True, "mlp_bias": True},
    ),
    Case(
        name="llama linear",
        ours={"rope": Rope(scaling="linear", factor=4.0)},
        rope={"rope_type": "linear", "factor": 4.0},
    ),
    Case(
        name="llama dynamic",
        ours={"rope": Rope(scaling="dynamic", factor=4.0)},
        rope={"rope_type": "dynamic", "factor": 4.0},
    ),
    Case(
        name="llama llama3",
        ours={"rope": LLAMA3},
        rope={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    Case(
        name="llama yarn",
        ours={"rope": YARN},
        rope={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    Case(
        name="llama yarn with every field",
        ours={
            "rope": Rope(
                scaling="yarn",
                factor=4.0,
                original_context=64,
                beta_fast=16.0,
                beta_slow=2.0,
                mscale=0.9,
                mscale_all_dim=0.7,
                truncate=False,
            )
        },
        rope={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.9,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
    ),
    Case(
        name="llama longrope within its trained context",
        ours={
            "rope": Rope(
                scaling="longrope",
                factor=4.0,
                original_context=256,
                short_factor=(1.0, 1.1, 1.3, 1.7, 2.2, 3.1),
                long_factor=(2.0, 2.1, 2.3, 2.7, 3.2, 4.1),
            )
        },
        rope={
            "rope_type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "short_factor": [1.0, 1.1, 1.3, 1.7, 2.2, 3.1],
            "long_factor": [2.0, 2.1, 2.3, 2.7, 3.2, 4.1],
        },
    ),
    Case(
        name="llama longrope beyond its trained context",
        ours={
            "rope": Rope(
                scaling="longrope",
                factor=4.0,
                original_context=32,
                short_factor=(1.0, 1.1, 1.3, 1.7, 2.2, 3.1),
                long_factor=(2.0, 2.1, 2.3, 2.7, 3.2, 4.1),
            )
        },
        rope={
            "rope_type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0, 1.1, 1.3, 1.7, 2.2, 3.1],
            "long_factor": [2.0, 2.1, 2.3, 2.7, 3.2, 4.1],
        },
    ),
    Case(
        name="mistral with a sliding window",
        ours={"architecture": "mistral", "windows": (9, 9, 9)},
        extra={"sliding_window": 9},
    ),
    Case(
        name="qwen2 with biases and windows on some layers",
        ours={"architecture": "qwen2", "qkv_bias": True, "head_dim": 8, "windows": (None, 9, 9)},
        extra={
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    Case(name="qwen3 with norms on q and k", ours={"architecture": "qwen3", "qk_norm": True, "tied_embeddings": True}),
    Case(
        name="qwen3 with biases and a rope base of its own",
        ours={
            "architecture": "qwen3",
            "qk_norm": True,
            "qkv_bias": True,
            "output_bias": True,
            "rope": Rope(theta=1e6),
        },
        extra={"attention_bias": True},
    ),
]


def reference(config: ModelConfig, case: Case, tokens: list[int]) -> tuple[Float32s, dict[str, Float32s]]:
    """transformers' logits [T, V] in float32, and the weights that it drew."""
    name, attention = config.architecture.capitalize(), first_attention(config)
    arguments = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": first_dense(config).inner,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm.eps,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": first_rope(config).theta} | case.rope,
        "attn_implementation": "eager",
    }
    settings = getattr(transformers, f"{name}Config")(**(arguments | case.extra))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(settings).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in parameter_name))
        logits = model(torch.tensor([tokens])).logits[0].numpy()
    state = model.state_dict()
    return logits, {key: state[key].numpy().copy() for key in model_tensors(config)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers_whole_chunked_and_decoded(case: Case) -> None:
    config = tiny_config(**case.ours)
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, config.vocab_size, NUM_TOKENS)]
    expected, weights = reference(config, case, tokens)
    tolerance = 2e-3 * float(np.abs(expected).max())
    chain = Chain(MemorySource(config, weights), ranges=[(0, 2), (2, 3)])

    whole = chain.run(tokens, [row(0, NUM_TOKENS, (0, 3))])
    np.testing.assert_allclose(whole, expected, atol=tolerance, rtol=0)

    pieces = [(0, 13), (13, 20), (33, 1), (34, 1), (35, 5)]  # prompt chunks and decode tokens, over scattered blocks
    table = ((7, 1), (4, 2))
    parts = [chain.run(tokens[at : at + count], [row(at, count, *table)]) for at, count in pieces]
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=tolerance, rtol=0)


def test_bfloat16_compute_stays_near_transformers() -> None:
    config = tiny_config()
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, config.vocab_size, NUM_TOKENS)]
    expected, weights = reference(config, Case(name="llama"), tokens)
    chain = Chain(MemorySource(config, weights), options=cpu_options(dtype="bfloat16"))
    got = chain.run(tokens, [row(0, NUM_TOKENS, (0, 3))])
    assert np.corrcoef(got.ravel(), expected.ravel())[0, 1] > 0.99
