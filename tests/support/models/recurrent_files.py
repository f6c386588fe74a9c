"""Tiny models of the families with recurrent layers: a folder, and the GGUF file that llama.cpp's converter makes.

The rules of the converter are written here once more, independent of edgepipe's readers: names by gguf-py's table,
``A_log`` as ``-exp(A_log)``, norms plus one, convolutions without their middle dimension, value heads tiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from edgepipe.spec.config import hf_config
from edgepipe.spec.layout import stored_shapes
from tests.support.models.family_files import with_joined_experts
from tests.support.models.files import permute_rows

Array = npt.NDArray[np.float32]

EPS = 2.0**-20  # float32 of the file's metadata holds it exactly
_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "rope_theta": 50_000.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_NEMOTRON: dict[str, Any] = {
    "head_dim": 16,
    "layer_norm_epsilon": EPS,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "mlp_hidden_act": "relu2",
}
_NEMOTRON_MOE: dict[str, Any] = {
    **_NEMOTRON,
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
}
_GRANITE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    "attention_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 16.0,
    "shared_intermediate_size": 20,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "tie_word_embeddings": True,
}
_LFM2: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "norm_eps": EPS,
    "conv_L_cache": 3,
    "block_multiple_of": 16,
    "tie_word_embeddings": True,
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3next": ("Qwen3NextForCausalLM", {**_DELTA, **_EXPERTS}),
    "qwen35": ("Qwen3_5ForCausalLM", {**_DELTA, "mtp_num_hidden_layers": 1}),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", {**_DELTA, **_EXPERTS}),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {**_NEMOTRON, "num_hidden_layers": 4, "hybrid_override_pattern": "M-*M"},
    ),
    "nemotron_h_moe": ("NemotronHForCausalLM", _NEMOTRON_MOE),
    "nemotron_h_moe with narrow experts": ("NemotronHForCausalLM", {**_NEMOTRON_MOE, "moe_latent_size": 16}),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", {**_GRANITE, "num_local_experts": 0}),
    "granitehybrid with experts": (
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "lfm2": ("Lfm2ForCausalLM", _LFM2),
    "lfm2moe": (
        "Lfm2MoeForCausalLM",
        {
            **_LFM2,
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "use_expert_bias": True,
        },
    ),
}
"""By GGUF architecture: the class and its config, beyond ``_BASE``."""

_STACKS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_STACKS |= {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
_EXPERT = re.compile(r".*layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight")
_Q8_0 = gguf.GGMLQuantizationType.Q8_0


def tiny_values(family: str) -> dict[str, Any]:
    """The ``config.json`` of a tiny model."""
    hf_class, more = TINY[family]
    return {"architectures": [hf_class], **_BASE, **more}


def random_stored(family: str) -> dict[str, Array]:
    """Random tensors as a folder holds them: multiples of 1/64 up to 1, exact as bf16, also norms plus one."""
    random = np.random.default_rng(len(family))
    found = {
        name: (random.integers(-64, 65, shape) / 64).astype(np.float32)
        for name, shape in stored_shapes(hf_config(tiny_values(family))).items()
    }
    for name, tensor in found.items():
        if "conv1d.weight" in name or "conv.conv.weight" in name:
            found[name] = tensor[:, None, :]  # as a grouped convolution of torch has it
        if "block_sparse_moe" in name and "router" not in name:
            found[name] = tensor.reshape(tiny_values(family)["num_local_experts"], -1, tensor.shape[1])
    return found


def write_recurrent_folder(folder: Path, family: str) -> Path:
    """The folder of a tiny model."""
    (folder / "config.json").write_text(json.dumps(tiny_values(family)), encoding="utf-8")
    save_file(random_stored(family), folder / "model.safetensors")
    return folder


def write_recurrent_gguf(
    path: Path,
    family: str,
    *,
    packed: tuple[str, ...] = (),
    early: bool = False,
    joined: bool = False,
    mtp: Mapping[str, Array] | None = None,
) -> Path:
    """The same model as llama.cpp's converter writes it.

    packed  ends of the names of matrices in Q8_0
    early   Qwen3-Next's queries, keys, values and gates are one tensor, as in the first files
    joined  gates and ups of all experts are one tensor
    mtp     tensors of the layer that predicts one token more, by GGUF's names; None: some of Qwen's
    """
    values = tiny_values(family)
    kind = family.partition(" ")[0]
    writer = gguf.GGUFWriter(path, kind)
    _write_metadata(writer, kind, values, mtp=mtp is not None or kind in ("qwen35", "qwen3next"))
    tensors = dict(_converted(kind, values, early=early))
    if joined:
        tensors = with_joined_experts(tensors)
    if mtp is not None:
        tensors |= mtp
    elif kind in ("qwen35", "qwen3next"):  # the layer that predicts a second token, with names of layers and its own
        tensors |= {"blk.4.attn_norm.weight": np.ones(32, np.float32)}
        tensors |= {"blk.4.nextn.eh_proj.weight": np.ones((32, 64), np.float32)}
    for name, tensor in tensors.items():
        scheme = _Q8_0 if packed and name.endswith(packed) else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(tensor), scheme), raw_dtype=scheme)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiled(rows: Array, heads: tuple[int, int], *, axis: int = 0) -> Array:
    """Value heads as llama.cpp orders them: first the first of each key head.

    heads  key heads, value heads
    """
    moved = np.moveaxis(rows, axis, 0)
    split = moved.reshape(heads[0], heads[1] // heads[0], -1, *moved.shape[1:])
    return np.moveaxis(split.swapaxes(0, 1).reshape(moved.shape), 0, axis)


def _converted(kind: str, values: Mapping[str, Any], *, early: bool) -> Iterator[tuple[str, Array]]:
    """Names and values of the file's tensors, before stacking experts."""
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == kind)
    table = gguf.get_tensor_name_map(arch, values.get("num_hidden_layers", 4))
    stacks: dict[str, dict[int, Array]] = {}
    family = next(name for name, (hf_class, more) in TINY.items() if tiny_values(name) == values)
    for stored, tensor in random_stored(family).items():
        if match := _EXPERT.fullmatch(stored):
            stacks.setdefault(f"blk.{match[1]}.{_STACKS[match[3]]}.weight", {})[int(match[2])] = tensor
            continue
        for name, own in _split(stored, tensor, values, early=early):
            own = _transformed(name, own, kind, values)
            if name.startswith("blk."):
                yield name, own
                continue
            plain = name.replace(".dt_bias", ".dt_proj.bias" if "mixer" not in name else ".dt.bias")
            plain = re.sub(r"(e_score_correction|expert)_bias$", r"\1_bias.bias", plain)
            plain = plain.replace("e_score_correction_bias.bias", "e_score_correction.bias")
            found = table.get_name(plain, try_suffixes=(".weight", ".bias"))
            assert found is not None, stored
            yield found, own
    for name, parts in stacks.items():
        yield name, np.stack([parts[index] for index in range(len(parts))])


