"""Attention over pages by the own kernel on a GPU: exact, the same in graphs, and in a backend as on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cuda.kernels.library import CudaLibrary  # noqa: E402
from edgepipe_torch.cuda.kernels.paged_checking import random_heads, worst_decode_error  # noqa: E402
from edgepipe_torch.cuda.kernels.paged_decode import PagedForm  # noqa: E402
from edgepipe_torch.layers.device import PAGE_TOKENS  # noqa: E402

from edgepipe.backend.types import BackendOptions  # noqa: E402
from edgepipe.spec.facts import LayerRange, make_slices  # noqa: E402
from edgepipe.spec.layer_spec import Latent  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights, tiny_config  # noqa: E402
from tests.support.backends.steps import make_step, run_step, step_row  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FORMS = {
    "Gemma 4": PagedForm(head_dim=512, value_dim=512, head_tiles=1),
    "GLM": PagedForm(head_dim=576, value_dim=512, head_tiles=2),
    "DeepSeek": PagedForm(head_dim=576, value_dim=512, head_tiles=4),
    "capped": PagedForm(head_dim=256, value_dim=256, head_tiles=1),
}
RANKS = Latent(query_rank=0, kv_rank=128, nope_dim=32, rope_dim=32, value_dim=32)
ATTENTIONS = {
    "large": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 512},
    "latent": {"num_heads": 20, "num_kv_heads": 1, "head_dim": 160, "rotary_dim": 32, "latent": RANKS},
    "capped": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "softcap": 2.0, "sinks": True},
}


def cuda() -> device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CudaLibrary:
    return CudaLibrary(cuda(), tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("multiprocessors", [1, 20, 1000])
def test_the_check_at_load_passes(name: str, multiprocessors: int, library: CudaLibrary) -> None:
    form = FORMS[name]
    kernel = library.paged(form).as_on(multiprocessors=multiprocessors)
    for _ in range(3):  # a race shows now and then
        assert worst_decode_error(kernel, form, cuda()) <= 1


@pytest.mark.parametrize("name", FORMS)
def test_a_graph_serves_other_lengths_than_it_was_recorded_with(name: str, library: CudaLibrary) -> None:
    form, rows, pages = FORMS[name], 5, 6
    heads, kernel = random_heads(form, device=cuda(), group=20, kv_heads=1), library.paged(form)
    pool = torch.randn(rows * pages, PAGE_TOKENS, heads.entries, form.head_dim, dtype=torch.bfloat16, device=cuda())
    keys, values = pool[:, :, :1], pool[..., : form.value_dim][:, :, -1:]
    queries = torch.randn(rows, heads.num_heads, form.head_dim, dtype=torch.bfloat16, device=cuda())
    lengths = torch.tensor([1, 300, 0, 1500, 64], dtype=torch.int32, device=cuda())
    tables = torch.randperm(rows * pages, device=cuda()).int().view(rows, pages)
    every = torch.arange(rows, dtype=torch.int32, device=cuda())

    def attend(out: Tensor) -> None:
        kernel(heads, queries, keys, values, out, rows=every, lengths=lengths, tables=tables)

    recorded, eager = (torch.zeros(rows, heads.num_heads, form.value_dim, dtype=torch.bfloat16).cuda() for _ in "ab")
    attend(recorded)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(recorded)
    for changed in ([1, 300, 0, 1500, 64], [1536, 2, 65, 0, 900], [0, 0, 0, 0, 1]):
        lengths.copy_(torch.tensor(changed, dtype=torch.int32))
        recorded.zero_()
        eager.zero_()
        attend(eager)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(recorded, eager)
        assert eager[int(np.argmax(changed))].any()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_backend_decodes_in_graphs_as_on_the_cpu(name: str) -> None:
    plain = tiny_config(num_layers=2, hidden_size=64, vocab_size=96)
    own = tuple(spec.with_attention(**ATTENTIONS[name]) for spec in plain.layers)
    config = replace(plain, layers=own)
    backends: list[TorchBackend] = []
    for kind in ("cpu", "cuda"):
        backend = TorchBackend(BackendOptions(device=kind))
        backend.load(make_slices([LayerRange(0, 2)], 2), TinyWeights(config), lambda _progress: None)
        backend.allocate_kv(num_blocks=8, block_size=PAGE_TOKENS)
        backends.append(backend)
    assert backends[1]._steps[0].counted_rows
    draw, at = np.random.default_rng(1), 0
    for count in (70, 1, 1, 1, 8, 9, 1):
        rows = [step_row(at, count, (index, 1), sequence=index + 1) for index in range(3)]
        ids = draw.integers(0, 96, 3 * count).astype(np.int32)
        cpu, gpu = (run_step(backend, make_step(rows), ids) for backend in backends)
        assert float(np.abs(gpu - cpu).max()) < 0.1 * float(np.abs(cpu).max())
        at += count
    for backend in backends:
        backend.close()
