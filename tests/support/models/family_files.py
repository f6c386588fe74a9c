"""Tiny models of every family with a GGUF architecture: a folder, and the GGUF file that llama.cpp's converter makes.

Names come from gguf-py's own table, so that they are independent of edgepipe's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from edgepipe.spec.config import hf_config
from edgepipe.spec.layout import stored_shapes
from tests.support.models.files import permute_rows

Tensors = dict[str, npt.NDArray[np.float32]]

EPS = 2.0**-20  # float32 of the file's metadata holds it exactly, as all numbers below
_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
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
_LINEAR = {"rope_type": "linear", "factor": 8.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.125}
_YARN |= {"beta_fast": 32, "beta_slow": 1}
_TEMPERED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.125}
_TEMPERED |= {"mscale": 1.0, "mscale_all_dim": 1.0}
_MSCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_MSCALED |= {"mscale": 1.25, "mscale_all_dim": 1.25}
_LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.25, 1.5], "long_factor": [1.5, 2.0, 4.0]}
_LONG |= {"attention_factor": 1.25}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SEVEN = {"num_hidden_layers": 7, "sliding_window": 32, "head_dim": 16, "query_pre_attn_scalar": 16}
_GEMMA4: dict[str, Any] = {
    "tie_word_embeddings": True,
    "num_hidden_layers": 6,
    "sliding_window": 32,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
    },
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral3": ("Mistral3ForConditionalGeneration", {"model_type": "mistral", "sliding_window": None, "head_dim": 16}),
    "ministral3": ("Ministral3ForCausalLM", {"sliding_window": None, "head_dim": 16, "rope_scaling": _TEMPERED}),
    "phi3": (
        "Phi3ForCausalLM",
        {
            "sliding_window": 32,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "rope_scaling": _LONG,
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", {"tie_word_embeddings": True, "rope_scaling": _LINEAR, **_SEVEN}),
    "gemma4": ("Gemma4ForCausalLM", _GEMMA4),
    "gemma4_moe": (
        "Gemma4ForCausalLM",
        _GEMMA4
        | {"num_global_key_value_heads": 1, "enable_moe_block": True}
        | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.25,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 16.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {"num_hidden_layers": 4, "sliding_window": 32, "rope_scaling": _YARN}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "sliding_window": 32,
            "logit_scale": 0.25,
            "layer_norm_eps": EPS,
            "rotary_pct": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "head_dim": 16, "norm_topk_prob": True, **_EXPERTS}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
            **_EXPERTS,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "rope_scaling": _MSCALED,
            **_EXPERTS,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 32,
            "rope_scaling": _YARN | {"truncate": False},
        },
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "rotary_dim": 8,
            "scoring_func": "sigmoid",
        },
    ),
}
"""By family: the class and its config, beyond ``_BASE``."""

ARCHS = {"olmo3": "olmo2", "qwen3_moe": "qwen3moe", "mixtral": "llama", "glm4_moe": "glm4moe"} | {
    "minimax_m2": "minimax-m2",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "deepseek2",
    "ministral3": "mistral3",
    "gemma4_moe": "gemma4",
}
_PERMUTED = ("llama", "mistral3", "ministral3", "mixtral", "granite")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_STACKS = {
    **dict.fromkeys(("gate_proj", "w1"), gguf.MODEL_TENSOR.FFN_GATE_EXP),
    **dict.fromkeys(("up_proj", "w3"), gguf.MODEL_TENSOR.FFN_UP_EXP),
    **dict.fromkeys(("down_proj", "w2"), gguf.MODEL_TENSOR.FFN_DOWN_EXP),
}
_Q8_0 = gguf.GGMLQuantizationType.Q8_0
_PARAMETER = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj(_bias)?")  # names that gpt-oss has


_OF_GEMMA4 = {  # within a layer, as the converter renames them itself or before it asks the table
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def tiny_values(family: str) -> dict[str, Any]:
    """The ``config.json`` of a family's tiny model."""
    hf_class, more = TINY[family]
    values = _BASE | more
    return {"architectures": [hf_class], **({"text_config": values} if family == "mistral3" else values)}


