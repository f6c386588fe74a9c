"""Gemma 3: norms before and after, windows in five of six layers, which rotate otherwise than the sixth."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape, sliding, unsupported
from edgepipe.spec.layer_spec import Attention, Dense, LayerSpec, Rope
from edgepipe.spec.rope_config import MAX_THETA, MIN_THETA

_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0
_LAYERS_OF_27B = 62
_EVERY = 6  # period of layers; the last of each period sees the whole context
_TOKENS = {"vocab_size": 262_208, "bos_token_id": 2, "eos_token_id": 1}
_DEFAULTS = {**_TOKENS, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8}


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation(("gelu_pytorch_tanh",), "hidden_activation")
    fields, size = shape.fields, shape.head_dim(256)
    if shape.flag("use_bidirectional_attention"):
        raise unsupported("use_bidirectional_attention", ["attention to earlier tokens"])
    every = fields.integer("sliding_window_pattern", low=1, high=1 << 20, default=_EVERY)
    slides = shape.sliding_layers(full_every=every)
    whole = shape.rope(size, default_theta=_GLOBAL_THETA, layers="full_attention")
    local = _local_rope(shape, size)
    cap = fields.optional_number("attn_logit_softcapping", low=0.0, high=1e6) or 0.0
    bias, heads = shape.flag("attention_bias"), shape.kv_heads(4)
    dense = Dense(inner=shape.inner(default=9216), activation="gelu_tanh")
    scale = 1 / sqrt(shape.factor("query_pre_attn_scalar", 256))

    def layer(slide: bool, window: int | None) -> LayerSpec:
        attention = Attention(
            num_heads=shape.num_heads,
            num_kv_heads=heads,
            head_dim=size,
            rope=local if slide else whole,
            window=window,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="head",
            softcap=cap,
            scale=scale,
        )
        return LayerSpec(attention=attention, dense=dense, norms="both")

    layers = tuple(map(layer, slides, shape.windows(slides, default=4096)))
    return FamilySpec(
        layers=layers,
        norm=replace(shape.norm(), plus_one=True),
        tied_embeddings=shape.tied(default=True),
        embedding_scale=sqrt(shape.hidden),
        logit_softcap=fields.optional_number("final_logit_softcapping", low=0.0, high=1e6) or 0.0,
    )


def _local_rope(shape: HfShape, size: int) -> Rope:
    """Return the rotary embedding of layers with windows, in the form of transformers 5 or of earlier ones."""
    if isinstance(shape.fields.raw("rope_parameters"), dict):
        return shape.rope(size, default_theta=_LOCAL_THETA, layers="sliding_attention")
    theta = shape.fields.number("rope_local_base_freq", low=MIN_THETA, high=MAX_THETA, default=_LOCAL_THETA)
    return Rope(theta=theta)


def _gguf(shape: GgufShape) -> FamilySpec:
    size = shape.head_dim()
    whole = shape.rope(size)
    window = shape.window()
    local = shape.sliding_rope(_LOCAL_THETA)
    slides = shape.sliding_layers(full_every=_EVERY) if window else [False] * shape.num_layers
    dense = Dense(inner=shape.inner(), activation="gelu_tanh")
    divided = shape.hidden // shape.num_heads if shape.num_layers == _LAYERS_OF_27B else size  # llama.cpp decides so
    scale = 1 / sqrt(divided)

    def layer(slide: bool, window: int | None) -> LayerSpec:
        plain = shape.attention(size, local if slide else whole)
        attention = replace(plain, window=window, qk_norm="head", scale=scale)
        return LayerSpec(attention=attention, dense=dense, norms="both")

    return FamilySpec(
        layers=tuple(map(layer, slides, sliding(slides, window, shape.context))),
        norm=shape.norm(),  # llama.cpp's converter adds the one
        tied_embeddings=shape.tied,
        embedding_scale=sqrt(shape.hidden),
        logit_softcap=shape.number("final_logit_softcapping", low=0.0, high=1e6, default=0.0),
    )


GEMMA3 = Family(
    name="gemma3_text",
    hf_class="Gemma3ForCausalLM",
    models="Gemma 3 1B, text-only Gemma 3",
    from_hf=_hf,
    default_context=131_072,
    defaults=_DEFAULTS,
    gguf="gemma3",
    from_gguf=_gguf,
    gguf_parts={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
GEMMA3_VISION = Family(
    name="gemma3",
    hf_class="Gemma3ForConditionalGeneration",
    models="Gemma 3 4B to 27B",
    from_hf=_hf,
    default_context=131_072,
    defaults=_DEFAULTS,
    text_key="text_config",
    naming="text of several",
)
