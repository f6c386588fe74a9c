"""Phi-3, Phi-3.5 and Phi-4: Llama whose q, k and v are one stored matrix, as are gate and up."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape, sliding, windowed
from edgepipe.spec.layer_spec import Dense, LayerSpec


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation()
    size = shape.any_head_dim()
    dims = shape.rotary_dims(size)
    attention = replace(shape.attention(size, shape.rope(dims)), rotary_dim=dims)
    layer = LayerSpec(attention=attention, dense=Dense(inner=shape.inner()))
    layers = windowed(layer, shape.windows([True] * shape.num_layers))
    return FamilySpec(layers=layers, norm=shape.norm(1e-5), tied_embeddings=shape.tied())


def _gguf(shape: GgufShape) -> FamilySpec:
    size = shape.head_dim()
    dims = shape.rotary_dims(size)
    attention = replace(shape.attention(size, shape.rope(dims)), rotary_dim=dims)
    layer = LayerSpec(attention=attention, dense=Dense(inner=shape.inner()))
    layers = windowed(layer, sliding([True] * shape.num_layers, shape.window(), shape.context))
    return FamilySpec(layers=layers, norm=shape.norm(), tied_embeddings=shape.tied)


PHI3 = Family(
    name="phi3",
    hf_class="Phi3ForCausalLM",
    models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    from_hf=_hf,
    naming="fused",
    default_context=4096,
    defaults={"original_max_position_embeddings": 4096},
    own_code=True,
    gguf="phi3",
    from_gguf=_gguf,
    gguf_naming="fused",
    gguf_parts={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
)
