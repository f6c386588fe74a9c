"""MiniMax-M2: experts that a corrected sigmoid chooses, and one norm over all heads of q and k."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape
from edgepipe.spec.layer_spec import LayerSpec, Router


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation()
    size = shape.any_head_dim(128)
    rotated = shape.fields.integer("rotary_dim", low=2, high=size, default=size)
    if rotated % 2:
        raise shape.fields.fail("rotary_dim", f"{rotated} dimensions rotate; pairs are needed")
    dims = shape.rotary_dims(size, rotated / size)
    attention = shape.attention(size, shape.rope(dims, default_theta=5_000_000.0), kv_heads=8)
    router = Router(score="sigmoid", correction=True)
    layer = LayerSpec(
        attention=replace(attention, rotary_dim=dims, qk_norm="all"),
        experts=shape.mixture(shape.experts("num_local_experts", 256), 8, shape.inner(), router),
    )
    return FamilySpec(layers=(layer,) * shape.num_layers, norm=shape.norm(), tied_embeddings=shape.tied())


def _gguf(shape: GgufShape) -> FamilySpec:
    size = shape.head_dim()
    dims = shape.rotary_dims(size)
    router = shape.router("sigmoid", correction=True)
    layer = LayerSpec(
        attention=replace(shape.attention(size, shape.rope(dims)), rotary_dim=dims, qk_norm="all"),
        experts=shape.mixture(shape.inner("expert_feed_forward_length"), router),
    )
    return FamilySpec(layers=(layer,) * shape.num_layers, norm=shape.norm(), tied_embeddings=shape.tied)


MINIMAX_M2 = Family(
    name="minimax_m2",
    hf_class="MiniMaxM2ForCausalLM",
    models="MiniMax-M2",
    from_hf=_hf,
    naming="minimax_m2",
    default_context=196_608,
    own_code=True,
    gguf="minimax-m2",
    from_gguf=_gguf,
    with_experts=True,
)
