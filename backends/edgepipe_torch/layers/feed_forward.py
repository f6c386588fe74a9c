"""Feed-forward parts of a layer: gated products, mixtures of experts, and both.

T rows, H hidden, I inner features, E experts, K of them used by each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.model.layer_spec import Activation, Experts, Router
from edgepipe_torch.layers.linear import HeldWeight, Linear

if TYPE_CHECKING:
    from edgepipe_torch.layers.expert_ram import ExpertsInRam

CLAMP, SHARPNESS = 7.0, 1.702  # of gpt-oss's gate
_LANES = 64  # a multiple of the floats that torch's loops over vectors take at once: 32 with AVX-512, 16 with AVX2
_SERIAL = 1 << 14  # elements that torch does not share among threads: it does from 32768 on


class FeedForward(Protocol):
    """What follows attention in a layer."""

    @property
    def num_bytes(self) -> int:
        """Memory of all weights."""
        ...

    @property
    def products(self) -> Sequence[Linear]:
        """The products that every row passes, where no others are needed; empty: rows differ."""
        ...

    @property
    def linears(self) -> Sequence[HeldWeight]:
        """The weights of all products."""
        ...

    @property
    def waits(self) -> bool:
        """Whether computing waits for the device, which no graph can."""
        ...

    def rows(self, x: Tensor) -> Tensor:
        """Compute x [T, H]; the result [T, H] is valid until the next call."""
        ...

    def add_to(self, x: Tensor, total: Tensor) -> None:
        """Add the result for x [T, H] to total [T, H]."""
        ...


class Gated:
    """``down(activation(gate(x), up(x)))``; of "relu2" ``down(relu(up(x)) ** 2)``, without a gate."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self.gate_up = gate_up
        self.down = down
        self._activation = activation

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes

    @property
    def products(self) -> Sequence[Linear]:
        return self.linears if self._activation == "silu" else ()

    @property
    def linears(self) -> Sequence[Linear]:
        return self.gate_up, self.down

    @property
    def waits(self) -> bool:
        return False

    def rows(self, x: Tensor) -> Tensor:
        return self.down.rows(self._inner(x))

    def add_to(self, x: Tensor, total: Tensor) -> None:
        self.down.add_to(self._inner(x), total)

    def _inner(self, x: Tensor) -> Tensor:
        if self._activation == "silu":
            return self.gate_up.swiglu(x)
        if self._activation == "relu2":
            return self.gate_up.rows(x).relu().square_()
        gate, up = self.gate_up.rows(x).chunk(2, dim=-1)
        return ACTIVATIONS[self._activation](gate, up)


class CountsExperts(Protocol):
    """Counts the experts that steps read."""

    @property
    def distinct(self) -> int | Tensor:
        """The experts that the last step read, or on a device [1] int32 that later work overwrites."""
        ...


class ExpertProducts(CountsExperts, Protocol):
    """The experts of a mixture in one place."""

    @property
    def linears(self) -> Sequence[HeldWeight]:
        """The weights of all products."""
        ...

    @property
    def waits(self) -> bool:
        """Whether ``add`` waits for the device, to learn which experts were chosen. Known after loading."""
        ...

    def add(self, x: Tensor, chosen: Tensor, weights: Tensor, total: Tensor) -> None:
        """Add to total [T, H] what each row's experts, chosen [T, K] int64, give for x [T, H], times weights [T, K].

        An expert that is in another place has the number -1 and the weight 0.
        """
        ...


class EachExpert:
    """Experts one after the other, each with its rows; on any device."""

    def __init__(self, experts: Sequence[Gated]) -> None:
        self._experts = experts
        self.distinct = 0  # see ``ExpertProducts``

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return len(self._experts)

    @property
    def linears(self) -> Sequence[Linear]:
        return [linear for expert in self._experts for linear in expert.linears]

    @property
    def waits(self) -> bool:
        return True

    @property
    def by_role(self) -> tuple[Sequence[Linear], Sequence[Linear]]:
        """Products of each expert: gate and up, down."""
        return [expert.gate_up for expert in self._experts], [expert.down for expert in self._experts]

    def add(self, x: Tensor, chosen: Tensor, weights: Tensor, total: Tensor) -> None:
        """See ``ExpertProducts``. Each row's experts are added in the order of their numbers."""
        order = chosen.reshape(-1).argsort(stable=True)
        used, counts = chosen.reshape(-1)[order].unique_consecutive(return_counts=True)
        self.distinct = 0
        rows, factors = order // chosen.shape[1], weights.reshape(-1)[order].unsqueeze(1).to(x.dtype)
        start = 0
        for expert, count in zip(used.tolist(), counts.tolist(), strict=True):
            if expert >= 0:
                own = rows[start : start + count]
                total.index_add_(0, own, self._experts[expert].rows(x[own]) * factors[start : start + count])
                self.distinct += 1
            start += count


