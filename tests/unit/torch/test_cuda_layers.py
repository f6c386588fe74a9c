"""Whole layers by CUDA's own kernels, compiled for a CPU, beside the same layers in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cuda.kernels.experts import ExpertKernels, RoutingKernels  # noqa: E402
from edgepipe_torch.cuda.kernels.forms import KernelForm  # noqa: E402
from edgepipe_torch.cuda.kernels.paged_decode import PagedDecode, PagedForm, paged_form  # noqa: E402
from edgepipe_torch.cuda.kernels.place_heads import PlaceHeads  # noqa: E402
from edgepipe_torch.cuda.kernels.products import Products  # noqa: E402
from edgepipe_torch.cuda.kernels.recurrent_step import MixerStep, step_form  # noqa: E402
from edgepipe_torch.layers.head_shape import LayerHeads  # noqa: E402
from edgepipe_torch.layers.recurrent import Mixer, StepKernel  # noqa: E402

from edgepipe.backend.types import BackendOptions, RowState, StateWrite  # noqa: E402
from edgepipe.spec.facts import LayerRange, make_slices  # noqa: E402
from tests.support.backends.host_compiler import COMPILER  # noqa: E402
from tests.support.backends.host_kernels import (  # noqa: E402
    PLACE,
    ROUTING,
    HostModule,
    compile_for_host,
    experts_part,
    paged_part,
    products_part,
    step_part,
)
from tests.support.backends.kernel_forms import FORMS  # noqa: E402
from tests.support.backends.steps import make_step, run_step, step_row  # noqa: E402
from tests.support.backends.torch_paging import CudaOnHost, cpu_paging  # noqa: E402
from tests.support.models import packed  # noqa: E402
from tests.support.models.counted_layers import DELTA, LAYERS, counted_model  # noqa: E402

PAGE = 64
HEADS = PagedForm(head_dim=64, value_dim=64, head_tiles=1)
STEP = step_form(DELTA, torch.bfloat16)
Q4_K, Q6_K = FORMS["Q4_K"], FORMS["Q6_K"]


class HostKernels:
    """Own kernels on this CPU. See ``edgepipe_torch.cuda.device.OwnKernels``."""

    def __init__(self, modules: dict[object, HostModule]) -> None:
        self._modules = modules

    def products(self, form: KernelForm) -> Products:
        return Products(self._modules["product", form], form, multiprocessors=3)

    def experts(self, form: KernelForm) -> ExpertKernels:
        return ExpertKernels(self._modules["experts", form], form, multiprocessors=3)

    def routing(self) -> RoutingKernels:
        return RoutingKernels(self._modules[RoutingKernels])

    def place_heads(self, kv: str = "") -> PlaceHeads:
        assert not kv
        return PlaceHeads(self._modules[PlaceHeads])

    def decode(self, heads: LayerHeads, kv: str = "") -> PagedDecode:
        assert paged_form(heads, kv) == HEADS
        return PagedDecode(self._modules[HEADS], HEADS, multiprocessors=3)

    def mixer_step(self, mixer: Mixer, dtype: Any) -> StepKernel:
        return MixerStep(self._modules[STEP], STEP).of(mixer)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    parts = {
        **{("product", form): products_part(form) for form in (Q4_K, Q6_K)},
        **{("experts", form): experts_part(form) for form in (Q4_K, Q6_K)},
        RoutingKernels: ROUTING,
        PlaceHeads: PLACE,
        HEADS: paged_part(HEADS),
        STEP: step_part(STEP),
    }
    modules = compile_for_host(list(parts.values()), tmp_path_factory.mktemp("kernels"))
    return HostKernels(dict(zip(parts, modules, strict=True)))


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_families(layer: str, kernels: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of each of two sequences, then tokens one by one; the first run of a size is not recorded."""
    monkeypatch.setattr(packed, "SPREAD", 0.06)  # so large that each part of a layer matters
    source, has_states = counted_model(layer, 1, file="Q4_K_M"), LAYERS[layer].recurrent is not None
    paging = cpu_paging(page_tokens=PAGE, decode=kernels.decode, attend=None, new_recorder=NoMemory)
    device = CudaOnHost("bfloat16", paging=paging, step_kernels=kernels.mixer_step, kernels=kernels)
    options = BackendOptions(device="cpu", dtype="bfloat16", threads=1)
    backends = [TorchBackend(options, device=device), TorchBackend(replace(options, dtype="float32"))]
    for backend in backends:
        backend.load(make_slices([LayerRange(0, 1)], 1), source, lambda _progress: None)
        backend.allocate_kv(num_blocks=3, block_size=PAGE, state_slots=3 if has_states else 0)
    draw = np.random.default_rng(3)
    for at, count in ((0, 9), (9, 1), (10, 1)):
        rows = [step_row(at, count, (2 - index, 1), sequence=index + 1) for index in range(2)]
        if has_states:
            states = [RowState(index if at else None, (StateWrite(count, index),)) for index in range(2)]
            rows = [replace(row, state=state) for row, state in zip(rows, states, strict=True)]
        ids = draw.integers(0, 97, 2 * count).astype(np.int32)
        found, exact = (run_step(backend, make_step(rows), ids) for backend in backends)
        np.testing.assert_allclose(found, exact, rtol=0, atol=0.03 * float(np.abs(exact).max()))


class NoMemory:
    """A recorder that has no memory for graphs: launches of kernels cannot be recorded on a CPU."""

    def record(self, compute: Any) -> Any:
        raise RuntimeError("no memory")
