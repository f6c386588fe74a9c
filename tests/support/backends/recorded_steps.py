"""Step kernels compiled for the host: which, and as one operation to torch, which a recorder of operations repeats."""

from __future__ import annotations

import torch
from edgepipe_torch.cuda.kernels.recurrent_step import MixerStep, StepForm, step_form
from edgepipe_torch.cuda.mixer_steps import StepKernels
from edgepipe_torch.layers.recurrent import Mixer, StepKernel
from torch import Tensor

from edgepipe.spec.layer_spec import DeltaNet
from tests.support.backends.host_kernels import HostModule
from tests.support.models.recurrent_layers import CONV, DELTA, MAMBA

QWEN = DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4)
STEP_FORMS = {
    "Qwen3.6": step_form(QWEN, torch.bfloat16),
    "delta": step_form(DELTA, torch.bfloat16),
    "mamba": step_form(MAMBA, torch.bfloat16),
    "conv": step_form(CONV, torch.bfloat16),
    "delta, float32": step_form(DELTA, torch.float32),
    "mamba, float32": step_form(MAMBA, torch.float32),
    "conv, float32": step_form(CONV, torch.float32),
}

_known: list[StepKernel] = []
_LIBRARY = torch.library.Library("edgepipe_tests", "FRAGMENT")
_LIBRARY.define(
    "mixer_step(int kernel, Tensor made, Tensor(a!) last, Tensor(b!) memory, Tensor read, Tensor write) -> Tensor"
)


def _mixer_step(kernel: int, made: Tensor, last: Tensor, memory: Tensor, read: Tensor, write: Tensor) -> Tensor:
    states = (last, memory) if memory.numel() else (last,)
    return _known[kernel].run(made, states, read, write, threads=1)


_LIBRARY.impl("mixer_step", _mixer_step, "CPU")


class _Recorded:
    """A kernel by its number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def run(self, made: Tensor, states: tuple[Tensor, ...], read: Tensor, write: Tensor, *, threads: int) -> Tensor:
        last, *others = states
        memory = others[0] if others else torch.empty(0)
        return torch.ops.edgepipe_tests.mixer_step(self._number, made, last, memory, read, write)


def recorded_steps(modules: dict[StepForm, HostModule]) -> StepKernels:
    """Return kernels of these forms."""

    def find(mixer: Mixer, dtype: torch.dtype) -> StepKernel:
        form = step_form(mixer.spec, dtype)
        _known.append(MixerStep(modules[form], form).of(mixer))
        return _Recorded(len(_known) - 1)

    return find
