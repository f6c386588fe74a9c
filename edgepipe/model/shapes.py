"""Shapes of well-known models, sufficient to plan and simulate them without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from edgepipe.errors import ModelUnknown
from edgepipe.model.shapes_recurrent import PUBLISHED
from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Experts, Rope, Router
from edgepipe.spec.uniform import UniformShape


def named_shape(name: str) -> ModelConfig:
    """Return the shape of a model by a name such as ``qwen2.5-32b``. Raises ModelUnknown."""
    shapes = model_shapes()
    key = name.strip().lower().removesuffix("-instruct")
    if key not in shapes:
        near = ", ".join(get_close_matches(key, shapes))
        raise ModelUnknown(
            f"the shape of '{name}' is not known",
            fact=f"{f'nearest: {near}; ' if near else ''}known models: {', '.join(shapes)}",
            next_step="name one of them, with a type if it is packed: llama-3.3-70b:q4_k_m",
        )
    return shapes[key]


def model_shapes() -> dict[str, ModelConfig]:
    """Return all shapes by name."""
    return _llama() | _qwen2() | _qwen3() | _qwen3_moe() | _of_families() | _small()


def _llama() -> dict[str, ModelConfig]:
    return {
        "llama-3.3-70b": _shape("llama", 80, 8192, 28672, heads=(64, 8, 128), vocab=128256, context=131072),
        "llama-3.1-8b": _shape("llama", 32, 4096, 14336, heads=(32, 8, 128), vocab=128256, context=131072),
        "llama-3.2-3b": _shape("llama", 28, 3072, 8192, heads=(24, 8, 128), vocab=128256, context=131072, tied=True),
        "mistral-7b": _shape("mistral", 32, 4096, 14336, heads=(32, 8, 128), vocab=32768, context=32768),
    }


def _qwen2() -> dict[str, ModelConfig]:
    return {
        "qwen2.5-72b": _shape("qwen2", 80, 8192, 29568, heads=(64, 8, 128), vocab=152064, context=32768),
        "qwen2.5-32b": _shape("qwen2", 64, 5120, 27648, heads=(40, 8, 128), vocab=152064, context=32768),
        "qwen2.5-14b": _shape("qwen2", 48, 5120, 13824, heads=(40, 8, 128), vocab=152064, context=32768),
        "qwen2.5-7b": _shape("qwen2", 28, 3584, 18944, heads=(28, 4, 128), vocab=152064, context=32768),
        "qwen2.5-0.5b": _shape("qwen2", 24, 896, 4864, heads=(14, 2, 64), vocab=151936, context=32768, tied=True),
    }


def _qwen3() -> dict[str, ModelConfig]:
    return {
        "qwen3-32b": _shape("qwen3", 64, 5120, 25600, heads=(64, 8, 128), vocab=151936, context=40960),
        "qwen3-14b": _shape("qwen3", 40, 5120, 17408, heads=(40, 8, 128), vocab=151936, context=40960),
        "qwen3-8b": _shape("qwen3", 36, 4096, 12288, heads=(32, 8, 128), vocab=151936, context=40960),
        "qwen3-4b": _shape("qwen3", 36, 2560, 9728, heads=(32, 8, 128), vocab=151936, context=40960, tied=True),
    }


def _qwen3_moe() -> dict[str, ModelConfig]:
    coder = _with_experts(48, 2048, heads=(32, 4, 128), experts=(128, 8, 768), context=262_144)
    return {
        "qwen3-30b-a3b": _with_experts(48, 2048, heads=(32, 4, 128), experts=(128, 8, 768), context=40_960),
        "qwen3-coder-30b-a3b": coder,
        "qwen3-235b-a22b": _with_experts(94, 4096, heads=(64, 4, 128), experts=(128, 8, 1536), context=40_960),
    }


_GPT_OSS: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
}
_LATENT: Mapping[str, Any] = {  # of all models of DeepSeek
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10_000,
    "max_position_embeddings": 163_840,
}
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
}
_PUBLISHED: dict[str, Mapping[str, Any]] = {  # fields of the published config.json that give sizes
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "vocab_size": 151_552,
        "max_position_embeddings": 131_072,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "vocab_size": 154_880,
        "max_position_embeddings": 202_752,
    },
    "deepseek-v2-lite": _LATENT
    | {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "vocab_size": 102_400,
    },
    "deepseek-v3": _LATENT
    | {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "vocab_size": 129_280,
    },
    "gemma-4-31b": {
        "model_type": "gemma4",
        "text_config": _GEMMA4
        | {
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
        },
    },
    "gemma-4-26b-a4b": {
        "model_type": "gemma4",
        "text_config": _GEMMA4
        | {
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
    },
    "gemma-3-27b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "gemma-3-12b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 3840,
            "intermediate_size": 15_360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "gemma-3-4b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "mistral-small-3.2-24b": {
        "model_type": "mistral3",
        "text_config": {
            "model_type": "mistral",
            "hidden_size": 5120,
            "intermediate_size": 32_768,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1_000_000_000.0,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "vocab_size": 131_072,
            "max_position_embeddings": 131_072,
        },
    },
    "phi-4": {
        "model_type": "phi3",
        "hidden_size": 5120,
        "intermediate_size": 17_920,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "rope_theta": 250_000,
        "rms_norm_eps": 1e-5,
        "vocab_size": 100_352,
        "max_position_embeddings": 16_384,
        "original_max_position_embeddings": 16_384,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32_000,
        "max_position_embeddings": 32_768,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "minimax-m2": {
        "model_type": "minimax_m2",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rotary_dim": 64,
        "rope_theta": 5_000_000,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200_064,
        "max_position_embeddings": 196_608,
        "rms_norm_eps": 1e-6,
    },
    "granite-3.3-8b": {
        "model_type": "granite",
        "hidden_size": 4096,
        "intermediate_size": 12_800,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12.0,
        "logits_scaling": 16.0,
        "residual_multiplier": 0.22,
        "rope_theta": 10_000_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "vocab_size": 49_159,
        "max_position_embeddings": 131_072,
    },
    "olmo-2-7b": {
        "model_type": "olmo2",
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rope_theta": 500_000,
        "rms_norm_eps": 1e-6,
        "vocab_size": 100_352,
        "max_position_embeddings": 4096,
    },
    "olmo-3.1-32b": {
        "model_type": "olmo3",
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
        "sliding_window": 4096,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500_000,
        "rms_norm_eps": 1e-6,
        "vocab_size": 100_278,
        "max_position_embeddings": 65_536,
    },
    "command-r7b": {
        "model_type": "cohere2",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "rope_theta": 50_000,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
    },
}


@cache
def _of_families() -> dict[str, ModelConfig]:
    """Return the shapes that their families read from the published config."""
    return {name: hf_config(values) for name, values in (_PUBLISHED | PUBLISHED).items()}


def _small() -> dict[str, ModelConfig]:
    return {
        "smollm2-1.7b": _shape("llama", 24, 2048, 8192, heads=(32, 32, 64), vocab=49152, context=8192, tied=True),
        "smollm2-135m": _shape("llama", 30, 576, 1536, heads=(9, 3, 64), vocab=49152, context=8192, tied=True),
    }


def _with_experts(
    layers: int,
    hidden: int,
    *,
    heads: tuple[int, int, int],  # query heads, key-value heads, head size
    experts: tuple[int, int, int],  # number of experts, how many a token uses, their inner size
    context: int,
) -> ModelConfig:
    """Return the shape of a Qwen3 with experts."""
    plain = _shape("qwen3", layers, hidden, 1, heads=heads, vocab=151_936, context=context)
    count, used, inner = experts
    mixture = Experts(count=count, used=used, inner=inner, router=Router())
    own = tuple(replace(spec, dense=None, experts=mixture) for spec in plain.layers)
    return replace(plain, architecture="qwen3_moe", layers=own)


def _shape(
    family: str,
    layers: int,
    hidden: int,
    intermediate: int,
    *,
    heads: tuple[int, int, int],  # query heads, key-value heads, head size
    vocab: int,
    context: int,
    tied: bool = False,
) -> ModelConfig:
    return UniformShape(
        architecture=family,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        vocab_size=vocab,
        context_length=context,
        rms_norm_eps=1e-6,
        rope=Rope(theta=1_000_000.0),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_embeddings=tied,
    ).config()
