"""The rotary part of a model's config: both forms of Hugging Face, and GGUF's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from edgepipe.errors import ArchitectureUnsupported, ModelInvalid
from edgepipe.files.fields import Fields
from edgepipe.spec.layer_spec import Rope

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""GGUF tensors with a divisor per rotary pair: for any context, and longrope's two."""
_ALIASES = {"su": "longrope", "none": "default"}
MIN_THETA = 2.0  # yarn divides by its logarithm; models have 10,000 or more
MAX_THETA = 1e15
MAX_FACTOR = 1e6
_MAX_CONTEXT = 1 << 25


def hf_rope(
    fields: Fields, *, dims: int, context_length: int, default_theta: float = 10_000.0, layers: str = ""
) -> Rope:
    """Convert ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling``.

    dims    dimensions of a head that rotate
    layers  the layer type whose parameters are read, where they differ between types

    Raises ModelInvalid.
    """
    scaling = rope_fields(fields, layers)
    theta = fields.number("rope_theta", low=MIN_THETA, high=MAX_THETA, default=default_theta)
    theta = scaling.number("rope_theta", low=MIN_THETA, high=MAX_THETA, default=theta)
    kind = scaling.text("rope_type", default=scaling.text("type", default="default"))
    kind = _ALIASES.get(kind, kind)
    if kind not in SCALINGS:
        raise _unsupported(kind)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "proportional":
        factor = scaling.number("factor", low=1.0, high=MAX_FACTOR, default=1.0)
        share = scaling.number("partial_rotary_factor", low=0.0, high=1.0, default=1.0)
        return Rope(theta=theta, scaling=kind, factor=factor, rotated_share=share)
    return _scaled(kind, theta, fields, scaling, head_dim=dims, context_length=context_length)


def partial_rotary(fields: Fields, default: float = 1.0) -> float:
    """Return the share of a head that rotates. Raises ModelInvalid."""
    share = fields.number("partial_rotary_factor", low=0.0, high=1.0, default=default)
    for key in ("rope_scaling", "rope_parameters"):
        value = fields.raw(key)
        if isinstance(value, dict):
            share = Fields(cast("dict[str, object]", value), what=f"config.json {key}").number(
                "partial_rotary_factor", low=0.0, high=1.0, default=share
            )
    return share


def extended_context(rope: Rope, declared_tokens: int) -> int:
    """Return a model's context length, given the number that its file declares.

    Published configs with yarn declare the context before or after scaling; the product works for both. With llama3,
    longrope and linear scaling they declare the scaled context. Dynamic scaling is not computed beyond it.
    """
    if rope.scaling != "yarn":
        return declared_tokens
    return max(declared_tokens, min(round(rope.original_context * rope.factor), _MAX_CONTEXT))


