"""Recurrent mixers: gated DeltaNet, Mamba-2, short convolutions. States and recurrences are float32.

Rows with one token take the step form, all at once. Longer rows take the chunked form, one row after another, so a row
does not depend on its neighbours. T packed rows, N of them with one token, L tokens of a long row, H heads, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import mlx.core as mx
import mlx.nn as nn

from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv
from edgepipe_mlx.layer_graphs import Arrays
from edgepipe_mlx.layer_weights import LayerWeights
from edgepipe_mlx.recurrent_chunks import delta_tokens, scan_tokens
from edgepipe_mlx.states import LongRow, State, StateStep

Advance = Callable[..., Arrays]

_LENGTH_EPS = 1e-6  # epsilon in the length of queries and keys


class Convolution:
    """A causal convolution per channel over the last tokens (``taps``, the token's own included)."""

    def __init__(self, weights: LayerWeights, module: str) -> None:
        self._weight = weights.vector(f"{module}.weight")  # [C, taps]
        self._bias = weights.bias(module)  # [C]

    def step(self, last: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
        """Convolve x [N, C] behind the inputs last [N, taps - 1, C]. Returns [N, C], and the inputs to keep."""
        window = [*(last[:, tap] for tap in range(last.shape[1])), x]
        out = reduce(mx.add, (each * self._weight[:, tap] for tap, each in enumerate(window)))  # fused, unlike a sum
        kept = mx.concatenate([last[:, 1:], x[:, None]], axis=1)
        return out if self._bias is None else out + self._bias, kept

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

    _num_products = 1

    def enter(self, x: mx.array, *positions: mx.array) -> list[mx.array]:
        """Return products [T, F] float32 of x [T, H]."""
        return self._input(x)

    def mix(self, made: Arrays, step: StateStep, advance: Advance) -> mx.array:
        """Mix what entered with states, and keep those that the rows name. Returns [T, W].

        advance  computes as ``self.advance`` does
        """
        where = step.step
        if not where.long:
            return self._singles(made, step, advance)
        out = mx.zeros((made[0].shape[0], self._width()), mx.float32)
        if where.rows is not None:
            out[where.rows] = self._singles([each[where.rows] for each in made], step, advance)
        for row in where.long:
            own = slice(row.first, row.first + row.count)
            out[own] = self._long([each[own] for each in made], row, step)
        return out

    def leave(self, mixed: Arrays) -> mx.array:
        """Return the product [T, H] of what was mixed."""
        return self._output(mixed[0])

    def advance(self, *given: mx.array) -> list[mx.array]:
        """Compute one token of N sequences, of products [N, F] and states [N, ...]. Returns [N, W], and new states."""
        out, after = self._step(given[: self._num_products], given[self._num_products :])
        return [out, *after]

    def _singles(self, made: Arrays, step: StateStep, advance: Advance) -> mx.array:
        out, *after = advance(*made, *step.pool.read(step.step.read))
        step.keep(step.step.write, tuple(after), own=True)
        return out

    def _long(self, made: Arrays, row: LongRow, step: StateStep) -> mx.array:
        slot = step.step.zeros if row.state.read is None else row.state.read
        state = tuple(each[0] for each in step.pool.read([slot]))
        parts: list[mx.array] = []
        start = 0
        for write in row.state.writes:
            out, state = self._whole([each[start : write.after] for each in made], state)
            parts.append(out)
            step.keep([write.slot], tuple(each[None] for each in state))
            start = write.after
        return mx.concatenate(parts)

    def _input(self, x: mx.array) -> list[mx.array]:
        """Return products [T, F] float32 of the layer's input, ``_num_products`` of them."""
        raise NotImplementedError

    def _output(self, x: mx.array) -> mx.array:
        """Return the product [T, H] in the compute dtype, of what was mixed [T, W] float32."""
        raise NotImplementedError

    def _width(self) -> int:
        """Return W."""
        raise NotImplementedError

    def _step(self, made: Arrays, state: State) -> tuple[mx.array, State]:
        """Compute one token of N sequences with states [N, ...]."""
        raise NotImplementedError

    def _whole(self, made: Arrays, state: State) -> tuple[mx.array, State]:
        """Compute L tokens of a sequence behind a state."""
        raise NotImplementedError


@partial(mx.compile, shapeless=True)  # one kernel on Metal, which reads and writes the states once
def _stepped(memory: mx.array, decay: mx.array, column: mx.array, row: mx.array) -> mx.array:
    return memory * decay + column * row


@partial(mx.compile, shapeless=True)
def _delta_gates(alpha: mx.array, beta: mx.array, bias: mx.array, rates: mx.array) -> tuple[mx.array, mx.array]:
    return -rates * nn.softplus(alpha + bias), mx.sigmoid(beta)


@partial(mx.compile, shapeless=True)
def _times_silu(x: mx.array, z: mx.array) -> mx.array:
    return x * nn.silu(z)


class DeltaNetMixer(RecurrentMixer):
    """See ``DeltaNet``."""

    _num_products = 4  # channels, gates, beta, alpha

    def __init__(self, spec: DeltaNet, weights: LayerWeights) -> None:
        self._spec = spec
        self._inputs = weights.joined([f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")])
        self._out = weights.linear("linear_attn.out_proj")
        self._convolution = Convolution(weights, "linear_attn.conv1d")
        self._dt_bias = weights.vector("linear_attn.dt_bias")
        self._rates = mx.exp(weights.vector("linear_attn.A_log"))
        self._norm = weights.vector("linear_attn.norm.weight")
        # Their norm gives queries and keys a length of 1. Queries need one of K^(-1/2): the norm of the outputs, which
        # are K^(1/2) times as large then, makes up for it.
        self._eps = weights.norm_eps * spec.key_dim
        self._lengths = mx.full((spec.key_dim,), spec.key_dim**-0.5)
        heads, shared = mx.arange(spec.value_heads), spec.value_heads // spec.key_heads  # value heads of a key head
        self._key_head = heads % spec.key_heads if spec.tiled else heads // shared
        # The value heads [H] in two axes a and b, and the one of those that share a key head.
        self._by_key_head = (shared, spec.key_heads) if spec.tiled else (spec.key_heads, shared)
        self._shared_axis = 1 if spec.tiled else 2
        mx.eval(self._rates, self._lengths, self._key_head)  # compiled steps would compute them each time

    def _input(self, x: mx.array) -> list[mx.array]:
        return self._inputs.multiply(x, in_float32=True)

    def _output(self, x: mx.array) -> mx.array:
        return self._out.multiply(x)

    def _width(self) -> int:
        return self._spec.value_heads * self._spec.value_dim

    def _heads(self, mixed: mx.array) -> tuple[mx.array, mx.array]:
        """Return queries and keys [T, 2, Hk, K], normalised, and values [T, H, V] of convolved channels [T, C]."""
        spec = self._spec
        size = spec.key_heads * spec.key_dim
        keys = mixed[:, : 2 * size].reshape(-1, 2, spec.key_heads, spec.key_dim)
        keys = mx.fast.rms_norm(keys, self._lengths, _LENGTH_EPS / spec.key_dim)
        return keys, mixed[:, 2 * size :].reshape(-1, spec.value_heads, spec.value_dim)

    def _gates(self, alpha: mx.array, beta: mx.array) -> tuple[mx.array, mx.array]:
        """Return the logarithm of the decay, and beta, [T, H]."""
        return _delta_gates(alpha, beta, self._dt_bias, self._rates)

    def _column(self, values: mx.array) -> mx.array:
        """Return values [..., H] as [..., a, b, 1], as they are used: MLX fuses nothing over a change of shape."""
        return values.reshape(*values.shape[:-1], *self._by_key_head, 1)

    def _gated(self, out: mx.array, z: mx.array) -> mx.array:
        """Normalise the heads' outputs [T, H, V] and multiply them with SiLU(z) [T, H V]."""
        normed = mx.fast.rms_norm(out, self._norm, self._eps)
        return _times_silu(normed.reshape(z.shape), z)

    def _step(self, made: Arrays, state: State) -> tuple[mx.array, State]:
        last, memory = state
        channels, z, beta, alpha = made
        mixed, last = self._convolution.step(last, channels)
        both, values = self._heads(nn.silu(mixed))
        queries, keys = (mx.expand_dims(both[:, index], self._shared_axis) for index in (0, 1))  # [N, a, b, K]
        log_decay, beta = _delta_gates(*map(self._column, (alpha, beta, self._dt_bias, self._rates)))
        decay = mx.exp(log_decay)
        memories = memory.reshape(-1, *self._by_key_head, *memory.shape[2:])
        values = values.reshape(-1, *self._by_key_head, values.shape[-1])
        error = (values - decay * (keys[..., None, :] @ memories).squeeze(-2)) * beta
        memories = _stepped(memories, decay[..., None], keys[..., None], error[..., None, :])
        out = (queries[..., None, :] @ memories).reshape(-1, *memory.shape[1:2], values.shape[-1])
        return self._gated(out, z), (last, memories.reshape(memory.shape))

    def _whole(self, made: Arrays, state: State) -> tuple[mx.array, State]:
        last, memory = state
        channels, z, beta, alpha = made
        mixed, last = self._convolution.whole(last, channels)
        both, values = self._heads(nn.silu(mixed))
        keys = mx.take(both, self._key_head, axis=2)
        queries, keys, values = (each.swapaxes(0, 1) for each in (keys[:, 0], keys[:, 1], values))
        log_decay, beta = (each.T for each in self._gates(alpha, beta))
        out, memory = delta_tokens(queries, keys, values, log_decay, beta, memory)
        return self._gated(out.swapaxes(0, 1), z), (last, memory)


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
        mx.eval(self._rates, self._group)  # compiled steps would compute them each time

    def _input(self, x: mx.array) -> list[mx.array]:
        return [self._in.float32(x)]

    def _output(self, x: mx.array) -> mx.array:
        return self._out.multiply(x)

    def _width(self) -> int:
        return self._spec.heads * self._spec.head_dim

    def _parts(self, made: mx.array) -> list[mx.array]:
        return list(mx.split(made, [self._width(), self._width() + self._spec.channels], axis=-1))

    def _heads(self, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return x [T, H, D], B and C [T, H, N] of convolved channels."""
        spec = self._spec
        groups = mixed[:, self._width() :].reshape(-1, 2, spec.groups, spec.state_dim)
        both = mx.take(groups, self._group, axis=2)
        return mixed[:, : self._width()].reshape(-1, spec.heads, spec.head_dim), both[:, 0], both[:, 1]

    def _steps(self, dt: mx.array) -> mx.array:
        return mx.clip(nn.softplus(dt + self._dt_bias), *self._spec.dt_limits)

    def _gated(self, out: mx.array, z: mx.array) -> mx.array:
        """Multiply the heads' outputs [T, H, D] with SiLU(z) [T, H D], and normalise each group."""
        gated = _times_silu(out.reshape(z.shape), z).reshape(z.shape[0], self._spec.groups, -1)
        return mx.fast.rms_norm(gated, None, self._eps).reshape(z.shape) * self._norm

    def _step(self, made: Arrays, state: State) -> tuple[mx.array, State]:
        last, memory = state
        z, channels, dt = self._parts(made[0])
        mixed, last = self._convolution.step(last, channels)
        x, into, out_of = self._heads(nn.silu(mixed))
        dt = self._steps(dt)
        decay = mx.exp(-self._rates * dt)[..., None, None]
        memory = _stepped(memory, decay, (x * dt[..., None])[..., None], into[..., None, :])
        out = (memory @ out_of[..., None]).squeeze(-1) + x * self._skips[:, None]
        return self._gated(out, z), (last, memory)

    def _whole(self, made: Arrays, state: State) -> tuple[mx.array, State]:
        last, memory = state
        z, channels, dt = self._parts(made[0])
        mixed, last = self._convolution.whole(last, channels)
        x, into, out_of = (each.swapaxes(0, 1) for each in self._heads(nn.silu(mixed)))
        dt = self._steps(dt).T
        out, memory = scan_tokens(x * dt[..., None], into, out_of, -self._rates[:, None] * dt, memory)
        return self._gated((out + x * self._skips[:, None, None]).swapaxes(0, 1), z), (last, memory)


class ShortConvMixer(RecurrentMixer):
    """See ``ShortConv``."""

    def __init__(self, spec: ShortConv, weights: LayerWeights) -> None:
        self._channels = spec.channels
        self._in, self._out = weights.linear("conv.in_proj"), weights.linear("conv.out_proj")
        self._convolution = Convolution(weights, "conv.conv")

    def _input(self, x: mx.array) -> list[mx.array]:
        return [self._in.float32(x)]

    def _output(self, x: mx.array) -> mx.array:
        return self._out.multiply(x)

    def _width(self) -> int:
        return self._channels

    def _step(self, made: Arrays, state: State) -> tuple[mx.array, State]:
        into, out_of, x = mx.split(made[0], 3, axis=-1)
        mixed, last = self._convolution.step(state[0], into * x)
        return out_of * mixed, (last,)

    def _whole(self, made: Arrays, state: State) -> tuple[mx.array, State]:
        into, out_of, x = mx.split(made[0], 3, axis=-1)
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