def _split(stored: str, tensor: Array, values: Mapping[str, Any], *, early: bool) -> Iterator[tuple[str, Array]]:
    """Split what the converter splits: Qwen3-Next's projection by key heads, Granite's gates and ups."""
    layer = next(iter(re.findall(r"layers\.(\d+)\.", stored)), "")
    if "in_proj_qkvz" in stored:
        if early:
            yield f"blk.{layer}.ssm_in.weight", tensor
            return
        keys, size = values["linear_num_key_heads"], values["linear_key_head_dim"]
        by_head = tensor.reshape(keys, -1, tensor.shape[1])
        own = values["linear_num_value_heads"] // keys * values["linear_value_head_dim"]
        parts = np.split(by_head, [size, 2 * size, 2 * size + own], axis=1)
        rows = [part.reshape(-1, tensor.shape[1]) for part in parts]
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate(rows[:3])
        yield f"blk.{layer}.attn_gate.weight", rows[3]
    elif "input_linear" in stored:
        gates, ups = np.split(tensor, 2, axis=-2)
        own = "exps" if "block_sparse_moe" in stored else "shexp"
        end = f"_{own}" if values["num_local_experts"] else ""
        yield f"blk.{layer}.ffn_gate{end}.weight", gates
        yield f"blk.{layer}.ffn_up{end}.weight", ups
    elif "shared_mlp.output_linear" in stored and not values["num_local_experts"]:
        yield f"blk.{layer}.ffn_down.weight", tensor
    else:
        yield stored, tensor


