"""Names of stored tensors where a family's files call them otherwise than edgepipe.

edgepipe's names are those of Hugging Face's Llama, with ``mlp.router``, ``mlp.experts.gate_proj`` (all experts in one
weight [experts * out, in]) and ``mlp.shared_expert`` for mixtures of experts. GGUF readers translate to them, so only
Hugging Face's folders need a naming.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

_GGUF_EXPERT = re.compile(r"blk\.\d+\.ffn_gate\.\d+\.weight")
_EXPERT = re.compile(r"mlp\.experts\.(gate_proj|up_proj|down_proj)\b")


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How a family's files name their tensors."""

    modules: Mapping[str, str] = field(default_factory=dict[str, str])  # within a layer: edgepipe's name to the files'
    experts: str = ""  # of each expert's matrices: "mlp.experts.{expert}.{matrix}"; empty: one tensor for all
    matrices: Mapping[str, str] = field(default_factory=dict[str, str])  # "gate_proj" to the files' name
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Stored modules that hold the rows of several modules of edgepipe's, in their order."""
    interleaved: bool = False  # rows of fused modules alternate
    parameters: bool = False  # all experts of a matrix are "mlp.experts.MATRIX" [experts, in, out] if stored as floats,
    # and "mlp.experts.MATRIX_bias" [experts, out]
    prefix: str = "model."  # before "layers.", "embed_tokens" and "norm"
    head: str = "lm_head"
    later_layers: bool = False  # files may hold layers beyond the model's, which predict several tokens at once
    skipped: tuple[str, ...] = ()  # regular expressions of tensors that edgepipe does not read
    unread: str = ""  # what those tensors and later layers are, for people

    def stored(self, name: str, *, expert: int | None = None) -> str:
        """Return the stored name of a weight or bias; ``expert``: of one expert's share."""
        if name.startswith("lm_head."):
            return self.head + name.removeprefix("lm_head")
        layers, dot, within = name.removeprefix("model.").partition(".")
        if layers != "layers":
            return self.prefix + name.removeprefix("model.")
        layer, _, inner = within.partition(".")
        return f"{self.prefix}layers{dot}{layer}.{self._within(inner, expert)}"

    def fused_with(self, module: str) -> tuple[str, ...]:
        """Return the modules within a layer that one stored module holds with this one, in order; () for none."""
        return next((modules for modules in self.fused.values() if module in modules), ())

    def _within(self, inner: str, expert: int | None) -> str:
        found = _EXPERT.match(inner)
        if found is not None and expert is not None:
            matrix = self.matrices.get(found[1], found[1])
            return self.experts.format(expert=expert, matrix=matrix) + inner[found.end() :]
        module, dot, suffix = inner.rpartition(".")
        module = next((name for name, modules in self.fused.items() if module in modules), module)
        if found is not None and self.parameters:
            return f"{module}_bias" if suffix == "bias" else module
        return self.modules.get(inner) or self.modules.get(module, module) + dot + suffix

    def skips(self, name: str) -> bool:
        """Return whether edgepipe leaves a stored tensor unread."""
        return any(re.match(pattern, name) for pattern in self.skipped)


PLAIN = Naming()
_EACH = "mlp.experts.{expert}.{matrix}"
_CORRECTION = "e_score_correction_bias"
_MATRICES = ("gate_proj", "up_proj", "down_proj")
_MTP = "multi-token prediction"
_W = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_GEMMA4_MODULES = {
    "mlp.router": "router.proj",
    "mlp.router.input_scale": "router.scale",
    "mlp.router.expert_scale": "router.per_expert_scale",
    "mlp.dense_output_norm": "post_feedforward_layernorm_1",
    "mlp.expert_input_norm": "pre_feedforward_layernorm_2",
    "mlp.expert_output_norm": "post_feedforward_layernorm_2",
}
_GEMMA4 = Naming(
    modules={
        **_GEMMA4_MODULES,
        "mlp.experts.gate_proj.weight": "experts.gate_up_proj",
        "mlp.experts.up_proj.weight": "experts.gate_up_proj",
        "mlp.experts.down_proj.weight": "experts.down_proj",
    },
    fused={"mlp.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj")},
)
_HF: Mapping[str, Naming] = {
    "": PLAIN,
    "qwen3_moe": Naming(modules={"mlp.router": "mlp.gate"}, experts=_EACH),
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
        unread=_MTP,
    ),
    "glm4_moe": Naming(
        modules={
            "mlp.router": "mlp.gate",
            "mlp.router.correction": f"mlp.gate.{_CORRECTION}",
            "mlp.shared_expert.gate_proj": "mlp.shared_experts.gate_proj",
            "mlp.shared_expert.up_proj": "mlp.shared_experts.up_proj",
            "mlp.shared_expert.down_proj": "mlp.shared_experts.down_proj",
        },
        experts=_EACH,
        later_layers=True,
        unread=_MTP,
    ),
    "gpt_oss": Naming(
        fused={"mlp.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj")},
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
        unread=_MTP,
    ),
    "experts' gates and ups": Naming(fused=_GEMMA4.fused),
    "later layers": Naming(later_layers=True, skipped=(r"blk\.\d+\.nextn\.",), unread=_MTP),
    "each expert": Naming(experts=_EACH),
}


def _stacked(naming: Naming) -> Naming:
    """Return the naming of a family's files as MLX writes them: all experts of a matrix in one tensor."""
    if naming.parameters:
        return replace(naming, fused={}, interleaved=False, parameters=False)
    within = naming.experts.partition(".experts.")[0]
    stacks = {f"mlp.experts.{matrix}": f"{within}.switch_mlp.{matrix}" for matrix in _MATRICES}
    heads = {"self_attn.k_b_proj": "self_attn.embed_q", "self_attn.v_b_proj": "self_attn.unembed_out"}
    return replace(naming, modules={**naming.modules, **stacks, **heads}, experts="")


NAMINGS: Mapping[str, Naming] = {
    **_HF,
    **{f"{name}, stacked": _stacked(naming) for name, naming in _HF.items() if naming.experts or naming.parameters},
    "gemma4 of several, stacked": Naming(
        modules={
            **_GEMMA4_MODULES,
            **{f"mlp.experts.{matrix}": f"experts.switch_glu.{matrix}" for matrix in _MATRICES},
        },
        prefix="language_model.model.",
        skipped=(r"(vision_tower|embed_vision|audio_tower|embed_audio|vision_embedder|multi_modal_projector)\.",),
        unread="pictures and sounds",
    ),
}
"""By ``ModelConfig.naming``."""


def settled_naming(name: str, stored: Collection[str]) -> str:
    """Return the naming of a model's files from that of the family, and the names of the stored tensors."""
    if not name and any(_GGUF_EXPERT.fullmatch(each) for each in stored):
        return "each expert"  # of Mixtral, as GGUF files of early 2024 hold them
    if name == "experts' gates and ups" and not any("ffn_gate_up_exps" in each for each in stored):
        return ""
    stacked = f"{name}, stacked"
    marks = (".switch_mlp.", ".experts.gate_proj.", "language_model.model.layers.")
    found = stacked in NAMINGS and any(mark in each for each in stored for mark in marks)
    return stacked if found else name
