"""Mixtures of experts on a GPU: exact in every kind of weight, the same in graphs, and in a backend as on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cuda.experts import CudaExperts, ExpertMatrix  # noqa: E402
from edgepipe_torch.cuda.kernels.checking import random_packed, worst_expert_error  # noqa: E402
from edgepipe_torch.cuda.kernels.forms import WIDE_FORM  # noqa: E402
from edgepipe_torch.cuda.kernels.library import CudaLibrary  # noqa: E402
from edgepipe_torch.layers.device import PAGE_TOKENS  # noqa: E402

from edgepipe.backend.types import BackendOptions  # noqa: E402
from edgepipe.spec.expert_places import SETTING  # noqa: E402
from edgepipe.spec.facts import LayerRange, make_slices  # noqa: E402
from edgepipe.weights.weights import open_hf_weights  # noqa: E402
from tests.support.backends.kernel_forms import FORMS  # noqa: E402
from tests.support.backends.steps import make_step, run_step, step_row  # noqa: E402
from tests.support.models.experts import write_expert_folder  # noqa: E402

if TYPE_CHECKING:
    from torch import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

EXPERTS, USED, HIDDEN, INNER = 16, 4, 512, 256
KINDS = {"Q4_K": FORMS["Q4_K"], "MXFP4": FORMS["MXFP4"], "bf16": WIDE_FORM}


def cuda() -> device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CudaLibrary:
    return CudaLibrary(cuda(), tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("name", KINDS)
def test_products_round_once(name: str, library: CudaLibrary) -> None:
    form = KINDS[name]
    products, routing = library.experts(form), library.routing()
    rows = (1, 2, 9, 17, 64, 200)
    assert worst_expert_error(products, routing, form, cuda(), experts=9, used=3, features=320, rows=rows) <= 1


@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_a_graph_serves_other_routes_than_it_was_recorded_with(num_rows: int, library: CudaLibrary) -> None:
    rng = np.random.default_rng(1)
    form = FORMS["Q4_K"]
    parts = [random_packed(form, EXPERTS * INNER, HIDDEN, rng) for _ in range(2)]
    down = random_packed(form, EXPERTS * HIDDEN, INNER, rng)
    forms = [part.form for part in parts]
    gate_up = ExpertMatrix(EXPERTS, HIDDEN, 2, INNER, forms, device=cuda(), library=library)
    for index, part in enumerate(parts):
        gate_up.fill(index, part)
    last = ExpertMatrix(EXPERTS, INNER, 1, HIDDEN, [down.form], device=cuda(), library=library)
    last.fill(0, down)
    experts = CudaExperts(gate_up, last, "silu", library)
    x = torch.randn(num_rows, HIDDEN, device=cuda(), dtype=torch.bfloat16)
    weights = torch.rand(num_rows, USED, device=cuda())

    def chosen() -> np.ndarray:
        return np.argsort(rng.random((num_rows, EXPERTS)), axis=1)[:, :USED].copy()

    routes = torch.from_numpy(chosen()).to(cuda())
    total = torch.zeros_like(x)
    with torch.inference_mode():
        experts.add(x, routes, weights, total)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            experts.add(x, routes, weights, total)
        for _ in range(3):
            routes.copy_(torch.from_numpy(chosen()))
            expected = torch.zeros_like(x)
            experts.add(x, routes, weights, expected)
            total.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(total, expected)


@pytest.mark.parametrize("share", ["none", "50%", "all"])
def test_a_backend_decodes_as_on_the_cpu(tmp_path: Path, share: str) -> None:
    """With experts in host memory, too, and then without graphs."""
    weights = open_hf_weights(write_expert_folder(tmp_path / "model"))
    config = weights.config
    backends: list[TorchBackend] = []
    for name in ("cpu", "cuda"):
        backend = TorchBackend(BackendOptions(device=name, settings={SETTING: share} if name == "cuda" else {}))
        (part,) = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
        backend.load([part], weights, lambda _progress: None)
        backend.allocate_kv(num_blocks=8, block_size=PAGE_TOKENS)
        backends.append(backend)
    for position in range(6):  # the third step of a size replays its graph
        ids = np.arange(position, position + 5, dtype=np.int32)
        rows = [step_row(position, 1, (index, 1), sequence=index + 1) for index in range(5)]
        cpu, gpu = (run_step(backend, make_step(rows), ids) for backend in backends)
        assert float(np.abs(gpu - cpu).max()) < 0.1 * float(np.abs(cpu).max())
    assert bool(backends[1]._steps[0].counted_rows) == (share == "none")
    for backend in backends:
        backend.close()
