"""Mixtures of experts on an NVIDIA GPU: exactness of own kernels, and decoder layers in graphs against memory time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from edgepipe_torch.cuda.kernels.checking import worst_expert_error
from edgepipe_torch.cuda.kernels.forms import WIDE_FORM
from edgepipe_torch.cuda.kernels.library import cuda_library
from edgepipe_torch.layers.compiled_code import KernelsUnavailable
from figures import Row, at_most, below
from gpu_layers import MOST_ROWS, Layers

from edgepipe.config import kernel_dir
from tests.support.backends.kernel_forms import FORMS

MIXTURE, DENSE = "qwen3-30b-a3b:q4_k_m", "llama-3.1-8b:q4_k_m"
FEW, MANY = 2, 12  # layers: the difference of their steps has no share of the host
EXACT_FORMS = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4", "FP8")
_EXACT = {"experts": 16, "used": 4, "features": 256, "in_features": 2048}
_EXACT_ROWS = (1, 9, 64, 300)


def expert_exact_rows() -> Iterator[Row]:
    """Experts' products of every common form: the largest error in units of one rounding of the result."""
    device = torch.device("cuda", 0)
    library = cuda_library(device, kernel_dir())
    if isinstance(library, KernelsUnavailable):
        raise library
    kinds = {name: FORMS[name] for name in EXACT_FORMS} | {"bf16": WIDE_FORM}
    for name, form in kinds.items():
        worst = worst_expert_error(library.experts(form), library.routing(), form, device, rows=_EXACT_ROWS, **_EXACT)
        yield below(f"experts by own kernel, {name}", worst, "roundings", 1.0)


def expert_rows() -> Iterator[Row]:
    """A layer with experts and a dense one, of 1 and 64 rows, against the time to read what they need."""
    for name in (DENSE, MIXTURE):
        many, few = Layers(name, MANY), Layers(name, FEW)
        for count in (1, MOST_ROWS):
            few.first_step(count)
            memory_s = many.first_step(count) / MANY / many.bandwidth
            layer_s = (many.step_s(count) - few.step_s(count)) / (MANY - FEW)
            row = f"layer of {name}, {count} row{'s' if count > 1 else ''}"
            if name == MIXTURE and count == 1:
                yield at_most(row, 1e6 * layer_s, "us", 1e6 * memory_s, "memory time", 1.5)
            else:
                yield Row(row, 1e6 * layer_s, "us", 1e6 * memory_s, "memory time", layer_s / memory_s)
        many.close()
        few.close()
