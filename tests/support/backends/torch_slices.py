"""Slices of a model loaded on the CPU, without a backend, and this process's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from edgepipe_torch.cpu.device import CpuDevice
from edgepipe_torch.cpu.kernels import CpuKernels, cpu_kernels
from edgepipe_torch.cpu.shard_cache import ShardCache
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.decoder import SliceWeights
from edgepipe_torch.layers.loading import load_slices
from edgepipe_torch.layers.rope import Rotations

from edgepipe.spec.facts import LayerRange, Slice, make_slices
from edgepipe.spec.tensors import WeightSource


def loaded_slice(
    source: WeightSource,
    part: Slice | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    kernels: CpuKernels | KernelsUnavailable | None = None,
    cache: ShardCache | None = None,
) -> SliceWeights:
    """Load ``part``, or the whole model; ``kernels``: None for this process's; ``cache``: of repacked weights."""
    (whole,) = make_slices([LayerRange(0, source.config.num_layers)], source.config.num_layers)
    device = CpuDevice(dtype, kernels=kernels)
    device.cache = cache
    (found,) = load_slices(
        [part or whole],
        source,
        lambda _progress: None,
        device=device,
        host=CpuDevice(torch.float32, kernels=kernels),
        rotations=Rotations(source.config).kinds,
    )
    return found


@contextmanager
def compiled_kernels() -> Iterator[None]:
    """Compute without gradients, then restore the number of threads. Skip the test without compiled kernels."""
    if not isinstance(cpu_kernels(), CpuKernels):
        pytest.skip("no compiled kernels")
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)
