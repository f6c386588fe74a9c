"""Chooses the list of longrope's rotary factors that a served model uses. PURE.

The short list is for sequences up to the context that the model was trained on first, the long one for longer
sequences. The keys of one cache must all have the same factors. So the served context decides, for prompts of any
length, on every stage alike. llama.cpp and vLLM choose by the same rule.
"""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import LayerSpec, Rope


def uses_long_factors(rope: Rope, context_tokens: int) -> bool:
    """Return whether a longrope embedding uses its long factors in a context of ``context_tokens``."""
    return 0 < rope.original_context < context_tokens


def depends_on_context(config: ModelConfig) -> bool:
    """Return whether a model's rotary factors differ between served contexts."""
    return _trained_tokens(config) > 0


def served_config(config: ModelConfig, context_tokens: int) -> ModelConfig:
    """Return the config whose longrope layers have only the factors of a served context of ``context_tokens``.

    0 means the model's own context. A config that was converted before stays as it is.
    """
    if not depends_on_context(config):
        return config
    tokens = context_tokens or config.context_length
    specs = {spec: _served_spec(spec, tokens) for spec in dict.fromkeys(config.layers)}
    return replace(config, layers=tuple(specs[spec] for spec in config.layers))


def factors_in_words(config: ModelConfig, context_tokens: int) -> str:
    """Say which factors a served context of ``context_tokens`` uses, and how to get the others.

    Empty if every context has the same factors.
    """
    trained = _trained_tokens(config)
    if not trained:
        return ""
    tokens = context_tokens or config.context_length
    if tokens > trained:
        return (
            f"long rotary factors: the context of {tokens:,} tokens is more than the {trained:,} of the model's first "
            f"training; for shorter chats, --context {trained} uses the short factors"
        )
    return (
        f"short rotary factors: the context of {tokens:,} tokens is within the {trained:,} of the model's first "
        "training; a longer --context uses the long factors"
    )


def _trained_tokens(config: ModelConfig) -> int:
    """Return the longest context that uses short factors; 0 if the factors never differ."""
    ropes = [spec.attention.rope for spec in config.layers if spec.attention is not None]
    return max((rope.original_context for rope in ropes if rope is not None and _differs(rope)), default=0)


def _differs(rope: Rope) -> bool:
    return rope.scaling == "longrope" and rope.original_context > 0 and rope.short_factor != rope.long_factor


def _served_spec(spec: LayerSpec, tokens: int) -> LayerSpec:
    attention = spec.attention
    if attention is None or attention.rope is None or not _differs(attention.rope):
        return spec
    rope = attention.rope
    chosen = rope.long_factor if uses_long_factors(rope, tokens) else rope.short_factor
    rope = replace(rope, short_factor=chosen, long_factor=chosen)
    return replace(spec, attention=replace(attention, rope=rope))
