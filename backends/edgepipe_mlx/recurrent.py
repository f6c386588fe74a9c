"""Recurrent mixers: gated DeltaNet, Mamba-2, short convolutions. States and recurrences are float32.

Rows with one token take the step form, all at once. Longer rows take the chunked form, one row after another, so a row
does not depend on its neighbours. T packed rows, N of them with one token, L tokens of a long row, H heads, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn

from edgepipe.model.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv
from edgepipe_mlx.layer_weights import LayerWeights
from edgepipe_mlx.states import LongRow, State, StateStep

_CHUNK = 64  # tokens that are computed side by side
_LENGTH_EPS = 1e-6  # of the length of queries and keys


class Convolution:
    """A causal convolution per channel over the last tokens (``taps``, the token's own included)."""

    def __init__(self, weights: LayerWeights, module: str) -> None:
        self._weight = weights.vector(f"{module}.weight")  # [C, taps]
        self._bias = weights.bias(module)  # [C]

    def step(self, last: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
        """Convolve x [N, C] behind the inputs last [N, taps - 1, C]. Returns [N, C], and the inputs to keep."""
        window = mx.concatenate([last, x[:, None]], axis=1)
        out = (window * self._weight.T).sum(axis=1)
        return out if self._bias is None else out + self._bias, window[:, 1:]

    def whole(self, last: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
        """Convolve the tokens x [L, C] behind the inputs last [taps - 1, C]. Returns [L, C], and the inputs to keep."""
        padded = mx.concatenate([last, x])
        length = x.shape[0]
        out = sum(
            (padded[tap : tap + length] * self._weight[:, tap] for tap in range(self._weight.shape[1])), mx.array(0.0)
        )
        return out if self._bias is None else out + self._bias, padded[length:]


class RecurrentMixer:
    """The way of a step's rows through a mixer's two forms, and its products before and behind."""

    def rows(self, x: mx.array, step: StateStep) -> mx.array:
        """Compute x [T, H], and keep the states that the rows name. Returns [T, H]."""
        made = self._input(x).astype(mx.float32)
        return self._output(self._mixed(made, step).astype(x.dtype))

    def _mixed(self, made: mx.array, step: StateStep) -> mx.array:
        where = step.step
        if not where.long:
            return self._singles(made, step)
        out = mx.zeros((made.shape[0], self._width()), mx.float32)
        if where.rows is not None:
            out[where.rows] = self._singles(made[where.rows], step)
        for row in where.long:
            out[row.first : row.first + row.count] = self._long(made[row.first : row.first + row.count], row, step)
        return out

    def _singles(self, made: mx.array, step: StateStep) -> mx.array:
        out, after = self._step(made, step.pool.read(step.step.read))
        step.keep(step.step.write, after)
        return out

    def _long(self, made: mx.array, row: LongRow, step: StateStep) -> mx.array:
        slot = step.step.zeros if row.state.read is None else row.state.read
        state = tuple(each[0] for each in step.pool.read([slot]))
        parts: list[mx.array] = []
        start = 0
        for write in row.state.writes:
            out, state = self._whole(made[start : write.after], state)
            parts.append(out)
            step.keep([write.slot], tuple(each[None] for each in state))
            start = write.after
        return mx.concatenate(parts)

    def _input(self, x: mx.array) -> mx.array:
        """Return the products [T, F] of the layer's input."""
        raise NotImplementedError

    def _output(self, x: mx.array) -> mx.array:
        """Return the product [T, H] of what was mixed [T, W]."""
        raise NotImplementedError

    def _width(self) -> int:
        """Return W."""
        raise NotImplementedError

    def _step(self, made: mx.array, state: State) -> tuple[mx.array, State]:
        """Compute one token of N sequences with states [N, ...]."""
        raise NotImplementedError

    def _whole(self, made: mx.array, state: State) -> tuple[mx.array, State]:
        """Compute L tokens of a sequence behind a state."""
        raise NotImplementedError


class DeltaNetMixer(RecurrentMixer):
    """See ``DeltaNet``."""

    def __init__(self, spec: DeltaNet, weights: LayerWeights) -> None:
        self._spec = spec
        self._inputs = [weights.linear(f"linear_attn.in_proj_{name}") for name in ("qkv", "z", "b", "a")]
        self._out = weights.linear("linear_attn.out_proj")
        self._convolution = Convolution(weights, "linear_attn.conv1d")
        self._dt_bias = weights.vector("linear_attn.dt_bias")
        self._rates = mx.exp(weights.vector("linear_attn.A_log"))
        self._norm = weights.vector("linear_attn.norm.weight")
        self._eps = weights.norm_eps
        heads = mx.arange(spec.value_heads)
        self._key_head = heads % spec.key_heads if spec.tiled else heads // (spec.value_heads // spec.key_heads)

    def _input(self, x: mx.array) -> mx.array:
        return mx.concatenate([each.multiply(x) for each in self._inputs], axis=-1)

    def _output(self, x: mx.array) -> mx.array:
        return self._out.multiply(x)

    def _width(self) -> int:
        return self._spec.value_heads * self._spec.value_dim

    def _parts(self, made: mx.array) -> list[mx.array]:
        spec = self._spec
        ends = list(accumulate([spec.channels, self._width(), spec.value_heads]))
        return list(mx.split(made, ends, axis=-1))

    def _heads(self, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries and keys [T, H, K], normalised, and values [T, H, V] of convolved channels [T, C]."""
        spec = self._spec
        size = spec.key_heads * spec.key_dim
        keys = mixed[:, : 2 * size].reshape(-1, 2, spec.key_heads, spec.key_dim)
        keys = keys * mx.rsqrt((keys * keys).sum(axis=-1, keepdims=True) + _LENGTH_EPS)
        keys = keys[:, :, self._key_head]
        values = mixed[:, 2 * size :].reshape(-1, spec.value_heads, spec.value_dim)
        return keys[:, 0] * spec.key_dim**-0.5, keys[:, 1], values

    def _gates(self, alpha: mx.array, beta: mx.array) -> tuple[mx.array, mx.array]:
        """Return the logarithm of the decay, and beta, [T, H]."""
        return -self._rates * nn.softplus(alpha + self._dt_bias), mx.sigmoid(beta)

    def _gated(self, out: mx.array, z: mx.array) -> mx.array:
        """Normalise the heads' outputs [T, H, V] and multiply them with SiLU(z) [T, H V]."""
        normed = mx.fast.rms_norm(out, self._norm, self._eps)
        return normed.reshape(z.shape) * nn.silu(z)

    def _step(self, made: mx.array, state: State) -> tuple[mx.array, State]:
        last, memory = state
        channels, z, beta, alpha = self._parts(made)
        mixed, last = self._convolution.step(last, channels)
        queries, keys, values = self._heads(nn.silu(mixed))
        log_decay, beta = self._gates(alpha, beta)
        memory = memory * mx.exp(log_decay)[..., None, None]
        error = (values - (memory * keys[..., None]).sum(axis=-2)) * beta[..., None]
        memory = memory + keys[..., None] * error[..., None, :]
        out = (memory * queries[..., None]).sum(axis=-2)
        return self._gated(out, z), (last, memory)

    def _whole(self, made: mx.array, state: State) -> tuple[mx.array, State]:
        last, memory = state
        channels, z, beta, alpha = self._parts(made)
        mixed, last = self._convolution.whole(last, channels)
        queries, keys, values = (each.swapaxes(0, 1) for each in self._heads(nn.silu(mixed)))
        log_decay, beta = (each.T for each in self._gates(alpha, beta))
        outs: list[mx.array] = []
        for part in _chunks(made.shape[0]):
            out, memory = delta_chunk(
                queries[:, part], keys[:, part], values[:, part], log_decay[:, part], beta[:, part], memory
            )
            outs.append(out)
        return self._gated(mx.concatenate(outs, axis=1).swapaxes(0, 1), z), (last, memory)


def delta_chunk(
    queries: mx.array, keys: mx.array, values: mx.array, log_decay: mx.array, beta: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the outputs [H, c, V] of c tokens, and the memory [H, K, V] behind them (section 3.3 of the paper).

    queries, keys    [H, c, K]
    values           [H, c, V]
    log_decay, beta  [H, c]
    memory           [H, K, V] before the tokens
    """
    total = mx.cumsum(log_decay, axis=-1)  # of each token's decay and those before it
    since = _decays(total)
    scaled = keys * beta[..., None]
    # What each token writes depends on those before it: a unit triangular system, which MLX solves on the CPU.
    system = mx.tril((scaled @ keys.swapaxes(-1, -2)) * since, -1) + mx.eye(keys.shape[1])
    wanted = values * beta[..., None] - (scaled * mx.exp(total)[..., None]) @ memory
    errors = mx.linalg.solve_triangular(system, wanted, upper=False, stream=mx.cpu)
    out = (queries * mx.exp(total)[..., None]) @ memory
    out = out + ((queries @ keys.swapaxes(-1, -2)) * since) @ errors
    left = mx.exp(total[:, -1:] - total)[..., None]
    return out, memory * mx.exp(total[:, -1:])[..., None] + (keys * left).swapaxes(-1, -2) @ errors


class Mamba2Mixer(RecurrentMixer):
    """See ``Mamba2``."""

    def __init__(self, spec: Mamba2, weights: LayerWeights) -> None:
        self._spec = spec
        self._in = weights.linear("mamba.in_proj")
        self._out = weights.linear("mamba.out_proj")
        self._convolution = Convolution(weights, "mamba.conv1d")
        self._dt_bias, self._skips = weights.vector("mamba.dt_bias"), weights.vector("mamba.D")
        self._rates = mx.exp(weights.vector("mamba.A_log"))
        self._norm = weights.vector("mamba.norm.weight")
        self._eps = weights.norm_eps
        self._group = mx.arange(spec.heads) // (spec.heads // spec.groups)

    def _input(self, x: mx.array) -> mx.array:
        return self._in.multiply(x)

    def _output(self, x: mx.array) -> mx.array:
        return self._out.multiply(x)

    def _width(self) -> int:
        return self._spec.heads * self._spec.head_dim

    def _parts(self, made: mx.array) -> list[mx.array]:
        return list(mx.split(made, [self._width(), self._width() + self._spec.channels], axis=-1))

    def _heads(self, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return x [T, H, D], B and C [T, H, N] of convolved channels."""
        spec = self._spec
        both = mixed[:, self._width() :].reshape(-1, 2, spec.groups, spec.state_dim)[:, :, self._group]
        return mixed[:, : self._width()].reshape(-1, spec.heads, spec.head_dim), both[:, 0], both[:, 1]

    def _steps(self, dt: mx.array) -> mx.array:
        return mx.clip(nn.softplus(dt + self._dt_bias), *self._spec.dt_limits)

    def _gated(self, out: mx.array, z: mx.array) -> mx.array:
        """Multiply the heads' outputs [T, H, D] with SiLU(z) [T, H D], and normalise each group."""
        gated = (out.reshape(z.shape) * nn.silu(z)).reshape(z.shape[0], self._spec.groups, -1)
        return mx.fast.rms_norm(gated, None, self._eps).reshape(z.shape) * self._norm

    def _step(self, made: mx.array, state: State) -> tuple[mx.array, State]:
        last, memory = state
        z, channels, dt = self._parts(made)
        mixed, last = self._convolution.step(last, channels)
        x, into, out_of = self._heads(nn.silu(mixed))
        dt = self._steps(dt)
        memory = memory * mx.exp(-self._rates * dt)[..., None, None]
        memory = memory + (x * dt[..., None])[..., None] * into[..., None, :]
        out = (memory * out_of[..., None, :]).sum(axis=-1) + x * self._skips[:, None]
        return self._gated(out, z), (last, memory)

    def _whole(self, made: mx.array, state: State) -> tuple[mx.array, State]:
        last, memory = state
        z, channels, dt = self._parts(made)
        mixed, last = self._convolution.whole(last, channels)
        x, into, out_of = (each.swapaxes(0, 1) for each in self._heads(nn.silu(mixed)))
        dt = self._steps(dt).T
        outs: list[mx.array] = []
        for part in _chunks(made.shape[0]):
            decay = -self._rates[:, None] * dt[:, part]
            out, memory = scan_chunk(x[:, part] * dt[:, part][..., None], into[:, part], out_of[:, part], decay, memory)
            outs.append(out + x[:, part] * self._skips[:, None, None])
        return self._gated(mx.concatenate(outs, axis=1).swapaxes(0, 1), z), (last, memory)


def scan_chunk(
    x: mx.array, into: mx.array, out_of: mx.array, log_decay: mx.array, memory: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the outputs [H, c, D] of c tokens, and the memory [H, D, N] behind them (section 6 of the paper).

    x             [H, c, D] times dt
    into, out_of  [H, c, N]: B and C
    log_decay     [H, c]
    memory        [H, D, N] before the tokens
    """
    total = mx.cumsum(log_decay, axis=-1)
    out = ((out_of @ into.swapaxes(-1, -2)) * _decays(total)) @ x
    out = out + (out_of * mx.exp(total)[..., None]) @ memory.swapaxes(-1, -2)
    left = mx.exp(total[:, -1:] - total)[..., None]
    return out, memory * mx.exp(total[:, -1:])[..., None] + (x * left).swapaxes(-1, -2) @ into


class ShortConvMixer(RecurrentMixer):
    """See ``ShortConv``."""

    def __init__(self, spec: ShortConv, weights: LayerWeights) -> None:
        self._channels = spec.channels
        self._in, self._out = weights.linear("conv.in_proj"), weights.linear("conv.out_proj")
        self._convolution = Convolution(weights, "conv.conv")

    def _input(self, x: mx.array) -> mx.array:
        return self._in.multiply(x)

    def _output(self, x: mx.array) -> mx.array:
        return self._out.multiply(x)

    def _width(self) -> int:
        return self._channels

    def _step(self, made: mx.array, state: State) -> tuple[mx.array, State]:
        into, out_of, x = mx.split(made, 3, axis=-1)
        mixed, last = self._convolution.step(state[0], into * x)
        return out_of * mixed, (last,)

    def _whole(self, made: mx.array, state: State) -> tuple[mx.array, State]:
        into, out_of, x = mx.split(made, 3, axis=-1)
        mixed, last = self._convolution.whole(state[0], into * x)
        return out_of * mixed, (last,)


def make_mixer(spec: Recurrent, weights: LayerWeights) -> RecurrentMixer:
    """Make a recurrent layer's mixer."""
    match spec:
        case DeltaNet():
            return DeltaNetMixer(spec, weights)
        case Mamba2():
            return Mamba2Mixer(spec, weights)
        case ShortConv():
            return ShortConvMixer(spec, weights)


def _decays(total: mx.array) -> mx.array:
    """Return the decay [H, c, c] from each token to those behind it; 0 to those before. total: sums of logs [H, c]."""
    apart = total[..., None] - total[..., None, :]
    return mx.tril(mx.exp(mx.minimum(apart, 0.0)))


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, _CHUNK):
        yield slice(start, min(start + _CHUNK, count))
