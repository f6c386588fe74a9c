"""Cohere2 (Command A, Command R7B, Aya): attention and feed-forward side by side; layers without windows see no
positions."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape
from edgepipe.spec.layer_spec import Attention, Dense, LayerSpec, Norm
from edgepipe.spec.shape_limits import MAX_CONTEXT


def _layers(attention: Attention, inner: int, windows: list[int | None], *, bias: bool) -> tuple[LayerSpec, ...]:
    own = replace(attention, interleaved=True, qkv_bias=bias, output_bias=bias)

    def layer(window: int | None) -> LayerSpec:
        placed = replace(own, rope=own.rope if window else None, window=window)
        return LayerSpec(attention=placed, dense=Dense(inner=inner), norms="parallel")

    return tuple(map(layer, windows))


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation()
    size = shape.head_dim()
    attention = shape.attention(size, shape.rope(size))
    if "sliding_window" in shape.fields and not shape.fields.has("sliding_window"):
        raise shape.fields.fail("sliding_window", "it is null")
    window = shape.fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=4096)
    every = shape.fields.integer("sliding_window_pattern", low=1, high=1 << 20, default=4)
    slides = shape.sliding_layers(full_every=every)  # also a window beyond the context matters: such layers rotate
    windows = [window if slide else None for slide in slides]
    layers = _layers(attention, shape.inner(), windows, bias=shape.flag("attention_bias"))
    return FamilySpec(
        layers=layers,
        norm=Norm(eps=shape.fields.number("layer_norm_eps", low=0.0, high=0.1, default=1e-5), kind="layer"),
        tied_embeddings=shape.tied(default=True),
        logit_scale=shape.factor("logit_scale", 0.0625),
    )


def _gguf(shape: GgufShape) -> FamilySpec:
    size = shape.head_dim()
    attention = shape.attention(size, shape.rope(size))
    window = shape.integer("attention.sliding_window", high=MAX_CONTEXT)
    windows = [window if slide else None for slide in shape.sliding_layers(full_every=4)]
    layers = _layers(attention, shape.inner(), windows, bias=False)
    eps = shape.number("attention.layer_norm_epsilon", low=0.0, high=0.1)
    return FamilySpec(
        layers=layers,
        norm=Norm(eps=eps, kind="layer"),
        tied_embeddings=shape.tied,
        logit_scale=shape.number("logit_scale", low=1e-6, high=1e6),
    )


COHERE2 = Family(
    name="cohere2",
    hf_class="Cohere2ForCausalLM",
    models="Command A, Command R7B",
    from_hf=_hf,
    default_context=8192,
    gguf="cohere2",
    from_gguf=_gguf,
)
