"""Decoder layers built from layer specs, over packed rows.

One kind of layer computes every spec. mlx-lm's definitions would serve only Llama's and Qwen3's, and are no faster.
T packed rows, H hidden, Hq and Hkv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from edgepipe.spec import layer_spec
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Activation, Experts, LayerSpec
from edgepipe.spec.layout import LAYER_SCALE, OWN_NORMS, norm_names
from edgepipe_mlx.attention import LayerStep
from edgepipe_mlx.experts import Mixture, RouterWeights, SharedExpert
from edgepipe_mlx.feed_forward import ACTIVATIONS, FeedForward, Gated, Sum
from edgepipe_mlx.latent import LatentAttention
from edgepipe_mlx.layer_graphs import Arrays, Compiled
from edgepipe_mlx.layer_weights import LayerWeights, Norm
from edgepipe_mlx.recurrent import RecurrentMixer, make_mixer
from edgepipe_mlx.rope import RotaryEmbedding, make_rope
from edgepipe_mlx.states import StateStep


class SelfAttention:
    """Grouped-query attention."""

    def __init__(self, spec: layer_spec.Attention, weights: LayerWeights, rope: RotaryEmbedding | None) -> None:
        self._spec = spec
        alike = not (spec.qk_norm or spec.gated or spec.values_from_keys)  # queries and keys are placed at once
        names = ("q", "k") if spec.values_from_keys else ("q", "k", "v")
        self._inputs = weights.joined([f"self_attn.{name}_proj" for name in names], together=2 if alike else 1)
        self._output = weights.linear("self_attn.o_proj")
        self._value_eps = weights.norm_eps if spec.value_norm else None
        self._query_norm = weights.norm("self_attn.q_norm") if spec.qk_norm else None
        self._key_norm = weights.norm("self_attn.k_norm") if spec.qk_norm else None
        self._sinks = weights.vector("self_attn.sinks") if spec.sinks else None
        self._rope = rope

    def enter(self, x: mx.array, *positions: mx.array) -> list[mx.array]:
        """Return queries [T, Hq, 1, D], keys and values [T, Hkv, 1, D], and gates [T, Hq D] if there are, of x [T, H].

        positions  [T] int32
        """
        spec = self._spec
        (at,) = positions
        asked, *others = self._inputs.multiply(x)
        gates: list[mx.array] = []
        if self._inputs.is_together:
            both = self._placed(asked, spec.num_heads + spec.num_kv_heads, None, at)
            queries, keys = both[:, : spec.num_heads], both[:, spec.num_heads :]
        else:
            if spec.gated:  # each head's query is followed by its gates
                parts = asked.reshape(-1, spec.num_heads, 2, spec.head_dim)
                asked = parts[:, :, 0].reshape(-1, spec.query_width)
                gates = [parts[:, :, 1].reshape(-1, spec.query_width)]
            queries = self._placed(asked, spec.num_heads, self._query_norm, at)
            keys = self._placed(others[0], spec.num_kv_heads, self._key_norm, at)
        values = others[-1].reshape(-1, spec.num_kv_heads, 1, spec.head_dim)
        if self._value_eps is not None:
            values = mx.fast.rms_norm(values, None, self._value_eps)
        return [queries, keys, values, *gates]

    def mix(self, entered: Arrays, step: LayerStep) -> list[mx.array]:
        """Write the rows' keys and values, and attend. Returns [T, Hq D], and gates as ``enter`` does."""
        queries, keys, values, *gates = entered
        if self._spec.temperature is not None:
            queries = step.tempered(queries, self._spec.temperature)
        attended = step.attend(queries, keys, values, self._sinks).reshape(-1, self._spec.query_width)
        return [attended, *gates]

    def leave(self, mixed: Arrays) -> mx.array:
        """Return the product [T, H] of what ``mix`` returned."""
        attended, *gates = mixed
        return self._output.multiply(attended * mx.sigmoid(gates[0]) if gates else attended)

    def _placed(self, x: mx.array, heads: int, norm: Norm | None, positions: mx.array) -> mx.array:
        """Return x [T, heads * D] normalised and rotated, as [T, heads, 1, D]."""
        if norm is not None and self._spec.qk_norm == "all":
            x = norm.rows(x)
        x = x.reshape(-1, heads, 1, self._spec.head_dim)
        if norm is not None and self._spec.qk_norm == "head":
            x = norm.rows(x)
        return x if self._rope is None else self._rope.rotate(x, positions)


