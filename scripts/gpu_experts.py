"""Mixtures of experts on an NVIDIA GPU: exactness of own kernels, and decoder layers in graphs against memory time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from edgepipe_torch import TorchBackend
from edgepipe_torch.compiled_code import KernelsUnavailable
from edgepipe_torch.cuda_kernels.checking import worst_expert_error
from edgepipe_torch.cuda_kernels.forms import WIDE_FORM
from edgepipe_torch.cuda_kernels.library import cuda_library
from figures import Row, at_most, below
from layer_steps import counted_experts

from edgepipe.backend.types import BackendOptions, BlockRun, Step, StepRow
from edgepipe.config import kernel_dir
from edgepipe.ids import SequenceId, StepId
from edgepipe.model.facts import LayerRange, Slice
from edgepipe.model.mixes import named_model
from edgepipe.model.resident import resident_sizes
from edgepipe.stage.made_up import MadeUpWeights, spread
from edgepipe.stage.probe import probe_rows
from tests.support.kernel_forms import FORMS

MIXTURE, DENSE = "qwen3-30b-a3b:q4_k_m", "llama-3.1-8b:q4_k_m"
FEW, MANY = 2, 12  # layers: the difference of their steps has no share of the host
EXACT_FORMS = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4", "FP8")
_EXACT = {"experts": 16, "used": 4, "features": 256, "in_features": 2048}
_EXACT_ROWS = (1, 9, 64, 300)
_PAGE = 256  # tokens
_STEPS, _WARM_UP, _ROUNDS = 40, 4, 5  # a size's second step records its graph
_MOST_ROWS = 64


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
        for count in (1, _MOST_ROWS):
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


class Layers:
    """Some layers of a model with made-up weights on the GPU."""

    def __init__(self, name: str, count: int) -> None:
        config, table = named_model(name)
        layers, forms = spread(config, table, count)
        shape = replace(config, layers=layers)
        part = Slice(index=1, layers=LayerRange(0, count), embedding=False, head=False)
        self._backend = TorchBackend(BackendOptions(device="cuda", threads=1))
        self.bandwidth = self._backend.profile().bandwidth_bytes_per_s
        self._backend.load([part], MadeUpWeights(shape, forms), lambda _progress: None)
        if slow := [each for each in self._backend.packed_products() if each.reason]:
            raise RuntimeError(f"{name} is multiplied by {slow[0].by}: {slow[0].reason}")
        self._backend.allocate_kv(num_blocks=_MOST_ROWS, block_size=_PAGE)
        sizes = resident_sizes(shape, forms, kind="torch-cuda", dtype="bfloat16")
        self._expert_bytes = sum(sizes.experts)
        self._other_bytes = sum(sizes.layers) - self._expert_bytes
        self._inputs = probe_rows(config.hidden_size)

    def first_step(self, count: int) -> float:
        """Run the first step of so many rows, which no graph has, and return the bytes that it reads.

        These are all but the experts that no row chose.
        """
        with counted_experts() as shares:
            self._submit(count)
        return self._other_bytes + (statistics.fmean(shares) if shares else 0.0) * self._expert_bytes

    def step_s(self, count: int) -> float:
        """Seconds of a decode step, the least of some rounds' means."""

        def run(steps: int) -> float:
            begun_s = time.perf_counter()
            for _ in range(steps):
                self._submit(count)
            return (time.perf_counter() - begun_s) / steps

        run(_WARM_UP)
        return min(run(_STEPS) for _ in range(_ROUNDS))

    def _submit(self, count: int) -> None:
        rows = tuple(
            StepRow(sequence=SequenceId(index), position=_PAGE // 2, num_tokens=1, runs=(BlockRun(index, 1),))
            for index in range(count)
        )
        step = Step(step=StepId(1), slice_index=1, rows=rows, logit_rows=np.zeros(0, np.int32))
        inputs = np.ascontiguousarray(self._inputs[:count])
        self._backend.collect(self._backend.submit(self._backend.prepare(step), inputs))

    def close(self) -> None:
        """Release the device's memory."""
        self._backend.close()
