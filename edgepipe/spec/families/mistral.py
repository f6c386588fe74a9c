"""Mistral and Ministral 3, alone or as the text model of Mistral 3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgepipe.spec.families.llama import dense_gguf, dense_reader
from edgepipe.spec.families.reading import Family, FamilySpec, HfShape

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MINISTRAL = "ministral3"


def _tempered(read: Callable[[HfShape], FamilySpec]) -> Callable[[HfShape], FamilySpec]:
    """Return a reader of models whose queries grow with their position."""

    def reader(shape: HfShape) -> FamilySpec:
        decoder, temperature = read(shape), shape.temperature()
        layers = (each.with_attention(temperature=temperature) for each in decoder.layers)
        return replace(decoder, layers=tuple(layers))

    return reader


def _text(shape: HfShape) -> FamilySpec:
    kind = shape.fields.text("model_type", default="mistral")
    return (_ministral if kind == _MINISTRAL else dense_reader(kv_heads=8, head_dim=128))(shape)


_ministral = _tempered(dense_reader(kv_heads=8, head_dim=128, eps=1e-5))

MISTRAL = Family(
    name="mistral",
    hf_class="MistralForCausalLM",
    models="Mistral 7B, Nemo, Small 2",
    from_hf=dense_reader(kv_heads=8),
    default_context=131_072,
)
MISTRAL3 = Family(
    name="mistral3",
    hf_class="Mistral3ForConditionalGeneration",
    models="Mistral Small 3.1, 3.2, Devstral, Ministral 3",
    from_hf=_text,
    default_context=131_072,
    text_key="text_config",
    naming="text of several",
    text_types=("mistral", _MINISTRAL),
    gguf="mistral3",
    from_gguf=dense_gguf,
    gguf_permuted=True,
)
MINISTRAL3 = Family(
    name=_MINISTRAL,
    hf_class="Ministral3ForCausalLM",
    models="Devstral 2, text models of Ministral 3",
    from_hf=_ministral,
    default_context=262_144,
    defaults={"rope_parameters": _YARN},
)