def arch_of(family: str) -> gguf.MODEL_ARCH:
    """gguf-py's architecture of a family."""
    name = ARCHS.get(family, family)
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def random_stored(family: str) -> Tensors:
    """Random tensors as the folder holds them, for GLM also those of the layer that predicts a second token.

    Multiples of 1/64 up to 1 stay exact as bf16, also those of norms plus 1.
    """
    values, random = tiny_values(family), np.random.default_rng(len(family))
    shapes = stored_shapes(hf_config(values))
    if family == "glm4_moe":
        more = stored_shapes(hf_config(values | {"num_hidden_layers": 3}))
        own = {"eh_proj": (32, 64), "enorm": (32,), "hnorm": (32,), "shared_head.norm": (32,)}
        shapes = more | {f"model.layers.2.{name}.weight": shape for name, shape in own.items()}
    return {name: (random.integers(-64, 65, shape) / 64).astype(np.float32) for name, shape in shapes.items()}


def write_family_folder(folder: Path, family: str) -> Path:
    """The folder of a tiny model."""
    (folder / "config.json").write_text(json.dumps(tiny_values(family)), encoding="utf-8")
    save_file(random_stored(family), folder / "model.safetensors")
    return folder


def write_family_gguf(
    path: Path,
    family: str,
    *,
    per_layer_heads: bool = False,
    stacked: bool = True,
    joined: bool = False,
    kv_b: str = "joined",
    packed: str | tuple[str, ...] = (),
) -> Path:
    """The same model as llama.cpp's converter writes it.

    per_layer_heads  key-value heads are a list
    stacked          all experts of a matrix are one tensor, as since April 2024
    joined           gates and ups of all experts are one tensor, also their biases
    kv_b             of latent attention: "joined"; "split" for keys and values, as since April 2025; "both"
    packed           ends of the names of matrices in Q8_0
    """
    values = tiny_values(family)
    values = values.get("text_config", values)
    arch = arch_of(family)
    layers = values["num_hidden_layers"] + values.get("num_nextn_predict_layers", 0)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_common(writer, values, layers, per_layer_heads=per_layer_heads)
    _write_own(writer, family, values)
    if family == "deepseek_v3":
        _write_latent(writer, values, split=kv_b == "split")
    named = _named(family, random_stored(family), values, layers)
    named = with_joined_experts(named) if joined else named
    for name, tensor in (named if kv_b == "joined" else _with_split_heads(named, values, kv_b)).items():
        apart = "_exps." in name and not stacked
        parts = (
            {name.replace("_exps.", f".{index}."): own for index, own in enumerate(tensor)} if apart else {name: tensor}
        )
        kind = _Q8_0 if packed and name.endswith(packed) else gguf.GGMLQuantizationType.F32
        for each, own in parts.items():
            writer.add_tensor(each, gguf.quants.quantize(own, kind), raw_dtype=kind)
    for kind in ("long", "short") if family == "phi3" else ():
        factors = np.array(values["rope_scaling"][f"{kind}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_joined_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file with gates and ups of all experts in one."""
    found = dict(tensors)
    for name in [name for name in tensors if ".ffn_gate_exps." in name]:
        gates, ups = found.pop(name), found.pop(name.replace("gate_exps", "up_exps"))
        found[name.replace("gate_exps", "gate_up_exps")] = np.concatenate([gates, ups], axis=1)
    return found


def _write_common(writer: gguf.GGUFWriter, values: Mapping[str, Any], layers: int, *, per_layer_heads: bool) -> None:
    kv_heads = values["num_key_value_heads"]
    writer.add_block_count(layers)
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    whole_heads = values.get("num_global_key_value_heads")
    if whole_heads:
        writer.add_head_count_kv([kv_heads if slides else whole_heads for slides in _slides(layers)])
    else:
        writer.add_head_count_kv([kv_heads] * layers if per_layer_heads else kv_heads)
    own_theta = values.get("rope_parameters", {}).get("full_attention", {}).get("rope_theta")
    writer.add_rope_freq_base(own_theta or values["rope_theta"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_eos_token_id(values["eos_token_id"])
    writer.add_bos_token_id(values["bos_token_id"])
    if "head_dim" in values:
        size = values.get("global_head_dim", values["head_dim"])
        writer.add_key_length(size)
        writer.add_value_length(size)
    scaling = values.get("rope_scaling", {})
    if scaling.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if "beta_fast" in scaling:
        writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    count = next((values[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in values), 0)
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(values.get("num_experts_per_tok") or values["top_k_experts"])
    if "n_group" in values:
        writer.add_expert_group_count(values["n_group"])
        writer.add_expert_group_used_count(values["topk_group"])


def _slides(layers: int) -> list[bool]:
    return [(layer + 1) % 6 != 0 for layer in range(layers)]


def _write_own(writer: gguf.GGUFWriter, family: str, values: Mapping[str, Any]) -> None:
    head = values.get("head_dim", values["hidden_size"] // values["num_attention_heads"])
    match family:
        case "llama" | "mistral3" | "mixtral":
            writer.add_rope_dimension_count(head)
        case "ministral3":
            writer.add_rope_dimension_count(head)
            writer.add_rope_scaling_yarn_log_mul(values["rope_scaling"]["mscale_all_dim"])
            writer.add_attn_temperature_scale(values["rope_scaling"]["llama_4_scaling_beta"])
        case "phi3":
            writer.add_rope_dimension_count(int(head * values["partial_rotary_factor"]))
            writer.add_rope_scaling_orig_ctx_len(values["original_max_position_embeddings"])
            writer.add_rope_scaling_attn_factors(values["rope_scaling"]["attention_factor"])
            writer.add_sliding_window(values["sliding_window"])
        case "gemma3":
            writer.add_sliding_window(values["sliding_window"])
        case "gemma4" | "gemma4_moe":
            writer.add_sliding_window(values["sliding_window"])
            writer.add_sliding_window_pattern(_slides(values["num_hidden_layers"]))
            writer.add_key_length_swa(head)
            writer.add_value_length_swa(head)
            writer.add_rope_dimension_count(values["global_head_dim"])
            writer.add_rope_dimension_count_swa(head)
            writer.add_rope_freq_base_swa(values["rope_parameters"]["sliding_attention"]["rope_theta"])
            writer.add_embedding_length_per_layer_input(0)
            writer.add_shared_kv_layers(0)
            writer.add_final_logit_softcapping(values["final_logit_softcapping"])
            if family == "gemma4_moe":
                writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
            pairs, turning = values["global_head_dim"] // 2, values["global_head_dim"] // 8
            writer.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32))
        case "granite":
            writer.add_rope_dimension_count(head)
            writer.add_attention_scale(values["attention_multiplier"])
            writer.add_embedding_scale(values["embedding_multiplier"])
            writer.add_residual_scale(values["residual_multiplier"])
            writer.add_logit_scale(values["logits_scaling"])
        case "olmo3":
            writer.add_sliding_window(values["sliding_window"])
            writer.add_sliding_window_pattern([(index + 1) % 4 != 0 for index in range(values["num_hidden_layers"])])
        case "cohere2":
            writer.add_layer_norm_eps(values["layer_norm_eps"])
            writer.add_logit_scale(values["logit_scale"])
            writer.add_sliding_window(values["sliding_window"])
            writer.add_rope_dimension_count(head)
            writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        case "qwen3_moe":
            writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
        case "gpt_oss":
            writer.add_sliding_window(values["sliding_window"])
            writer.add_expert_feed_forward_length(values["intermediate_size"])
        case "glm4_moe" | "deepseek_v3":
            rotates = values.get("qk_rope_head_dim") or int(head * values["partial_rotary_factor"])
            writer.add_rope_dimension_count(rotates)
            writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
            writer.add_expert_shared_count(values["n_shared_experts"])
            writer.add_leading_dense_block_count(values["first_k_dense_replace"])
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_weights_scale(values["routed_scaling_factor"])
            writer.add_expert_weights_norm(values["norm_topk_prob"])
            writer.add_nextn_predict_layers(values.get("num_nextn_predict_layers", 0))
        case "minimax_m2":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_feed_forward_length(values["intermediate_size"])
            writer.add_rope_dimension_count(values["rotary_dim"])


def _write_latent(writer: gguf.GGUFWriter, values: Mapping[str, Any], *, split: bool) -> None:
    key, rank = values["qk_nope_head_dim"] + values["qk_rope_head_dim"], values["kv_lora_rank"]
    writer.add_q_lora_rank(values["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_scaling_yarn_log_mul(0.1 * values["rope_scaling"]["mscale_all_dim"])
    writer.add_key_length(rank + values["qk_rope_head_dim"] if split else key)
    writer.add_value_length(rank if split else values["v_head_dim"])
    if split:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(values["v_head_dim"])


def _with_split_heads(tensors: Tensors, values: Mapping[str, Any], kind: str) -> Tensors:
    """Put [heads, rank, key] and [heads, value, rank] beside kv_b or in its place."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        part = name.replace("attn_kv_b", "{}")
        if part == name or kind == "both":
            found[name] = tensor
        if part != name:
            heads = tensor.reshape(values["num_attention_heads"], -1, values["kv_lora_rank"])
            keys, own = np.split(heads, [values["qk_nope_head_dim"]], axis=1)
            found[part.format("attn_k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
            found[part.format("attn_v_b")] = np.ascontiguousarray(own)
    return found


def _named(family: str, tensors: Tensors, values: Mapping[str, Any], layers: int) -> Tensors:
    """Rename, permute, add and stack as the converter does."""
    table = gguf.get_tensor_name_map(arch_of(family), layers)
    found: Tensors = {}
    stacks: dict[str, dict[int, npt.NDArray[np.float32]]] = {}
    for stored, tensor in _without_parameters(tensors).items():
        if match := _EXPERT.fullmatch(stored):
            name = f"{gguf.TENSOR_NAMES[_STACKS[match[3]]].format(bid=int(match[1]))}.weight"
            stacks.setdefault(name, {})[int(match[2])] = tensor
            continue
        within = stored.removeprefix("model.layers.").partition(".")
        if own := _OF_GEMMA4.get(within[2]):
            joined = tensor.reshape(values["num_experts"], -1, tensor.shape[-1]) if "_exps.weight" in own else tensor
            found[f"blk.{within[0]}.{own}"] = joined
            continue
        plain = stored.removeprefix("language_model.").replace("e_score_correction_bias", "e_score_correction.bias")
        name = table.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert name is not None, stored
        name = f"{name}.weight" if name.endswith("sinks") else name
        if family in _PERMUTED and "_proj." in stored:
            heads = {"q": values["num_attention_heads"], "k": values["num_key_value_heads"]}
            part = stored.rpartition("_proj.")[0][-1]
            tensor = permute_rows(tensor, heads[part]) if part in heads and "self_attn" in stored else tensor
        found[name] = tensor + 1 if family == "gemma3" and name.endswith("norm.weight") else tensor
    for name, parts in stacks.items():
        found[name] = np.stack([parts[index] for index in range(len(parts))])
    assert sum(tensor.size for tensor in found.values()) == sum(prod(tensor.shape) for tensor in tensors.values())
    return {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in found.items()}


def _without_parameters(tensors: Tensors) -> Tensors:
    """Split gpt-oss's gates from its ups, which take turns in the last dimension, and put outputs before inputs."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        match = _PARAMETER.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        prefix, part, bias = match.groups()
        parts = {"gate": tensor[..., 0::2], "up": tensor[..., 1::2]} if part == "gate_up" else {part: tensor}
        for each, own in parts.items():
            found[f"{prefix}{each}_proj.{'bias' if bias else 'weight'}"] = own if bias else own.swapaxes(1, 2)
    return found
