"""Decoder layers built from layer specs, over packed rows.

One kind of layer computes every spec. mlx-lm's definitions would serve only Llama's and Qwen3's, and are no faster.
T packed rows, H hidden, Hq and Hkv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from edgepipe.spec import layer_spec
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Activation, Experts, LayerSpec
from edgepipe.spec.layout import LAYER_SCALE, OWN_NORMS, norm_names
from edgepipe_mlx.attention import LayerStep
from edgepipe_mlx.experts import Mixture, RouterWeights, SharedExpert
from edgepipe_mlx.feed_forward import ACTIVATIONS, FeedForward, Gated, Sum
from edgepipe_mlx.latent import LatentAttention
from edgepipe_mlx.layer_weights import LayerWeights, Norm
from edgepipe_mlx.recurrent import RecurrentMixer, make_mixer
from edgepipe_mlx.rope import RotaryEmbedding, make_rope
from edgepipe_mlx.states import StateStep


class SelfAttention:
    """Grouped-query attention."""

    def __init__(self, spec: layer_spec.Attention, weights: LayerWeights, rope: RotaryEmbedding | None) -> None:
        self._spec = spec
        self._query, self._key, self._output = (weights.linear(f"self_attn.{name}_proj") for name in ("q", "k", "o"))
        self._value = None if spec.values_from_keys else weights.linear("self_attn.v_proj")
        self._value_eps = weights.norm_eps if spec.value_norm else None
        self._query_norm = weights.norm("self_attn.q_norm") if spec.qk_norm else None
        self._key_norm = weights.norm("self_attn.k_norm") if spec.qk_norm else None
        self._sinks = weights.vector("self_attn.sinks") if spec.sinks else None
        self._rope = rope

    def rows(self, x: mx.array, step: LayerStep) -> mx.array:
        """Compute x [T, H], and write the rows' keys and values. Returns [T, H]."""
        spec = self._spec
        asked, gates = self._query.multiply(x), None
        if spec.gated:  # each head's query is followed by its gates
            both = asked.reshape(-1, spec.num_heads, 2, spec.head_dim)
            asked, gates = (both[:, :, part].reshape(-1, spec.query_width) for part in (0, 1))
        queries = self._placed(asked, spec.num_heads, self._query_norm, step)
        if spec.temperature is not None:
            queries = step.tempered(queries, spec.temperature)
        key_rows = self._key.multiply(x)
        value_rows = key_rows if self._value is None else self._value.multiply(x)
        keys = self._placed(key_rows, spec.num_kv_heads, self._key_norm, step)
        values = value_rows.reshape(-1, spec.num_kv_heads, 1, spec.head_dim)
        if self._value_eps is not None:
            values = mx.fast.rms_norm(values, None, self._value_eps)
        attended = step.attend(queries, keys, values, self._sinks).reshape(-1, spec.query_width)
        return self._output.multiply(attended if gates is None else attended * mx.sigmoid(gates))

    def _placed(self, x: mx.array, heads: int, norm: Norm | None, step: LayerStep) -> mx.array:
        """Return x [T, heads * D] normalised and rotated, as [T, heads, 1, D]."""
        if norm is not None and self._spec.qk_norm == "all":
            x = norm.rows(x)
        x = x.reshape(-1, heads, 1, self._spec.head_dim)
        if norm is not None and self._spec.qk_norm == "head":
            x = norm.rows(x)
        return x if self._rope is None else self._rope.rotate(x, step.positions)


