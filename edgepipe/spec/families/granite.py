"""Granite 3 and 4, dense: Llama with factors on embeddings, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape
from edgepipe.spec.layer_spec import Dense, LayerSpec


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation()
    size, bias = shape.head_dim(), shape.flag("attention_bias")
    attention = replace(
        shape.attention(size, shape.rope(size)),
        qkv_bias=bias,
        output_bias=bias,
        scale=shape.factor("attention_multiplier"),
    )
    layer = LayerSpec(
        attention=attention,
        dense=Dense(inner=shape.inner(), bias=shape.flag("mlp_bias")),
        residual_scale=shape.factor("residual_multiplier"),
    )
    return FamilySpec(
        layers=(layer,) * shape.num_layers,
        norm=shape.norm(),
        tied_embeddings=shape.tied(),
        embedding_scale=shape.factor("embedding_multiplier"),
        logit_scale=1 / shape.factor("logits_scaling"),
    )


def _gguf(shape: GgufShape) -> FamilySpec:
    size = shape.head_dim()
    rotates = shape.fields.flag(f"{shape.arch}.rope.scaling.finetuned", default=True)  # llama.cpp's switch for Granite
    attention = replace(
        shape.attention(size, shape.rope(size) if rotates else None),
        qkv_bias=shape.biased("attn_q"),
        output_bias=shape.biased("attn_output"),
        scale=shape.number("attention.scale", low=0.0, high=1e6, default=0.0),
    )
    residual = shape.number("residual_scale", low=0.0, high=1e6, default=0.0) or 1.0
    dense = Dense(inner=shape.inner(), bias=shape.biased("ffn_up"))
    layer = LayerSpec(attention=attention, dense=dense, residual_scale=residual)
    return FamilySpec(
        layers=(layer,) * shape.num_layers,
        norm=shape.norm(),
        tied_embeddings=shape.tied,
        embedding_scale=shape.number("embedding_scale", low=0.0, high=1e6, default=0.0) or 1.0,
        logit_scale=1 / shape.number("logit_scale", low=1e-6, high=1e6),
    )


GRANITE = Family(
    name="granite",
    hf_class="GraniteForCausalLM",
    models="Granite 3, dense Granite 4",
    from_hf=_hf,
    default_context=2048,
    gguf="granite",
    from_gguf=_gguf,
    gguf_permuted=True,
)
