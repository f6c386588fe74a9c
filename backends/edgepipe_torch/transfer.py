"""Arrays between the host and the device. On a CPU they are the same memory; CUDA copies through pinned buffers.

CUDA's buffers come in two sets that alternate by submission, so that filling the next step's inputs never waits for,
nor overwrites, what the step before still reads (SiPipe 5.2).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Transfer(Protocol):
    """Moves one step's arrays."""

    max_submitted: int

    def begin(self) -> None:
        """A submission starts."""
        ...

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """The array on the device; the caller may reuse its array at once only if it was copied, so hand in its own."""
        ...

    def download(self, tensor: Tensor) -> Download:
        """Start bringing a result of the submission to the host; ends it."""
        ...


class Download(Protocol):
    """A result on its way."""

    def wait(self) -> npt.NDArray[Any]:
        """The result in memory that nobody else uses."""
        ...


class _Here:
    """A result that is in host memory already."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> npt.NDArray[Any]:
        return self._tensor.numpy()


class HostTransfer:
    """The device is the host: nothing moves, and a submitted step is done."""

    max_submitted = 1

    def begin(self) -> None:
        """Nothing to do."""

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """The array itself."""
        return torch.from_numpy(array)

    def download(self, tensor: Tensor) -> Download:
        """The tensor itself."""
        return _Here(tensor)


class _PinnedResult:
    def __init__(self, tensor: Tensor, done: torch.cuda.Event) -> None:
        self._tensor = tensor
        self._done = done

    def wait(self) -> npt.NDArray[Any]:
        self._done.synchronize()
        return self._tensor.numpy()


class _PinnedSet:
    """Pinned buffers of one submission, reused by the one after the next, in the order in which arrays come."""

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
    """Two steps may be submitted: each has its own pinned inputs."""

    max_submitted = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sets = (_PinnedSet(), _PinnedSet())
        self._submission = 0

    def begin(self) -> None:
        """Take the other set, once the step that used it has read it."""
        self._submission += 1
        self._set.reset()

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """A copy on the device, on its way; the array may be reused at once."""
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        moved = self._set.fill(array).to(self._device, non_blocking=True)
        return moved.view(dtype).view(array.shape)

    def upload_to(self, array: npt.NDArray[Any], target: Tensor) -> None:
        """Overwrite the beginning of ``target`` behind what was queued before; the array may be reused at once."""
        filled = self._set.fill(array)
        target.view(-1).view(torch.uint8)[: filled.numel()].copy_(filled, non_blocking=True)

    def download(self, tensor: Tensor) -> Download:
        """Queue the copy to pinned memory behind the step's kernels."""
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
    """The way between the host and ``device``."""
    return CudaTransfer(device) if device.type == "cuda" else HostTransfer()
