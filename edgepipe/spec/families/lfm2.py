"""LFM2, dense and with experts: short convolutions in most layers, attention in the others."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape
from edgepipe.spec.families.recurrent import gguf_attention, gguf_kinds, layer_kinds, leading_dense, with_mixers
from edgepipe.spec.layer_spec import Dense, LayerSpec, Norm, Router, ShortConv
from edgepipe.spec.shape_limits import MAX_INTERMEDIATE, MAX_LAYERS, MAX_TAPS

_THETA = 1_000_000.0
_GGUF_PARTS = {f"shortconv.{part}": f"conv.{part}" for part in ("in_proj", "conv", "out_proj")}


def _hf(shape: HfShape) -> FamilySpec:
    return _decoder(shape, [LayerSpec(dense=Dense(inner=_inner(shape)))] * shape.num_layers)


def _hf_experts(shape: HfShape) -> FamilySpec:
    router = Router(
        score="sigmoid",
        normalised=shape.flag("norm_topk_prob", default=True),
        scale=shape.factor("routed_scaling_factor", 1.0),
        correction=shape.flag("use_expert_bias", default=True),
    )
    inner = shape.inner("moe_intermediate_size", 1792)
    experts = shape.mixture(shape.experts("num_experts", 32), 4, inner, router)
    leading = shape.fields.integer("num_dense_layers", low=0, high=MAX_LAYERS, default=2)
    return _decoder(shape, leading_dense(Dense(inner=shape.inner(default=7168)), experts, leading, shape.num_layers))


def _decoder(shape: HfShape, feeds: list[LayerSpec]) -> FamilySpec:
    size, fields = shape.head_dim(), shape.fields
    attention = shape.attention(size, shape.rope(size, default_theta=_THETA), kv_heads=8)
    taps = fields.integer("conv_L_cache", low=2, high=MAX_TAPS, default=3)
    mixers = {
        "full_attention": LayerSpec(attention=replace(attention, qk_norm="head")),
        "conv": LayerSpec(recurrent=ShortConv(channels=shape.hidden, taps=taps, bias=shape.flag("conv_bias"))),
    }
    return FamilySpec(
        layers=with_mixers(_kinds(shape), mixers, feeds),
        norm=Norm(eps=fields.number("norm_eps", low=0.0, high=0.1, default=1e-5)),
        tied_embeddings=shape.flag("tie_embedding", default=shape.tied(default=True)),
    )


def _kinds(shape: HfShape) -> list[str]:
    """Return each layer's kind, from the list of newer configs or the numbers of earlier ones. Raises ModelInvalid."""
    if found := layer_kinds(shape, "layer_types", ("full_attention", "conv")):
        return found
    key, fields = "full_attn_idxs", shape.fields
    places = fields.items(key) if fields.has(key) else list(range(shape.num_layers))
    if not all(type(place) is int and 0 <= place < shape.num_layers for place in places):
        raise fields.fail(key, f"numbers of {shape.num_layers} layers are needed")
    return ["full_attention" if layer in places else "conv" for layer in range(shape.num_layers)]


def _inner(shape: HfShape) -> int:
    """Return the feed-forward width: two thirds of the declared one, times a factor, rounded up to a multiple."""
    fields = shape.fields
    declared = fields.integer("block_ff_dim", low=1, high=MAX_INTERMEDIATE, default=shape.inner(default=12_288))
    if not shape.flag("block_auto_adjust_ff_dim", default=True):
        return declared
    multiple = fields.integer("block_multiple_of", low=1, high=MAX_INTERMEDIATE, default=256)
    factor = fields.number("block_ffn_dim_multiplier", low=1e-3, high=64.0, default=1.0)
    inner = int(factor * int(2 * declared / 3))
    return max(1, -(-inner // multiple)) * multiple


def _gguf(shape: GgufShape) -> FamilySpec:
    return _gguf_decoder(shape, [LayerSpec(dense=Dense(inner=shape.inner()))] * shape.num_layers)


def _gguf_experts(shape: GgufShape) -> FamilySpec:
    biased = any(name.endswith(".exp_probs_b.bias") for name in shape.tensors)
    inner = shape.inner("expert_feed_forward_length")
    experts = shape.mixture(inner, shape.router("sigmoid", correction=biased))
    leading = shape.integer("leading_dense_block_count", low=0, high=MAX_LAYERS, default=0)
    return _gguf_decoder(shape, leading_dense(Dense(inner=shape.inner()), experts, leading, shape.num_layers))


def _gguf_decoder(shape: GgufShape, feeds: list[LayerSpec]) -> FamilySpec:
    conv = ShortConv(
        channels=shape.hidden,
        taps=shape.integer("shortconv.l_cache", low=2, high=MAX_TAPS),
        bias=any(name.endswith(".shortconv.in_proj.bias") for name in shape.tensors),
    )
    attention = replace(gguf_attention(shape, shape.rope), qk_norm="head")
    mixers = {"full_attention": LayerSpec(attention=attention), "conv": LayerSpec(recurrent=conv)}
    kinds = gguf_kinds(shape, "shortconv.conv", shape.num_layers, "conv")
    return FamilySpec(layers=with_mixers(kinds, mixers, feeds), norm=shape.norm(), tied_embeddings=shape.tied)


LFM2 = Family(
    name="lfm2",
    hf_class="Lfm2ForCausalLM",
    models="LFM2 350M to 2.6B",
    from_hf=_hf,
    naming="lfm2",
    default_context=128_000,
    gguf="lfm2",
    from_gguf=_gguf,
    gguf_parts=_GGUF_PARTS,
)
LFM2_MOE = Family(
    name="lfm2_moe",
    hf_class="Lfm2MoeForCausalLM",
    models="LFM2-8B-A1B",
    from_hf=_hf_experts,
    naming="lfm2",
    default_context=128_000,
    gguf="lfm2moe",
    from_gguf=_gguf_experts,
    gguf_parts=_GGUF_PARTS,
    with_experts=True,
)
