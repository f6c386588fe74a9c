"""Gemma 4: windows beside layers with larger heads whose values are their keys; some models have experts, too.

E2B and E4B, which embed tokens once more in every layer, are refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any, cast

from edgepipe.files.fields import Fields
from edgepipe.spec.families.gemma4_gguf import GGUF_PARTS, INSTEAD_OF_SMALL, from_gguf
from edgepipe.spec.families.gemma4_layers import LOCAL, WHOLE, Gemma4Layers, attention, router
from edgepipe.spec.families.reading import Family, FamilySpec, HfShape, unsupported
from edgepipe.spec.layer_spec import Dense, Experts
from edgepipe.spec.shape_limits import ExpertKeys, checked_experts, read_head_dim, read_kv_heads

_TOKENS = {"vocab_size": 262_144, "bos_token_id": 2, "eos_token_id": 1}
_DEFAULTS = {**_TOKENS, "hidden_size": 2304, "num_hidden_layers": 30, "num_attention_heads": 8}
_KEYS = ExpertKeys(used="top_k_experts")


def _hf(shape: HfShape) -> FamilySpec:
    shape.check_activation(("gelu_pytorch_tanh",), "hidden_activation")
    fields, size, norm = shape.fields, shape.any_head_dim(256), shape.norm()
    _refuse_small(fields)
    slides = [*shape.sliding_layers(full_every=6)[:-1], False]  # transformers lets the last layer see all
    declared = isinstance(fields.raw("rope_parameters"), dict)
    ropes = [shape.rope(size, layers=kind) for kind in ("sliding_attention", "full_attention")] if declared else []
    local_rope, whole_rope = ropes or (LOCAL, WHOLE)
    kv_heads, bias = shape.kv_heads(4), shape.flag("attention_bias")
    whole_size, whole_heads = _whole_heads(shape, slides, size, kv_heads)
    local = replace(attention(shape.num_heads, kv_heads, size, local_rope), qkv_bias=bias, output_bias=bias)
    whole = attention(shape.num_heads, whole_heads, whole_size, whole_rope)
    parts = Gemma4Layers(
        local=local,
        whole=replace(whole, qkv_bias=bias, output_bias=bias, values_from_keys=shape.flag("attention_k_eq_v")),
        dense=Dense(inner=shape.inner(default=9216), activation="gelu_tanh"),
        experts=_experts(shape, norm.eps) if shape.flag("enable_moe_block") else None,
    )
    return FamilySpec(
        layers=parts.layers(slides, shape.windows(slides, default=512)),
        norm=norm,
        tied_embeddings=shape.tied(default=True),
        embedding_scale=sqrt(shape.hidden),
        logit_softcap=fields.optional_number("final_logit_softcapping", low=0.0, high=1e6) or 0.0,
    )


def _experts(shape: HfShape, eps: float) -> Experts:
    found = Experts(
        count=shape.experts("num_experts"),
        used=shape.experts("top_k_experts"),
        inner=shape.inner("moe_intermediate_size"),
        router=router(eps),
        activation="gelu_tanh",
    )
    return checked_experts(shape.fields, found, _KEYS)


def _whole_heads(shape: HfShape, slides: list[bool], size: int, kv_heads: int) -> tuple[int, int]:
    """Return size and number of kv heads of layers that see the whole context.

    size, kv_heads  of the others
    """
    fields, heads = shape.fields, shape.num_heads
    per_layer = fields.raw("per_layer_config")  # transformers 5.23 and later
    if isinstance(per_layer, dict):
        entries = cast("dict[str, Any]", per_layer)
        own = [entries.get(str(layer), {}) for layer, slide in enumerate(slides) if not slide]
        same = all(each == own[0] for each in own) and len(entries) in (0, len(own))
        if not same or not isinstance(own[0], dict) or not {*own[0]} <= {"head_dim", "num_key_value_heads"}:
            raise unsupported("per_layer_config", ["heads that all layers with full_attention share"])
        fields = Fields(cast("dict[str, object]", own[0]), what="config.json's per_layer_config")
        size = read_head_dim(fields, "head_dim", shape.hidden, heads, size)
        return size, read_kv_heads(fields, "num_key_value_heads", heads, kv_heads)
    size = read_head_dim(fields, "global_head_dim", shape.hidden, heads, 512)
    own_heads = shape.flag("attention_k_eq_v") and fields.raw("num_global_key_value_heads") is not None
    return size, read_kv_heads(fields, "num_global_key_value_heads", heads, None) if own_heads else kv_heads


def _refuse_small(fields: Fields) -> None:
    """Refuse what only E2B and E4B have. Raises ArchitectureUnsupported."""
    if fields.integer("hidden_size_per_layer_input", low=0, high=1 << 20, default=256):
        raise unsupported("hidden_size_per_layer_input (Gemma 4 E2B, E4B)", INSTEAD_OF_SMALL)
    if fields.integer("num_kv_shared_layers", low=0, high=1 << 20, default=0):
        raise unsupported("num_kv_shared_layers (Gemma 4 E2B, E4B)", INSTEAD_OF_SMALL)
    if fields.raw("use_bidirectional_attention") == "all":
        raise unsupported("use_bidirectional_attention", ["attention to earlier tokens"])


GEMMA4 = Family(
    name="gemma4_text",
    hf_class="Gemma4ForCausalLM",
    models="Gemma 4 in GGUF files, text-only Gemma 4",
    from_hf=_hf,
    default_context=131_072,
    defaults=_DEFAULTS,
    naming="gemma4",
    gguf="gemma4",
    from_gguf=from_gguf,
    gguf_parts=GGUF_PARTS,
    with_experts=None,
)
GEMMA4_VISION = Family(
    name="gemma4",
    hf_class="Gemma4ForConditionalGeneration",
    models="Gemma 4 31B, 26B-A4B",
    from_hf=_hf,
    default_context=131_072,
    defaults=_DEFAULTS,
    text_key="text_config",
    naming="gemma4 of several",
    with_experts=None,
)
