"""Shapes of well-known models with recurrent layers: the fields of their published config.json that give sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROTARY = {"rope_parameters": {"rope_theta": 10_000_000, "partial_rotary_factor": 0.25}}
_DELTA: Mapping[str, Any] = {  # of Qwen3-Next and Qwen3.5
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
    **_ROTARY,
}
_EXPERTS: Mapping[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_DENSE_27B: Mapping[str, Any] = {
    **_DELTA,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
    "vocab_size": 248_320,
}
_GRANITE4: Mapping[str, Any] = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "position_embedding_type": "nope",
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "logits_scaling": 6,
    "tie_word_embeddings": True,
    "vocab_size": 100_352,
    "max_position_embeddings": 131_072,
}
PUBLISHED: dict[str, Mapping[str, Any]] = {
    "qwen3.6-35b-a3b": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **_DELTA,
            **_EXPERTS,
            "num_hidden_layers": 40,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "vocab_size": 248_320,
        },
    },
    "qwen3.6-27b": {"model_type": "qwen3_5", "text_config": _DENSE_27B},
    "qwen3.8-27b": {"model_type": "qwen3_5", "text_config": _DENSE_27B},
    "qwen3.5-122b-a10b": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **_DELTA,
            "hidden_size": 3072,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 64,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            "vocab_size": 248_320,
        },
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5",
        "text_config": {
            **_DELTA,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 248_320,
        },
    },
    "qwen3-coder-next": {
        "model_type": "qwen3_next",
        **_DELTA,
        **_EXPERTS,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "vocab_size": 151_936,
    },
    "nemotron-3-nano": {
        "model_type": "nemotron_h",
        "hidden_size": 2688,
        "intermediate_size": 1856,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
        "vocab_size": 131_072,
        "max_position_embeddings": 262_144,
    },
    "nemotron-3-super": {
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "intermediate_size": 2688,
        "num_hidden_layers": 88,
        "hybrid_override_pattern": (
            "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
        ),
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
        "moe_latent_size": 1024,
        "routed_scaling_factor": 5.0,
        "vocab_size": 131_072,
        "max_position_embeddings": 262_144,
    },
    "granite-4.0-h-tiny": {
        **_GRANITE4,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
    },
}
"""By the model's name."""
