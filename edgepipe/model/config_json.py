"""Convert ``ModelConfig`` to and from JSON, for ``edgepipe.json`` and peers. Reading checks every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from edgepipe.errors import ArchitectureUnsupported
from edgepipe.model import config as limits
from edgepipe.model.facts import ModelConfig, Rope
from edgepipe.model.fields import Fields
from edgepipe.model.formats import check_format
from edgepipe.model.quantisation import Quantisation, quantisation_from_json, quantisation_to_json
from edgepipe.model.rope_config import MAX_FACTOR, MAX_THETA, MIN_THETA, SCALINGS

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Convert a config to plain JSON values; ``config_from_json`` restores an equal config."""
    values = asdict(config)
    del values["quantisation"]
    return values | ({"quantisation": quantisation_to_json(config.quantisation)} if config.quantisation else {})


def config_from_json(values: Mapping[str, Any]) -> ModelConfig:
    """Restore the config that ``config_to_json`` wrote. Raises ModelInvalid, ArchitectureUnsupported."""
    fields = Fields(values, what="the model's description")
    family = fields.text("architecture")
    if family not in _FAMILIES:
        raise ArchitectureUnsupported(
            f"the architecture '{family[:80]}' is not supported", fact=f"supported: {', '.join(_FAMILIES)}"
        )
    vocab = fields.integer("vocab_size", low=1, high=limits.MAX_VOCAB)
    layers = fields.integer("num_layers", low=1, high=limits.MAX_LAYERS)
    heads = fields.integer("num_heads", low=1, high=limits.MAX_HEADS)
    hidden = fields.integer("hidden_size", low=1, high=limits.MAX_WIDTH)
    head_dim = limits.read_head_dim(fields, "head_dim", hidden, heads, None)
    bos = fields.token_ids("bos_token_id", vocab_size=vocab)
    return ModelConfig(
        architecture=family,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", low=1, high=limits.MAX_INTERMEDIATE),
        num_heads=heads,
        num_kv_heads=limits.read_kv_heads(fields, "num_kv_heads", heads, None),
        head_dim=head_dim,
        vocab_size=vocab,
        context_length=fields.integer("context_length", low=1, high=limits.MAX_CONTEXT),
        rms_norm_eps=fields.number("rms_norm_eps", low=0.0, high=0.1),
        rope=_rope(fields, head_dim // 2),
        qkv_bias=fields.flag("qkv_bias", default=False),
        output_bias=fields.flag("output_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        qk_norm=fields.flag("qk_norm", default=False),
        sliding_windows=_windows(fields, layers),
        tied_embeddings=fields.flag("tied_embeddings", default=False),
        eos_token_ids=fields.token_ids("eos_token_ids", vocab_size=vocab),
        bos_token_id=bos[0] if bos else None,
        quantisation=_quantisation(fields),
    )


def _quantisation(fields: Fields) -> Quantisation | None:
    value = fields.raw("quantisation")
    if value is None:
        return None
    quantisation = quantisation_from_json(value)
    for stored in quantisation.formats:
        check_format(stored)
    return quantisation


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    items = fields.items("sliding_windows")
    good = all(item is None or (type(item) is int and 0 < item <= limits.MAX_CONTEXT) for item in items)
    if not good or len(items) not in (0, layers):
        raise fields.fail("sliding_windows", f"{layers} windows or none are needed, it has {len(items)}")
    return tuple(cast("list[int | None]", items))


def _rope(fields: Fields, num_pairs: int) -> Rope:
    value = fields.raw("rope")
    rope = Fields(cast("dict[str, object]", value) if isinstance(value, dict) else {}, what="the model's rope")
    scaling = rope.text("scaling")
    if scaling not in SCALINGS:
        raise rope.fail("scaling", f"it is {scaling[:40]!r}")
    factors = {
        name: rope.numbers(name, low=1e-6, high=MAX_FACTOR, length=num_pairs) if rope.items(name) else ()
        for name in ("short_factor", "long_factor")
    }
    optional = {
        name: rope.optional_number(name, low=0.0, high=MAX_FACTOR)
        for name in ("attention_factor", "mscale", "mscale_all_dim")
    }
    low, high = (rope.number(f"{name}_freq_factor", low=0.0, high=MAX_FACTOR) for name in ("low", "high"))
    if scaling == "llama3" and high <= low:
        raise rope.fail("high_freq_factor", f"it is {high:g}; more than low_freq_factor ({low:g}) is needed")
    return Rope(
        theta=rope.number("theta", low=MIN_THETA, high=MAX_THETA),
        scaling=scaling,
        factor=rope.number("factor", low=1.0, high=MAX_FACTOR),
        original_context=rope.integer("original_context", low=0, high=limits.MAX_CONTEXT),
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=rope.number("beta_fast", low=0.0, high=MAX_FACTOR),
        beta_slow=rope.number("beta_slow", low=0.0, high=MAX_FACTOR),
        truncate=rope.flag("truncate", default=True),
        attention_factor=optional["attention_factor"],
        mscale=optional["mscale"],
        mscale_all_dim=optional["mscale_all_dim"],
        short_factor=factors["short_factor"],
        long_factor=factors["long_factor"],
    )
