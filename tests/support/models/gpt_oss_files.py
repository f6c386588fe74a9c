"""A tiny gpt-oss with MXFP4 experts, as Hugging Face, MLX and llama.cpp store it: the same values in three layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from edgepipe.spec.config import hf_config
from edgepipe.spec.layout import stored_shapes

Arrays = dict[str, npt.NDArray[Any]]

EXPERTS = 4
VALUES: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 96,  # 2880, too, is a multiple of 32 and of no larger power of two
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 2.0**-20,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_GGUF_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def random_tensors(*, seed: int = 0) -> Arrays:
    """Tensors as Hugging Face stores them: experts as blocks and scales, the rest as floats that bf16 holds exactly.

    Gates and ups reach beyond 7, where they are clamped.
    """
    random = np.random.default_rng(seed)
    found: Arrays = {}
    for name, shape in stored_shapes(hf_config(VALUES)).items():
        if len(shape) == 3:
            experts, inputs, outputs = shape
            scale = 126 if "gate_up" in name else 123
            found[f"{name}_blocks"] = random.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
            found[f"{name}_scales"] = random.integers(
                scale - 3, scale, (experts, outputs, inputs // 32), dtype=np.uint8
            )
        else:
            spread = 1.0 if len(shape) == 1 or "bias" in name else 3.0 / shape[-1] ** 0.5
            values = random.integers(-32, 33, shape) / 64 * spread + ("norm" in name)
            found[name] = (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return found


def write_hugging_face(folder: Path, tensors: Arrays) -> Path:
    """A folder as gpt-oss is published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(VALUES | {"quantization_config": QUANTIZATION}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_mlx(folder: Path, tensors: Arrays) -> Path:
    """A folder as mlx-lm converts it, whose other matrices stay floats."""
    folder.mkdir(parents=True, exist_ok=True)
    quantisation = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(VALUES | {"quantization": quantisation}), encoding="utf-8")
    found: Arrays = {}
    for name, tensor in separated(tensors).items():
        module, _, suffix = name.rpartition(".")
        if suffix == "blocks":
            found[f"{module}.weight"] = np.ascontiguousarray(tensor).view(np.uint32).reshape(*tensor.shape[:2], -1)
        else:
            found[name] = np.ascontiguousarray(tensor)
    save_file(found, folder / "model.safetensors")
    return folder


def write_gguf(path: Path, tensors: Arrays) -> Path:
    """A file as llama.cpp's converter writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(VALUES["num_hidden_layers"])
    writer.add_context_length(VALUES["max_position_embeddings"])
    writer.add_embedding_length(VALUES["hidden_size"])
    writer.add_feed_forward_length(VALUES["intermediate_size"])
    writer.add_expert_feed_forward_length(VALUES["intermediate_size"])
    writer.add_head_count(VALUES["num_attention_heads"])
    writer.add_head_count_kv(VALUES["num_key_value_heads"])
    writer.add_key_length(VALUES["head_dim"])
    writer.add_value_length(VALUES["head_dim"])
    writer.add_sliding_window(VALUES["sliding_window"])
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(VALUES["num_experts_per_tok"])
    writer.add_layer_norm_rms_eps(VALUES["rms_norm_eps"])
    writer.add_rope_freq_base(VALUES["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(VALUES["rope_scaling"]["factor"])
    writer.add_rope_scaling_orig_ctx_len(VALUES["rope_scaling"]["original_max_position_embeddings"])
    writer.add_eos_token_id(VALUES["eos_token_id"])
    parts = separated(tensors)
    for name, tensor in parts.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "blocks":
            data = _gguf_blocks(tensor, parts[f"{module}.scales"])
            writer.add_tensor(f"{_gguf_name(module)}.weight", data, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        elif suffix == "sinks":
            writer.add_tensor(f"{_gguf_name(name)}.weight", tensor)
        elif suffix != "scales":
            writer.add_tensor(f"{_gguf_name(module)}.{suffix}", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def separated(tensors: Arrays) -> Arrays:
    """Tensors with gates and ups apart, under names with dots: ``mlp.experts.gate_proj.blocks``."""
    found: Arrays = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found[name] = tensor
            continue
        module, _, suffix = name.rpartition("_")
        if module.endswith("gate_up_proj"):
            prefix = module.removesuffix("gate_up_proj")
            found[f"{prefix}gate_proj.{suffix}"] = np.ascontiguousarray(tensor[:, 0::2])
            found[f"{prefix}up_proj.{suffix}"] = np.ascontiguousarray(tensor[:, 1::2])
        else:
            found[f"{module}.{suffix}"] = tensor
    return found


def _gguf_blocks(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """GGUF's blocks [E, O, I / 32 * 17]: the scale, then code j with code j + 16 in one byte."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    halves = codes[..., :16] | (codes[..., 16:] << 4)
    joined = np.concatenate([scales[..., None], halves.astype(np.uint8)], axis=-1)
    return joined.reshape(*scales.shape[:2], -1)


def _gguf_name(module: str) -> str:
    if module in _GGUF_WHOLE:
        return _GGUF_WHOLE[module]
    _, _, layer, within = module.split(".", 3)
    return f"blk.{layer}.{_GGUF_PARTS[within]}"
