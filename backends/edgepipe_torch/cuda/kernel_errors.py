"""Errors of the CUDA kernels against float64, for people who measure a machine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from edgepipe.backend.types import KernelError
from edgepipe.spec.kv_forms import KV_FORMS
from edgepipe.spec.layer_spec import Recurrent
from edgepipe.weights.made_up_packed import CHECKED_TYPES, checked_weight
from edgepipe_torch.cuda.kernels.checked_library import CheckedLibrary
from edgepipe_torch.cuda.kernels.checking import worst_error, worst_expert_error, worst_gated_error
from edgepipe_torch.cuda.kernels.forms import WIDE_FORM, KernelForm, kernel_form
from edgepipe_torch.cuda.kernels.paged_checking import worst_decode_error
from edgepipe_torch.cuda.kernels.paged_decode import PagedForm
from edgepipe_torch.cuda.kernels.place_checking import worst_place_error
from edgepipe_torch.cuda.kernels.recurrent_checking import worst_step_error
from edgepipe_torch.cuda.kernels.recurrent_step import step_form
from edgepipe_torch.cuda.kernels.routing_checking import worst_routing_error
from edgepipe_torch.layers.compiled_code import kernel_error
from edgepipe_torch.layers.recurrent import CHECKED_MIXERS

_ROWS = (1, 3, 8, 9, 16, 17, 32, 33, 64)  # each number of column tiles, full and not
_EXPERT_ROWS = (1, 9, 64)
_FEATURES, _INPUTS = 1000, 2048  # many tiles, not all of them full
_GATES = 512
_KV = ("", *KV_FORMS)
_PAGED = tuple(
    PagedForm(head_dim=key, value_dim=value, head_tiles=1, kv=kv)
    for kv in _KV
    for key, value in ((64, 64), (128, 128), (256, 256), (512, 512), (576, 512))
)


def cuda_kernel_errors(library: CheckedLibrary, device: torch.device, dtype: torch.dtype) -> Iterator[KernelError]:
    """See ``CheckingBackend.kernel_errors``."""
    forms = {scheme: kernel_form(checked_weight(scheme, rows=16, inputs=_INPUTS)) for scheme in CHECKED_TYPES}
    for scheme, form in forms.items():
        yield kernel_error(f"product {scheme}", lambda form=form: _product_error(library, form, device))
    yield kernel_error("choice of experts", lambda: worst_routing_error(library.routing(), device))
    for scheme, form in {**forms, "bf16": WIDE_FORM}.items():
        yield kernel_error(f"experts {scheme}", lambda form=form: _expert_error(library, form, device))
    for kv in _KV:
        name = f"placing of heads{_named(kv)}"
        yield kernel_error(name, lambda kv=kv: worst_place_error(library.place_heads(kv), device, kv=kv))
    for paged in _PAGED:
        name = f"attention, heads of {paged.head_dim}{_named(paged.kv)}"
        yield kernel_error(name, lambda form=paged: worst_decode_error(library.paged(form), form, device))
    for name, spec in CHECKED_MIXERS.items():
        yield kernel_error(f"one token of {name}", lambda spec=spec: _mixer_error(library, spec, device, dtype))


def _named(kv: str) -> str:
    return f", KV in {kv}" if kv else ""


def _product_error(library: CheckedLibrary, form: KernelForm, device: torch.device) -> float:
    sizes, products = {"out_features": _FEATURES, "in_features": _INPUTS}, library.products(form)
    gated = worst_gated_error(products, form, device, features=_GATES, rows=_ROWS)
    return max(worst_error(products, form, device, rows=_ROWS, **sizes), gated)


def _expert_error(library: CheckedLibrary, form: KernelForm, device: torch.device) -> float:
    sizes = {"experts": 16, "used": 4, "features": 256, "in_features": _INPUTS}
    return worst_expert_error(library.experts(form), library.routing(), form, device, rows=_EXPERT_ROWS, **sizes)


def _mixer_error(library: CheckedLibrary, spec: Recurrent, device: torch.device, dtype: torch.dtype) -> float:
    form = step_form(spec, dtype)
    return worst_step_error(library.mixer_step(form), form, device)
