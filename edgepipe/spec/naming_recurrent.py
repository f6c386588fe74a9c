"""Names of stored tensors of the families with recurrent layers, in Hugging Face's folders and in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgepipe.spec.naming_rules import EACH, GATES_AND_UPS, MTP, Naming

_JOINED = {  # gates and ups of all experts in one tensor [experts, 2 * inner, H]
    "mlp.experts.gate_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.up_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj.weight": "mlp.experts.down_proj",
}
_BETA_ALPHA = {"linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a")}
_BY_KEY_HEAD = {"linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"), **_BETA_ALPHA}
_ROUTER = {"mlp.router": "mlp.gate"}

_QWEN3_NEXT = Naming(
    modules=_ROUTER, experts=EACH, fused=_BY_KEY_HEAD, by_key_head=True, skipped=(r"mtp\.",), mtp="mtp."
)
_QWEN3_5 = Naming(
    modules=_ROUTER,
    experts=EACH,
    skipped=(r"mtp\.", r"model\.visual\."),
    unread="pictures",
    mtp="mtp.",
)
_QWEN3_5_VISION = replace(_QWEN3_5, prefix="model.language_model.")
_GGUF = Naming(later_layers=True, skipped=(r"blk\.\d+\.nextn\.",), exponents=True)

_MAMBA = ("in_proj", "out_proj", "conv1d", "norm", "dt_bias", "A_log", "D")
_NEMOTRON_H = Naming(
    modules={
        "input_layernorm": "norm",
        "post_attention_layernorm": "norm",
        **{f"self_attn.{name}": f"mixer.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{f"mamba.{name}": f"mixer.{name}" for name in _MAMBA},
        **{f"mlp.{name}": f"mixer.{name}" for name in ("up_proj", "down_proj")},
        **{f"mlp.shared_expert.{name}": f"mixer.shared_experts.{name}" for name in ("up_proj", "down_proj")},
        "mlp.latent_in": "mixer.fc1_latent_proj",
        "mlp.latent_out": "mixer.fc2_latent_proj",
        "mlp.router": "mixer.gate",
        "mlp.router.correction": "mixer.gate.e_score_correction_bias",
    },
    experts="mixer.experts.{expert}.{matrix}",
    prefix="backbone.",
    tables={"embed_tokens": "embeddings", "norm": "norm_f"},
    skipped=(r"mtp\.",),
    unread=MTP,
)
_SHARED_MLP = "shared_mlp.input_linear"
_GRANITE = Naming(
    modules={
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear",
        "mlp.experts.down_proj": "block_sparse_moe.output_linear",
        "mlp.gate_up_proj": _SHARED_MLP,
        "mlp.down_proj": "shared_mlp.output_linear",
        "mlp.shared_expert.gate_up_proj": _SHARED_MLP,
        "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
    },
    fused={
        **GATES_AND_UPS,
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.shared_expert.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    },
)
_W = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LFM2 = Naming(
    modules={
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        **{f"mlp.{name}": f"feed_forward.{stored}" for name, stored in _W.items()},
        "mlp.router": "feed_forward.gate",
        "mlp.router.correction": "feed_forward.expert_bias",
    },
    experts="feed_forward.experts.{expert}.{matrix}",
    matrices=_W,
    tables={"norm": "embedding_norm"},
)


def _joined(naming: Naming) -> Naming:
    """Return the naming of files that hold all experts in two tensors."""
    return replace(naming, modules={**naming.modules, **_JOINED}, fused={**naming.fused, **GATES_AND_UPS}, experts="")


_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_MLX_QWEN3_5 = Naming(
    modules={**_ROUTER, **{f"mlp.experts.{name}": f"mlp.switch_mlp.{name}" for name in _EXPERTS}},
    prefix="language_model.model.",
    head="language_model.lm_head",
    skipped=(r"vision_tower\.", r"(language_model\.)?mtp\."),
    unread="pictures",
    mtp="language_model.mtp.",
)
_MLX_NEMOTRON_H = replace(
    _NEMOTRON_H,
    modules={
        **_NEMOTRON_H.modules,
        "mlp.experts.up_proj": "mixer.switch_mlp.fc1",
        "mlp.experts.down_proj": "mixer.switch_mlp.fc2",
    },
    experts="",
)

_MLX_GRANITE = replace(
    _GRANITE,
    modules={
        **_GRANITE.modules,
        **{f"mlp.experts.{name}": f"block_sparse_moe.switch_mlp.{name}" for name in _EXPERTS},
    },
    fused={"mlp.shared_expert.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")},
)
_MLX_LFM2 = replace(
    _LFM2,
    modules={
        **_LFM2.modules,
        **{f"mlp.{name}": f"feed_forward.{name}" for name in _EXPERTS},
        **{f"mlp.experts.{name}": f"feed_forward.switch_mlp.{name}" for name in _EXPERTS},
    },
    experts="",
)

RECURRENT_STACKED: Mapping[str, Naming] = {
    "qwen3_5, stacked": _MLX_QWEN3_5,
    "qwen3_5 of several, stacked": _MLX_QWEN3_5,
    "nemotron_h, stacked": _MLX_NEMOTRON_H,
    "granitemoehybrid, stacked": _MLX_GRANITE,
    "granitemoehybrid, plain": Naming(),
    "lfm2, stacked": _MLX_LFM2,
}
"""Names in MLX's files that do not follow from those in Hugging Face's."""

RECURRENT: Mapping[str, Naming] = {
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_next, joined": _joined(_QWEN3_NEXT),
    "qwen3_5": _QWEN3_5,
    "qwen3_5, joined": _joined(_QWEN3_5),
    "qwen3_5 of several": _QWEN3_5_VISION,
    "qwen3_5 of several, joined": _joined(_QWEN3_5_VISION),
    "qwen3_next, GGUF": replace(_GGUF, fused=_BETA_ALPHA, by_key_head=True),
    "qwen3_next, GGUF, early": replace(_GGUF, fused=_BY_KEY_HEAD, by_key_head=True),
    "qwen3_5, GGUF": _GGUF,
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h, GGUF": replace(_GGUF, modules={"post_attention_layernorm": "input_layernorm"}, unread=MTP),
    "granitemoehybrid": _GRANITE,
    "granitemoehybrid, GGUF": Naming(exponents=True),
    "lfm2": _LFM2,
}
"""Keys are values of ``ModelConfig.naming``."""
