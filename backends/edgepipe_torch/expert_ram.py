"""Experts in host memory, on a stage that keeps everything else on its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgepipe_torch.feed_forward import ExpertProducts
from edgepipe_torch.linear import HeldWeight

CPU = torch.device("cpu")


class ExpertsInRam:
    """``ExpertProducts`` that the CPU computes where the weights are, in float32; activations cross, T rows each way.

    The CPU waits for the device to learn which experts were chosen, so no graph holds it.
    """

    def __init__(self, experts: ExpertProducts) -> None:
        """``experts``: on the CPU, in float32."""
        self._experts = experts

    @property
    def distinct(self) -> int | Tensor:
        """See ``ExpertProducts``."""
        return self._experts.distinct

    @property
    def linears(self) -> Sequence[HeldWeight]:
        """See ``ExpertProducts``."""
        return self._experts.linears

    @property
    def waits(self) -> bool:
        """See ``ExpertProducts``."""
        return True

    def add(self, x: Tensor, chosen: Tensor, weights: Tensor, total: Tensor) -> None:
        """See ``ExpertProducts``. A row's results are summed in float32 before they are added."""
        found = torch.zeros(x.shape, dtype=torch.float32)
        self._experts.add(x.to(CPU, torch.float32), chosen.to(CPU), weights.to(CPU), found)
        total.add_(found.to(total.device, total.dtype))
