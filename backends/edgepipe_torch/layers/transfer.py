"""Transfer of arrays between host and device. On a CPU both share memory; CUDA copies through pinned buffers.

CUDA has two sets of buffers that alternate by submission. So filling the next step's inputs neither waits for nor
overwrites the buffers that the previous step still reads (SiPipe 5.2).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
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


class _PinnedResult:
    def __init__(self, tensor: Tensor, done: torch.cuda.Event) -> None:
        self._tensor = tensor
        self._done = done

    def wait(self) -> npt.NDArray[Any]:
        self._done.synchronize()
        return self._tensor.numpy()


class _PinnedSet:
    """Pinned buffers of one submission, in the order of its arrays; the submission after the next reuses them."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0
        self.done = torch.cuda.Event()

    def reset(self) -> None:
        self.done.synchronize()  # returns at once for an event that was never recorded
        self._used = 0

    def fill(self, array: npt.NDArray[Any]) -> Tensor:
        source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if self._used == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        if self._buffers[self._used].numel() < source.size:
            self._buffers[self._used] = torch.empty(2 * source.size, dtype=torch.uint8, pin_memory=True)
        pinned = self._buffers[self._used][: source.size]
        self._used += 1
        pinned.numpy()[:] = source
        return pinned


class CudaTransfer:
    """Transfer on CUDA for two submitted steps, each with its own pinned inputs."""

    max_submitted = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sets = (_PinnedSet(), _PinnedSet())
        self._submission = 0

    def begin(self) -> None:
        """Switch to the other set, once the step that used it has read it."""
        self._submission += 1
        self._set.reset()

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Start a copy to the device; the caller may reuse the array at once."""
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        moved = self._set.fill(array).to(self._device, non_blocking=True)
        return moved.view(dtype).view(array.shape)

    def upload_to(self, array: npt.NDArray[Any], target: Tensor) -> None:
        """Queue an overwrite of the start of ``target``; the caller may reuse the array at once."""
        filled = self._set.fill(array)
        target.view(-1).view(torch.uint8)[: filled.numel()].copy_(filled, non_blocking=True)

    def download(self, tensor: Tensor) -> Download:
        """Queue the copy to pinned memory after the step's kernels."""
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        self._set.done.record()
        done = torch.cuda.Event()
        done.record()
        return _PinnedResult(pinned, done)

    @property
    def _set(self) -> _PinnedSet:
        return self._sets[self._submission % 2]


def make_transfer(device: torch.device) -> Transfer:
    """Return the transfer between the host and ``device``."""
    return CudaTransfer(device) if device.type == "cuda" else HostTransfer()