def rope_fields(fields: Fields, layers: str = "") -> Fields:
    """Return the rotary parameters, of ``layers`` if they differ between layer types. Raises ModelInvalid."""
    for key in ("rope_scaling", "rope_parameters"):
        value = fields.raw(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fields.fail(key, f"it is a {type(value).__name__}; an object is needed")
        values = cast("dict[str, object]", value)
        if values:
            return Fields(_flat(fields, key, values, layers), what=f"config.json {key}")
    return Fields({}, what="config.json rope_parameters")


def _flat(fields: Fields, key: str, values: dict[str, object], layers: str) -> dict[str, object]:
    """Unwrap parameters nested per layer type: those of one type, or of all if they agree."""
    own = values.get(layers)
    if isinstance(own, dict):
        return cast("dict[str, object]", own)
    nested = [cast("dict[str, object]", value) for value in values.values() if isinstance(value, dict)]
    if not nested:
        return values
    if len(nested) != len(values) or any(value != nested[0] for value in nested):
        raise fields.fail(key, "it differs between layer types, which is not supported")
    return nested[0]


def _scaled(kind: str, theta: float, fields: Fields, scaling: Fields, *, head_dim: int, context_length: int) -> Rope:
    """Build a scaled Rope. A missing factor of longrope or yarn is the contexts' ratio, as in transformers."""
    original = _original_context(kind, fields, scaling, context_length)
    stretched = kind == "longrope" or (kind == "yarn" and original < context_length)
    default_factor = max(1.0, context_length / original) if stretched else None
    rope = Rope(
        theta=theta,
        scaling=kind,
        factor=scaling.number("factor", low=1.0, high=MAX_FACTOR, default=default_factor),
        original_context=original,
    )
    if kind == "llama3":
        return _llama3(rope, scaling)
    if kind == "yarn":
        return _yarn(rope, scaling)
    return _longrope(rope, scaling, head_dim // 2) if kind == "longrope" else rope


def _original_context(kind: str, fields: Fields, scaling: Fields, context_length: int) -> int:
    """Return the original context: 0 for linear scaling, the config's for dynamic, else as declared."""
    if kind in ("linear", "dynamic"):
        return context_length if kind == "dynamic" else 0
    key = "original_max_position_embeddings"
    declared = scaling.integer(key, low=1, high=_MAX_CONTEXT, default=context_length)
    return fields.integer(key, low=1, high=_MAX_CONTEXT, default=declared)


def _llama3(rope: Rope, scaling: Fields) -> Rope:
    low = scaling.number("low_freq_factor", low=1e-6, high=MAX_FACTOR)
    high = scaling.number("high_freq_factor", low=1e-6, high=MAX_FACTOR)
    if high <= low:
        raise scaling.fail("high_freq_factor", f"it is {high:g}; more than low_freq_factor ({low:g}) is needed")
    return replace(rope, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: Rope, scaling: Fields) -> Rope:
    return replace(
        rope,
        beta_fast=scaling.number("beta_fast", low=1e-6, high=MAX_FACTOR, default=32.0),
        beta_slow=scaling.number("beta_slow", low=1e-6, high=MAX_FACTOR, default=1.0),
        attention_factor=scaling.optional_number("attention_factor", low=0.0, high=MAX_FACTOR),
        mscale=scaling.optional_number("mscale", low=0.0, high=MAX_FACTOR),
        mscale_all_dim=scaling.optional_number("mscale_all_dim", low=0.0, high=MAX_FACTOR),
        truncate=scaling.flag("truncate", default=True),
    )


def _longrope(rope: Rope, scaling: Fields, num_pairs: int) -> Rope:
    return replace(
        rope,
        attention_factor=scaling.optional_number("attention_factor", low=0.0, high=MAX_FACTOR),
        short_factor=scaling.numbers("short_factor", low=1e-6, high=MAX_FACTOR, length=num_pairs),
        long_factor=scaling.numbers("long_factor", low=1e-6, high=MAX_FACTOR, length=num_pairs),
    )


def gguf_rope(
    fields: Fields, arch: str, *, dims: int, context_length: int, factors: Mapping[str, tuple[float, ...]]
) -> Rope:
    """Convert GGUF's rotary keys to a Rope.

    dims     dimensions of a head that rotate
    factors  tensors of ROPE_FACTORS

    Raises ModelInvalid, ArchitectureUnsupported.

    GGUF stores llama3 scaling as one factor per rotary pair (``rope_freqs.weight``). Dividing frequencies by fixed
    factors is longrope with equal factor lists and an attention factor of 1. Longrope itself has no type in GGUF.
    """
    if fields.integer(f"{arch}.rope.dimension_count", low=1, high=1 << 16, default=dims) != dims:
        raise _unsupported(f"{arch}.rope.dimension_count unlike the dimensions that rotate")
    theta = fields.number(f"{arch}.rope.freq_base", low=MIN_THETA, high=MAX_THETA, default=10_000.0)
    key = f"{arch}.rope.scaling.original_context_length"
    if factors:
        original = fields.integer(key, low=1, high=_MAX_CONTEXT, default=context_length)
        amplitude = fields.number(f"{arch}.rope.scaling.attn_factor", low=0.0, high=MAX_FACTOR, default=1.0)
        return _factored(theta, factors, dims, context_length, original=original, amplitude=amplitude)
    factor = _gguf_factor(fields, arch)
    kind = fields.text(f"{arch}.rope.scaling.type", default="linear")
    kind = _ALIASES.get(kind, kind)
    if kind == "default" or (kind == "linear" and factor == 1.0):
        return Rope(theta=theta)
    if kind not in ("linear", "yarn"):
        raise _unsupported(kind)
    if kind == "linear":
        return Rope(theta=theta, scaling="linear", factor=factor)
    multiplier = fields.number(f"{arch}.rope.scaling.yarn_log_multiplier", low=0.0, high=MAX_FACTOR, default=0.0)
    return Rope(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_context=fields.integer(key, low=1, high=_MAX_CONTEXT, default=context_length),
        attention_factor=_gguf_attention_factor(fields, arch, factor),
        mscale=1.0 if multiplier else None,
        mscale_all_dim=multiplier or None,
        beta_fast=fields.number(f"{arch}.rope.scaling.yarn_beta_fast", low=1e-6, high=MAX_FACTOR, default=32.0),
        beta_slow=fields.number(f"{arch}.rope.scaling.yarn_beta_slow", low=1e-6, high=MAX_FACTOR, default=1.0),
    )


def _gguf_factor(fields: Fields, arch: str) -> float:
    """Return the scaling factor from its current or former key; 0 means no scaling."""
    former = fields.number(f"{arch}.rope.scale_linear", low=0.0, high=MAX_FACTOR, default=1.0)
    factor = fields.number(f"{arch}.rope.scaling.factor", low=0.0, high=MAX_FACTOR, default=former) or 1.0
    if factor < 1.0:
        raise fields.fail(f"{arch}.rope.scaling.factor", f"it is {factor:g}; 1 or more is needed")
    return factor


def _gguf_attention_factor(fields: Fields, arch: str, factor: float) -> float | None:
    """Convert GGUF's attention factors to Hugging Face's, which replaces yarn's.

    ``yarn_attn_factor`` is Hugging Face's; ``attn_factor`` multiplies.
    """
    own = fields.optional_number(f"{arch}.rope.scaling.yarn_attn_factor", low=0.0, high=MAX_FACTOR)
    declared = fields.number(f"{arch}.rope.scaling.attn_factor", low=0.0, high=MAX_FACTOR, default=1.0)
    return own if declared == 1.0 else declared * (own or 1.0 + 0.1 * math.log(factor))


def _factored(
    theta: float,
    factors: Mapping[str, tuple[float, ...]],
    dims: int,
    context_length: int,
    *,
    original: int,
    amplitude: float,
) -> Rope:
    """``original``: context of longrope's short factors; ``amplitude``: of longrope."""
    plain, short, long = (factors.get(name, ()) for name in ROPE_FACTORS)
    for values in (plain,) if plain else (short, long):
        if len(values) != dims // 2 or not all(1e-6 <= factor <= MAX_FACTOR for factor in values):
            raise ModelInvalid(
                "the GGUF file has unusable rope factors",
                fact=f"{len(values)} factors, {dims // 2} positive ones are needed",
            )
    return Rope(
        theta=theta,
        scaling="longrope",
        factor=1.0 if plain else max(1.0, context_length / original),
        original_context=context_length if plain else original,
        attention_factor=1.0 if plain else amplitude,
        short_factor=plain or short,
        long_factor=plain or long,
    )


def _unsupported(kind: str) -> ArchitectureUnsupported:
    return ArchitectureUnsupported(
        f"the rotary embedding '{kind[:40]}' is not supported",
        fact=f"supported: {', '.join(SCALINGS)}",
        next_step="choose another model",
    )
