"""Tiny random checkpoints of every family, as ``transformers`` saves them, each with a tokenizer and its logits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 320
TOKENS: list[int] = np.random.default_rng(11).integers(16, 270, 60).tolist()
"""The prompt whose logits all sides compute. Longer than the windows of the models that have them."""

Floats = npt.NDArray[np.float32]

_SPECIAL = ("<pad>", "<s>", "</s>", "<|endoftext|>", "[gMASK]", "<|user|>", "<|observation|>", "<|im_end|>")
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3}
_ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1}
_LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3}
_SIGMOID = {"scoring_func": "sigmoid"}
_YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32}
_LATENT |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 1}
_GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True}
_DELTA: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
_MTP = {"mtp_num_hidden_layers": 1}
_UNKNOWN = {"model_type": "published"}  # else the converter lets transformers fill in and rename values
_MAMBA_LAYERS = ["mamba", "attention", "mamba", "mamba"]
_MAMBA: dict[str, Any] = {"mamba_n_groups": 2, "mamba_d_state": 16}
_MIXED: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_GEMMA4: dict[str, Any] = {
    "final_logit_softcapping": 20.0,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One model of a family."""

    config: str  # name of transformers' class
    values: Mapping[str, Any]
    pre_tokenizer: str = "gpt-2"  # what the converter would find for a known tokenizer
    recurrent: bool = False
    tokenizer: str = "bytes"  # or as the converter wants it: "fallback" to bytes as Gemma's, "gpt2" by class
    published: Mapping[str, Any] | None = None  # values of published folders that transformers writes otherwise
    has_mtp: bool = False  # a block that predicts a second token goes with it


def _family(config: str, *parts: Mapping[str, Any], **options: Any) -> Family:
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= part
    return Family(config, merged, **options)


