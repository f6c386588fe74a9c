"""The kernel that places heads: its own source, run on a CPU, compiled for each architecture, and in a layer."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch.cuda.kernels.forms import PLACE_FILES, kernel_source, options  # noqa: E402
from edgepipe_torch.cuda.kernels.place_checking import CASES, PlacedCase, place_error, worst_place_error  # noqa: E402
from edgepipe_torch.cuda.kernels.place_heads import PlaceHeads  # noqa: E402
from edgepipe_torch.cuda.step_ops import CudaOps, make_ops  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.head_shape import layer_heads  # noqa: E402
from edgepipe_torch.layers.kv import KVStorage  # noqa: E402
from edgepipe_torch.layers.step_ops import HeadNorms, TorchOps  # noqa: E402

from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from tests.support.backends.host_kernels import COMPILER, PLACE, SOURCES, Part, compile_for_host  # noqa: E402
from tests.support.backends.nvrtc import nvrtc_for  # noqa: E402

CPU = torch.device("cpu")
CONFIG = tiny_config(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> PlaceHeads:
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    (module,) = compile_for_host([PLACE], tmp_path_factory.mktemp("kernels"))
    return PlaceHeads(module)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dim}, {case.turned}, {case.normalised}")
def test_heads_round_once(case: PlacedCase, kernel: PlaceHeads) -> None:
    assert place_error(kernel, case, CPU) <= 1


def test_many_rows(kernel: PlaceHeads) -> None:
    case = PlacedCase(rows=10, heads=7, kv_heads=1, dim=128, turned=64, normalised=(True, True, False))
    assert place_error(kernel, case, CPU) <= 1


MUTANTS = (
    ("if (pair < turned)", "if (pair + 1 < turned)"),
    ("is_value ? 0 : given.turned", "given.turned"),
    ("before * imaginary + second", "first * imaginary + second"),
    ("is_value ? given.value_norm : given.key_norm", "given.key_norm"),
    ("/ given.dim + given.eps", "/ given.dim"),
    ("given.slots[row])", "row)"),
    ("apart = 16; apart;", "apart = 8; apart;"),
    ("if (is_query && !norm && !turned) return;", "if (is_query && !turned) return;"),
)


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
def test_the_check_at_load_refuses_broken_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    *shared, own = PLACE_FILES
    source = (SOURCES / own).read_text(encoding="utf-8")
    for each in shared:
        shutil.copy(SOURCES / each, folder)
    parts: list[Part] = []
    for index, (whole, broken) in enumerate(MUTANTS):
        assert source.count(whole) == 1, whole
        (folder / f"mutant_{index}.cu").write_text(source.replace(whole, broken), encoding="utf-8")
        parts.append(Part(files=(*shared, f"mutant_{index}.cu"), macros={}, functions=PLACE.functions))
    modules = compile_for_host(parts, tmp_path, folder)
    errors = {
        whole: worst_place_error(PlaceHeads(each), CPU) for (whole, _), each in zip(MUTANTS, modules, strict=True)
    }
    assert [whole for whole, error in errors.items() if error <= 1] == []


@pytest.mark.parametrize("architecture", [80, 89, 90, 120])
def test_compile_without_a_gpu(architecture: int) -> None:
    cubin = nvrtc_for(architecture).compile(kernel_source(PLACE_FILES), architecture=architecture, options=options({}))
    assert b"place_heads" in cubin


def placed(ops: Any, norms: HeadNorms, *, turned: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries and pool after a step of three rows."""
    (heads,) = layer_heads([spec.attention for spec in CONFIG.layers if spec.attention is not None])
    pool = KVStorage([heads], classes=[0], num_blocks=[4], block_size=2, dtype=torch.bfloat16, device=CPU)
    draw = torch.Generator().manual_seed(3)
    qkv = torch.randn(3, 8, 16, generator=draw).bfloat16()
    angles = torch.randn(3, 1, turned, generator=draw)
    turns = torch.polar(torch.ones_like(angles), angles)
    ops.place(qkv, turns, torch.tensor([5, 0, 3]), pool, heads, norms)
    return qkv[:, :4].float().numpy(), pool.pools[0].float().numpy()


@pytest.mark.parametrize("normalised", [(), (16, 16), (64, 32), (16, 16, 16)], ids=str)
@pytest.mark.parametrize("turned", [4, 8])
def test_agrees_with_torchs_operations(normalised: tuple[int, ...], turned: int, kernel: PlaceHeads) -> None:
    """Norms over all heads of a row are torch's there, too."""
    norms = HeadNorms(*(1 + torch.arange(size) / 64 for size in normalised))
    norms = HeadNorms(*(None if each is None else each.bfloat16() for each in norms))
    found = placed(CudaOps(CONFIG, kernel), norms, turned=turned)
    for own, expected in zip(found, placed(TorchOps(CONFIG), norms, turned=turned), strict=True):
        np.testing.assert_allclose(own, expected, rtol=0.02, atol=0.02)  # torch rounds between its operations


def test_other_kinds_of_norm_are_torchs(kernel: PlaceHeads) -> None:
    """The kernel would not subtract the mean."""
    config = replace(CONFIG, norm=replace(CONFIG.norm, kind="layer"))
    norms = HeadNorms(*(torch.ones(16).bfloat16() for _ in range(2)))
    found = placed(CudaOps(config, kernel), norms, turned=8)
    for own, expected in zip(found, placed(TorchOps(config), norms, turned=8), strict=True):
        np.testing.assert_array_equal(own, expected)


def test_without_the_kernel_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Without:
        def place_heads(self) -> PlaceHeads:
            raise KernelsUnavailable("NVRTC was not found")

    assert type(make_ops(CONFIG, Without(), CPU, torch.bfloat16)) is TorchOps
    assert "in more launches: NVRTC was not found" in caplog.text