class Mixture:
    """Experts, of which each row uses K, and parts that all rows use."""

    def __init__(
        self,
        spec: Experts,
        router: RouterWeights,
        experts: ExpertProducts | None,
        shared: Gated | None,
        gate: Tensor | None,
        around: tuple[Linear, Linear] | None = None,
        in_ram: ExpertsInRam | None = None,
    ) -> None:
        """
        experts  on the device; None: all are in host memory
        gate     [1, H], of the shared expert
        around   products from H features to those of the experts, and back
        """
        self._spec = spec
        self._router = router
        self._experts = experts
        self._shared = shared
        self._gate = gate
        self._around = around
        self._in_ram = in_ram

    @property
    def num_bytes(self) -> int:
        gate = self._gate.nbytes if self._gate is not None else 0
        return sum(linear.num_bytes for linear in self.linears) + self._router.num_bytes + gate

    @property
    def products(self) -> Sequence[Linear]:
        return ()

    @property
    def linears(self) -> Sequence[HeldWeight]:
        routed = [linear for part in (self._experts, self._in_ram) if part is not None for linear in part.linears]
        return (*routed, *(self._shared.linears if self._shared else ()), *(self._around or ()))

    @property
    def waits(self) -> bool:
        return self._in_ram is not None or (self._experts is not None and self._experts.waits)

    def rows(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        self.add_to(x, out)
        return out

    def add_to(self, x: Tensor, total: Tensor, asked: Tensor | None = None) -> None:
        """See ``FeedForward``. A row adds its experts in an order that depends on that row alone.

        asked [T, H]: what the router reads, where that is not x
        """
        chosen, weights = route(self._spec, self._router, x if asked is None else asked)
        x = x.clone()  # the norm's buffer, which products may overwrite
        entering = x if self._around is None else self._around[0].rows(x).clone()
        sent = self._in_ram.send(entering, chosen, weights) if self._in_ram is not None else None
        if self._shared is not None:
            shared = self._shared.rows(x)
            total.add_(shared if self._gate is None else shared * torch.sigmoid(F.linear(x, self._gate)))
        mixed = total if self._around is None else torch.zeros_like(entering)
        if self._experts is not None:
            own = (chosen, weights) if self._in_ram is None else self._in_ram.on_device(chosen, weights)
            self._experts.add(entering, *own, mixed)
        if self._in_ram is not None and sent is not None:
            self._in_ram.add(sent, mixed)
        if self._around is not None:
            self._around[1].add_to(mixed, total)


class Both:
    """A gated part and a mixture, whose results are added."""

    def __init__(self, dense: Gated, mixture: Mixture) -> None:
        self.dense = dense
        self.mixture = mixture
        self._parts: tuple[FeedForward, ...] = (dense, mixture)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    @property
    def products(self) -> Sequence[Linear]:
        return ()

    @property
    def linears(self) -> Sequence[HeldWeight]:
        return [linear for part in self._parts for linear in part.linears]

    @property
    def waits(self) -> bool:
        return any(part.waits for part in self._parts)

    def rows(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        self.add_to(x, out)
        return out

    def add_to(self, x: Tensor, total: Tensor) -> None:
        x = x.clone()
        for part in self._parts:
            part.add_to(x, total)


class Apart:
    """A gated part and a mixture with norms of their own, added. The router reads what enters both."""

    def __init__(self, parts: Both, norms: tuple[Tensor, ...], eps: float) -> None:
        """``norms`` [H]: of the gated part's input and output, and of the mixture's."""
        self._parts = parts
        self._norms = norms
        self._eps = eps

    @property
    def num_bytes(self) -> int:
        return self._parts.num_bytes + sum(norm.nbytes for norm in self._norms)

    @property
    def products(self) -> Sequence[Linear]:
        return ()

    @property
    def linears(self) -> Sequence[HeldWeight]:
        return self._parts.linears

    @property
    def waits(self) -> bool:
        return self._parts.waits

    def rows(self, x: Tensor) -> Tensor:
        entering, leaving, to_experts, from_experts = self._norms
        dense = self._norm(self._parts.dense.rows(self._norm(x, entering)), leaving)
        mixed = torch.zeros_like(x)
        self._parts.mixture.add_to(self._norm(x, to_experts), mixed, asked=x)
        return dense.add_(self._norm(mixed, from_experts))

    def add_to(self, x: Tensor, total: Tensor) -> None:
        total.add_(self.rows(x))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)


class RouterWeights:
    """The router's weights, in float32 whatever the compute dtype."""

    def __init__(
        self,
        weight: Tensor | Linear,
        bias: Tensor | None,
        correction: Tensor | None,
        input_scale: Tensor | None = None,
        expert_scale: Tensor | None = None,
    ) -> None:
        """weight [E, H], bias [E], correction [E], input_scale [H], expert_scale [E]; filled later.

        weight  or a product that gives a row the same bits in any batch, with the bias
        """
        self.weight = weight
        self.bias = bias
        self.correction = correction
        self.input_scale = input_scale
        self.expert_scale = expert_scale
        self.choose: Callable[[Router, Tensor, Tensor | None, int], tuple[Tensor, Tensor]] | None = None
        """Computes as ``choose`` does, in one kernel."""

    @property
    def num_bytes(self) -> int:
        """Memory of all of them."""
        every = (self.bias, self.correction, self.input_scale, self.expert_scale)
        weight = self.weight.nbytes if isinstance(self.weight, Tensor) else self.weight.num_bytes
        return weight + sum(each.nbytes for each in every if each is not None)

    def logits(self, x: Tensor) -> Tensor:
        """Return each expert's logit [T, E] of x [T, H] float32, valid until the next call."""
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight, self.bias)
        return self.weight.rows(x)


