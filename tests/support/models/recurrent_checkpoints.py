"""Tiny checkpoints with random weights of families with recurrent layers, as ``transformers`` saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

TOKENS = np.random.default_rng(3).integers(0, 60, 70).tolist()
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
NEMOTRON: dict[str, Any] = {
    "head_dim": 8,
    "intermediate_size": 40,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
}
GRANITE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "intermediate_size": 24,
    "shared_intermediate_size": 16,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
LFM2: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}


def made(name: str, *parts: dict[str, Any], **more: Any) -> Callable[[], PretrainedConfig]:
    """A config of transformers' class of this name."""

    def make() -> PretrainedConfig:
        values: dict[str, Any] = dict(SIZES)
        for part in (*parts, more):
            values |= part
        return getattr(transformers, name)(**values)

    return make


def with_pictures() -> PretrainedConfig:
    """Qwen3.5 with experts, beside a model of pictures."""
    text = made("Qwen3_5MoeTextConfig", DELTA, EXPERTS)().to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    return transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision)


LAYERS = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3-next": made("Qwen3NextConfig", DELTA, EXPERTS),
    "qwen3-next, some layers dense": made("Qwen3NextConfig", DELTA, EXPERTS, mlp_only_layers=[1], intermediate_size=48),
    "qwen3.5": made("Qwen3_5TextConfig", DELTA, intermediate_size=48),
    "qwen3.5, tied": made("Qwen3_5TextConfig", DELTA, intermediate_size=48, tie_word_embeddings=True),
    "qwen3.5 with experts": made("Qwen3_5MoeTextConfig", DELTA, EXPERTS),
    "qwen3.5 with pictures": with_pictures,
    "nemotron-h": made("NemotronHConfig", NEMOTRON, layers_block_type=LAYERS),
    "nemotron-h, narrow experts": made(
        "NemotronHConfig", NEMOTRON, layers_block_type=LAYERS, moe_latent_size=16, tie_word_embeddings=True
    ),
    "nemotron-h, long steps": made("NemotronHConfig", NEMOTRON, layers_block_type=LAYERS, time_step_min=0.5),
    "granite 4": made("GraniteMoeHybridConfig", GRANITE, num_local_experts=4),
    "granite 4, dense": made("GraniteMoeHybridConfig", GRANITE, num_local_experts=0, time_step_limit=(0.1, 0.9)),
    "granite 4, rotating": made("GraniteMoeHybridConfig", GRANITE, position_embedding_type="rope"),
    "lfm2": made("Lfm2Config", LFM2, intermediate_size=48, block_multiple_of=16),
    "lfm2, biased": made("Lfm2Config", LFM2, intermediate_size=48, conv_bias=True, block_auto_adjust_ff_dim=False),
    "lfm2 with experts": made("Lfm2MoeConfig", LFM2, EXPERTS, intermediate_size=48, num_dense_layers=1),
}


def save_checkpoint(
    config: PretrainedConfig, folder: Path, tokens: list[int], *, slow: bool = False
) -> npt.NDArray[np.float64]:
    """Save a model with this config. Returns its logits [T, V] of the tokens, in float32.

    slow  states remember tens to hundreds of tokens, as trained ones do; else a few
    """
    torch.manual_seed(0)
    kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("A_log"):
                parameter.normal_(std=1.0 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.3)
            elif slow:
                parameter.uniform_(-7.0, -2.0)
        for name, buffer in model.named_buffers():
            if "bias" in name:  # corrections of routers
                buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].double().numpy()
