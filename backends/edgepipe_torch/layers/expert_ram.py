"""Experts in host memory, on a stage whose device holds everything else: both places compute a layer at once.

T rows, H features that experts read, K experts used by each row, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edgepipe_torch.layers.expert_uses import Uses
from edgepipe_torch.layers.experts import ExpertProducts
from edgepipe_torch.layers.linear import HeldWeight
from edgepipe_torch.layers.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Sent:
    """A step's rows in host memory, or on their way there."""

    x: Tensor  # [T, H]
    chosen: Tensor  # [T, K] int64
    weights: Tensor  # [T, K]
    wait: Callable[[], None]  # returns when the rows are there


class ExpertsInRam:
    """Some of a layer's experts, which the CPU multiplies in float32 where their weights are.

    Call ``send``, queue what the device computes meanwhile, then call ``add``. ``add`` waits for the device to learn
    which experts were chosen, so no graph holds it.
    """

    def __init__(
        self, experts: ExpertProducts, numbers: Sequence[int], uses: Uses, transfer: Transfer, device: torch.device
    ) -> None:
        """
        experts   on the CPU, in float32
        numbers   theirs among the layer's experts, ascending
        uses      [E] of each of the layer's experts; every choice is added
        transfer  to the device that computes the other experts
        """
        self._experts = experts
        self._uses = uses
        self._transfer = transfer
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
        (x, chosen, weights), wait = self._transfer.to_host((x, chosen, weights))
        return Sent(x, chosen, weights, wait)

    def on_device(self, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers and weights [T, K] of the device's own experts; see ``ExpertProducts.add``."""
        return _own(self._there, chosen, weights)

    def add(self, sent: Sent, total: Tensor) -> None:
        """Add the results of these experts to total [T, H]. A row's are summed in float32 before they are added."""
        sent.wait()
        uses = np.bincount(sent.chosen.reshape(-1).numpy(), minlength=len(self._uses))
        self._uses += uses
        self._distinct = int(np.count_nonzero(uses))
        own, weights = _own(self._here, sent.chosen, sent.weights)
        if not bool((own >= 0).any()):
            return
        found = self._transfer.host_zeros(sent.x.shape)
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
