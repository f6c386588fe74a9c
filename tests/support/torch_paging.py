"""A CPU that offers what a CUDA device offers for pages and graphs, so that tests need no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from edgepipe_torch.cuda.paging import GraphRecorder, PagedDecode, Paging
from edgepipe_torch.layers.head_shape import LayerHeads
from torch import Tensor

from tests.support.decode_reference import reference_decode
from tests.support.graph_recorder import CpuRecorder
from tests.support.varlen_reference import varlen_attention


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


def cpu_paging(
    *,
    page_tokens: int,
    new_recorder: Callable[[], GraphRecorder] = CpuRecorder,
    decode: Callable[[LayerHeads], PagedDecode] = reference_decode,
) -> Paging:
    """Return the reference kernels, recorded operations and copies. Any number of tokens makes a page."""
    return Paging(
        attend=varlen_attention,
        decode=decode,
        page_tokens=page_tokens,
        new_recorder=new_recorder,
        transfer=CopyingTransfer(),
    )
