"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without positions, or one of two feed-forward parts.

Feed-forward parts and experts have no gate: the activation is a squared ReLU.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from edgepipe.spec.families.glm4_moe import corrected_router
from edgepipe.spec.families.nemotron_h_gguf import LEAST_STEP, from_gguf
from edgepipe.spec.families.reading import Family, FamilySpec, HfShape, unsupported
from edgepipe.spec.families.recurrent import GGUF_MAMBA, layer_kinds
from edgepipe.spec.layer_spec import Dense, Experts, LayerSpec, Mamba2, Norm
from edgepipe.spec.shape_limits import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_INTERMEDIATE,
    MAX_TAPS,
    MAX_TIME_STEP,
    checked_mamba2,
)

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation(("relu2",), "mlp_hidden_act")
    shape.check_activation(key="mamba_hidden_act")
    _refuse(shape)
    size = shape.fields.integer("attention_head_dim", low=2, high=MAX_HEAD_DIM, default=128)  # earlier configs' key
    attention = shape.attention(shape.any_head_dim(size), None, kv_heads=8)
    kinds = _kinds(shape)
    layers: dict[str, LayerSpec] = {}
    for kind in dict.fromkeys(kinds):
        match kind:
            case "full_attention":
                layers[kind] = LayerSpec(attention=attention)
            case "mlp":
                inner, bias = shape.inner(default=21_504), shape.flag("mlp_bias")
                layers[kind] = LayerSpec(dense=Dense(inner=inner, bias=bias, gated=False, activation="relu2"))
            case "moe":
                layers[kind] = LayerSpec(experts=_experts(shape))
            case _:
                layers[kind] = LayerSpec(recurrent=_mamba2(shape))
    norm = Norm(eps=shape.fields.number("layer_norm_epsilon", low=0.0, high=0.1, default=1e-5))
    return FamilySpec(
        layers=tuple(layers[kind] for kind in kinds),
        norm=norm,
        tied_embeddings=False,  # whatever the config says: transformers' class has a head of its own
    )


def _refuse(shape: HfShape) -> None:
    """Refuse fields that change the computation. Raises ArchitectureUnsupported."""
    fields = shape.fields
    if fields.has("sliding_window"):
        raise unsupported("sliding_window", ["attention to the whole context"])
    if shape.flag("attention_bias"):
        raise unsupported("attention_bias true", ["attention without biases"])
    if shape.flag("mamba_proj_bias") != shape.flag("use_bias"):
        raise unsupported("mamba_proj_bias unlike use_bias", ["one of both for all projections"])


def _kinds(shape: HfShape) -> list[str]:
    """Return each layer's kind, from the list of newer configs or the letters of earlier ones. Raises ModelInvalid."""
    key, count = "hybrid_override_pattern", shape.num_layers
    if found := layer_kinds(shape, "layers_block_type", tuple(_LETTERS.values())):
        return found
    pattern = shape.fields.text(key, default="")
    if len(pattern) != count or not set(_LETTERS).issuperset(pattern):
        raise shape.fields.fail(key, f"{count} letters of {''.join(_LETTERS)} are needed, it has {len(pattern)}")
    return [_LETTERS[letter] for letter in pattern]


def _mamba2(shape: HfShape) -> Mamba2:
    fields = shape.fields
    mamba = Mamba2(
        heads=fields.integer("mamba_num_heads", low=1, high=MAX_HEADS, default=128),
        head_dim=fields.integer("mamba_head_dim", low=1, high=MAX_HEAD_DIM, default=64),
        groups=fields.integer("n_groups", low=1, high=MAX_HEADS, default=8),
        state_dim=fields.integer("ssm_state_size", low=1, high=MAX_HEAD_DIM, default=128),
        taps=fields.integer("conv_kernel", low=2, high=MAX_TAPS, default=4),
        conv_bias=shape.flag("use_conv_bias", default=True),
        bias=shape.flag("use_bias"),
        dt_limits=(fields.number("time_step_min", low=0.0, high=MAX_TIME_STEP, default=LEAST_STEP), inf),
    )
    return checked_mamba2(fields, mamba, "n_groups")


def _experts(shape: HfShape) -> Experts:
    if shape.flag("mlp_bias"):
        raise unsupported("mlp_bias true with experts", ["experts without biases"])
    router = corrected_router(shape, scale=1.0, groups=1, groups_used=1)
    inner = shape.inner("moe_intermediate_size", 7688)
    shared = shape.inner("moe_shared_expert_intermediate_size", 7688)
    found = shape.mixture(shape.experts("n_routed_experts", 8), 2, inner, router, shared_inner=shared)
    latent = shape.fields.integer("moe_latent_size", low=1, high=MAX_INTERMEDIATE, default=0)
    return replace(found, gated=False, activation="relu2", latent=latent)


NEMOTRON_H = Family(
    name="nemotron_h",
    hf_class="NemotronHForCausalLM",
    models="Nemotron-3-Nano and Super, Nemotron-H",
    from_hf=_hf,
    naming="nemotron_h",
    default_context=4096,
    own_code=True,
    gguf="nemotron_h",
    gguf_naming="nemotron_h, GGUF",
    from_gguf=from_gguf,
    gguf_parts=GGUF_MAMBA,
    with_experts=None,
)
NEMOTRON_H_MOE = replace(NEMOTRON_H, gguf="nemotron_h_moe", models="Nemotron-3-Nano and Super in GGUF files")
