"""Recurrent mixers: gated DeltaNet, Mamba-2, short convolutions. States and recurrences are float32.

Rows with one token take the step form, all at once. Longer rows take the chunked form, one row after another, so a row
does not depend on its neighbours. T packed rows, N of them with one token, L tokens of a long row, H heads, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv
from edgepipe_torch.layers.linear import Linear
from edgepipe_torch.layers.recurrent_chunks import delta_tokens, scan_tokens
from edgepipe_torch.layers.states import LongRow, StepStates

_LENGTH_EPS = 1e-6  # epsilon in the length of queries and keys

CHECKED_MIXERS: dict[str, Recurrent] = {
    "gated DeltaNet": DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4),
    "Mamba-2": Mamba2(heads=64, head_dim=64, groups=8, state_dim=128, taps=4),
    "short convolution": ShortConv(channels=2048, taps=3),
}
"""Sizes of usual models (Qwen3.6, Nemotron 3, LFM2) for the comparison of step kernels with float64."""

State = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerWeights:
    """A mixer's weights, float32; None: the mixer has no such weight."""

    taps: Tensor  # [C, taps]
    bias: Tensor | None = None  # [C]
    steps: Tensor | None = None  # dt_bias [H]
    rates: Tensor | None = None  # exp(A_log) [H]
    skips: Tensor | None = None  # D [H]
    norm: Tensor | None = None  # [V] of DeltaNet; [H D] of Mamba-2


class StepKernel(Protocol):
    """A compiled step form of one layer's mixer."""

    def run(self, made: Tensor, states: State, read: Tensor, write: Tensor, *, threads: int) -> Tensor:
        """Return what enters the output product [N, W], valid until the next call; write the rows' states.

        made         [N, F] of the input product, in the type that the kernel is for
        states       [slots + 1, ...] of the layer
        read, write  [N] int64 slots
        """
        ...


class Mixer(Protocol):
    """What mixes the tokens of a recurrent layer."""

    input: Linear  # its product of the layer's input
    kernel: StepKernel | None  # computes rows with one token; None: torch does

    @property
    def spec(self) -> Recurrent:
        """What it computes."""
        ...

    @property
    def eps(self) -> float:
        """Epsilon of the model's norms."""
        ...

    @property
    def weights(self) -> MixerWeights:
        """All weights but those of the products, once they are loaded."""
        ...

    def rows(self, made: Tensor, states: State, step: StepStates) -> Tensor:
        """Return what enters the layer's output product [T, W], float32 or as ``made``, and keep the rows' states.

        made    [T, F], of the input product
        states  [slots + 1, ...] of the layer
        """
        ...


