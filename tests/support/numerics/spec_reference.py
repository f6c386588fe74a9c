"""A decoder of layer specs in numpy, in float64 and without any tricks: the reference for backends.

One pass over all tokens of a sequence. T tokens, H hidden, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import numpy as np
import numpy.typing as npt

from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.layer_spec import Attention, Experts, Latent, LayerSpec, Norm, Router
from edgepipe.spec.packed import Packed
from edgepipe.spec.rope import rotary_frequencies
from edgepipe.spec.tensors import WeightSource
from edgepipe.weights.dequantise import as_float32
from tests.support.numerics.recurrent_reference import mixed

Array = npt.NDArray[np.float64]


def float_weights(source: WeightSource) -> dict[str, npt.NDArray[np.float32]]:
    """Read all weights of a model, by edgepipe's names; packed ones as the floats that they stand for."""
    whole = Slice(index=0, layers=LayerRange(0, source.config.num_layers), embedding=True, head=True)
    found: dict[str, npt.NDArray[np.float32]] = {}
    for info in source.weights(whole):
        raw = source.load(info.name)
        found[info.name] = raw.float32() if isinstance(raw, Packed) else as_float32(raw).reshape(info.shape)
    return found


def reference_logits(config: ModelConfig, weights: Mapping[str, npt.NDArray[np.float32]], tokens: list[int]) -> Array:
    """Return the logits [T, V] of every token; ``weights`` by edgepipe's names."""
    wide = {name: weight.astype(np.float64) for name, weight in weights.items()}
    return _head(config, wide, _finals(config, wide, tokens))


def reference_drafts(
    config: ModelConfig, weights: Mapping[str, npt.NDArray[np.float32]], tokens: list[int], depth: int
) -> Array:
    """Return the logits [depth, V] of greedy guesses behind tokens, by the last layer, which predicts one token more.

    At each position the layer takes the model's output behind its final norm, and the token behind the position. Where
    the model has no output yet, it takes its own output behind its last norm.
    """
    wide = {name: weight.astype(np.float64) for name, weight in weights.items()}
    outputs, behind = list(_finals(config, wide, tokens[:-1])), tokens[1:]
    own = _own(wide, config.num_layers - 1)
    layer = _Layer(config, config.layers[-1], own)
    found: list[Array] = []
    for _ in range(depth):
        embedded = wide["model.embed_tokens.weight"][behind] * config.embedding_scale
        normed = (
            _norm(embedded, own["enorm.weight"], config.norm),
            _norm(np.stack(outputs), own["hnorm.weight"], config.norm),
        )
        hidden = layer.run(np.concatenate(normed, axis=-1) @ own["eh_proj.weight"].T)
        last = _norm(hidden[-1], own["shared_head.norm.weight"], config.norm)
        found.append(_head(config, wide, last))
        outputs, behind = [*outputs, last], [*behind, int(found[-1].argmax())]
    return np.stack(found)


def _finals(config: ModelConfig, wide: Mapping[str, Array], tokens: list[int]) -> Array:
    """Return the model's output [T, H] behind its final norm."""
    hidden = wide["model.embed_tokens.weight"][tokens] * config.embedding_scale
    for index, spec in enumerate(config.layers):
        if not spec.mtp:
            hidden = _Layer(config, spec, _own(wide, index)).run(hidden)
    return _norm(hidden, wide["model.norm.weight"], config.norm)


def _own(wide: Mapping[str, Array], layer: int) -> dict[str, Array]:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): weight for name, weight in wide.items() if name.startswith(prefix)}


def _head(config: ModelConfig, wide: Mapping[str, Array], finals: Array) -> Array:
    table = wide["model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"]
    logits = finals @ table.T * config.logit_scale
    return config.logit_softcap * np.tanh(logits / config.logit_softcap) if config.logit_softcap else logits


