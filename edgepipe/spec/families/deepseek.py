"""DeepSeek V2 and V3: latent attention, leading dense layers, then experts in groups beside shared ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgepipe.spec.families.glm4_moe import corrected_router, sparse_layers
from edgepipe.spec.families.latent_attention import GGUF_PARTS, LatentSizes, gguf_latent, hf_latent
from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape, unsupported
from edgepipe.spec.layer_spec import Attention, Dense, LayerSpec, Router
from edgepipe.spec.shape_limits import MAX_EXPERTS, MAX_LAYERS

_SIZES = LatentSizes(query_rank=1536, nope_dim=128, value_dim=128)


def _reader(
    router: Callable[[HfShape], Router], *, first: int, inner: int, expert_inner: int, shared: int, count: int
) -> Callable[[HfShape], FamilySpec]:
    """Return a family's reader; numbers are defaults of the class in transformers."""

    def read(shape: HfShape) -> FamilySpec:
        shape.check_activation()
        if shape.fields.integer("moe_layer_freq", low=1, high=MAX_LAYERS, default=1) != 1:
            raise unsupported("moe_layer_freq", ["1"])
        width = shape.inner("moe_intermediate_size", expert_inner)
        shared_inner = width * shape.fields.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=shared)
        own = router(shape)
        number = shape.experts("n_routed_experts", count)
        used = shape.experts("num_experts_per_tok", 8 if own.correction else None)
        experts = shape.mixture(number, used, width, own, shared_inner=shared_inner)
        leading = shape.fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=first)
        dense = Dense(inner=shape.inner(default=inner))
        attention = _attention(shape, own)
        layers = sparse_layers(shape.num_layers, attention, dense, experts, leading)
        mtp = shape.mtp(LayerSpec(attention=attention, experts=experts))
        return FamilySpec(layers=layers, norm=shape.norm(), tied_embeddings=shape.tied(), mtp=mtp)

    return read


def _attention(shape: HfShape, router: Router) -> Attention:
    attention = hf_latent(shape, _SIZES)
    return attention if router.correction else replace(attention, interleaved=True)


def _router_v2(shape: HfShape) -> Router:
    for key in ("norm_topk_prob", "mlp_bias"):  # transformers does not read the former
        if shape.flag(key):
            raise unsupported(key, ["false"])
    method = shape.fields.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise unsupported(f"topk_method {method}", ["greedy", "group_limited_greedy"])
    grouped = method == "group_limited_greedy"
    return Router(
        normalised=False,
        scale=shape.factor("routed_scaling_factor"),
        groups=shape.experts("n_group") if grouped else 1,
        groups_used=shape.experts("topk_group") if grouped else 1,
    )


def _router_v3(shape: HfShape) -> Router:
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (found := shape.fields.text(key, default=only)) != only:
            raise unsupported(f"{key} {found}", [only])
    return corrected_router(shape, scale=2.5, groups=8, groups_used=4)


def _gguf(shape: GgufShape) -> FamilySpec:
    corrected = any(name.endswith(".exp_probs_b.bias") for name in shape.tensors)
    kind = shape.integer("expert_gating_func", low=0, high=2, default=0)
    sigmoid = kind == 2 or (kind == 0 and corrected)  # early files say nothing
    first = shape.integer("leading_dense_block_count", low=0, high=MAX_LAYERS, default=0)
    router = replace(
        shape.router("sigmoid" if sigmoid else "softmax", group_score="top2" if sigmoid else "max"),
        correction=corrected,
        normalised=shape.fields.flag(f"{shape.arch}.expert_weights_norm", default=False),
    )
    width = shape.inner("expert_feed_forward_length")
    shared = width * shape.integer("expert_shared_count", low=0, high=MAX_EXPERTS, default=0)
    experts = shape.mixture(width, router, shared_inner=shared)
    dense = Dense(inner=shape.inner())
    attention = gguf_latent(shape)
    layers = sparse_layers(shape.own_layers, attention, dense, experts, first)
    mtp = shape.mtp(LayerSpec(attention=attention, experts=experts))
    return FamilySpec(layers=layers, norm=shape.norm(), tied_embeddings=shape.tied, mtp=mtp)


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    hf_class="DeepseekV2ForCausalLM",
    models="DeepSeek-V2, V2-Lite, V2.5, Coder-V2",
    from_hf=_reader(_router_v2, first=0, inner=11_008, expert_inner=1407, shared=2, count=64),
    default_context=2048,
    naming="glm4_moe",
    own_code=True,
    with_experts=True,
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    hf_class="DeepseekV3ForCausalLM",
    models="DeepSeek-V3, V3.1, R1, Kimi K2",
    from_hf=_reader(_router_v3, first=3, inner=18_432, expert_inner=2048, shared=1, count=256),
    default_context=4096,
    naming="glm4_moe",
    own_code=True,
    gguf="deepseek2",
    from_gguf=_gguf,
    gguf_naming="deepseek2",
    gguf_parts=GGUF_PARTS,
    with_experts=True,
)
