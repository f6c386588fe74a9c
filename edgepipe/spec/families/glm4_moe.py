"""GLM-4.5, 4.6 and GLM-4.5-Air: leading dense layers, then experts that a corrected sigmoid chooses."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape
from edgepipe.spec.layer_spec import Attention, Dense, Experts, LayerSpec, Router
from edgepipe.spec.shape_limits import MAX_EXPERTS, MAX_LAYERS


def sparse_layers(
    num_layers: int, attention: Attention, dense: Dense, experts: Experts, first: int
) -> tuple[LayerSpec, ...]:
    """Return the layers; ``first``: the first with experts."""
    leading = (LayerSpec(attention=attention, dense=dense),) * min(first, num_layers)
    return (*leading, *(LayerSpec(attention=attention, experts=experts),) * (num_layers - len(leading)))


def corrected_router(shape: HfShape, *, scale: float, groups: int, groups_used: int) -> Router:
    """Return the router without auxiliary loss, with a class's defaults. Raises ModelInvalid."""
    return Router(
        score="sigmoid",
        normalised=shape.flag("norm_topk_prob", default=True),
        scale=shape.factor("routed_scaling_factor", scale),
        correction=True,
        groups=shape.experts("n_group", groups),
        groups_used=shape.experts("topk_group", groups_used),
        group_score="top2",
    )


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation()
    fields, size = shape.fields, shape.any_head_dim()
    dims = shape.rotary_dims(size, 0.5)
    attention = replace(
        shape.attention(size, shape.rope(dims), kv_heads=8),
        rotary_dim=dims,
        qkv_bias=shape.flag("attention_bias"),
        qk_norm="head" if shape.flag("use_qk_norm") else "",
    )
    router = corrected_router(shape, scale=1.0, groups=1, groups_used=1)
    inner = shape.inner("moe_intermediate_size", 1408)
    shared = inner * fields.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=1)
    experts = shape.mixture(shape.experts("n_routed_experts", 128), 8, inner, router, shared_inner=shared)
    first = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=1)
    layers = sparse_layers(shape.num_layers, attention, Dense(inner=shape.inner(default=10_944)), experts, first)
    mtp = shape.mtp(LayerSpec(attention=attention, experts=experts))
    return FamilySpec(layers=layers, norm=shape.norm(1e-5), tied_embeddings=shape.tied(), mtp=mtp)


def _gguf(shape: GgufShape) -> FamilySpec:
    size = shape.head_dim()
    dims = shape.rotary_dims(size)
    attention = replace(
        shape.attention(size, shape.rope(dims)),
        rotary_dim=dims,
        qkv_bias=shape.biased("attn_q"),
        qk_norm="head" if "blk.0.attn_q_norm.weight" in shape.tensors else "",
    )
    inner = shape.inner("expert_feed_forward_length")
    shared = inner * shape.integer("expert_shared_count", low=0, high=MAX_EXPERTS, default=1)
    router = shape.router("sigmoid", correction=True, group_score="top2")
    experts = shape.mixture(inner, router, shared_inner=shared)
    first = shape.integer("leading_dense_block_count", low=0, high=MAX_LAYERS, default=1)
    layers = sparse_layers(shape.own_layers, attention, Dense(inner=shape.inner()), experts, first)
    mtp = shape.mtp(LayerSpec(attention=attention, experts=experts))
    return FamilySpec(layers=layers, norm=shape.norm(), tied_embeddings=shape.tied, mtp=mtp)


GLM4_MOE = Family(
    name="glm4_moe",
    hf_class="Glm4MoeForCausalLM",
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
    from_hf=_hf,
    naming="glm4_moe",
    gguf_naming="later layers",
    default_context=131_072,
    gguf="glm4moe",
    from_gguf=_gguf,
    with_experts=True,
    gguf_parts={"post_attention_norm": "post_attention_layernorm"},
)
