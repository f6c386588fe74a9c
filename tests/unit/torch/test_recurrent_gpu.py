"""One token of recurrent layers by own kernels on a GPU: exact, the same in graphs, and in a backend as on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cuda.kernels.library import CudaLibrary  # noqa: E402
from edgepipe_torch.cuda.kernels.recurrent_checking import random_mixer, worst_step_error  # noqa: E402
from edgepipe_torch.cuda.kernels.recurrent_step import step_form  # noqa: E402
from edgepipe_torch.layers.device import PAGE_TOKENS  # noqa: E402

from edgepipe.backend.types import BackendOptions, RowState, StateWrite  # noqa: E402
from edgepipe.spec.facts import LayerRange, make_slices  # noqa: E402
from edgepipe.spec.layer_spec import DeltaNet, Mamba2, Recurrent, ShortConv  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights  # noqa: E402
from tests.support.backends.steps import make_step, run_step, step_row  # noqa: E402
from tests.support.models.recurrent_layers import MODELS  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MIXERS: dict[str, Recurrent] = {
    "Qwen3.6": DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4),
    "Nemotron 3": Mamba2(heads=64, head_dim=64, groups=8, state_dim=128, taps=4),
    "Granite 4": Mamba2(heads=48, head_dim=64, groups=1, state_dim=128, taps=4),
    "LFM2": ShortConv(channels=2048, taps=3),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CudaLibrary:
    return CudaLibrary(torch.device("cuda", 0), tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_the_check_at_load_passes(name: str, dtype: Any, library: CudaLibrary) -> None:
    form = step_form(MIXERS[name], dtype)
    for _ in range(3):  # a race shows now and then
        assert worst_step_error(library.mixer_step(form), form, torch.device("cuda", 0)) <= 1


@pytest.mark.parametrize("name", MIXERS)
def test_a_graph_serves_other_slots_than_it_was_recorded_with(name: str, library: CudaLibrary) -> None:
    spec, cuda = MIXERS[name], torch.device("cuda", 0)
    kernel = library.mixer_step(step_form(spec, torch.bfloat16)).of(random_mixer(spec, torch.Generator(), cuda))
    made = torch.randn(4, 30_000, dtype=torch.bfloat16, device=cuda)
    recorded = tuple(torch.randn(9, *shape, device=cuda) for shape in spec.state_shapes)
    eager = tuple(each.clone() for each in recorded)
    read, write = (torch.arange(4, device=cuda) for _ in range(2))
    kernel.run(made, tuple(each.clone() for each in recorded), read, write, threads=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel.run(made, recorded, read, write, threads=1)
    for slots in (([0, 1, 2, 3], [0, 1, 2, 3]), ([8, 8, 2, 7], [0, 1, 2, 3]), ([0, 3, 7, 7], [0, 5, 8, 8])):
        for tensor, own in zip((read, write), slots, strict=True):
            tensor.copy_(torch.tensor(own))
        made.normal_()
        graph.replay()
        expected = kernel.run(made, eager, read, write, threads=1)
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
        for graphed, other in zip(recorded, eager, strict=True):
            assert torch.equal(graphed[:8], other[:8])  # both surplus rows wrote to the last slot


@pytest.mark.parametrize("name", MODELS)
def test_a_backend_decodes_in_graphs_as_on_the_cpu(name: str) -> None:
    config, backends = MODELS[name], list[TorchBackend]()
    for kind in ("cpu", "cuda"):
        backend = TorchBackend(BackendOptions(device=kind))
        parts = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
        backend.load(parts, TinyWeights(config), lambda _progress: None)
        backend.allocate_kv(num_blocks=8, block_size=PAGE_TOKENS, state_slots=6)
        backends.append(backend)
    assert backends[1]._steps[0].counted_rows
    draw, at = np.random.default_rng(1), 0
    for count in (70, 1, 1, 1, 8, 100, 1, 1):
        rows = [
            replace(
                step_row(at, count, (index, 1), sequence=index + 1),
                state=RowState(index if at else None, (StateWrite(count, index),)),
            )
            for index in range(3)
        ]
        ids = draw.integers(0, 31, 3 * count).astype(np.int32)
        cpu, gpu = (run_step(backend, make_step(rows), ids) for backend in backends)
        assert float(np.abs(gpu - cpu).max()) < 0.2 * float(np.abs(cpu).max())
        at += count
    for backend in backends:
        backend.close()
