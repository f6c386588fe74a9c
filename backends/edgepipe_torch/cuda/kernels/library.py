"""Kernels of one CUDA device: compiled per form on first use, kept on disk, and checked (``checked_library.py``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from edgepipe.config import kernel_dir
from edgepipe_torch.cuda.kernels.checked_library import CheckedLibrary
from edgepipe_torch.cuda.kernels.driver import CudaModule
from edgepipe_torch.cuda.kernels.experts import ExpertKernels, RoutingKernels
from edgepipe_torch.cuda.kernels.forms import KernelForm, kernel_source, options
from edgepipe_torch.cuda.kernels.nvrtc import Nvrtc, find_nvrtc
from edgepipe_torch.cuda.kernels.place_heads import PlaceHeads
from edgepipe_torch.cuda.kernels.products import Products
from edgepipe_torch.layers.compiled_code import CodeCache, KernelsUnavailable

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = 80  # bf16 on tensor cores


class KernelLibrary(Protocol):
    """Source of kernels by form."""

    def products(self, form: KernelForm) -> Products:
        """Return the kernels of a form. The first call of a form may take seconds. Raises KernelsUnavailable."""
        ...


class PlaceLibrary(Protocol):
    """Source of the kernel that places heads."""

    def place_heads(self, kv: str = "") -> PlaceHeads:
        """Return the kernel, for KV of a form with own kernels, or in bf16 where that is empty.

        The first call may take seconds. Raises KernelsUnavailable.
        """
        ...


class ExpertLibrary(Protocol):
    """Source of kernels for mixtures of experts."""

    def experts(self, form: KernelForm) -> ExpertKernels:
        """Return the products with experts of a form. The first call may take seconds. Raises KernelsUnavailable."""
        ...

    def routing(self) -> RoutingKernels:
        """Return what surrounds them. Raises KernelsUnavailable."""
        ...


class CudaLibrary(CheckedLibrary):
    """Kernels compiled for one CUDA device."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        """``folder`` keeps compiled kernels. Raises KernelsUnavailable."""
        properties = torch.cuda.get_device_properties(device)
        architecture = 10 * properties.major + properties.minor
        if architecture < _MIN_CAPABILITY:
            raise KernelsUnavailable(f"{properties.name} has no bf16 tensor cores (sm_{architecture})")
        nvrtc = find_nvrtc(_cuda_major(), Path(torch.__file__).parent / "lib")
        logger.info("own kernels for sm_%d by NVRTC %s", architecture, nvrtc.version)
        modules = CudaModules(CompiledKernels(nvrtc, folder), architecture, device)
        super().__init__(device, modules, multiprocessors=properties.multi_processor_count)


class CudaModules:
    """Modules of a device; see ``checked_library.Modules``."""

    def __init__(self, compiled: CompiledKernels, architecture: int, device: torch.device) -> None:
        self._compiled = compiled
        self._architecture = architecture
        self._device = device

    def load(self, files: tuple[str, ...], macros: Mapping[str, str], functions: Sequence[str]) -> CudaModule:
        """Load compiled sources. Raises KernelsUnavailable."""
        cubin = self._compiled.cubin(files, macros, self._architecture)
        return CudaModule(cubin, functions, self._device, compiler=self._compiled.compiler)

    def mark(self, files: tuple[str, ...], macros: Mapping[str, str], reason: str) -> None:
        """Keep later processes from kernels that stop the device."""
        self._compiled.mark(files, macros, self._architecture, reason)


class CompiledKernels:
    """Cubins on disk, by source, macros, architecture and compiler version."""

    def __init__(self, nvrtc: Nvrtc, folder: Path) -> None:
        self._nvrtc = nvrtc
        self.compiler = nvrtc.version
        self._folder = folder

    def cubin(self, files: tuple[str, ...], macros: Mapping[str, str], architecture: int) -> bytes:
        """Return the cubin of sources from disk, or compile it. Raises KernelsUnavailable, also for a marked one."""
        chosen = options(macros)
        return self._cache(chosen, architecture).get(
            kernel_source(files),
            lambda source: self._nvrtc.compile(source, architecture=architecture, options=chosen),
        )

    def mark(self, files: tuple[str, ...], macros: Mapping[str, str], architecture: int, reason: str) -> None:
        """Refuse the cubin for a day."""
        self._cache(options(macros), architecture).mark(kernel_source(files), reason)

    def _cache(self, chosen: Sequence[str], architecture: int) -> CodeCache:
        target = "\n".join([*chosen, self._nvrtc.version, str(architecture)])
        return CodeCache(self._folder, target, suffix=".cubin")


@cache
def cuda_library(device: torch.device, folder: Path) -> CudaLibrary | KernelsUnavailable:
    """Return the device's library, or the reason for its absence."""
    try:
        return CudaLibrary(device, folder)
    except KernelsUnavailable as exc:
        return exc


def own_library(device: torch.device) -> CudaLibrary:
    """Return the device's library with its kernels in the user's folder. Raises KernelsUnavailable."""
    if device.type != "cuda":
        raise KernelsUnavailable("own kernels need a CUDA device")
    found = cuda_library(device, kernel_dir())
    if isinstance(found, KernelsUnavailable):
        raise found
    return found


def _cuda_major() -> int | None:
    version = torch.version.cuda
    return int(version.split(".")[0]) if version else None
