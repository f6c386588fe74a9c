"""Weights as a source reads them into host memory, before they lie where products read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import StoredTensor, TensorInfo, WeightInfo
from edgepipe.weights.dequantise import as_bf16_bits, as_float32
from edgepipe.weights.gguf_packing import checked_row_bytes, pack_gguf
from edgepipe_torch.layers.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlocks:
    """A tensor [O, I] of a quantised GGUF type that is still in its file."""

    info: TensorInfo
    read: Callable[[], StoredTensor]  # may raise ModelInvalid
    # Arguments: an offset and a number of bytes; threads may call it at once.
    read_range: Callable[[int, int], npt.NDArray[np.uint8]]

    def rows(self, first: int, end: int) -> StoredBlocks:
        """Return the rows ``[first, end)``. Raises ModelInvalid if bytes and shape disagree."""
        row_bytes = checked_row_bytes(self.info)
        start, count = first * row_bytes, (end - first) * row_bytes
        info = replace(self.info, shape=(end - first, *self.info.shape[1:]), num_bytes=count)
        return StoredBlocks(
            info=info,
            read=lambda: StoredTensor(info=info, data=self.read_range(start, count)),
            read_range=lambda offset, num_bytes: self.read_range(start + offset, num_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """A weight with a form whose tensors are still in their files."""

    info: WeightInfo
    load: Callable[[], Packed]  # may raise ModelInvalid


@runtime_checkable
class StoredLinear(Linear, Protocol):
    """A ``Linear`` that reads weights from their files itself."""

    def fill_stored(
        self, part: int, weight: StoredBlocks | StoredWeight, order: npt.NDArray[np.int64] | None = None
    ) -> None:
        """Read one part's weight [O, I]. ``order``: rows of the outputs [O]; None: as they are. Raises ModelInvalid."""
        ...


HostWeight = Tensor | Packed | StoredBlocks | StoredWeight
Sink = Callable[[HostWeight], None]


def host_tensor(raw: StoredTensor) -> Tensor:
    """Return the tensor in its logical shape: bf16 if exact (half the bytes), else float32."""
    if is_bf16(raw.info):
        bits = as_bf16_bits(raw)
        return torch.from_numpy(bits.view("<i2") if bits.flags.writeable else bits.view("<i2").copy()).view(
            torch.bfloat16
        )
    values = as_float32(raw)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def is_bf16(info: TensorInfo | WeightInfo) -> bool:
    """Return whether bf16 holds the tensor's values exactly."""
    return info.rounded or info.scheme == "BF16"


def exact_type(info: TensorInfo | WeightInfo) -> torch.dtype:
    """Return the narrowest type that holds the values of a tensor of floats exactly."""
    if is_bf16(info):
        return torch.bfloat16
    return torch.float16 if info.scheme == "F16" else torch.float32


def floats_of(weight: HostWeight) -> Tensor:
    """Return a weight's values; packed ones in float32."""
    if isinstance(weight, StoredWeight):  # such as a packed router
        weight = weight.load()
    if isinstance(weight, StoredBlocks):
        weight = pack_gguf(weight.read())
    return torch.from_numpy(weight.float32()) if isinstance(weight, Packed) else weight


def shape_of(weight: HostWeight) -> tuple[int, ...]:
    """Return a weight's shape without reading it."""
    return weight.info.shape if isinstance(weight, StoredBlocks | StoredWeight) else tuple(weight.shape)


def copy_exactly(target: Tensor, source: Tensor) -> None:
    """Copy a tensor of the same shape; nothing is broadcast. Raises RuntimeError."""
    if target.shape != source.shape:
        raise RuntimeError("another shape is needed")  # take() turns it into ModelInvalid
    target.copy_(source)
