"""Kernels of one device, each compared with exact results once per process before it is used.

Kernels that fail their check in any way are left out, and torch's operations take their place. After some failures,
such as a read outside of memory, CUDA refuses all further work of the process. Then the load fails, and a mark beside
the compiled code keeps later processes from the same kernels for a day.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from edgepipe.errors import EdgepipeError, StageError
from edgepipe_torch.cuda.kernels.checking import worst_expert_error, worst_product_error
from edgepipe_torch.cuda.kernels.driver import Module
from edgepipe_torch.cuda.kernels.experts import ExpertKernels, RoutingKernels
from edgepipe_torch.cuda.kernels.forms import (
    EXPERT_FUNCTIONS,
    EXPERT_MACROS,
    FUNCTIONS,
    PAGED_FILES,
    PAGED_FUNCTIONS,
    PLACE_FILES,
    PLACE_FUNCTIONS,
    PRODUCT_FILES,
    ROUTING_FILES,
    ROUTING_FUNCTIONS,
    KernelForm,
    expert_files,
)
from edgepipe_torch.cuda.kernels.paged_checking import worst_decode_error
from edgepipe_torch.cuda.kernels.paged_decode import PagedDecode, PagedForm
from edgepipe_torch.cuda.kernels.place_checking import worst_place_error
from edgepipe_torch.cuda.kernels.place_heads import PlaceHeads
from edgepipe_torch.cuda.kernels.products import Products
from edgepipe_torch.cuda.kernels.recurrent_checking import worst_step_error
from edgepipe_torch.cuda.kernels.recurrent_step import MixerStep, StepForm
from edgepipe_torch.cuda.kernels.routing_checking import worst_routing_error
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.measuring import check_device, lacks_memory

logger = logging.getLogger(__name__)

Key = TypeVar("Key")
Kernels = TypeVar("Kernels")


class Modules(Protocol):
    """Source of compiled kernels."""

    def load(self, files: tuple[str, ...], macros: Mapping[str, str], functions: Sequence[str]) -> Module:
        """Compile sources, or take them from disk. Raises KernelsUnavailable."""
        ...

    def mark(self, files: tuple[str, ...], macros: Mapping[str, str], reason: str) -> None:
        """Keep later processes from kernels that stop the device."""
        ...


class CheckedLibrary:
    """Kernels by form. Loading those of a new form may take seconds."""

    def __init__(self, device: torch.device, modules: Modules, *, multiprocessors: int) -> None:
        self._device = device
        self._modules = modules
        self._multiprocessors = multiprocessors
        self._products = _Known(self._load_products)
        self._experts = _Known(self._load_experts)
        self._routing = _Known(self._load_routing)
        self._paged = _Known(self._load_paged)
        self._place = _Known(self._load_place)
        self._mixer_steps = _Known(self._load_mixer_step)

    def products(self, form: KernelForm) -> Products:
        """Return products of packed weights. Raises KernelsUnavailable, StageError, torch's memory errors."""
        return self._products.get(form)

    def experts(self, form: KernelForm) -> ExpertKernels:
        """Return products with experts. See ``products``."""
        return self._experts.get(form)

    def routing(self) -> RoutingKernels:
        """Return what surrounds products with experts. See ``products``."""
        return self._routing.get(None)

    def paged(self, form: PagedForm) -> PagedDecode:
        """Return attention over pages. See ``products``."""
        return self._paged.get(form)

    def place_heads(self, kv: str = "") -> PlaceHeads:
        """Return what normalises, rotates and writes heads. See ``products``, and ``PlaceLibrary`` for ``kv``."""
        return self._place.get(kv)

    def mixer_step(self, form: StepForm) -> MixerStep:
        """Return what computes one token of recurrent layers. See ``products``."""
        return self._mixer_steps.get(form)

    def _load_products(self, form: KernelForm) -> Products:
        return self._load(
            PRODUCT_FILES,
            form.macros,
            FUNCTIONS,
            lambda module: Products(module, form, multiprocessors=self._multiprocessors),
            lambda products: worst_product_error(products, form, self._device),
        )

    def _load_experts(self, form: KernelForm) -> ExpertKernels:
        routing = self.routing()
        return self._load(
            expert_files(form),
            form.macros | EXPERT_MACROS,
            EXPERT_FUNCTIONS,
            lambda module: ExpertKernels(module, form, multiprocessors=self._multiprocessors),
            lambda products: worst_expert_error(products, routing, form, self._device),
        )

    def _load_routing(self, _key: None) -> RoutingKernels:
        return self._load(
            ROUTING_FILES,
            {},
            ROUTING_FUNCTIONS,
            RoutingKernels,
            lambda routing: worst_routing_error(routing, self._device),
        )

    def _load_paged(self, form: PagedForm) -> PagedDecode:
        return self._load(
            PAGED_FILES,
            form.macros,
            PAGED_FUNCTIONS,
            lambda module: PagedDecode(module, form, multiprocessors=self._multiprocessors),
            lambda kernel: worst_decode_error(kernel, form, self._device),
        )

    def _load_place(self, kv: str) -> PlaceHeads:
        return self._load(
            PLACE_FILES, {}, PLACE_FUNCTIONS, PlaceHeads, lambda kernel: worst_place_error(kernel, self._device, kv=kv)
        )

    def _load_mixer_step(self, form: StepForm) -> MixerStep:
        return self._load(
            form.files,
            form.macros,
            form.functions,
            lambda module: MixerStep(module, form),
            lambda kernels: worst_step_error(kernels, form, self._device),
        )

    def _load(
        self,
        files: tuple[str, ...],
        macros: Mapping[str, str],
        functions: Sequence[str],
        make: Callable[[Module], Kernels],
        error: Callable[[Kernels], float],
    ) -> Kernels:
        """Load and check kernels; ``error``: in units of the rounding. Raises as ``products`` does."""
        try:
            kernels = make(self._modules.load(files, macros, functions))
            _refuse_wrong(error(kernels))
        except (KernelsUnavailable, EdgepipeError):
            raise
        except Exception as exc:  # whatever it is, torch's operations compute the same without these kernels
            if lacks_memory(exc):
                raise
            reason = f"own kernels fail their check here: {(str(exc) or repr(exc)).splitlines()[0]}"
            logger.info("the check of %s failed", files[-1], exc_info=exc)
            self._check_device(files, macros, reason)
            raise KernelsUnavailable(reason) from exc
        return kernels

    def _check_device(self, files: tuple[str, ...], macros: Mapping[str, str], reason: str) -> None:
        """Mark kernels after which the device does not compute. Raises StageError then."""
        try:
            check_device(self._device, torch.float32)
        except StageError as exc:
            self._modules.mark(files, macros, reason)
            raise StageError(
                f"own kernels stopped {self._device}", fact=reason, next_step="load again: torch computes without them"
            ) from exc


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
