"""Mixtures of experts, alone or beside a gated part.

T rows, H hidden, E experts, K of them used by each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from edgepipe.spec.layer_spec import Experts
from edgepipe_torch.layers.expert_ram import ExpertsInRam
from edgepipe_torch.layers.experts import ExpertProducts
from edgepipe_torch.layers.feed_forward import FeedForward, Gated
from edgepipe_torch.layers.linear import HeldWeight, Linear
from edgepipe_torch.layers.routing import AddGated, RouterWeights, add_gated, route


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
        *,
        add_gated: AddGated = add_gated,
        input_stays: bool = False,
    ) -> None:
        """
        experts      on the device; None: all are in host memory
        gate         [1, H], of the shared expert
        around       products from H features to those of the experts, and back
        add_gated    adds the shared expert's result
        input_stays  no product overwrites the rows that enter
        """
        self._add_gated = add_gated
        self._input_stays = input_stays
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
        if not self._input_stays or x is total:
            x = x.clone()  # the norm's buffer, which products may overwrite
        entering = x if self._around is None else self._around[0].rows(x).clone()
        sent = self._in_ram.send(entering, chosen, weights) if self._in_ram is not None else None
        if self._shared is not None:
            shared = self._shared.rows(x)
            if self._gate is None:
                total.add_(shared)
            else:
                self._add_gated(x, self._gate, shared, total)
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

    def __init__(self, parts: Both, norms: tuple[Tensor, ...], norm: Callable[[Tensor, Tensor], Tensor]) -> None:
        """``norms`` [H]: of the gated part's input and output, and of the mixture's. ``norm``: see ``norm_of``."""
        self._parts = parts
        self._norms = norms
        self._norm = norm

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