FAMILIES: dict[str, Family] = {
    "llama": _family("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": _family("MistralConfig", {"sliding_window": None}),
    "ministral3": _family(
        "Ministral3Config",
        {"sliding_window": None},
        {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
    "qwen2": _family("Qwen2Config", {}, pre_tokenizer="qwen2"),
    "qwen3": _family("Qwen3Config", {}, pre_tokenizer="qwen2"),
    "gemma3": _family(
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "sliding_window": 16, "tie_word_embeddings": True},
        tokenizer="fallback",
    ),
    "gemma4": _family("Gemma4TextConfig", _SLIDING, _GEMMA4, tokenizer="fallback"),
    "gemma4 experts": _family(
        "Gemma4TextConfig",
        _SLIDING,
        _GEMMA4,
        {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3},
        tokenizer="fallback",
    ),
    "phi": _family("Phi3Config", {"sliding_window": None, "original_max_position_embeddings": 256}, tokenizer="gpt2"),
    "granite": _family(
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.3},
        {"residual_multiplier": 0.6, "logits_scaling": 2.5},
    ),
    "olmo2": _family("Olmo2Config", {}),
    "olmo3": _family("Olmo3Config", {"sliding_window": 16}),
    "cohere2": _family(
        "Cohere2Config", {"sliding_window": 16, "logit_scale": 0.3, "rotary_pct": 1.0, "tie_word_embeddings": True}
    ),
    "qwen3 experts": _family("Qwen3MoeConfig", _EXPERTS, {"norm_topk_prob": True}, pre_tokenizer="qwen2"),
    "mixtral": _family("MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "gpt-oss": _family(
        "GptOssConfig", _LOCAL, _SLIDING, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    ),
    "glm4 experts": _family(
        "Glm4MoeConfig",
        _ROUTED,
        {"attention_bias": True, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8},
        pre_tokenizer="glm4",
    ),
    "glm4 lite": _family(
        "Glm4MoeLiteConfig", _LATENT, _ROUTED, _SIGMOID, {"routed_scaling_factor": 1.8}, pre_tokenizer="glm4"
    ),
    "deepseek v2": _family("DeepseekV2Config", _LATENT, _ROUTED, {"norm_topk_prob": False}),
    "deepseek v3": _family("DeepseekV3Config", _LATENT, _ROUTED, _GROUPS, _SIGMOID),
    "minimax m2": _family(
        "MiniMaxM2Config",
        _LOCAL,
        _SIGMOID,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "qwen3-next": _family("Qwen3NextConfig", _EXPERTS, _DELTA, pre_tokenizer="qwen2", recurrent=True, has_mtp=True),
    "qwen3.5": _family("Qwen3_5TextConfig", _DELTA, _MTP, pre_tokenizer="qwen35", recurrent=True, has_mtp=True),
    "qwen3.5 experts": _family(
        "Qwen3_5MoeTextConfig", _EXPERTS, _DELTA, _MTP, pre_tokenizer="qwen35", recurrent=True, has_mtp=True
    ),
    "nemotron-h": _family(
        "NemotronHConfig",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
        {"ssm_state_size": 16, "n_groups": 2},
        recurrent=True,
        published={"hybrid_override_pattern": "M-*-", "layers_block_type": None, "num_hidden_layers": 4}
        | dict.fromkeys(("num_experts_per_tok", "n_routed_experts", "n_shared_experts", "n_group", "topk_group"))
        | _UNKNOWN,
    ),
    "nemotron-h experts": _family(
        "NemotronHConfig",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]},
        {"ssm_state_size": 16, "n_groups": 2, "routed_scaling_factor": 2.5},
        _ROUTED,
        recurrent=True,
    ),
    "granite 4": _family(
        "GraniteMoeHybridConfig",
        _MAMBA,
        {"layer_types": _MAMBA_LAYERS, "num_local_experts": 0, "num_experts_per_tok": 0},
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 4.0},
        recurrent=True,
        published={"layer_types": _MAMBA_LAYERS, **_UNKNOWN},
    ),
    "granite 4 experts": _family(
        "GraniteMoeHybridConfig",
        _MAMBA,
        _LOCAL,
        {"layer_types": _MAMBA_LAYERS},
        {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 4.0},
        recurrent=True,
        published={"layer_types": _MAMBA_LAYERS, **_UNKNOWN},
    ),
    "lfm2": _family("Lfm2Config", _MIXED, {"block_auto_adjust_ff_dim": False}, recurrent=True),
    "lfm2 experts": _family(
        "Lfm2MoeConfig", _EXPERTS, _MIXED, {"num_dense_layers": 1, "tie_word_embeddings": True}, recurrent=True
    ),
}
"""Keys are the names in tables."""


def slug(name: str) -> str:
    """Return a family's name as a file's."""
    return name.replace(" ", "-").replace(".", "")


def conversion(name: str, folder: Path, file: str) -> dict[str, str]:
    """Return the job for ``referee_converter`` that makes a family's GGUF file in its folder."""
    pre = FAMILIES[name].pre_tokenizer
    return {"folder": str(folder), "file": str(folder / file), "type": "f32", "pre": pre}


