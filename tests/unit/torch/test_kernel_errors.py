"""A device tells the error of each of its kernels, and why one cannot run."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from edgepipe_torch import TorchBackend
from edgepipe_torch.cpu.device import CpuDevice
from edgepipe_torch.cpu.kernels import cpu_kernels
from edgepipe_torch.cuda.kernel_errors import cuda_kernel_errors
from edgepipe_torch.layers.compiled_code import KernelsUnavailable

from edgepipe.backend.protocol import CheckingBackend
from edgepipe.backend.types import BackendOptions
from edgepipe.weights.made_up_packed import CHECKED_TYPES

REASON = "own kernels compute wrong values here: 12 times the rounding"


class NoLibrary:
    """A CUDA library none of whose kernels passes its check."""

    def products(self, form: object) -> object:
        raise KernelsUnavailable(REASON)

    experts = paged = mixer_step = place_heads = products

    def routing(self) -> object:
        raise KernelsUnavailable(REASON)


def test_the_cpus_kernels_are_within_their_bounds() -> None:
    kernels = cpu_kernels()
    if isinstance(kernels, KernelsUnavailable):
        pytest.skip(str(kernels))
    backend = TorchBackend(BackendOptions(device="cpu", threads=2))
    assert isinstance(backend, CheckingBackend)
    found = list(islice(backend.kernel_errors(), 3))
    assert [each.kernel for each in found] == ["norms and SwiGLU", "product Q4_0", "product Q4_1"]
    assert all(0 < each.error <= 1 and not each.reason for each in found)


def test_a_cpu_without_kernels_says_why() -> None:
    device = CpuDevice(torch.float32, kernels=KernelsUnavailable("this CPU has no AVX2, FMA and F16C"))
    (found,) = TorchBackend(BackendOptions(device="cpu"), device=device).kernel_errors()
    assert found.reason == "this CPU has no AVX2, FMA and F16C"


def test_every_cuda_kernel_is_told_though_none_can_be_used() -> None:
    found = list(cuda_kernel_errors(NoLibrary(), torch.device("cpu"), torch.bfloat16))  # type: ignore[arg-type]  # a stand-in
    assert {each.reason for each in found} == {REASON}
    names = {each.kernel for each in found}
    assert {f"{kind} {scheme}" for kind in ("product", "experts") for scheme in CHECKED_TYPES} < names
    assert {"choice of experts", "placing of heads", "attention, heads of 576", "one token of gated DeltaNet"} < names
    assert {"placing of heads, KV in 8bit", "attention, heads of 576, KV in 8bit"} < names
