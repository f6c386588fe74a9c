"""Give the mixers of recurrent layers the kernels that compute rows with one token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from edgepipe.spec.layer_spec import Recurrent
from edgepipe_torch.cuda.kernels.library import own_library
from edgepipe_torch.cuda.kernels.recurrent_step import step_form
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from edgepipe_torch.layers.recurrent import Mixer, StepKernel

logger = logging.getLogger(__name__)

StepKernels = Callable[[Mixer, torch.dtype], StepKernel]
"""Returns a mixer's kernel for rows of a type; the first call for a shape may take seconds. Raises
KernelsUnavailable."""


def use_kernels(mixers: Iterable[Mixer], kernels: StepKernels, dtype: torch.dtype) -> None:
    """Give each mixer its kernel; the log says once for each shape why it has none."""
    said: set[Recurrent] = set()
    for mixer in mixers:
        try:
            mixer.kernel = kernels(mixer, dtype)
        except KernelsUnavailable as exc:
            if mixer.spec not in said:
                logger.warning("recurrent layers compute single tokens by torch's operations: %s", exc)
            said.add(mixer.spec)


def own_step_kernels(device: torch.device) -> StepKernels:
    """Return the device's own kernels."""
    return lambda mixer, dtype: own_library(device).mixer_step(step_form(mixer.spec, dtype)).of(mixer)
