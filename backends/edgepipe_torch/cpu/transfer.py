"""Transfer on a CPU, where host and device share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe_torch.layers.transfer import Download


class _Here:
    """A result in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> npt.NDArray[Any]:
        return self._tensor.numpy()


class HostTransfer:
    """Transfer without copies: the device is the host, and a submitted step is done."""

    max_submitted = 1

    def begin(self) -> None:
        """Do nothing."""

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Return the array itself."""
        return torch.from_numpy(array)

    def download(self, tensor: Tensor) -> Download:
        """Return the tensor itself."""
        return _Here(tensor)

    def read(self, tensor: Tensor) -> npt.NDArray[Any]:
        """See ``Transfer``."""
        return tensor.numpy().copy()

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """Return the tensors themselves."""
        return tensors, lambda: None

    def host_zeros(self, shape: Sequence[int]) -> Tensor:
        """See ``Transfer``."""
        return torch.zeros(tuple(shape))
