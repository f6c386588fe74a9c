"""gpt-oss: windows in every second layer, sinks, and experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape, sliding, unsupported, windowed
from edgepipe.spec.layer_spec import Attention, Experts, LayerSpec, Router

_EVERY = 2  # period of layers; the last of each period sees the whole context
_CLAMP = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # values that backends compute; others are refused
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _layer(attention: Attention, experts: Experts, *, qkv_bias: bool, output_bias: bool) -> LayerSpec:
    return LayerSpec(
        attention=replace(attention, qkv_bias=qkv_bias, output_bias=output_bias, sinks=True),
        experts=replace(experts, activation="clamped_swiglu", bias=True),
    )


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation()
    if not any(shape.fields.raw(key) for key in ("rope_scaling", "rope_parameters")):
        shape.fields = shape.fields.over({"rope_parameters": _ROPE})
    for key, computed in _CLAMP.items():
        if (found := shape.factor(key, computed)) != computed:
            raise unsupported(f"{key} {found:g}", [f"{computed:g}"])
    size, bias = shape.head_dim(64), shape.flag("attention_bias", default=True)
    count = shape.experts("num_local_experts", shape.experts("num_experts", 128))
    layer = _layer(
        shape.attention(size, shape.rope(size, default_theta=150_000.0), kv_heads=8),
        shape.mixture(count, 4, shape.inner(default=2880), Router(bias=True)),
        qkv_bias=bias,
        output_bias=bias,
    )
    layers = windowed(layer, shape.windows(shape.sliding_layers(full_every=_EVERY), default=128))
    return FamilySpec(layers=layers, norm=shape.norm(1e-5), tied_embeddings=shape.tied())


def _gguf(shape: GgufShape) -> FamilySpec:
    size = shape.head_dim()
    rope = replace(shape.rope(size), truncate=False)  # the published value; GGUF has no key for it
    layer = _layer(
        shape.attention(size, rope),
        shape.mixture(shape.inner("expert_feed_forward_length"), replace(shape.router("softmax"), bias=True)),
        qkv_bias=shape.biased("attn_q"),
        output_bias=shape.biased("attn_output"),
    )
    windows = sliding(shape.sliding_layers(full_every=_EVERY), shape.window(), shape.context)
    return FamilySpec(layers=windowed(layer, windows), norm=shape.norm(), tied_embeddings=shape.tied)


GPT_OSS = Family(
    name="gpt_oss",
    hf_class="GptOssForCausalLM",
    models="gpt-oss-20b, gpt-oss-120b",
    from_hf=_hf,
    naming="gpt_oss",
    default_context=131_072,
    gguf="gpt-oss",
    from_gguf=_gguf,
    with_experts=True,
    gguf_parts={"post_attention_norm": "post_attention_layernorm"},
)
