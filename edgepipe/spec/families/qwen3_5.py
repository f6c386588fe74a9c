"""Qwen3.5 and 3.6, dense and with experts: as Qwen3-Next, with projections of its own for queries, keys and values.

Pictures are skipped.
"""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.families.qwen3_next import (
    GGUF_PARTS,
    gguf_experts,
    gguf_layers,
    gguf_mtp,
    hf_experts,
    hf_mixers,
)
from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape
from edgepipe.spec.families.recurrent import every_nth, with_mixers
from edgepipe.spec.layer_spec import Dense, LayerSpec, Router

_CONTEXT = 32_768
_DENSE = "Qwen3.6-27B, Qwen3.5-9B"
_EXPERTS = "Qwen3.6-35B-A3B, Qwen3.5-122B-A10B"


def _hf_dense(shape: HfShape) -> FamilySpec:
    return _decoder(shape, LayerSpec(dense=Dense(inner=shape.inner(default=12_288))), kv_heads=4)


def _hf_experts(shape: HfShape) -> FamilySpec:
    return _decoder(shape, LayerSpec(experts=hf_experts(shape, 256, 8, Router())), kv_heads=2)


def _decoder(shape: HfShape, feed: LayerSpec, *, kv_heads: int) -> FamilySpec:
    mixers = hf_mixers(shape, kv_heads)
    own_embedding = shape.flag("mtp_use_dedicated_embeddings")
    after = replace(feed, attention=mixers["full_attention"].attention)
    return FamilySpec(
        layers=with_mixers(every_nth(shape), mixers, [feed] * shape.num_layers),
        norm=replace(shape.norm(), plus_one=True),
        tied_embeddings=shape.tied(),
        mtp=None if own_embedding else shape.mtp(after, "mtp_num_hidden_layers", default=1),
    )


def _gguf_dense(shape: GgufShape) -> FamilySpec:
    return _gguf_decoder(shape, LayerSpec(dense=Dense(inner=shape.inner())))


def _gguf_experts(shape: GgufShape) -> FamilySpec:
    return _gguf_decoder(shape, gguf_experts(shape))


def _gguf_decoder(shape: GgufShape, feed: LayerSpec) -> FamilySpec:
    return FamilySpec(
        layers=gguf_layers(shape, feed, tiled=True),
        norm=shape.norm(),
        tied_embeddings=shape.tied,
        mtp=gguf_mtp(shape, feed),
    )


QWEN3_5 = Family(
    name="qwen3_5_text",
    hf_class="Qwen3_5ForCausalLM",
    models=f"{_DENSE} in GGUF files, text-only Qwen3.5",
    from_hf=_hf_dense,
    naming="qwen3_5",
    default_context=_CONTEXT,
    gguf="qwen35",
    gguf_naming="qwen3_5, GGUF",
    from_gguf=_gguf_dense,
    gguf_parts=GGUF_PARTS,
)
QWEN3_5_MOE = Family(
    name="qwen3_5_moe_text",
    hf_class="Qwen3_5MoeForCausalLM",
    models=f"{_EXPERTS} in GGUF files, text-only Qwen3.5 with experts",
    from_hf=_hf_experts,
    naming="qwen3_5",
    default_context=_CONTEXT,
    gguf="qwen35moe",
    gguf_naming="qwen3_5, GGUF",
    from_gguf=_gguf_experts,
    gguf_parts=GGUF_PARTS,
    with_experts=True,
)
QWEN3_5_VISION = Family(
    name="qwen3_5",
    hf_class="Qwen3_5ForConditionalGeneration",
    models=_DENSE,
    from_hf=_hf_dense,
    naming="qwen3_5 of several",
    default_context=_CONTEXT,
    text_key="text_config",
)
QWEN3_5_MOE_VISION = Family(
    name="qwen3_5_moe",
    hf_class="Qwen3_5MoeForConditionalGeneration",
    models=_EXPERTS,
    from_hf=_hf_experts,
    naming="qwen3_5 of several",
    default_context=_CONTEXT,
    text_key="text_config",
    with_experts=True,
)
