"""Convert ``LayerSpec`` and its parts to and from JSON. Reading checks every value."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, cast, get_args

from edgepipe.errors import ModelInvalid
from edgepipe.files.fields import Fields
from edgepipe.spec import shape_limits as limits
from edgepipe.spec.layer_spec import (
    Activation,
    Attention,
    Dense,
    Experts,
    Latent,
    LayerSpec,
    Norm,
    NormPlaces,
    Recurrent,
    Rope,
    Router,
    Temperature,
)
from edgepipe.spec.recurrent_json import recurrent_from_json, recurrent_to_json
from edgepipe.spec.rope_config import MAX_FACTOR, MAX_THETA, MIN_THETA, SCALINGS

_MAX_SCALE = 1e6

T = TypeVar("T", bound=str)


def without_defaults(value: Any) -> Any:
    """Return a spec as plain JSON values, without fields that have their defaults."""
    if not dataclasses.is_dataclass(value):
        return value
    if isinstance(value, Recurrent):
        return recurrent_to_json(value)
    own = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    return {name: without_defaults(item) for name, (item, default) in own.items() if item != default}


def norm_from_json(value: object) -> Norm:
    """Restore a Norm. Raises ModelInvalid."""
    fields = _fields(value, "the model's norm")
    return Norm(
        eps=fields.number("eps", low=0.0, high=0.1),
        kind=_one_of(fields, "kind", ("rms", "layer")),
        plus_one=fields.flag("plus_one", default=False),
    )


def layer_from_json(value: object) -> LayerSpec:
    """Restore a LayerSpec. Raises ModelInvalid."""
    fields = _fields(value, "the model's layer")
    attention, recurrent, dense, experts = map(fields.raw, ("attention", "recurrent", "dense", "experts"))
    norms = _one_of(fields, "norms", get_args(NormPlaces))
    if attention is not None and recurrent is not None:
        raise fields.fail("recurrent", "a layer has one mixer")
    mixes, feeds = attention is not None or recurrent is not None, dense is not None or experts is not None
    if not (mixes and feeds) and (norms != "before" or not (mixes or feeds)):
        raise fields.fail("dense", f"a layer with norms {norms} needs a mixer and a feed-forward part")
    mtp = fields.flag("mtp", default=False)
    if mtp and (attention is None or not feeds):
        raise fields.fail("mtp", "a layer that predicts one token more needs attention and a feed-forward part")
    return LayerSpec(
        attention=None if attention is None else _attention(attention),
        recurrent=None if recurrent is None else recurrent_from_json(_fields(recurrent, "the model's recurrent layer")),
        dense=None if dense is None else _dense(dense),
        experts=None if experts is None else _experts(experts),
        norms=norms,
        residual_scale=fields.number("residual_scale", low=0.0, high=_MAX_SCALE, default=1.0),
        own_norms=fields.flag("own_norms", default=False),
        output_scaled=fields.flag("output_scaled", default=False),
        mtp=mtp,
    )


def _attention(value: object) -> Attention:
    fields = _fields(value, "the model's attention")
    heads = fields.integer("num_heads", low=1, high=limits.MAX_HEADS)
    size = fields.integer("head_dim", low=2, high=limits.MAX_HEAD_DIM)
    rotary = fields.integer("rotary_dim", low=0, high=size, default=0)
    if size % 2 or rotary % 2:
        raise fields.fail("head_dim", f"it is {size}, of which {rotary or size} rotate; even numbers are needed")
    rope = fields.raw("rope")
    attention = Attention(
        num_heads=heads,
        num_kv_heads=limits.read_kv_heads(fields, "num_kv_heads", heads, None),
        head_dim=size,
        rope=None if rope is None else rope_from_json(rope, num_pairs=(rotary or size) // 2),
        rotary_dim=rotary,
        interleaved=fields.flag("interleaved", default=False),
        window=fields.integer("window", low=1, high=limits.MAX_CONTEXT) if fields.has("window") else None,
        qkv_bias=fields.flag("qkv_bias", default=False),
        output_bias=fields.flag("output_bias", default=False),
        qk_norm=_one_of(fields, "qk_norm", ("", "head", "all")),
        sinks=fields.flag("sinks", default=False),
        softcap=fields.number("softcap", low=0.0, high=_MAX_SCALE, default=0.0),
        scale=fields.number("scale", low=0.0, high=_MAX_SCALE, default=0.0),
        temperature=_temperature(fields.raw("temperature")),
        latent=_latent(fields.raw("latent")),
        values_from_keys=fields.flag("values_from_keys", default=False),
        value_norm=fields.flag("value_norm", default=False),
        gated=fields.flag("gated", default=False),
    )
    return limits.checked_latent(fields, attention)


def _latent(value: object) -> Latent | None:
    if value is None:
        return None
    fields = _fields(value, "the model's latent attention")
    return Latent(
        query_rank=fields.integer("query_rank", low=0, high=limits.MAX_WIDTH),
        kv_rank=fields.integer("kv_rank", low=2, high=limits.MAX_HEAD_DIM),
        nope_dim=fields.integer("nope_dim", low=1, high=limits.MAX_HEAD_DIM),
        rope_dim=fields.integer("rope_dim", low=2, high=limits.MAX_HEAD_DIM),
        value_dim=fields.integer("value_dim", low=1, high=limits.MAX_HEAD_DIM),
        joined=fields.flag("joined", default=True),
        norm_eps=fields.number("norm_eps", low=0.0, high=0.1, default=1e-6),
    )


def _temperature(value: object) -> Temperature | None:
    if value is None:
        return None
    fields = _fields(value, "the model's temperature")
    return Temperature(
        growth=fields.number("growth", low=0.0, high=_MAX_SCALE),
        context=fields.integer("context", low=1, high=limits.MAX_CONTEXT),
    )


def _dense(value: object) -> Dense:
    fields = _fields(value, "the model's feed-forward part")
    return Dense(
        inner=fields.integer("inner", low=1, high=limits.MAX_INTERMEDIATE),
        activation=_activation(fields),
        bias=fields.flag("bias", default=False),
        gated=fields.flag("gated", default=True),
    )


def _activation(fields: Fields) -> Activation:
    """Return the activation of a part that says whether it has a gate. Raises ModelInvalid."""
    activation = _one_of(fields, "activation", get_args(Activation))
    if fields.flag("gated", default=True) == (activation == "relu2"):
        raise fields.fail("activation", f"it is {activation}; relu2 has no gate, and all others have one")
    return activation


def _experts(value: object) -> Experts:
    fields = _fields(value, "the model's experts")
    return limits.checked_experts(
        fields,
        Experts(
            count=fields.integer("count", low=1, high=limits.MAX_EXPERTS),
            used=fields.integer("used", low=1, high=limits.MAX_EXPERTS),
            inner=fields.integer("inner", low=1, high=limits.MAX_INTERMEDIATE),
            router=_router(fields.raw("router")),
            activation=_activation(fields),
            bias=fields.flag("bias", default=False),
            shared_inner=fields.integer("shared_inner", low=0, high=limits.MAX_INTERMEDIATE, default=0),
            shared_gated=fields.flag("shared_gated", default=False),
            gated=fields.flag("gated", default=True),
            latent=fields.integer("latent", low=0, high=limits.MAX_INTERMEDIATE, default=0),
        ),
    )


def _router(value: object) -> Router:
    fields = _fields({} if value is None else value, "the model's router")
    return Router(
        score=_one_of(fields, "score", ("softmax", "sigmoid")),
        normalised=fields.flag("normalised", default=True),
        scale=fields.number("scale", low=0.0, high=_MAX_SCALE, default=1.0),
        bias=fields.flag("bias", default=False),
        correction=fields.flag("correction", default=False),
        groups=fields.integer("groups", low=1, high=limits.MAX_EXPERTS, default=1),
        groups_used=fields.integer("groups_used", low=1, high=limits.MAX_EXPERTS, default=1),
        group_score=_one_of(fields, "group_score", ("max", "top2")),
        input_eps=fields.optional_number("input_eps", low=0.0, high=0.1),
        expert_scales=fields.flag("expert_scales", default=False),
    )


def _one_of(fields: Fields, key: str, names: tuple[T, ...]) -> T:
    """Return one of some texts; absent: the first. Raises ModelInvalid."""
    found = fields.text(key, default=names[0])
    if found not in names:
        raise fields.fail(key, f"it is {found[:40]!r}; one of {', '.join(names)} is needed")
    return names[names.index(cast("T", found))]


def _fields(value: object, what: str) -> Fields:
    if not isinstance(value, dict):
        raise ModelInvalid(f"{what} cannot be read", fact="an object is needed")
    return Fields(cast("dict[str, object]", value), what=what)


def rope_from_json(value: object, *, num_pairs: int) -> Rope:
    """Restore a Rope; ``num_pairs``: dimensions that rotate, halved. Raises ModelInvalid."""
    rope = _fields(value, "the model's rope")
    plain = Rope()
    scaling = rope.text("scaling", default=plain.scaling)
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
    low = rope.number("low_freq_factor", low=0.0, high=MAX_FACTOR, default=plain.low_freq_factor)
    high = rope.number("high_freq_factor", low=0.0, high=MAX_FACTOR, default=plain.high_freq_factor)
    if scaling == "llama3" and high <= low:
        raise rope.fail("high_freq_factor", f"it is {high:g}; more than low_freq_factor ({low:g}) is needed")
    return Rope(
        theta=rope.number("theta", low=MIN_THETA, high=MAX_THETA, default=plain.theta),
        scaling=scaling,
        factor=rope.number("factor", low=1.0, high=MAX_FACTOR, default=plain.factor),
        original_context=rope.integer("original_context", low=0, high=limits.MAX_CONTEXT, default=0),
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=rope.number("beta_fast", low=0.0, high=MAX_FACTOR, default=plain.beta_fast),
        beta_slow=rope.number("beta_slow", low=0.0, high=MAX_FACTOR, default=plain.beta_slow),
        truncate=rope.flag("truncate", default=True),
        attention_factor=optional["attention_factor"],
        mscale=optional["mscale"],
        mscale_all_dim=optional["mscale_all_dim"],
        short_factor=factors["short_factor"],
        long_factor=factors["long_factor"],
        rotated_share=rope.number("rotated_share", low=0.0, high=1.0, default=plain.rotated_share),
    )
