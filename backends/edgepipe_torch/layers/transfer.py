"""Transfer of arrays between host and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt
from torch import Tensor


class Transfer(Protocol):
    """Moves a step's arrays."""

    max_submitted: int

    def begin(self) -> None:
        """Start a submission."""
        ...

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Return the array on the device. It may share memory with ``array``, so the caller must not reuse that."""
        ...

    def download(self, tensor: Tensor) -> Download:
        """Start the transfer of the submission's result to the host. Ends the submission."""
        ...

    def read(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Return a copy of a tensor whose submission has ended; later submissions go on meanwhile."""
        ...

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """Begin to copy tensors to host memory. The function waits for them."""
        ...

    def host_zeros(self, shape: Sequence[int]) -> Tensor:
        """Return float32 zeros in host memory, from which copies to the device do not wait."""
        ...


class GraphTransfer(Transfer, Protocol):
    """A transfer that also overwrites tensors in place, as graphs need with their fixed addresses."""

    def upload_to(self, array: npt.NDArray[Any], target: Tensor) -> None:
        """Queue an overwrite of the start of ``target``; the caller may reuse the array at once."""
        ...


class Download(Protocol):
    """A result in transfer."""

    def wait(self) -> npt.NDArray[Any]:
        """Return the result in memory owned by the caller."""
        ...