class _Layer:
    def __init__(self, config: ModelConfig, spec: LayerSpec, weights: Mapping[str, Array]) -> None:
        self._config = config
        self._spec = spec
        self._weights = weights

    def run(self, hidden: Array) -> Array:
        scale = self._spec.residual_scale
        match self._spec.norms:
            case "parallel":
                normed = self._normed(hidden, "input_layernorm")
                return hidden + scale * (self._attend(normed) + self._feed_forward(normed))
            case "before":
                if self._spec.mixes:
                    hidden = hidden + scale * self._mix(self._normed(hidden, "input_layernorm"))
                if not self._spec.feeds:
                    return hidden
                return hidden + scale * self._feed_forward(self._normed(hidden, "post_attention_layernorm"))
            case "after":
                hidden = hidden + scale * self._normed(self._attend(hidden), "post_attention_layernorm")
                return hidden + scale * self._normed(self._feed_forward(hidden), "post_feedforward_layernorm")
            case "both":
                added = self._attend(self._normed(hidden, "input_layernorm"))
                hidden = hidden + scale * self._normed(added, "post_attention_layernorm")
                added = self._feed_forward(self._normed(hidden, "pre_feedforward_layernorm"))
                return hidden + scale * self._normed(added, "post_feedforward_layernorm")

    def _normed(self, x: Array, name: str) -> Array:
        return _norm(x, self._weights[f"{name}.weight"], self._config.norm)

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self._weights[f"{name}.weight"].T + self._weights.get(f"{name}.bias", 0.0)

    @property
    def _attention(self) -> Attention:
        assert self._spec.attention is not None
        return self._spec.attention

    def _mix(self, x: Array) -> Array:
        recurrent = self._spec.recurrent
        if recurrent is None:
            return self._attend(x)
        return mixed(recurrent, self._weights, x, eps=self._config.norm.eps)

    def _attend(self, x: Array) -> Array:
        spec = self._attention
        queries, keys, values = self._heads_of(x) if spec.latent is None else self._latent_heads(x, spec.latent)
        sinks = self._weights.get("self_attn.sinks", np.full(spec.num_heads, -inf))
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        seen = (distance >= 0) & (distance < (spec.window or inf))
        heads: list[Array] = []
        for head in range(spec.num_heads):
            group = head * keys.shape[1] // spec.num_heads
            logits = queries[:, head] @ keys[:, group].T * (spec.scale or spec.head_dim**-0.5)
            logits = spec.softcap * np.tanh(logits / spec.softcap) if spec.softcap else logits
            powers = np.where(seen, np.exp(logits), 0.0)
            heads.append(powers @ values[:, group] / (powers.sum(-1, keepdims=True) + np.exp(sinks[head])))
        out = np.concatenate(heads, axis=-1)
        if spec.gated:
            gates = self._linear(x, "self_attn.q_proj").reshape(len(x), spec.num_heads, 2, -1)[:, :, 1]
            out = out / (1 + np.exp(-gates.reshape(out.shape)))
        return self._linear(out, "self_attn.o_proj")

    def _heads_of(self, x: Array) -> tuple[Array, Array, Array]:
        spec = self._attention
        values = self._linear(x, "self_attn.v_proj").reshape(len(x), spec.num_kv_heads, -1)
        return self._heads(x, "q", spec.num_heads), self._heads(x, "k", spec.num_kv_heads), values

    def _latent_heads(self, x: Array, latent: Latent) -> tuple[Array, Array, Array]:
        """Each head with keys and values of its own, as published, not absorbed."""
        spec, heads, rank, own = self._attention, self._attention.num_heads, latent.kv_rank, latent.nope_dim
        norm, context = Norm(eps=latent.norm_eps), self._config.context_length
        asked = x
        if latent.query_rank:
            asked = _norm(self._linear(x, "self_attn.q_a_proj"), self._weights["self_attn.q_a_layernorm.weight"], norm)
        asked = self._linear(asked, "self_attn.q_b_proj" if latent.query_rank else "self_attn.q_proj")
        queries = asked.reshape(len(x), heads, -1)
        rotated = _rotated(queries[..., own:], spec, context)
        made = self._linear(x, "self_attn.kv_a_proj_with_mqa")
        kept = _norm(made[:, :rank], self._weights["self_attn.kv_a_layernorm.weight"], norm)
        key = np.repeat(_rotated(made[:, None, rank:], spec, context), heads, axis=1)
        if latent.joined:
            parts = self._linear(kept, "self_attn.kv_b_proj").reshape(len(x), heads, -1)
            keys, values = parts[..., :own], parts[..., own:]
        else:
            matrices = self._weights["self_attn.k_b_proj.weight"].reshape(heads, rank, own)
            keys = np.einsum("tc,hcn->thn", kept, matrices)
            values = self._linear(kept, "self_attn.v_b_proj").reshape(len(x), heads, -1)
        both = [np.concatenate(each, axis=-1) for each in ((queries[..., :own], rotated), (keys, key))]
        return both[0], both[1], values

    def _heads(self, x: Array, name: str, count: int) -> Array:
        spec, made = self._attention, self._linear(x, f"self_attn.{name}_proj")
        if spec.gated and name == "q":  # each head's query is followed by its gate
            made = made.reshape(len(x), count, 2, -1)[:, :, 0].reshape(len(x), -1)
        made = self._normed(made, f"self_attn.{name}_norm") if spec.qk_norm == "all" else made
        heads = made.reshape(len(x), count, spec.head_dim)
        heads = self._normed(heads, f"self_attn.{name}_norm") if spec.qk_norm == "head" else heads
        return _rotated(heads, spec, self._config.context_length)

    def _feed_forward(self, x: Array) -> Array:
        total = np.zeros_like(x)
        if self._spec.dense is not None:
            total += self._part(x, "mlp", self._spec.dense.activation, gated=self._spec.dense.gated)
        if self._spec.experts is not None:
            total += np.stack([self._mixed(row, self._spec.experts) for row in x])
        return total

    def _part(self, x: Array, name: str, activation: str, *, gated: bool) -> Array:
        up = self._linear(x, f"{name}.up_proj")
        gate = self._linear(x, f"{name}.gate_proj") if gated else up
        return self._linear(_activated(gate, up, activation), f"{name}.down_proj")

    def _mixed(self, row: Array, spec: Experts) -> Array:
        """Compute one row [H]."""
        logits = self._linear(row, "mlp.router")
        entering = self._linear(row, "mlp.latent_in") if spec.latent else row
        mixed = np.zeros_like(entering)
        for expert, factor in choose(logits, self._weights.get("mlp.router.correction"), spec.used, spec.router):
            up = self._expert(entering, "up", expert, spec.count)
            gate = self._expert(entering, "gate", expert, spec.count) if spec.gated else up
            mixed += factor * self._expert(_activated(gate, up, spec.activation), "down", expert, spec.count)
        total = self._linear(mixed, "mlp.latent_out") if spec.latent else mixed
        if spec.shared_inner:
            activation = "silu" if spec.gated else spec.activation
            shared = self._part(row, "mlp.shared_expert", activation, gated=spec.gated)
            gate = self._weights["mlp.shared_expert_gate.weight"] @ row if spec.shared_gated else inf
            total += shared / (1 + np.exp(-gate))
        return total

    def _expert(self, x: Array, name: str, expert: int, count: int) -> Array:
        matrices = self._weights[f"mlp.experts.{name}_proj.weight"].reshape(count, -1, x.shape[-1])
        biases = self._weights.get(f"mlp.experts.{name}_proj.bias", np.zeros(count)).reshape(count, -1)
        return matrices[expert] @ x + biases[expert]


