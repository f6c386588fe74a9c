"""Qwen3 with experts (Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B)."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape
from edgepipe.spec.layer_spec import Dense, LayerSpec, Router
from edgepipe.spec.shape_limits import MAX_LAYERS


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation()
    fields, size, bias = shape.fields, shape.head_dim(), shape.flag("attention_bias")
    attention = replace(
        shape.attention(size, shape.rope(size), kv_heads=4), qkv_bias=bias, output_bias=bias, qk_norm="head"
    )
    count = shape.experts("num_experts", shape.experts("num_local_experts", 128))
    router = Router(normalised=shape.flag("norm_topk_prob"))
    experts = shape.mixture(count, 8, shape.inner("moe_intermediate_size", 768), router)
    dense = Dense(inner=shape.inner(default=6144))
    every = fields.integer("decoder_sparse_step", low=1, high=MAX_LAYERS, default=1)
    dense_layers = fields.items("mlp_only_layers")
    if not all(type(layer) is int for layer in dense_layers):
        raise fields.fail("mlp_only_layers", "numbers of layers are needed")
    slides = [shape.flag("use_sliding_window")] * shape.num_layers

    def layer(index: int, window: int | None) -> LayerSpec:
        own = replace(attention, window=window)
        if index in dense_layers or (index + 1) % every:
            return LayerSpec(attention=own, dense=dense)
        return LayerSpec(attention=own, experts=experts)

    layers = tuple(layer(index, window) for index, window in enumerate(shape.windows(slides, default=4096)))
    return FamilySpec(layers=layers, norm=shape.norm(), tied_embeddings=shape.tied())


def _gguf(shape: GgufShape) -> FamilySpec:
    size = shape.head_dim()
    layer = LayerSpec(
        attention=replace(shape.attention(size, shape.rope(size)), qk_norm="head"),
        experts=shape.mixture(shape.inner("expert_feed_forward_length"), shape.router("softmax")),
    )
    return FamilySpec(layers=(layer,) * shape.num_layers, norm=shape.norm(), tied_embeddings=shape.tied)


QWEN3_MOE = Family(
    name="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    models="Qwen3-30B-A3B, Qwen3-Coder-30B-A3B, Qwen3-235B-A22B",
    from_hf=_hf,
    naming="qwen3_moe",
    default_context=32_768,
    gguf="qwen3moe",
    from_gguf=_gguf,
    with_experts=True,
)