def config_of(family: Family, hidden: int, layers: int | None = None) -> transformers.PretrainedConfig:
    """Return the config of a model of this hidden size, a multiple of 32. Inner sizes are multiples of it.

    ``layers``: for a family whose layers are all alike; None: four or as many as its values list.
    """
    head = max(32 if family.config.startswith("Qwen3_5") else 16, hidden // 4)  # as wide as the sections of its rope
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "head_dim": head}
    sizes |= {"moe_intermediate_size": hidden, "shared_expert_intermediate_size": hidden}
    if family.config.startswith("NemotronH"):
        sizes |= {"mamba_num_heads": 4, "mamba_head_dim": hidden // 2, "moe_shared_expert_intermediate_size": hidden}
    if family.config.startswith("Granite"):
        sizes |= {"mamba_n_heads": 4, "mamba_d_head": hidden // 2, "shared_intermediate_size": hidden}
    if family.config.startswith("Gemma4"):
        sizes |= {"global_head_dim": 2 * head}
    if family.config in ("MixtralConfig", "GptOssConfig", "MiniMaxM2Config", "GraniteMoeHybridConfig"):
        sizes["intermediate_size"] = hidden  # size of each expert
    if family.config == "MiniMaxM2Config":
        sizes["rotary_dim"] = head // 2
    if "kv_lora_rank" in family.values:
        del sizes["head_dim"]
    values = _BASE | sizes | dict(family.values)
    listed = values.get("layers_block_type")
    values["num_hidden_layers"] = layers or (len(listed) if listed else values["num_hidden_layers"])
    return getattr(transformers, family.config)(**values)


def write_checkpoint(
    family: Family, folder: Path, *, hidden: int, layers: int | None = None, grid: float | None = None
) -> Floats:
    """Save a model with its tokenizer. Returns its logits [TOKENS, V] in float32.

    ``grid``: weights are multiples of it, so that compressed files are small.
    """
    torch.manual_seed(0)
    config = config_of(family, hidden, layers)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, grid)
        for name, buffer in model.named_buffers():
            if "bias" in name:  # corrections of routers
                buffer.normal_(std=0.3)
            if "layer_scalar" in name:
                buffer.copy_(torch.randint(96, 160, buffer.shape) / 128)  # exact in bf16, as published ones are
    model.save_pretrained(folder)
    if family.published:
        written = json.loads((folder / "config.json").read_text(encoding="utf-8")) | dict(family.published)
        kept = {key: value for key, value in written.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    if family.has_mtp:
        _add_mtp(folder)
    _write_tokenizer(family, folder)
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def _fill(name: str, parameter: torch.Tensor, grid: float | None) -> None:
    """Give a weight random values: all parts matter, norms lie near their neutral value, states remember tokens."""
    if name.endswith("A_log"):
        parameter.uniform_(-4.0, -1.0)
        return
    neutral = float(parameter.flatten()[0]) if "norm" in name else 0.0
    fan_in = parameter.shape[-1] * (parameter.shape[-2] if "conv" in name and parameter.dim() > 2 else 1)
    parameter.normal_(std=1.2 / fan_in**0.5 if parameter.dim() > 1 else 0.2)
    if "norm" in name:
        parameter.add_(neutral)
    elif grid is not None:
        parameter.copy_((parameter / grid).round() * grid)


def _add_mtp(folder: Path) -> None:
    """Add the block that predicts a second token, as Qwen3-Next's folders have it: one more layer of attention."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    last = config["num_hidden_layers"] - 1
    prefix = f"model.layers.{last}."
    hidden = config["hidden_size"]
    for name in [name for name in tensors if name.startswith(prefix)]:
        tensors["mtp.layers.0." + name.removeprefix(prefix)] = tensors[name].clone()
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.randn(hidden)
    save_file(tensors, path, metadata={"format": "pt"})


def _write_tokenizer(family: Family, folder: Path) -> None:
    """Write a tokenizer of bytes with few merges, as JSON that transformers reads."""
    if family.tokenizer == "fallback":
        tokenizer = _byte_fallback()
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {text: index for index, text in enumerate((*_SPECIAL, *letters))}
        merges = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("Ġ", "the"), ("e", "r")]
        vocabulary |= {"".join(pair): len(vocabulary) + index for index, pair in enumerate(merges)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    kept = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<pad>"}
    kind = "GPT2Tokenizer" if family.tokenizer == "gpt2" else "PreTrainedTokenizerFast"
    settings = {"tokenizer_class": kind, "add_bos_token": True, **kept}
    settings["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _byte_fallback() -> Tokenizer:
    """Return a tokenizer as Gemma has it: text as it is, bytes where the vocabulary lacks a character."""
    texts = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("▁", "the")]
    texts += ["".join(pair) for pair in merges]
    texts += [f"<unused{index}>" for index in range(VOCABULARY - len(texts))]  # converters cut tables to the tokenizer
    vocabulary = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