def choose(logits: Array, correction: Array | None, used: int, router: Router) -> list[tuple[int, float]]:
    """Return the experts of one row and their weights, from its logits [E]."""
    scores = 1 / (1 + np.exp(-logits)) if router.score == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    ranked = scores if correction is None else scores + correction
    groups = ranked.reshape(router.groups, -1)
    values = [sorted(group)[-1:] if router.group_score == "max" else sorted(group)[-2:] for group in groups]
    best = sorted(range(router.groups), key=lambda group: -sum(values[group]))[: router.groups_used]
    open_to = [expert for expert in range(len(ranked)) if expert * router.groups // len(ranked) in best]
    chosen = sorted(open_to, key=lambda expert: -ranked[expert])[:used]
    total = sum(scores[expert] for expert in chosen) if router.normalised else 1.0
    return [(expert, float(scores[expert] / total * router.scale)) for expert in chosen]


def _norm(x: Array, weight: Array, how: Norm) -> Array:
    x = x - x.mean(-1, keepdims=True) if how.kind == "layer" else x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + how.eps) * (weight + how.plus_one)


def _rotated(heads: Array, spec: Attention, context_length: int) -> Array:
    """Rotate heads [T, n, D] by their positions."""
    if spec.rope is None:
        return heads
    frequencies, amplitude = rotary_frequencies(spec.rope, dims=spec.rotated, context_length=context_length)
    pairs = np.arange(spec.rotated).reshape(-1, 2) if spec.interleaved else np.arange(spec.rotated).reshape(2, -1).T
    turns = np.exp(1j * np.arange(len(heads))[:, None] * frequencies) * amplitude
    turned = (heads[..., pairs[:, 0]] + 1j * heads[..., pairs[:, 1]]) * turns[:, None]
    out = heads.copy()
    out[..., pairs[:, 0]], out[..., pairs[:, 1]] = turned.real, turned.imag
    return out


def _activated(gate: Array, up: Array, activation: str) -> Array:
    match activation:
        case "gelu_tanh":
            return gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2 * up
        case "clamped_swiglu":
            gate = np.minimum(gate, 7.0)
            return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7.0, 7.0) + 1)
        case "relu2":  # has no gate
            return np.maximum(up, 0.0) ** 2
        case _:
            return gate / (1 + np.exp(-gate)) * up
