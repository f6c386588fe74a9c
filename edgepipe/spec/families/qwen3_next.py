"""Qwen3-Next and Qwen3-Coder-Next: a gated delta rule in three of four layers, gated attention, many experts."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape, unsupported
from edgepipe.spec.families.recurrent import (
    every_nth,
    gguf_attention,
    gguf_delta_net,
    gguf_kinds,
    hf_delta_net,
    with_mixers,
)
from edgepipe.spec.layer_spec import Attention, Dense, Experts, LayerSpec, Router
from edgepipe.spec.shape_limits import MAX_LAYERS

GGUF_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
"""Names within a layer of GGUF files, also of Qwen3.5."""


def hf_mixers(shape: HfShape, kv_heads: int) -> dict[str, LayerSpec]:
    """Return both kinds of mixers; ``kv_heads``: their default number.

    Raises ModelInvalid, and ArchitectureUnsupported if the output of attention has no gate.
    """
    shape.check_activation()
    if not shape.flag("attn_output_gate", default=True):
        raise unsupported("attn_output_gate false", ["attention with a gate"])
    shape.check_activation(("swish", "silu"), "output_gate_type")
    size, bias = shape.any_head_dim(256), shape.flag("attention_bias")
    dims = shape.rotary_dims(size, 0.25)
    plain = shape.attention(size, shape.rope(dims), kv_heads=kv_heads)
    attention = replace(_gated(plain, dims), qkv_bias=bias, output_bias=bias)
    return {
        "full_attention": LayerSpec(attention=attention),
        "linear_attention": LayerSpec(recurrent=hf_delta_net(shape)),
    }


def hf_experts(shape: HfShape, count: int, used: int, router: Router) -> Experts:
    """Return the experts with a class's default numbers. Raises ModelInvalid."""
    inner = shape.inner("moe_intermediate_size", 512)
    shared = shape.inner("shared_expert_intermediate_size", 512)
    found = shape.mixture(shape.experts("num_experts", count), used, inner, router, shared_inner=shared)
    return replace(found, shared_gated=True)


def gguf_layers(shape: GgufShape, feed: LayerSpec, *, tiled: bool) -> tuple[LayerSpec, ...]:
    """Return layers with a spec's feed-forward part; ``tiled``: see ``gguf_delta_net``. Raises ModelInvalid."""
    dims = shape.rotary_dims(shape.head_dim())
    mixers = {
        "full_attention": LayerSpec(attention=_gated(gguf_attention(shape, lambda _: shape.rope(dims)), dims)),
        "linear_attention": LayerSpec(recurrent=gguf_delta_net(shape, tiled=tiled)),
    }
    kinds = gguf_kinds(shape, "ssm_conv1d", shape.own_layers)
    return with_mixers(kinds, mixers, [feed] * len(kinds))


def gguf_mtp(shape: GgufShape, feed: LayerSpec) -> LayerSpec | None:
    """Return the layer that predicts one token more: full attention with a feed-forward part. Raises ModelInvalid."""
    dims = shape.rotary_dims(shape.head_dim())
    return shape.mtp(replace(feed, attention=_gated(gguf_attention(shape, lambda _: shape.rope(dims)), dims)))


def gguf_experts(shape: GgufShape) -> LayerSpec:
    """Return the experts alone. Raises ModelInvalid."""
    inner = shape.inner("expert_feed_forward_length")
    shared = shape.integer("expert_shared_feed_forward_length", high=1 << 20, default=inner)
    found = shape.mixture(inner, shape.router("softmax"), shared_inner=shared)
    return LayerSpec(experts=replace(found, shared_gated=True))


def _gated(attention: Attention, dims: int) -> Attention:
    return replace(attention, rotary_dim=dims, qk_norm="head", gated=True)


def _hf(shape: HfShape) -> FamilySpec:
    mixers, fields = hf_mixers(shape, kv_heads=2), shape.fields
    experts = hf_experts(shape, 512, 10, Router(normalised=shape.flag("norm_topk_prob", default=True)))
    dense, sparse = LayerSpec(dense=Dense(inner=shape.inner(default=5632))), LayerSpec(experts=experts)
    every = fields.integer("decoder_sparse_step", low=1, high=MAX_LAYERS, default=1)
    dense_layers = fields.items("mlp_only_layers")
    if not all(type(layer) is int for layer in dense_layers):
        raise fields.fail("mlp_only_layers", "numbers of layers are needed")
    layers = range(shape.num_layers)
    feeds = [dense if layer in dense_layers or (layer + 1) % every else sparse for layer in layers]
    norm = replace(shape.norm(), plus_one=True)
    return FamilySpec(
        layers=with_mixers(every_nth(shape), mixers, feeds),
        norm=norm,
        tied_embeddings=shape.tied(),
        mtp=shape.mtp(replace(mixers["full_attention"], experts=experts), default=1),
    )


def _gguf(shape: GgufShape) -> FamilySpec:
    feed = gguf_experts(shape)
    return FamilySpec(
        layers=gguf_layers(shape, feed, tiled=False),
        norm=shape.norm(),
        tied_embeddings=shape.tied,
        mtp=gguf_mtp(shape, feed),
    )


QWEN3_NEXT = Family(
    name="qwen3_next",
    hf_class="Qwen3NextForCausalLM",
    models="Qwen3-Coder-Next, Qwen3-Next-80B-A3B",
    from_hf=_hf,
    naming="qwen3_next",
    default_context=32_768,
    gguf="qwen3next",
    gguf_naming="qwen3_next, GGUF",
    from_gguf=_gguf,
    gguf_parts=GGUF_PARTS,
    with_experts=True,
)
