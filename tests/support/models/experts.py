"""Tiny mixtures of experts: a config, a folder as Hugging Face has it, and the same weights as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layout import is_expert, model_tensors, stored_shapes
from edgepipe.spec.tensors import StoredTensor, TensorInfo
from edgepipe.weights.stored_weight import load_weight, weight_info

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2.0**-20,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_GGUF_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def expert_config(**changes: Any) -> ModelConfig:
    """The config of a tiny Qwen3 with experts."""
    return hf_config(QWEN3_MOE | changes)


def stored_tensors(config: ModelConfig, *, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random tensors under the names of Hugging Face's files."""
    random = np.random.default_rng(seed)
    return {
        name: (random.normal(0, 0.1, shape) + ("norm" in name)).astype(np.float32)
        for name, shape in stored_shapes(config).items()
    }


def write_expert_folder(folder: Path, **changes: Any) -> Path:
    """A folder with ``config.json`` and safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE | changes), encoding="utf-8")
    save_file(stored_tensors(expert_config(**changes)), folder / "model.safetensors")
    return folder


def whole_weights(
    config: ModelConfig, tensors: dict[str, npt.NDArray[np.float32]]
) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of stored tensors, all experts of a matrix in one."""
    infos = {
        name: TensorInfo(name=name, shape=tensor.shape, scheme="F32", num_bytes=tensor.nbytes)
        for name, tensor in tensors.items()
    }

    def read(name: str) -> StoredTensor:
        return StoredTensor(info=infos[name], data=tensors[name].reshape(-1).view(np.uint8))

    found: dict[str, npt.NDArray[np.float32]] = {}
    for name, shape in model_tensors(config).items():
        raw = load_weight(weight_info(config, infos, name), config, read)
        assert isinstance(raw, StoredTensor)
        found[name] = raw.data.view(np.float32).reshape(shape)
    return found


def write_expert_gguf(path: Path, weights: dict[str, npt.NDArray[np.float32]], *, scheme: str = "F32") -> Path:
    """A GGUF file of these weights; matrices in ``scheme``, the router in F32, the experts in three dimensions."""
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(QWEN3_MOE["num_hidden_layers"])
    writer.add_context_length(QWEN3_MOE["max_position_embeddings"])
    writer.add_embedding_length(QWEN3_MOE["hidden_size"])
    writer.add_feed_forward_length(QWEN3_MOE["intermediate_size"])
    writer.add_expert_feed_forward_length(QWEN3_MOE["moe_intermediate_size"])
    writer.add_expert_count(QWEN3_MOE["num_experts"])
    writer.add_expert_used_count(QWEN3_MOE["num_experts_per_tok"])
    writer.add_head_count(QWEN3_MOE["num_attention_heads"])
    writer.add_head_count_kv(QWEN3_MOE["num_key_value_heads"])
    writer.add_key_length(QWEN3_MOE["head_dim"])
    writer.add_layer_norm_rms_eps(QWEN3_MOE["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_eos_token_id(2)
    quantised = gguf.GGMLQuantizationType[scheme]
    for name, weight in weights.items():
        floats = weight.ndim == 1 or "router" in name
        kind = gguf.GGMLQuantizationType.F32 if floats else quantised
        shaped = weight.reshape(QWEN3_MOE["num_experts"], -1, weight.shape[-1]) if is_expert(name) else weight
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(np.ascontiguousarray(shaped), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    module, suffix = name.rsplit(".", 1)
    if module in _GGUF_WHOLE:
        return f"{_GGUF_WHOLE[module]}.{suffix}"
    _, _, layer, within = module.split(".", 3)
    return f"blk.{layer}.{_GGUF_PARTS[within]}.{suffix}"
