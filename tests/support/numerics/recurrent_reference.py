"""Recurrent mixers in numpy, one token after another, in float64: the reference for backends.

T tokens, H hidden. ``weights`` are those of one layer, by edgepipe's names within it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv

Array = npt.NDArray[np.float64]

_LENGTH_EPS = 1e-6  # epsilon of the length of queries and keys


def mixed(spec: Recurrent, weights: Mapping[str, Array], x: Array, *, eps: float) -> Array:
    """Return what a mixer adds [T, H] to tokens x [T, H] that begin a sequence; ``eps``: of the model's norms."""
    match spec:
        case DeltaNet():
            return _delta_net(spec, weights, x, eps)
        case Mamba2():
            return _mamba2(spec, weights, x, eps)
        case ShortConv():
            return _short_conv(weights, x)


def _delta_net(spec: DeltaNet, weights: Mapping[str, Array], x: Array, eps: float) -> Array:
    name, tokens = "linear_attn", len(x)
    channels = _silu(_convolved(_linear(weights, x, f"{name}.in_proj_qkv"), weights, f"{name}.conv1d"))
    queries, keys, values = np.split(channels, np.array([1, 2]) * spec.key_heads * spec.key_dim, axis=1)
    heads = np.arange(spec.value_heads)
    used = heads % spec.key_heads if spec.tiled else heads // (spec.value_heads // spec.key_heads)
    queries = _unit(queries.reshape(tokens, spec.key_heads, -1))[:, used] * spec.key_dim**-0.5
    keys = _unit(keys.reshape(tokens, spec.key_heads, -1))[:, used]
    values = values.reshape(tokens, spec.value_heads, -1)
    alpha = _linear(weights, x, f"{name}.in_proj_a") + weights[f"{name}.dt_bias"]
    decay = np.exp(-np.exp(weights[f"{name}.A_log"]) * _softplus(alpha))
    beta = _sigmoid(_linear(weights, x, f"{name}.in_proj_b"))
    state = np.zeros((spec.value_heads, spec.key_dim, spec.value_dim))
    out = np.empty_like(values)
    for token in range(tokens):
        state *= decay[token, :, None, None]
        error = values[token] - np.einsum("hkv,hk->hv", state, keys[token])
        state += np.einsum("h,hk,hv->hkv", beta[token], keys[token], error)
        out[token] = np.einsum("hkv,hk->hv", state, queries[token])
    gates = _linear(weights, x, f"{name}.in_proj_z").reshape(values.shape)
    normed = _normed(out, eps) * weights[f"{name}.norm.weight"] * _silu(gates)
    return _linear(weights, normed.reshape(tokens, -1), f"{name}.out_proj")


def _mamba2(spec: Mamba2, weights: Mapping[str, Array], x: Array, eps: float) -> Array:
    name, tokens, inner = "mamba", len(x), spec.heads * spec.head_dim
    gates, channels, steps = np.split(_linear(weights, x, f"{name}.in_proj"), [inner, inner + spec.channels], axis=1)
    channels = _silu(_convolved(channels, weights, f"{name}.conv1d"))
    size = spec.groups * spec.state_dim
    values, into, out_of = np.split(channels, [inner, inner + size], axis=1)
    values = values.reshape(tokens, spec.heads, -1)
    own = np.arange(spec.heads) // (spec.heads // spec.groups)
    into, out_of = (part.reshape(tokens, spec.groups, -1)[:, own] for part in (into, out_of))
    steps = np.clip(_softplus(steps + weights[f"{name}.dt_bias"]), *spec.dt_limits)
    decay = np.exp(-np.exp(weights[f"{name}.A_log"]) * steps)
    state = np.zeros((spec.heads, spec.head_dim, spec.state_dim))
    out = np.empty_like(values)
    for token in range(tokens):
        state *= decay[token, :, None, None]
        state += np.einsum("h,hd,hn->hdn", steps[token], values[token], into[token])
        out[token] = np.einsum("hdn,hn->hd", state, out_of[token]) + weights[f"{name}.D"][:, None] * values[token]
    gated = (out.reshape(tokens, -1) * _silu(gates)).reshape(tokens, spec.groups, -1)
    normed = _normed(gated, eps).reshape(tokens, -1) * weights[f"{name}.norm.weight"]
    return _linear(weights, normed, f"{name}.out_proj")


def _short_conv(weights: Mapping[str, Array], x: Array) -> Array:
    into, out_of, values = np.split(_linear(weights, x, "conv.in_proj"), 3, axis=1)
    return _linear(weights, out_of * _convolved(into * values, weights, "conv.conv"), "conv.out_proj")


def _linear(weights: Mapping[str, Array], x: Array, name: str) -> Array:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def _convolved(x: Array, weights: Mapping[str, Array], name: str) -> Array:
    """Convolve each channel [T, C] with its taps [C, taps], the token's own last."""
    taps = weights[f"{name}.weight"].reshape(x.shape[1], -1)
    padded = np.concatenate([np.zeros((taps.shape[1] - 1, x.shape[1])), x])
    total = np.zeros_like(x) + weights.get(f"{name}.bias", 0.0)
    for tap in range(taps.shape[1]):
        total += padded[tap : tap + len(x)] * taps[:, tap]
    return total


def _unit(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + _LENGTH_EPS)


def _normed(x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)
