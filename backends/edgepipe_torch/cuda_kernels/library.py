"""Kernels of one device: compile per form on first use, keep the results on disk, and check them once per process."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from edgepipe_torch.cuda_kernels.checking import worst_error
from edgepipe_torch.cuda_kernels.driver import CudaModule
from edgepipe_torch.cuda_kernels.forms import FUNCTIONS, KernelForm, kernel_source, options
from edgepipe_torch.cuda_kernels.nvrtc import KernelsUnavailable, Nvrtc, find_nvrtc
from edgepipe_torch.cuda_kernels.products import Products

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = 80  # bf16 on tensor cores


class KernelLibrary(Protocol):
    """Source of kernels by form."""

    def products(self, form: KernelForm) -> Products:
        """Return the kernels of a form. The first call of a form may take seconds. Raises KernelsUnavailable."""
        ...


class CudaLibrary:
    """Kernels compiled for one CUDA device."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        """``folder`` keeps compiled kernels. Raises KernelsUnavailable."""
        properties = torch.cuda.get_device_properties(device)
        self._architecture = 10 * properties.major + properties.minor
        if self._architecture < _MIN_CAPABILITY:
            raise KernelsUnavailable(f"{properties.name} has no bf16 tensor cores (sm_{self._architecture})")
        self._device = device
        self._multiprocessors: int = properties.multi_processor_count
        self._nvrtc = find_nvrtc(_cuda_major(), Path(torch.__file__).parent / "lib")
        logger.info("packed weights: own kernels for sm_%d by NVRTC %s", self._architecture, self._nvrtc.version)
        self._folder = folder
        self._known: dict[KernelForm, Products | KernelsUnavailable] = {}

    def products(self, form: KernelForm) -> Products:
        """See KernelLibrary. A form that failed once fails again without a new attempt."""
        found = self._known.get(form)
        if found is None:
            try:
                found = self._load(form)
            except KernelsUnavailable as exc:
                found = exc
            self._known[form] = found
        if isinstance(found, KernelsUnavailable):
            raise found
        return found

    def _load(self, form: KernelForm) -> Products:
        compiled = CompiledKernels(self._nvrtc, self._folder)
        try:
            module = CudaModule(compiled.cubin(form, self._architecture), FUNCTIONS, self._device)
        except KernelsUnavailable:  # the file may be damaged
            module = CudaModule(compiled.compile(form, self._architecture), FUNCTIONS, self._device)
        products = Products(module, form, multiprocessors=self._multiprocessors)
        error = worst_error(products, form, self._device)
        if not error <= 1:
            raise KernelsUnavailable(f"own kernels compute wrong values here: {error:.3g} times the rounding")
        return products


class CompiledKernels:
    """Cubins on disk, by source, form, architecture and compiler version."""

    def __init__(self, nvrtc: Nvrtc, folder: Path) -> None:
        self._nvrtc = nvrtc
        self._folder = folder

    def cubin(self, form: KernelForm, architecture: int) -> bytes:
        """Return a form's cubin from disk, or compile it. Raises KernelsUnavailable."""
        try:
            return self._path(form, architecture).read_bytes()
        except OSError:
            return self.compile(form, architecture)

    def compile(self, form: KernelForm, architecture: int) -> bytes:
        """Compile a form and write the result to disk. Raises KernelsUnavailable."""
        cubin = self._nvrtc.compile(kernel_source(), architecture=architecture, options=options(form.macros))
        path = self._path(form, architecture)
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_bytes(cubin)
            os.replace(new, path)
        except OSError as exc:  # such as a full disk: the next start compiles again
            logger.info("compiled kernels are not kept: %s", exc)
            with suppress(OSError):
                new.unlink()
        return cubin

    def _path(self, form: KernelForm, architecture: int) -> Path:
        key = "\n".join([kernel_source(), *options(form.macros), self._nvrtc.version, str(architecture)])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"


@cache
def cuda_library(device: torch.device, folder: Path) -> CudaLibrary | KernelsUnavailable:
    """Return the device's library, or the reason for its absence."""
    try:
        return CudaLibrary(device, folder)
    except KernelsUnavailable as exc:
        return exc


def _cuda_major() -> int | None:
    version = torch.version.cuda
    return int(version.split(".")[0]) if version else None
