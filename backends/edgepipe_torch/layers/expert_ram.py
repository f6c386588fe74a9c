"""Experts in host memory, on a stage whose device holds everything else: both places compute a layer at once.

T rows, H features that experts read, K experts used by each row, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edgepipe_torch.layers.expert_uses import Uses
from edgepipe_torch.layers.feed_forward import ExpertProducts
from edgepipe_torch.layers.linear import HeldWeight

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A step's rows in host memory, or on their way there."""

    x: Tensor  # [T, H]
    chosen: Tensor  # [T, K] int64
    weights: Tensor  # [T, K]
    arrived: torch.cuda.Event | None  # None: they are there


class ExpertsInRam:
    """Some of a layer's experts, which the CPU multiplies in float32 where their weights are.

    Call ``send``, queue what the device computes meanwhile, then call ``add``. ``add`` waits for the device to learn
    which experts were chosen, so no graph holds it.
    """

    def __init__(self, experts: ExpertProducts, numbers: Sequence[int], uses: Uses, *, device: torch.device) -> None:
        """
        experts  on the CPU, in float32
        numbers  theirs among the layer's experts, ascending
        uses     [E] of each of the layer's experts; every choice is added
        device   that computes the other experts
        """
        self._experts = experts
        self._uses = uses
        self._device = device
        count = len(uses)
        others = sorted({*range(count)} - {*numbers})
        self._here = _places(numbers, count)
        self._there = _places(others, count).to(device)
        self._distinct = 0

    @property
    def distinct(self) -> int:
        """See ``ExpertProducts``: of both places."""
        return self._distinct

    @property
    def linears(self) -> Sequence[HeldWeight]:
        """See ``ExpertProducts``."""
        return self._experts.linears

    def send(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Sent:
        """Begin to copy what ``ExpertProducts.add`` takes to host memory."""
        if self._device.type == "cpu":
            return Sent(x=x, chosen=chosen, weights=weights, arrived=None)
        x, chosen, weights = (
            torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
            for each in (x, chosen, weights)
        )
        arrived = torch.cuda.Event()
        arrived.record()
        return Sent(x=x, chosen=chosen, weights=weights, arrived=arrived)

    def on_device(self, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers and weights [T, K] of the device's own experts; see ``ExpertProducts.add``."""
        return _own(self._there, chosen, weights)

    def add(self, sent: Sent, total: Tensor) -> None:
        """Add the results of these experts to total [T, H]. A row's are summed in float32 before they are added."""
        if sent.arrived is not None:
            sent.arrived.synchronize()
        uses = np.bincount(sent.chosen.reshape(-1).numpy(), minlength=len(self._uses))
        self._uses += uses
        self._distinct = int(np.count_nonzero(uses))
        own, weights = _own(self._here, sent.chosen, sent.weights)
        if not bool((own >= 0).any()):
            return
        found = torch.zeros(sent.x.shape, dtype=torch.float32, pin_memory=sent.arrived is not None)
        self._experts.add(sent.x.float(), own, weights, found)
        total.add_(found.to(self._device, non_blocking=True))


def _places(numbers: Sequence[int], count: int) -> Tensor:
    """Return each expert's place [E] int64 in ``numbers``; -1: it is not there."""
    places = torch.full((count,), -1)
    places[list(numbers)] = torch.arange(len(numbers))
    return places


def _own(places: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    own = places[chosen]
    return own, weights.masked_fill(own < 0, 0.0)
