"""Granite 4 with Mamba-2 in most layers: Granite's factors, a feed-forward part or experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape, unsupported
from edgepipe.spec.families.recurrent import (
    GGUF_MAMBA,
    gguf_attention,
    gguf_kinds,
    gguf_mamba2,
    layer_kinds,
    time_limits,
    with_mixers,
)
from edgepipe.spec.layer_spec import Attention, Dense, LayerSpec, Mamba2, Router
from edgepipe.spec.shape_limits import MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_INTERMEDIATE, MAX_TAPS, checked_mamba2

_KINDS = ("linear_attention", "full_attention")


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation()
    size, bias = shape.head_dim(), shape.flag("attention_bias")
    rotates = shape.fields.text("position_embedding_type", default="nope")
    if rotates not in ("nope", "rope"):
        raise unsupported(f"position_embedding_type {rotates}", ["nope", "rope"])
    attention = shape.attention(size, shape.rope(size) if rotates == "rope" else None)
    attention = replace(attention, qkv_bias=bias, output_bias=bias, scale=shape.factor("attention_multiplier"))
    mixers = _mixers(attention, _mamba2(shape), shape.factor("residual_multiplier"))
    kinds = layer_kinds(shape, "layer_types", _KINDS) or layer_kinds(shape, "layers_block_type", _KINDS)
    kinds = kinds or ["linear_attention"] * shape.num_layers
    return FamilySpec(
        layers=with_mixers(kinds, mixers, [_feed(shape)] * len(kinds)),
        norm=shape.norm(),
        tied_embeddings=shape.tied(),
        embedding_scale=shape.factor("embedding_multiplier"),
        logit_scale=1 / shape.factor("logits_scaling"),
    )


def _mixers(attention: Attention, mamba: Mamba2, scale: float) -> dict[str, LayerSpec]:
    return {
        "linear_attention": LayerSpec(recurrent=mamba, residual_scale=scale),
        "full_attention": LayerSpec(attention=attention, residual_scale=scale),
    }


def _feed(shape: HfShape) -> LayerSpec:
    shared = shape.inner("shared_intermediate_size", 1024)
    count = shape.fields.integer("num_local_experts", low=0, high=MAX_EXPERTS, default=8)
    if not count:
        return LayerSpec(dense=Dense(inner=shared))
    return LayerSpec(experts=shape.mixture(count, 2, shape.inner(default=11_008), Router(), shared_inner=shared))


def _mamba2(shape: HfShape) -> Mamba2:
    fields, key = shape.fields, "mamba_d_head"
    heads = fields.integer("mamba_n_heads", low=1, high=MAX_HEADS, default=128)
    inner = shape.hidden * fields.integer("mamba_expand", low=1, high=64, default=2)
    derived = fields.raw(key) in (None, "auto")
    size = inner // heads if derived else fields.integer(key, low=1, high=MAX_HEAD_DIM)
    if size * heads != inner or not 1 <= size <= MAX_HEAD_DIM:
        raise fields.fail(
            "mamba_n_heads", f"{heads} heads of {size} do not fill {inner}, mamba_expand times hidden_size"
        )
    mamba = Mamba2(
        heads=heads,
        head_dim=size,
        groups=fields.integer("mamba_n_groups", low=1, high=MAX_HEADS, default=1),
        state_dim=fields.integer("mamba_d_state", low=1, high=MAX_HEAD_DIM, default=256),
        taps=fields.integer("mamba_d_conv", low=2, high=MAX_TAPS, default=4),
        conv_bias=shape.flag("mamba_conv_bias", default=True),
        bias=shape.flag("mamba_proj_bias"),
        dt_limits=time_limits(fields, "time_step_limit"),
    )
    return checked_mamba2(fields, mamba, "mamba_n_groups")


def _gguf(shape: GgufShape) -> FamilySpec:
    rotates = shape.fields.flag(f"{shape.arch}.rope.scaling.finetuned", default=True)  # llama.cpp's switch for Granite
    attention = replace(
        gguf_attention(shape, lambda size: shape.rope(size) if rotates else None),
        scale=shape.number("attention.scale", low=0.0, high=1e6, default=0.0),
    )
    scale = shape.number("residual_scale", low=0.0, high=1e6, default=0.0) or 1.0
    mixers = _mixers(attention, gguf_mamba2(shape), scale)
    kinds = gguf_kinds(shape, "ssm_in", shape.num_layers)
    return FamilySpec(
        layers=with_mixers(kinds, mixers, [_gguf_feed(shape)] * len(kinds)),
        norm=shape.norm(),
        tied_embeddings=shape.tied,
        embedding_scale=shape.number("embedding_scale", low=0.0, high=1e6, default=0.0) or 1.0,
        logit_scale=1 / shape.number("logit_scale", low=1e-6, high=1e6),
    )


def _gguf_feed(shape: GgufShape) -> LayerSpec:
    if not shape.integer("expert_count", low=0, high=MAX_EXPERTS, default=0):
        inner = shape.integer("expert_shared_feed_forward_length", high=MAX_INTERMEDIATE, default=shape.inner())
        return LayerSpec(dense=Dense(inner=inner))
    shared = shape.integer("expert_shared_feed_forward_length", high=MAX_INTERMEDIATE)
    return LayerSpec(experts=shape.mixture(shape.inner(), shape.router("softmax"), shared_inner=shared))


GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    hf_class="GraniteMoeHybridForCausalLM",
    models="Granite 4 (H Micro, H Tiny, H Small)",
    from_hf=_hf,
    naming="granitemoehybrid",
    default_context=2048,
    gguf="granitehybrid",
    gguf_naming="granitemoehybrid, GGUF",
    from_gguf=_gguf,
    gguf_parts=GGUF_MAMBA,
    gguf_permuted=True,
    with_experts=None,
)