def _transformed(name: str, tensor: Array, kind: str, values: Mapping[str, Any]) -> Array:
    if kind.startswith("qwen35") and "linear_attn" in name:
        tensor = _with_tiled_heads(name, tensor, values)
    if name.endswith("A_log"):
        tensor = -np.exp(tensor)
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        tensor = tensor.squeeze(1)
    if kind.startswith("qwen3") and name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + 1
    if "mamba" in name or "mixer" in name:
        if name.endswith(("A_log", ".D")):
            tensor = tensor[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensor = tensor.reshape(values.get("n_groups", 1), -1)
    if kind == "granitehybrid" and name.endswith(("q_proj.weight", "k_proj.weight")):
        tensor = permute_rows(tensor, values["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
    return tensor


def _with_tiled_heads(name: str, tensor: Array, values: Mapping[str, Any]) -> Array:
    heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    if "in_proj_qkv" in name or "conv1d" in name:
        keys = 2 * heads[0] * values["linear_key_head_dim"]
        return np.concatenate([tensor[:keys], tiled(tensor[keys:], heads)])
    if "out_proj" in name:
        return tiled(tensor, heads, axis=1)
    return tensor if "norm" in name else tiled(tensor, heads)


def _write_metadata(writer: gguf.GGUFWriter, kind: str, values: Mapping[str, Any], *, mtp: bool) -> None:
    layers = values.get("num_hidden_layers", 4)
    writer.add_block_count(layers + mtp)
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_eos_token_id(values["eos_token_id"])
    writer.add_bos_token_id(values["bos_token_id"])
    if mtp:
        writer.add_nextn_predict_layers(1)
    kv_heads = values["num_key_value_heads"]
    if kind.startswith("qwen3"):
        writer.add_head_count_kv(kv_heads)
        _write_qwen(writer, values)
    else:
        kinds = values.get("layer_types") or values.get("layers_block_type") or values["hybrid_override_pattern"]
        writer.add_head_count_kv([kv_heads if each in ("attention", "full_attention", "*") else 0 for each in kinds])
    if kind.startswith("nemotron"):
        _write_nemotron(writer, kind, values)
    elif kind == "granitehybrid":
        _write_granite(writer, values)
    elif kind.startswith("lfm2"):
        _write_lfm2(writer, kind, values)


def _write_qwen(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])
    writer.add_rope_dimension_count(values["head_dim"] // 4)
    writer.add_ssm_conv_kernel(values["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(values["linear_key_head_dim"])
    writer.add_ssm_group_count(values["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values["linear_num_value_heads"])
    writer.add_ssm_inner_size(values["linear_num_value_heads"] * values["linear_value_head_dim"])
    writer.add_full_attention_interval(4)
    if "num_experts" in values:
        _write_experts(writer, values, values["num_experts"])
        writer.add_expert_shared_feed_forward_length(values["shared_expert_intermediate_size"])


def _write_experts(writer: gguf.GGUFWriter, values: Mapping[str, Any], count: int) -> None:
    writer.add_expert_count(count)
    writer.add_expert_used_count(values["num_experts_per_tok"])
    if "moe_intermediate_size" in values:
        writer.add_expert_feed_forward_length(values["moe_intermediate_size"])


def _write_nemotron(writer: gguf.GGUFWriter, kind: str, values: Mapping[str, Any]) -> None:
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])
    writer.add_ssm_conv_kernel(values["conv_kernel"])
    writer.add_ssm_state_size(values["ssm_state_size"])
    writer.add_ssm_group_count(values["n_groups"])
    writer.add_ssm_inner_size(values["mamba_num_heads"] * values["mamba_head_dim"])
    writer.add_ssm_time_step_rank(values["mamba_num_heads"])
    writer.add_rope_scaling_finetuned(False)
    if kind == "nemotron_h":
        pattern = values["hybrid_override_pattern"]
        writer.add_feed_forward_length([values["intermediate_size"] if each == "-" else 0 for each in pattern])
        return
    pattern = values["layers_block_type"]
    writer.add_feed_forward_length([values["moe_intermediate_size"] if each == "moe" else 0 for each in pattern])
    _write_experts(writer, values, values["n_routed_experts"])
    writer.add_expert_shared_feed_forward_length(values["moe_shared_expert_intermediate_size"])
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_norm(values["norm_topk_prob"])
    writer.add_expert_weights_scale(values["routed_scaling_factor"])
    writer.add_expert_group_count(values["n_group"])
    if "moe_latent_size" in values:
        writer.add_uint32(f"{kind}.moe_latent_size", values["moe_latent_size"])


def _write_granite(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_expert_shared_feed_forward_length(values["shared_intermediate_size"])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(values["mamba_d_state"])
    writer.add_ssm_group_count(1)
    writer.add_ssm_inner_size(2 * values["hidden_size"])
    writer.add_ssm_time_step_rank(values["mamba_n_heads"])
    writer.add_rope_dimension_count(8)
    writer.add_rope_scaling_finetuned(False)
    writer.add_attention_scale(values["attention_multiplier"])
    writer.add_embedding_scale(values["embedding_multiplier"])
    writer.add_residual_scale(values["residual_multiplier"])
    writer.add_logit_scale(values["logits_scaling"])
    if values["num_local_experts"]:
        _write_experts(writer, values, values["num_local_experts"])


def _write_lfm2(writer: gguf.GGUFWriter, kind: str, values: Mapping[str, Any]) -> None:
    writer.add_shortconv_l_cache(values["conv_L_cache"])
    if kind == "lfm2":
        writer.add_feed_forward_length(int(2 * values["intermediate_size"] / 3))
        return
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_leading_dense_block_count(values["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    _write_experts(writer, values, values["num_experts"])
