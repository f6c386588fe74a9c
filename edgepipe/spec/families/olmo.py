"""OLMo 2 and 3: norms after attention and feed-forward, one norm over all heads of q and k; windows in OLMo 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape, sliding
from edgepipe.spec.layer_spec import Attention, Dense, LayerSpec, Rope

_THETA = 500_000.0  # OLMo 3's default


def _decoder(
    shape: HfShape, ropes: dict[bool, Rope], windows: Sequence[int | None], slides: Sequence[bool]
) -> FamilySpec:
    """``ropes``: of layers that slide, and of the others."""
    bias = shape.flag("attention_bias")
    attention = replace(shape.attention(shape.head_dim(), None), qkv_bias=bias, output_bias=bias, qk_norm="all")
    layers = _layers(attention, Dense(inner=shape.inner()), [ropes[slide] for slide in slides], windows)
    return FamilySpec(layers=layers, norm=shape.norm(1e-5), tied_embeddings=shape.tied())


def _layers(
    attention: Attention, dense: Dense, ropes: Sequence[Rope], windows: Sequence[int | None]
) -> tuple[LayerSpec, ...]:
    own = [replace(attention, rope=rope, window=window) for rope, window in zip(ropes, windows, strict=True)]
    return tuple(LayerSpec(attention=each, dense=dense, norms="after") for each in own)


def _olmo2(shape: HfShape) -> FamilySpec:
    shape.check_activation()
    none = [False] * shape.num_layers
    return _decoder(shape, {False: shape.rope(shape.head_dim())}, (None,) * shape.num_layers, none)


def _olmo3(shape: HfShape) -> FamilySpec:
    shape.check_activation()
    dims, slides = shape.head_dim(), shape.sliding_layers(full_every=4)
    full = shape.rope(dims, default_theta=_THETA, layers="full_attention")
    local = Rope(theta=full.theta)
    if isinstance(shape.fields.raw("rope_parameters"), dict):
        local = shape.rope(dims, default_theta=_THETA, layers="sliding_attention")
    ropes = {False: full, True: local}
    return _decoder(shape, ropes, shape.windows(slides, default=4096), slides)


def _gguf(shape: GgufShape) -> FamilySpec:
    """Read OLMo 2, or OLMo 3, which llama.cpp calls OLMo 2 with windows."""
    size = shape.head_dim()
    full, window = shape.rope(size), shape.window()
    local = shape.sliding_rope(full.theta)
    slides = shape.sliding_layers(full_every=4) if window else [False] * shape.num_layers
    ropes = [local if slide else full for slide in slides]
    attention = replace(shape.attention(size, None), qk_norm="all")
    layers = _layers(attention, Dense(inner=shape.inner()), ropes, sliding(slides, window, shape.context))
    return FamilySpec(layers=layers, norm=shape.norm(), tied_embeddings=shape.tied)


OLMO2 = Family(
    name="olmo2",
    hf_class="Olmo2ForCausalLM",
    models="OLMo 2",
    from_hf=_olmo2,
    default_context=2048,
    gguf="olmo2",
    from_gguf=_gguf,
    gguf_parts={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
OLMO3 = Family(name="olmo3", hf_class="Olmo3ForCausalLM", models="OLMo 3", from_hf=_olmo3, default_context=2048)
