"""Checkpoints that ``transformers`` saves of families with recurrent layers, read by edgepipe, give its logits.

The decoder is the reference in numpy. So a weight in a wrong place, or a field read otherwise, shows without a backend.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers
from transformers import PretrainedConfig

from edgepipe.model.dequantise import as_float32
from edgepipe.model.facts import LayerRange, Slice
from edgepipe.model.packed import Packed
from edgepipe.model.tensors import WeightSource
from edgepipe.model.weights import open_weights
from tests.support.recurrent_checkpoints import save_checkpoint
from tests.support.recurrent_files import TINY as GGUF_TINY
from tests.support.recurrent_files import write_recurrent_folder, write_recurrent_gguf
from tests.support.spec_reference import reference_logits

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
    "nemotron-h, long steps": made("NemotronHConfig", NEMOTRON, layers_block_type=LAYERS, time_step_min=0.5),
    "granite 4": made("GraniteMoeHybridConfig", GRANITE, num_local_experts=4),
    "granite 4, dense": made("GraniteMoeHybridConfig", GRANITE, num_local_experts=0, time_step_limit=(0.1, 0.9)),
    "granite 4, rotating": made("GraniteMoeHybridConfig", GRANITE, position_embedding_type="rope"),
    "lfm2": made("Lfm2Config", LFM2, intermediate_size=48, block_multiple_of=16),
    "lfm2, biased": made("Lfm2Config", LFM2, intermediate_size=48, conv_bias=True, block_auto_adjust_ff_dim=False),
    "lfm2 with experts": made("Lfm2MoeConfig", LFM2, EXPERTS, intermediate_size=48, num_dense_layers=1),
}


def logits_of(source: WeightSource) -> np.ndarray:
    """The reference's logits with a model's weights as edgepipe reads them."""
    config = source.config
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    weights: dict[str, np.ndarray] = {}
    for info in source.weights(whole):
        raw = source.load(info.name)
        assert not isinstance(raw, Packed)
        weights[info.name] = as_float32(raw).reshape(info.shape)
    return reference_logits(config, weights, TOKENS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_checkpoint_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    expected = save_checkpoint(CONFIGS[name](), tmp_path, TOKENS)
    found = logits_of(open_weights(tmp_path))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))


@pytest.mark.parametrize("family", GGUF_TINY)
def test_the_file_of_llama_cpp_s_converter_gives_the_logits_of_the_folder(family: str, tmp_path: Path) -> None:
    folder = open_weights(write_recurrent_folder(tmp_path, family))
    file = open_weights(write_recurrent_gguf(tmp_path / "m.gguf", family))
    expected, found = logits_of(folder), logits_of(file)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
