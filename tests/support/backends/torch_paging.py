"""The CUDA backend's device on a CPU, with pages and graphs, so that tests need no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from edgepipe_torch.cpu.device import CpuDevice
from edgepipe_torch.cuda.device import CudaDevice, OwnKernels
from edgepipe_torch.cuda.mixer_steps import StepKernels
from edgepipe_torch.cuda.paging import GraphRecorder, PagedDecode, Paging, VarlenAttention
from edgepipe_torch.layers.head_shape import LayerHeads
from edgepipe_torch.layers.host_copies import HostMover, Mover
from torch import Tensor

from edgepipe.backend.types import DeviceProfile
from edgepipe.weights.repacked import RepackedPlace
from tests.support.backends.graph_recorder import CpuRecorder
from tests.support.numerics.decode_reference import reference_decode
from tests.support.numerics.varlen_reference import varlen_attention


@dataclass(frozen=True, slots=True)
class _Copy:
    tensor: Tensor

    def wait(self) -> npt.NDArray[Any]:
        return self.tensor.numpy()


class CopyingTransfer:
    """Copies everything, as a transfer to a device does; two steps may be submitted at once."""

    max_submitted = 2

    def begin(self) -> None:
        """Do nothing."""

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """Return a copy."""
        return torch.from_numpy(np.array(array, order="C"))

    def upload_to(self, array: npt.NDArray[Any], target: Tensor) -> None:
        """Overwrite the start of ``target``."""
        sent = self.upload(array).view(-1).view(torch.uint8)
        target.view(-1).view(torch.uint8)[: sent.numel()].copy_(sent)

    def download(self, tensor: Tensor) -> _Copy:
        """Copy what the submission computed."""
        return _Copy(tensor.clone())

    def read(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Return a copy."""
        return tensor.numpy().copy()

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """Return copies."""
        return [each.clone() for each in tensors], lambda: None

    def host_zeros(self, shape: Sequence[int]) -> Tensor:
        """Return float32 zeros."""
        return torch.zeros(tuple(shape))


def cpu_paging(
    *,
    page_tokens: int,
    new_recorder: Callable[[], GraphRecorder] = CpuRecorder,
    decode: Callable[[LayerHeads], PagedDecode] = reference_decode,
    attend: VarlenAttention | None = varlen_attention,
) -> Paging:
    """Return the reference kernels, recorded operations and copies. Any number of tokens makes a page."""
    return Paging(
        attend=attend,
        decode=decode,
        page_tokens=page_tokens,
        new_recorder=new_recorder,
        transfer=CopyingTransfer(),
    )


class CudaOnHost(CudaDevice):
    """A CUDA device whose memory is the host's: its products, experts, attention and graphs run on a CPU."""

    picks_candidates = False

    def __init__(
        self,
        dtype: str = "float32",
        *,
        paging: Paging | None = None,
        step_kernels: StepKernels | None = None,
        kernels: OwnKernels | None = None,
        kv: str = "",
        mover: Mover | None = None,
    ) -> None:
        """``paging``: as of ``cpu_paging``; None: neither pages nor graphs. ``mover``: by default the host's."""
        kind = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        super().__init__(
            torch.device("cpu"),
            kind,
            kv=kv,
            paging=paging,
            step_kernels=step_kernels,
            kernels=kernels,
            transfer=CopyingTransfer(),
            mover=mover or HostMover(),
        )

    def profile(self) -> DeviceProfile:
        """Measure the CPU."""
        return replace(CpuDevice(self.dtype).profile(), block_sizes=self.block_sizes)

    def free_bytes(self) -> int:
        """Return the host's."""
        return CpuDevice(self.dtype).free_bytes()

    def start_load(self, kept: RepackedPlace | None) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Forget buffers."""
        self._reset()
