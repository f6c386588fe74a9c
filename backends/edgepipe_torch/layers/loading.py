"""Load weights from a source into a slice, one tensor at a time; each raw tensor is freed before the next is read.

Packed weights stay packed, or are widened to the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from edgepipe.backend.types import LoadProgress
from edgepipe.spec.facts import Slice
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import StoredTensor, TensorInfo, WeightInfo, WeightSource
from edgepipe.weights.dequantise import round_to_bf16
from edgepipe_torch.layers.decoder import SliceWeights
from edgepipe_torch.layers.device import Device
from edgepipe_torch.layers.expert_uses import ExpertUses
from edgepipe_torch.layers.host_weights import HostWeight, StoredBlocks, StoredWeight, host_tensor
from edgepipe_torch.layers.rope import RotaryKind
from edgepipe_torch.layers.slice_builder import SliceBuilder


def load_slices(
    slices: Sequence[Slice],
    source: WeightSource,
    progress: Callable[[LoadProgress], None],
    *,
    device: Device,
    host: Device,
    rotations: Mapping[RotaryKind, int],
    ram_percent: int = 0,
    uses: ExpertUses | None = None,
) -> list[SliceWeights]:
    """Read every slice's weights.

    device       that computes the slices
    host         that computes experts in host memory
    rotations    place of each kind of rotary embedding among those of a step
    ram_percent  of each layer's experts, which stay in host memory (``edgepipe.spec.expert_places``)
    uses         of experts before, which decide which experts these are; counts them from now on

    Raises ModelInvalid, ArchitectureUnsupported, and torch's memory errors.
    """
    build = partial(
        SliceBuilder,
        source.config,
        device=device,
        host=host,
        rotations=rotations,
        ram_percent=ram_percent,
        uses=uses,
    )
    return _load_slices(slices, source, progress, device, build)


def _load_slices(
    slices: Sequence[Slice],
    source: WeightSource,
    progress: Callable[[LoadProgress], None],
    device: Device,
    build: Callable[[Slice, Sequence[WeightInfo]], SliceBuilder],
) -> list[SliceWeights]:
    todo = [(part, info) for part in slices for info in source.weights(part)]
    total_bytes = sum(info.num_bytes for _part, info in todo)
    done, done_bytes = 0, 0
    loaded: list[SliceWeights] = []
    for part in slices:
        infos = source.weights(part)
        stored = {info.name: info for info in source.tensors(part)}
        builder = build(part, infos)
        try:
            for info in infos:
                builder.take(info.name, _host_weight(source, device, info, stored))
                done, done_bytes = done + 1, done_bytes + info.num_bytes
                progress(
                    LoadProgress(
                        tensors_done=done, tensors_total=len(todo), bytes_done=done_bytes, bytes_total=total_bytes
                    )
                )
        finally:
            builder.release()
        loaded.append(builder.weights)
    return loaded


def _host_weight(
    source: WeightSource, device: Device, info: WeightInfo, stored: Mapping[str, TensorInfo]
) -> HostWeight:
    """Read a weight: packed if it has a form and may stay so, else as floats. ``take`` may read it later.

    ``stored``: the slice's tensors by name.
    """
    tensor = stored.get(info.name)
    if tensor is not None and (tensor.scheme, tensor.shape) == (info.scheme, info.shape):
        if info.form is not None and device.reads_stored:
            read, read_range = partial(source.read, info.name), partial(source.read_range, info.name)
            return StoredBlocks(info=tensor, read=read, read_range=read_range)
        if not device.packed:
            return host_tensor(source.read(info.name))
    if info.form is not None and device.reads_stored:
        return StoredWeight(info=info, load=partial(_load_packed, source, info.name))
    weight = source.load(info.name)
    if isinstance(weight, StoredTensor):
        return host_tensor(weight)
    return weight if device.packed else _widened(weight, rounded=info.rounded)


def _load_packed(source: WeightSource, name: str) -> Packed:
    weight = source.load(name)
    assert isinstance(weight, Packed), f"{name} has a form"
    return weight


def _widened(weight: Packed, *, rounded: bool) -> Tensor:
    """Return a packed weight's values: float32, or bf16 if ``rounded``."""
    values = weight.float32()
    if not rounded:
        return torch.from_numpy(values)
    return torch.from_numpy(round_to_bf16(values).view(np.int16)).view(torch.bfloat16)