def route(spec: Experts, router: RouterWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Choose each row's experts, in float32: their numbers [T, K] int64 and weights [T, K], of x [T, H]."""
    how, x = spec.router, x.float()
    if how.input_eps is not None:
        x = F.rms_norm(x, x.shape[-1:], router.input_scale, how.input_eps) * x.shape[-1] ** -0.5
    chosen, weights = (router.choose or choose)(how, router.logits(x), router.correction, spec.used)
    if router.expert_scale is not None:
        weights = weights * router.expert_scale[chosen]
    return chosen, weights if how.scale == 1 else weights * how.scale


def choose(how: Router, logits: Tensor, correction: Tensor | None, used: int) -> tuple[Tensor, Tensor]:
    """Choose ``used`` experts of each row by logits [T, E]: their numbers [T, K] int64 and weights [T, K], unscaled."""
    scores = logits.softmax(-1) if how.score == "softmax" else _sigmoid(logits)
    ranked = scores if correction is None else scores + correction
    if how.groups > 1:
        ranked = _within_groups(how, ranked)
    chosen = ranked.topk(used, dim=-1).indices
    weights = scores.gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) if how.normalised else weights


def _sigmoid(logits: Tensor) -> Tensor:
    """Return the sigmoid of logits [T, E], with the same bits for a row in any batch.

    On CPUs torch computes most elements in vectors, and those that fill no vector by another function, which rounds
    differently. Here every element is part of a vector.
    """
    count = logits.numel()
    if logits.device.type != "cpu" or (count % _LANES == 0 and count <= _SERIAL):
        return logits.sigmoid()
    values = F.pad(logits.flatten(), (0, -count % _LANES))
    for part in values.split(_SERIAL):
        part.sigmoid_()
    return values[:count].view_as(logits)


def _within_groups(router: Router, ranked: Tensor) -> Tensor:
    """Rank experts outside the best groups last. ranked [T, E]."""
    groups = ranked.unflatten(-1, (router.groups, -1))
    best = groups.amax(-1) if router.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
    used = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(router.groups_used, dim=-1).indices, True)
    return groups.masked_fill(~used.unsqueeze(-1), -torch.inf).flatten(-2)


def _gelu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(SHARPNESS * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"gelu_tanh": _gelu, "clamped_swiglu": _clamped}