class Apart:
    """A dense part and a mixture with norms of their own, added. The router reads what enters both."""

    def __init__(
        self, dense: FeedForward, mixture: Mixture, *, dense_norms: tuple[Norm, Norm], mixture_norms: tuple[Norm, Norm]
    ) -> None:
        """Norms of each part's input and output."""
        self._dense = dense
        self._mixture = mixture
        self._dense_norms = dense_norms
        self._mixture_norms = mixture_norms

    def rows(self, x: mx.array) -> mx.array:
        """See ``FeedForward``."""
        dense = self._dense_norms[1].rows(self._dense.rows(self._dense_norms[0].rows(x)))
        mixed = self._mixture.rows(self._mixture_norms[0].rows(x), x)
        return dense + self._mixture_norms[1].rows(mixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer."""

    spec: LayerSpec
    input_norm: Norm | None  # norm before the mixer
    mixer: SelfAttention | LatentAttention | RecurrentMixer | None
    attended_norm: Norm | None  # norm of the mixer's output
    inner_norm: Norm | None  # norm before the feed-forward part
    feed_forward: FeedForward | None
    mixture: Mixture | None  # the feed-forward part's experts
    added_norm: Norm | None  # norm of the feed-forward part's output
    output_scale: mx.array | None  # [1]

    def run(self, hidden: mx.array, step: LayerStep | StateStep | None, wanted: mx.array | None = None) -> mx.array:
        """Return the next layer's input [T, H] for hidden [T, H]. ``step``: of the layer's mixer, if it has one.

        ``wanted`` [R]: the rows to return, in this order; None: all.
        """
        normed = _normed(hidden, self.input_norm)
        if self.spec.norms == "parallel":
            assert self.feed_forward is not None
            mixed = self._mixed(normed, step)
            hidden, normed, mixed = (_rows(each, wanted) for each in (hidden, normed, mixed))
            return self._sum(hidden, mixed + self.feed_forward.rows(normed))
        if self.mixer is not None:
            hidden = self._sum(hidden, _normed(self._mixed(normed, step), self.attended_norm))
        hidden = _rows(hidden, wanted)
        if self.feed_forward is not None:
            added = self.feed_forward.rows(_normed(hidden, self.inner_norm))
            hidden = self._sum(hidden, _normed(added, self.added_norm))
        return hidden if self.output_scale is None else hidden * self.output_scale

    def _mixed(self, normed: mx.array, step: LayerStep | StateStep | None) -> mx.array:
        if isinstance(step, StateStep):
            assert isinstance(self.mixer, RecurrentMixer)
            return self.mixer.rows(normed, step)
        assert isinstance(step, LayerStep)
        assert isinstance(self.mixer, SelfAttention | LatentAttention)
        return self.mixer.rows(normed, step)

    def _sum(self, hidden: mx.array, added: mx.array) -> mx.array:
        scale = self.spec.residual_scale
        return hidden + (added if scale == 1 else added * scale)


def _rows(x: mx.array, wanted: mx.array | None) -> mx.array:
    return x if wanted is None else x[wanted]


def _normed(x: mx.array, norm: Norm | None) -> mx.array:
    return x if norm is None else norm.rows(x)


def build_layer(config: ModelConfig, index: int, weights: LayerWeights) -> DecoderLayer:
    """Build a decoder layer of its loaded weights. Raises ArchitectureUnsupported for an unknown rope scaling."""
    spec = config.layers[index]
    before, after = ([weights.norm(name) for name in names] for names in norm_names(spec))
    input_norm, inner_norm = [*(() if spec.mixes else (None,)), *before, None, None][:2]
    attended_norm, added_norm = [*after, None, None][:2]
    mixture = None if spec.experts is None else _mixture(spec.experts, weights)
    return DecoderLayer(
        spec=spec,
        input_norm=input_norm,
        mixer=_mixer(spec, weights, config.context_length),
        attended_norm=attended_norm,
        inner_norm=None if spec.own_norms else inner_norm,
        feed_forward=_feed_forward(spec, inner_norm, mixture, weights) if spec.feeds else None,
        mixture=mixture,
        added_norm=added_norm,
        output_scale=weights.vector(LAYER_SCALE) if spec.output_scaled else None,
    )


def _mixer(
    spec: LayerSpec, weights: LayerWeights, context_length: int
) -> SelfAttention | LatentAttention | RecurrentMixer | None:
    if spec.recurrent is not None:
        return make_mixer(spec.recurrent, weights)
    if spec.attention is None:
        return None
    attention = SelfAttention if spec.attention.latent is None else LatentAttention
    return attention(spec.attention, weights, make_rope(spec.attention, context_length))


def _feed_forward(
    spec: LayerSpec, entering: Norm | None, mixture: Mixture | None, weights: LayerWeights
) -> FeedForward:
    """``entering``: norm before the feed-forward part, which a part with its own norms applies itself."""
    if spec.own_norms:
        return _apart(spec, entering, mixture, weights)
    parts: list[FeedForward] = []
    if spec.dense is not None:
        parts.append(_gated("mlp", spec.dense.activation, weights, gated=spec.dense.gated))
    if spec.experts is not None and mixture is not None:
        parts.append(mixture)
        if spec.experts.shared_inner:
            gate = weights.matrix("mlp.shared_expert_gate.weight") if spec.experts.shared_gated else None
            activation = "silu" if spec.experts.gated else spec.experts.activation
            shared = _gated("mlp.shared_expert", activation, weights, gated=spec.experts.gated)
            parts.append(SharedExpert(shared, gate))
    return parts[0] if len(parts) == 1 else Sum(parts)


def _apart(spec: LayerSpec, entering: Norm | None, mixture: Mixture | None, weights: LayerWeights) -> FeedForward:
    assert spec.dense is not None
    assert mixture is not None
    assert entering is not None
    dense = _gated("mlp", spec.dense.activation, weights)
    leaving, to_experts, from_experts = (weights.norm(name) for name in OWN_NORMS)
    return Apart(dense, mixture, dense_norms=(entering, leaving), mixture_norms=(to_experts, from_experts))


def _gated(module: str, activation: Activation, weights: LayerWeights, *, gated: bool = True) -> Gated:
    gate = weights.linear(f"{module}.gate_proj") if gated else None
    up, down = (weights.linear(f"{module}.{name}_proj") for name in ("up", "down"))
    return Gated(gate, up, down, ACTIVATIONS[activation])


def _mixture(spec: Experts, weights: LayerWeights) -> Mixture:
    correction = weights.vector("mlp.router.correction") if spec.router.correction else None
    how = spec.router
    input_scale = None if how.input_eps is None else weights.vector("mlp.router.input_scale")
    expert_scale = weights.vector("mlp.router.expert_scale") if how.expert_scales else None
    router = RouterWeights(weights.linear("mlp.router"), correction, input_scale, expert_scale)
    up, down = (weights.experts(f"mlp.experts.{name}_proj", spec.count) for name in ("up", "down"))
    gate = weights.experts("mlp.experts.gate_proj", spec.count) if spec.gated else None
    around = (weights.linear("mlp.latent_in"), weights.linear("mlp.latent_out")) if spec.latent else None
    return Mixture(spec, router, gate, up, down, ACTIVATIONS[spec.activation], around)
