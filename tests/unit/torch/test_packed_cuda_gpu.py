"""Packed products on a GPU: exact in every form, in graphs, and by the fallback of torch's 4-bit kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch.cuda.kernels.checking import random_packed, worst_error  # noqa: E402
from edgepipe_torch.cuda.kernels.library import CudaLibrary  # noqa: E402
from edgepipe_torch.cuda.packed import PackedCudaLinear  # noqa: E402
from edgepipe_torch.cuda.packed_fallbacks import Int4Weights  # noqa: E402

from tests.support.backends.kernel_forms import FORMS  # noqa: E402

if TYPE_CHECKING:
    from torch import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

IN_FEATURES = 1024


def cuda() -> device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CudaLibrary:
    return CudaLibrary(cuda(), tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "FP8", "NF4"])  # scripts/gpu_check has a row for every form
def test_own_kernels_round_once(name: str, library: CudaLibrary) -> None:
    rows = (1, 2, 8, 9, 16, 17, 32, 33, 64)
    form = FORMS[name]
    unit = max(form.group, form.span, 16)
    in_features = 1936 // unit * unit
    products = library.products(form)
    assert worst_error(products, form, cuda(), out_features=3000, in_features=in_features, rows=rows) <= 1


def test_compiled_kernels_load_from_disk_and_damaged_ones_are_compiled_again(tmp_path: Path) -> None:
    CudaLibrary(cuda(), tmp_path).products(FORMS["Q4_0"])
    (kept,) = tmp_path.iterdir()
    CudaLibrary(cuda(), tmp_path).products(FORMS["Q4_0"])
    whole = kept.read_bytes()
    kept.write_bytes(b"damaged")
    CudaLibrary(cuda(), tmp_path).products(FORMS["Q4_0"])
    assert len(kept.read_bytes()) == len(whole)


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_a_graph_gives_the_same_bits(num_rows: int, library: CudaLibrary) -> None:
    rng = np.random.default_rng(1)
    weights = [random_packed(FORMS[name], size, IN_FEATURES, rng) for name, size in (("Q4_K", 512), ("Q6_K", 256))]
    linear = PackedCudaLinear(
        IN_FEATURES, [512, 256], [w.form for w in weights], dtype=torch.bfloat16, device=cuda(), library=library
    )
    for index, weight in enumerate(weights):
        linear.fill(index, weight)
    x = torch.randn(num_rows, IN_FEATURES, device=cuda(), dtype=torch.bfloat16)
    with torch.inference_mode():
        eager = linear.rows(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = linear.rows(x)
        for _ in range(3):
            recorded.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(recorded, eager)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "AWQ"])
def test_torchs_kernel_computes_4_bits(name: str) -> None:
    weight = random_packed(FORMS[name], 256, IN_FEATURES, np.random.default_rng(2))
    assert Int4Weights.accepts(weight, 256, cuda(), torch.bfloat16)
    weights = Int4Weights(256, IN_FEATURES, weight.form.group, cuda())
    for start in (128, 0):
        weights.fill(start, weight.rows(slice(start, start + 128)))
    x = torch.randn(20, IN_FEATURES).bfloat16()
    out = torch.empty(20, 256, dtype=torch.bfloat16, device=cuda())
    weights.multiply(x.to(cuda()), out, bias=None, add=False)
    exact = weight.float32()
    expected = x.float().numpy() @ exact.T
    size = np.abs(x.float().numpy()) @ np.abs(exact).T
    assert (np.abs(out.float().cpu().numpy() - expected) <= 0.02 * size).all()
