"""Kernels of one device: compile per form on first use, keep the results on disk, and check them once per process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from edgepipe_torch.compiled_code import CodeCache, KernelsUnavailable
from edgepipe_torch.cuda_kernels.checking import worst_error, worst_expert_error
from edgepipe_torch.cuda_kernels.driver import CudaModule
from edgepipe_torch.cuda_kernels.experts import ExpertKernels, RoutingKernels
from edgepipe_torch.cuda_kernels.forms import (
    EXPERT_FUNCTIONS,
    EXPERT_MACROS,
    FUNCTIONS,
    PAGED_FILES,
    PAGED_FUNCTIONS,
    PRODUCT_FILES,
    ROUTING_FILES,
    ROUTING_FUNCTIONS,
    KernelForm,
    expert_files,
    kernel_source,
    options,
)
from edgepipe_torch.cuda_kernels.nvrtc import Nvrtc, find_nvrtc
from edgepipe_torch.cuda_kernels.paged_checking import worst_decode_error
from edgepipe_torch.cuda_kernels.paged_decode import PagedDecode, PagedForm
from edgepipe_torch.cuda_kernels.products import Products
from edgepipe_torch.cuda_kernels.recurrent_checking import worst_step_error
from edgepipe_torch.cuda_kernels.recurrent_step import MixerStep, StepForm

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = 80  # bf16 on tensor cores

Key = TypeVar("Key")
Kernels = TypeVar("Kernels")


class KernelLibrary(Protocol):
    """Source of kernels by form."""

    def products(self, form: KernelForm) -> Products:
        """Return the kernels of a form. The first call of a form may take seconds. Raises KernelsUnavailable."""
        ...


class ExpertLibrary(Protocol):
    """Source of kernels for mixtures of experts."""

    def experts(self, form: KernelForm) -> ExpertKernels:
        """Return the products with experts of a form. The first call may take seconds. Raises KernelsUnavailable."""
        ...

    def routing(self) -> RoutingKernels:
        """Return what surrounds them. Raises KernelsUnavailable."""
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
        logger.info("own kernels for sm_%d by NVRTC %s", self._architecture, self._nvrtc.version)
        self._compiled = CompiledKernels(self._nvrtc, folder)
        self._products = _Known(self._load_products)
        self._experts = _Known(self._load_experts)
        self._routing = _Known(self._load_routing)
        self._paged = _Known(self._load_paged)
        self._mixer_steps = _Known(self._load_mixer_step)

    def products(self, form: KernelForm) -> Products:
        """See KernelLibrary."""
        return self._products.get(form)

    def experts(self, form: KernelForm) -> ExpertKernels:
        """See ExpertLibrary."""
        return self._experts.get(form)

    def routing(self) -> RoutingKernels:
        """See ExpertLibrary."""
        return self._routing.get(None)

    def paged(self, form: PagedForm) -> PagedDecode:
        """Return attention over pages. The first call of a form may take seconds. Raises KernelsUnavailable."""
        return self._paged.get(form)

    def mixer_step(self, form: StepForm) -> MixerStep:
        """Return what computes one token of recurrent layers. See ``paged``."""
        return self._mixer_steps.get(form)

    def _load_products(self, form: KernelForm) -> Products:
        module = self._module(PRODUCT_FILES, form.macros, FUNCTIONS)
        products = Products(module, form, multiprocessors=self._multiprocessors)
        _refuse_wrong(worst_error(products, form, self._device))
        return products

    def _load_experts(self, form: KernelForm) -> ExpertKernels:
        module = self._module(expert_files(form), form.macros | EXPERT_MACROS, EXPERT_FUNCTIONS)
        products = ExpertKernels(module, form, multiprocessors=self._multiprocessors)
        _refuse_wrong(worst_expert_error(products, self.routing(), form, self._device))
        return products

    def _load_routing(self, _key: None) -> RoutingKernels:
        return RoutingKernels(self._module(ROUTING_FILES, {}, ROUTING_FUNCTIONS))

    def _load_paged(self, form: PagedForm) -> PagedDecode:
        module = self._module(PAGED_FILES, form.macros, PAGED_FUNCTIONS)
        kernel = PagedDecode(module, form, multiprocessors=self._multiprocessors)
        _refuse_wrong(worst_decode_error(kernel, form, self._device))
        return kernel

    def _load_mixer_step(self, form: StepForm) -> MixerStep:
        kernels = MixerStep(self._module(form.files, form.macros, form.functions), form)
        _refuse_wrong(worst_step_error(kernels, form, self._device))
        return kernels

    def _module(self, files: tuple[str, ...], macros: dict[str, str], functions: Sequence[str]) -> CudaModule:
        return CudaModule(self._compiled.cubin(files, macros, self._architecture), functions, self._device)


class _Known(Generic[Key, Kernels]):
    """Kernels by what they are for, loaded once. Those that failed fail again without a new attempt."""

    def __init__(self, load: Callable[[Key], Kernels]) -> None:
        self._load = load
        self._found: dict[Key, Kernels | KernelsUnavailable] = {}

    def get(self, key: Key) -> Kernels:
        found = self._found.get(key)
        if found is None:
            try:
                found = self._load(key)
            except KernelsUnavailable as exc:
                found = exc
            self._found[key] = found
        if isinstance(found, KernelsUnavailable):
            raise found
        return found


def _refuse_wrong(error: float) -> None:
    """``error`` in units of the rounding. Raises KernelsUnavailable."""
    if not error <= 1:
        raise KernelsUnavailable(f"own kernels compute wrong values here: {error:.3g} times the rounding")


class CompiledKernels:
    """Cubins on disk, by source, macros, architecture and compiler version."""

    def __init__(self, nvrtc: Nvrtc, folder: Path) -> None:
        self._nvrtc = nvrtc
        self._folder = folder

    def cubin(self, files: tuple[str, ...], macros: Mapping[str, str], architecture: int) -> bytes:
        """Return the cubin of source files from disk, or compile it. Raises KernelsUnavailable."""
        chosen = options(macros)
        target = "\n".join([*chosen, self._nvrtc.version, str(architecture)])
        return CodeCache(self._folder, target, suffix=".cubin").get(
            kernel_source(files),
            lambda source: self._nvrtc.compile(source, architecture=architecture, options=chosen),
        )


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
