"""Transfer on CUDA, through pinned buffers.

Two sets of buffers alternate by submission. So filling the next step's inputs neither waits for nor overwrites the
buffers that the previous step still reads (SiPipe 5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe_torch.layers.transfer import Download


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

    def read(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Copy on a stream of its own, because the device may compute the next step."""
        with torch.cuda.stream(torch.cuda.Stream(tensor.device)):
            return tensor.cpu().numpy()

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """Queue copies to pinned memory."""
        found = [
            torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
            for each in tensors
        ]
        arrived = torch.cuda.Event()
        arrived.record()
        return found, arrived.synchronize

    def host_zeros(self, shape: Sequence[int]) -> Tensor:
        """Return zeros in pinned memory."""
        return torch.zeros(tuple(shape), pin_memory=True)

    @property
    def _set(self) -> _PinnedSet:
        return self._sets[self._submission % 2]