class Convolution:
    """A causal convolution per channel over the last tokens (``taps``, the token's own included)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [C, taps] and bias [C], float32."""
        self.weight = weight
        self.bias = bias

    def step(self, last: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve x [N, C] behind the inputs last [N, taps - 1, C]. Returns [N, C], and the inputs to keep."""
        window = torch.cat([last, x.unsqueeze(1)], 1)
        out = (window * self.weight.t()).sum(1)
        return out if self.bias is None else out + self.bias, window[:, 1:]

    def whole(self, last: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve the tokens x [L, C] behind the inputs last [taps - 1, C]. Returns [L, C], and the inputs to keep."""
        padded, count = torch.cat([last, x]), x.shape[0]
        first, *others = self.weight.t().contiguous()  # weights [C] of each tap
        out = padded[:count] * first
        for tap, weight in enumerate(others, 1):
            out.addcmul_(padded[tap : tap + count], weight)
        return out if self.bias is None else out.add_(self.bias), padded[count:]


class _Mixed:
    """The way of a step's rows through a mixer's two forms."""

    def __init__(self, input_product: Linear, convolution: Convolution, width: int, *, eps: float = 0.0) -> None:
        self.input = input_product
        self.kernel: StepKernel | None = None
        self.eps = eps
        self.convolution = convolution
        self._width = width

    def rows(self, made: Tensor, states: State, step: StepStates) -> Tensor:
        """See ``Mixer``."""
        if not step.long:
            return self._singles(made, states, step)
        out = made.new_empty(made.shape[0], self._width, dtype=torch.float32)
        if step.rows is not None and step.num_single:
            out[step.rows] = self._singles(made[step.rows], states, step).float()
        for row in step.long:
            out[row.first : row.first + row.count] = self._long(
                made[row.first : row.first + row.count].float(), states, row, step
            )
        return out

    def _singles(self, made: Tensor, states: State, step: StepStates) -> Tensor:
        if self.kernel is not None:
            return self.kernel.run(made, states, step.read, step.write, threads=torch.get_num_threads())
        made = made.float()
        if step.only is not None:  # states are updated in place
            own = tuple(each[step.only : step.only + 1] for each in states)
            out, after = self.step(made, own)
            for kept, new in zip(own, after, strict=True):
                if new is not kept:
                    kept.copy_(new)
            return out
        out, after = self.step(made, tuple(each.index_select(0, step.read) for each in states))
        for each, new in zip(states, after, strict=True):
            each.index_copy_(0, step.write, new)
        return out

    def _long(self, made: Tensor, states: State, row: LongRow, step: StepStates) -> Tensor:
        slot = step.zeros if row.state.read is None else row.state.read
        state = tuple(each[slot] for each in states)
        parts: list[Tensor] = []
        kept: list[tuple[int, State]] = []
        start = 0
        for write in row.state.writes:
            out, state = self._whole(made[start : write.after], state)
            parts.append(out)
            kept.append((write.slot, state))
            start = write.after
        for slot, found in kept:
            for each, new in zip(states, found, strict=True):
                each[slot] = new
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def step(self, made: Tensor, state: State) -> tuple[Tensor, State]:
        """Compute one token of N sequences with states [N, ...], which may be overwritten."""
        raise NotImplementedError

    def _whole(self, made: Tensor, state: State) -> tuple[Tensor, State]:
        """Compute L tokens of a sequence behind a state, which stays."""
        raise NotImplementedError


class DeltaNetMixer(_Mixed):
    """See ``DeltaNet``. The input product has queries, keys and values, then z, beta, alpha."""

    def __init__(
        self, spec: DeltaNet, input_product: Linear, convolution: Convolution, *, eps: float, device: torch.device
    ) -> None:
        """``eps``: of the model's norms."""
        super().__init__(input_product, convolution, spec.value_heads * spec.value_dim, eps=eps)
        self.spec = spec
        self.dt_bias = torch.zeros(spec.value_heads, device=device)
        self.rates = torch.zeros(spec.value_heads, device=device)  # exp(A_log)
        self.norm = torch.ones(spec.value_dim, device=device)
        heads = torch.arange(spec.value_heads, device=device)
        shared = spec.value_heads // spec.key_heads
        self._key_head = heads % spec.key_heads if spec.tiled else heads // shared
        self._same = shared == 1

    @property
    def weights(self) -> MixerWeights:
        """See ``Mixer``."""
        own = self.convolution
        return MixerWeights(taps=own.weight, bias=own.bias, steps=self.dt_bias, rates=self.rates, norm=self.norm)

    def _parts(self, made: Tensor) -> tuple[Tensor, ...]:
        spec = self.spec
        return made.split([spec.channels, self._width, spec.value_heads, spec.value_heads], -1)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [T, H, K], normalised, and values [T, H, V] of convolved channels [T, C]."""
        spec = self.spec
        size = spec.key_heads * spec.key_dim
        keys = mixed[:, : 2 * size].view(-1, 2, spec.key_heads, spec.key_dim)
        keys = keys * (keys * keys).sum(-1, keepdim=True).add_(_LENGTH_EPS).rsqrt_()
        if not self._same:
            keys = keys.index_select(2, self._key_head)
        values = mixed[:, 2 * size :].view(-1, spec.value_heads, spec.value_dim)
        return keys[:, 0] * spec.key_dim**-0.5, keys[:, 1], values

    def _gates(self, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithm of the decay, and beta, [T, H]."""
        return F.softplus(alpha + self.dt_bias).mul_(self.rates).neg_(), beta.sigmoid()

    def _gated(self, out: Tensor, z: Tensor) -> Tensor:
        """Normalise the heads' outputs [T, H, V] and multiply them with SiLU(z) [T, H V]."""
        normed = F.rms_norm(out, (self.spec.value_dim,), self.norm, self.eps)
        return normed.reshape(z.shape).mul_(F.silu(z))

    def step(self, made: Tensor, state: State) -> tuple[Tensor, State]:
        last, memory = state
        channels, z, beta, alpha = self._parts(made)
        mixed, last = self.convolution.step(last, channels)
        queries, keys, values = self._heads(F.silu(mixed))
        log_decay, beta = self._gates(alpha, beta)
        memory = memory.mul_(log_decay.exp_()[..., None, None])
        error = (values - (keys.unsqueeze(-2) @ memory).squeeze(-2)).mul_(beta.unsqueeze(-1))
        memory.addcmul_(keys.unsqueeze(-1), error.unsqueeze(-2))
        out = (queries.unsqueeze(-2) @ memory).squeeze(-2)
        return self._gated(out, z), (last, memory)

    def _whole(self, made: Tensor, state: State) -> tuple[Tensor, State]:
        last, memory = state
        channels, z, beta, alpha = self._parts(made)
        mixed, last = self.convolution.whole(last, channels)
        queries, keys, values = (each.transpose(0, 1) for each in self._heads(F.silu(mixed)))
        log_decay, beta = (each.t() for each in self._gates(alpha, beta))
        out, memory = delta_tokens(queries, keys, values, log_decay, beta, memory)
        return self._gated(out.transpose(0, 1), z), (last, memory)


class Mamba2Mixer(_Mixed):
    """See ``Mamba2``. The input product has z, x, B, C, dt."""

    def __init__(
        self, spec: Mamba2, input_product: Linear, convolution: Convolution, *, eps: float, device: torch.device
    ) -> None:
        """``eps``: of the model's norms."""
        super().__init__(input_product, convolution, spec.heads * spec.head_dim, eps=eps)
        self.spec = spec
        self.dt_bias = torch.zeros(spec.heads, device=device)
        self.rates = torch.zeros(spec.heads, device=device)  # exp(A_log)
        self.skips = torch.zeros(spec.heads, device=device)  # D
        self.norm = torch.ones(self._width, device=device)
        self._group = torch.arange(spec.heads, device=device) // (spec.heads // spec.groups)

    @property
    def weights(self) -> MixerWeights:
        """See ``Mixer``."""
        own = self.convolution
        return MixerWeights(
            taps=own.weight, bias=own.bias, steps=self.dt_bias, rates=self.rates, skips=self.skips, norm=self.norm
        )

    def _parts(self, made: Tensor) -> tuple[Tensor, ...]:
        return made.split([self._width, self.spec.channels, self.spec.heads], -1)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x [T, H, D], B and C [T, H, N] of convolved channels."""
        spec = self.spec
        x, both = mixed.split([self._width, 2 * spec.groups * spec.state_dim], -1)
        both = both.view(-1, 2, spec.groups, spec.state_dim).index_select(2, self._group)
        return x.view(-1, spec.heads, spec.head_dim), both[:, 0], both[:, 1]

    def _steps(self, dt: Tensor) -> Tensor:
        return F.softplus(dt + self.dt_bias).clamp_(*self.spec.dt_limits)

    def _gated(self, out: Tensor, z: Tensor) -> Tensor:
        """Multiply the heads' outputs [T, H, D] with SiLU(z) [T, H D], and normalise each group."""
        gated = out.reshape(z.shape).mul(F.silu(z)).view(z.shape[0], self.spec.groups, -1)
        return F.rms_norm(gated, gated.shape[-1:], None, self.eps).view(z.shape).mul_(self.norm)

    def step(self, made: Tensor, state: State) -> tuple[Tensor, State]:
        last, memory = state
        z, channels, dt = self._parts(made)
        mixed, last = self.convolution.step(last, channels)
        x, into, out_of = self._heads(F.silu(mixed))
        dt = self._steps(dt)
        memory = memory.mul_((dt * -self.rates).exp_()[..., None, None])
        memory.addcmul_((x * dt.unsqueeze(-1)).unsqueeze(-1), into.unsqueeze(-2))
        out = (memory @ out_of.unsqueeze(-1)).squeeze(-1) + x * self.skips.unsqueeze(-1)
        return self._gated(out, z), (last, memory)

    def _whole(self, made: Tensor, state: State) -> tuple[Tensor, State]:
        last, memory = state
        z, channels, dt = self._parts(made)
        mixed, last = self.convolution.whole(last, channels)
        x, into, out_of = (each.transpose(0, 1) for each in self._heads(F.silu(mixed)))
        dt = self._steps(dt).t()
        out, memory = scan_tokens(x * dt.unsqueeze(-1), into, out_of, dt * -self.rates.unsqueeze(-1), memory)
        out += x * self.skips[:, None, None]
        return self._gated(out.transpose(0, 1), z), (last, memory)


class ShortConvMixer(_Mixed):
    """See ``ShortConv``. The input product has B, C, x."""

    def __init__(self, spec: ShortConv, input_product: Linear, convolution: Convolution) -> None:
        super().__init__(input_product, convolution, spec.channels)
        self.spec = spec

    @property
    def weights(self) -> MixerWeights:
        """See ``Mixer``."""
        return MixerWeights(taps=self.convolution.weight, bias=self.convolution.bias)

    def step(self, made: Tensor, state: State) -> tuple[Tensor, State]:
        into, out_of, x = made.chunk(3, -1)
        mixed, last = self.convolution.step(state[0], into * x)
        return out_of * mixed, (last,)

    def _whole(self, made: Tensor, state: State) -> tuple[Tensor, State]:
        into, out_of, x = made.chunk(3, -1)
        mixed, last = self.convolution.whole(state[0], into * x)
        return out_of * mixed, (last,)
