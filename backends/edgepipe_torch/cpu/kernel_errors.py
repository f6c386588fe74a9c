"""Errors of the CPU's kernels against float64, for people who measure a machine."""

from __future__ import annotations

from collections.abc import Iterator

from edgepipe.backend.types import KernelError
from edgepipe.spec.kv_forms import KV_FORMS
from edgepipe.spec.layer_spec import Recurrent
from edgepipe.weights.made_up_packed import CHECKED_TYPES, checked_weight
from edgepipe_torch.cpu.checking import head_error, product_error, step_error
from edgepipe_torch.cpu.kernels import CpuKernels, Kernels
from edgepipe_torch.cpu.recurrent_checking import recurrent_error
from edgepipe_torch.cpu.recurrent_code import step_form
from edgepipe_torch.cpu.repack import repack
from edgepipe_torch.layers.compiled_code import KernelsUnavailable, kernel_error
from edgepipe_torch.layers.recurrent import CHECKED_MIXERS

_HEAD_DIMS = (64, 128, 256)


def cpu_kernel_errors(kernels: Kernels) -> Iterator[KernelError]:
    """See ``CheckingBackend.kernel_errors``."""
    if isinstance(kernels, KernelsUnavailable):
        yield KernelError(kernel="all", reason=str(kernels))
        return
    yield kernel_error("norms and SwiGLU", lambda: step_error(kernels))
    for scheme in CHECKED_TYPES:
        yield kernel_error(f"product {scheme}", lambda scheme=scheme: _product_error(kernels, scheme))
    for head_dim in _HEAD_DIMS:
        for kv in ("", *KV_FORMS):
            name = f"attention, heads of {head_dim}{f', {kv} KV' if kv else ''}"
            yield kernel_error(name, lambda size=head_dim, kv=kv: _head_error(kernels, size, kv))
    for name, spec in CHECKED_MIXERS.items():
        yield kernel_error(f"one token of {name}", lambda spec=spec: _mixer_error(kernels, spec))


def _product_error(kernels: CpuKernels, scheme: str) -> float:
    kind = repack(checked_weight(scheme, rows=16, inputs=512)).kind
    return product_error(kernels, kind, kernels.product(kind))


def _head_error(kernels: CpuKernels, head_dim: int, kv: str) -> float:
    return head_error(kernels, (head_dim, 0), kernels.heads(head_dim, kv=kv), kv=kv)


def _mixer_error(kernels: CpuKernels, spec: Recurrent) -> float:
    form = step_form(spec)
    assert form is not None  # all sizes are multiples of 8
    return recurrent_error(kernels, form, kernels.recurrent(form))