class LayerMixer(Protocol):
    """The computations of a mixer before and behind its state."""

    def enter(self, x: mx.array, *positions: mx.array) -> list[mx.array]:
        """Return what the state meets, of x [T, H]."""
        ...

    def leave(self, mixed: Arrays) -> mx.array:
        """Return the output [T, H], of what the state made of it."""
        ...


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
class LayerParts:
    """What a layer is made of, and its computations that hold no state."""

    spec: LayerSpec
    input_norm: Norm | None  # norm before the mixer
    mixer: LayerMixer | None
    attended_norm: Norm | None  # norm of the mixer's output
    inner_norm: Norm | None  # norm before the feed-forward part
    feed_forward: FeedForward | None
    mixture: Mixture | None  # the feed-forward part's experts
    added_norm: Norm | None  # norm of the feed-forward part's output
    output_scale: mx.array | None  # [1]

    @property
    def parallel(self) -> bool:
        """Whether the feed-forward part reads what the mixer reads."""
        return self.spec.norms == "parallel"

    def enter(self, hidden: mx.array, *positions: mx.array) -> list[mx.array]:
        """Return what the mixer's state meets; before it, where the layer is ``parallel``, the norm [T, H].

        hidden     [T, H]
        positions  [T] int32, for attention only
        """
        normed = _normed(hidden, self.input_norm)
        entered = [] if self.mixer is None else self.mixer.enter(normed, *positions)
        return [normed, *entered] if self.parallel else entered

    def leave(self, hidden: mx.array, *mixed: mx.array) -> list[mx.array]:
        """Return the layer's output [T, H], and the experts that the rows chose if the layer has a mixture.

        mixed  what the mixer made of what entered; before it, where the layer is ``parallel``, the norm
        """
        if self.parallel:
            normed, *mixed_rows = mixed
            assert self.mixer is not None
            assert self.feed_forward is not None
            added = self.mixer.leave(mixed_rows)
            hidden = self._sum(hidden, added + self.feed_forward.rows(normed))
        else:
            if self.mixer is not None:
                hidden = self._sum(hidden, _normed(self.mixer.leave(mixed), self.attended_norm))
            if self.feed_forward is not None:
                added = self.feed_forward.rows(_normed(hidden, self.inner_norm))
                hidden = self._sum(hidden, _normed(added, self.added_norm))
            if self.output_scale is not None:
                hidden = hidden * self.output_scale
        chosen = None if self.mixture is None else self.mixture.chosen
        return [hidden] if chosen is None else [hidden, chosen]

    def _sum(self, hidden: mx.array, added: mx.array) -> mx.array:
        scale = self.spec.residual_scale
        return hidden + (added if scale == 1 else added * scale)


class DecoderLayer:
    """One layer."""

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        mixer = parts.mixer
        self._enter, self._leave = Compiled(parts.enter), Compiled(parts.leave)
        self._advance = Compiled(mixer.advance) if isinstance(mixer, RecurrentMixer) else None

    @property
    def spec(self) -> LayerSpec:
        """What the layer computes."""
        return self._parts.spec

    @property
    def mixture(self) -> Mixture | None:
        """The layer's experts."""
        return self._parts.mixture

    def run(self, hidden: mx.array, step: LayerStep | StateStep | None, wanted: mx.array | None = None) -> mx.array:
        """Return the next layer's input [T, H] for hidden [T, H]. ``step``: of the layer's mixer, if it has one.

        ``wanted`` [R]: the rows to return, in this order; None: all.
        """
        mixed: Sequence[mx.array] = ()
        if self._parts.mixer is not None:
            positions = (step.positions,) if isinstance(step, LayerStep) else ()
            entered = self._enter(hidden, *positions)
            norms = 1 if self._parts.parallel else 0
            mixed = [*entered[:norms], *self._mixed(entered[norms:], step)]
        if wanted is not None:
            hidden, mixed = hidden[wanted], [each[wanted] for each in mixed]
        out, *chosen = self._leave(hidden, *mixed)
        if (mixture := self._parts.mixture) is not None:
            (mixture.chosen,) = chosen
        return out

    def _mixed(self, entered: Arrays, step: LayerStep | StateStep | None) -> list[mx.array]:
        mixer = self._parts.mixer
        if isinstance(step, StateStep):
            assert isinstance(mixer, RecurrentMixer)
            assert self._advance is not None
            return [mixer.mix(entered, step, self._advance)]
        assert isinstance(step, LayerStep)
        assert isinstance(mixer, SelfAttention | LatentAttention)
        return mixer.mix(entered, step)


def _normed(x: mx.array, norm: Norm | None) -> mx.array:
    return x if norm is None else norm.rows(x)


def build_layer(config: ModelConfig, index: int, weights: LayerWeights) -> DecoderLayer:
    """Build a decoder layer of its loaded weights. Raises ArchitectureUnsupported for an unknown rope scaling."""
    spec = config.layers[index]
    before, after = ([weights.norm(name) for name in names] for names in norm_names(spec))
    input_norm, inner_norm = [*(() if spec.mixes else (None,)), *before, None, None][:2]
    attended_norm, added_norm = [*after, None, None][:2]
    mixture = None if spec.experts is None else _mixture(spec.experts, weights)
    parts = LayerParts(
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
    return DecoderLayer(parts)


def _mixer(spec: LayerSpec, weights: LayerWeights, context_length: int) -> LayerMixer | None:
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
    names = ("gate", "up") if gated else ("up",)
    gate_up = weights.joined([f"{module}.{name}_proj" for name in names], activated=True)
    return Gated(gate_up, weights.linear(f"{module}.down_proj"), ACTIVATIONS[activation])


def _mixture(spec: Experts, weights: LayerWeights) -> Mixture:
    correction = weights.vector("mlp.router.correction") if spec.router.correction else None
    how = spec.router
    input_scale = None if how.input_eps is None else weights.vector("mlp.router.input_scale")
    expert_scale = weights.vector("mlp.router.expert_scale") if how.expert_scales else None
    router = RouterWeights(weights.linear("mlp.router"), correction, input_scale, expert_scale)
    names = ("gate", "up") if spec.gated else ("up",)
    gate_up = weights.joined_experts([f"mlp.experts.{name}_proj" for name in names], spec.count)
    down = weights.experts("mlp.experts.down_proj", spec.count)
    around = (weights.linear("mlp.latent_in"), weights.linear("mlp.latent_out")) if spec.latent else None
    return Mixture(spec, router, gate_up, down, ACTIVATIONS[spec.activation], around)
