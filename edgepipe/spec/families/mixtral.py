"""Mixtral: Mistral with experts."""

from __future__ import annotations

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape, windowed
from edgepipe.spec.layer_spec import LayerSpec, Router


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation()
    size = shape.head_dim()
    layer = LayerSpec(
        attention=shape.attention(size, shape.rope(size, default_theta=1_000_000.0), kv_heads=8),
        experts=shape.mixture(shape.experts("num_local_experts", 8), 2, shape.inner(), Router()),
    )
    layers = windowed(layer, shape.windows([True] * shape.num_layers))
    return FamilySpec(layers=layers, norm=shape.norm(1e-5), tied_embeddings=shape.tied())


def _gguf(shape: GgufShape) -> FamilySpec:
    size = shape.head_dim()
    layer = LayerSpec(
        attention=shape.attention(size, shape.rope(size)),
        experts=shape.mixture(shape.inner(), shape.router("softmax")),
    )
    return FamilySpec(layers=(layer,) * shape.num_layers, norm=shape.norm(), tied_embeddings=shape.tied)


MIXTRAL = Family(
    name="mixtral",
    hf_class="MixtralForCausalLM",
    models="Mixtral 8x7B, 8x22B",
    from_hf=_hf,
    naming="mixtral",
    default_context=131_072,
    gguf="llama",
    from_gguf=_gguf,
    with_experts=True,
    gguf_permuted=True,
)
