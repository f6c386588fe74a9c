"""Names of stored tensors where a family's files call them otherwise than edgepipe.

edgepipe's names are those of Hugging Face's Llama, with ``mlp.router``, ``mlp.experts.gate_proj`` (all experts in one
weight [experts * out, in]) and ``mlp.shared_expert`` for mixtures of experts. GGUF readers translate to them, so only
Hugging Face's folders need a naming.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from edgepipe.spec.naming_recurrent import RECURRENT, RECURRENT_STACKED
from edgepipe.spec.naming_rules import EACH, GATES_AND_UPS, MTP, Naming

_GGUF_EXPERT = re.compile(r"blk\.\d+\.ffn_gate\.\d+\.weight")
PLAIN = Naming()
_CORRECTION = "e_score_correction_bias"
_MATRICES = ("gate_proj", "up_proj", "down_proj")
_W = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_GEMMA4_MODULES = {
    "mlp.router": "router.proj",
    "mlp.router.input_scale": "router.scale",
    "mlp.router.expert_scale": "router.per_expert_scale",
    "mlp.dense_output_norm": "post_feedforward_layernorm_1",
    "mlp.expert_input_norm": "pre_feedforward_layernorm_2",
    "mlp.expert_output_norm": "post_feedforward_layernorm_2",
}
_GEMMA4_STACKED = Naming(  # MLX's names
    modules={
        **_GEMMA4_MODULES,
        **{f"mlp.experts.{matrix}": f"experts.switch_glu.{matrix}" for matrix in _MATRICES},
    }
)
_GEMMA4 = Naming(
    modules={
        **_GEMMA4_MODULES,
        "mlp.experts.gate_proj.weight": "experts.gate_up_proj",
        "mlp.experts.up_proj.weight": "experts.gate_up_proj",
        "mlp.experts.down_proj.weight": "experts.down_proj",
    },
    fused=GATES_AND_UPS,
)
_HF: Mapping[str, Naming] = {
    "": PLAIN,
    "qwen3_moe": Naming(modules={"mlp.router": "mlp.gate"}, experts=EACH),
    "mixtral": Naming(
        modules={"mlp.router": "block_sparse_moe.gate"},
        experts="block_sparse_moe.experts.{expert}.{matrix}",
        matrices=_W,
    ),
    "minimax_m2": Naming(
        modules={
            "mlp.router": "block_sparse_moe.gate",
            "mlp.router.correction": f"block_sparse_moe.{_CORRECTION}",
        },
        experts="block_sparse_moe.experts.{expert}.{matrix}",
        matrices=_W,
        later_layers=True,
        unread=MTP,
    ),
    "glm4_moe": Naming(
        modules={
            "mlp.router": "mlp.gate",
            "mlp.router.correction": f"mlp.gate.{_CORRECTION}",
            "mlp.shared_expert.gate_proj": "mlp.shared_experts.gate_proj",
            "mlp.shared_expert.up_proj": "mlp.shared_experts.up_proj",
            "mlp.shared_expert.down_proj": "mlp.shared_experts.down_proj",
        },
        experts=EACH,
        later_layers=True,
    ),
    "gpt_oss": Naming(
        fused=GATES_AND_UPS,
        interleaved=True,
        parameters=True,
    ),
    "fused": Naming(
        fused={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        }
    ),
    "gemma4": _GEMMA4,
    "gemma4 of several": replace(
        _GEMMA4,
        prefix="model.language_model.",
        skipped=(r"model\.(vision_tower|embed_vision|audio_tower|embed_audio|vision_embedder)\.",),
        unread="pictures and sounds",
    ),
    "text of several": Naming(
        prefix="language_model.model.",
        head="language_model.lm_head",
        skipped=("vision_tower\\.", "vision_model\\.", "multi_modal_projector\\."),
        unread="pictures",
    ),
    "deepseek2": Naming(
        later_layers=True,
        skipped=(r"blk\.\d+\.nextn\.", r"model\.layers\.\d+\.self_attn\.[kv]_b_proj\."),  # some files have kv_b twice
    ),
    "later layers": Naming(later_layers=True, skipped=(r"blk\.\d+\.nextn\.",)),
    "each expert": Naming(experts=EACH),
    **RECURRENT,
}


def _stacked(naming: Naming) -> Naming:
    """Return the naming of a family's files as MLX writes them: all experts of a matrix in one tensor."""
    if naming.parameters:
        return replace(naming, fused={}, interleaved=False, parameters=False)
    within = naming.experts.partition(".experts.")[0]
    stacks = {f"mlp.experts.{matrix}": f"{within}.switch_mlp.{matrix}" for matrix in _MATRICES}
    heads = {"self_attn.k_b_proj": "self_attn.embed_q", "self_attn.v_b_proj": "self_attn.unembed_out"}
    return replace(naming, modules={**naming.modules, **stacks, **heads}, experts="")


_GGUF_WITH_EXPERTS = (
    *("", "deepseek2", "later layers"),
    *("qwen3_next, GGUF", "qwen3_5, GGUF", "granitemoehybrid, GGUF"),
)


_OF_PLAIN = {"joined": "experts' gates and ups"}  # the cards of stored models spell it so


def _variant(name: str, variant: str) -> str:
    return f"{name}, {variant}" if name else _OF_PLAIN.get(variant, variant)


NAMINGS: Mapping[str, Naming] = {
    **_HF,
    **{
        _variant(name, "joined"): replace(_HF[name], fused={**_HF[name].fused, **GATES_AND_UPS})
        for name in _GGUF_WITH_EXPERTS
    },
    **{f"{name}, stacked": _stacked(naming) for name, naming in _HF.items() if naming.experts or naming.parameters},
    "gemma4, stacked": _GEMMA4_STACKED,
    "gemma4 of several, stacked": replace(
        _GEMMA4_STACKED,
        prefix="language_model.model.",
        skipped=(r"(vision_tower|embed_vision|audio_tower|embed_audio|vision_embedder|multi_modal_projector)\.",),
        unread="pictures and sounds",
    ),
    **RECURRENT_STACKED,
}
"""Keys are values of ``ModelConfig.naming``."""


_VARIANTS = {  # variants of a naming: a stored name that contains one of the marks shows the variant
    "stacked": (".switch_mlp.", ".switch_glu.", ".experts.gate_proj.", "language_model.model.layers."),
    "joined": (".experts.gate_up_proj", ".ffn_gate_up_exps."),
    "early": (".ssm_in.",),
    "plain": (".mlp.gate_proj.",),
}


def settled_naming(name: str, stored: Collection[str]) -> str:
    """Return the naming of a model's files from that of the family, and the names of the stored tensors."""
    if not name and any(_GGUF_EXPERT.fullmatch(each) for each in stored):
        return "each expert"  # Mixtral's GGUF files of early 2024
    for variant, marks in _VARIANTS.items():
        found = _variant(name, variant)
        if found in NAMINGS and any(mark in each for each in stored for mark in marks):
            return found
    return name
