"""CUDA kernels that fail when they load: torch's operations take their place, and the load goes on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch.cuda.experts import ExpertMatrix  # noqa: E402
from edgepipe_torch.cuda.kernels import library as cuda  # noqa: E402
from edgepipe_torch.cuda.kernels.checking import random_packed  # noqa: E402
from edgepipe_torch.cuda.kernels.experts import RoutingKernels  # noqa: E402
from edgepipe_torch.cuda.kernels.forms import ROUTING_FILES, WIDE_FORM  # noqa: E402
from edgepipe_torch.cuda.kernels.library import CudaLibrary  # noqa: E402
from edgepipe_torch.cuda.kernels.paged_decode import paged_form  # noqa: E402
from edgepipe_torch.cuda.kernels.routing_checking import worst_routing_error  # noqa: E402
from edgepipe_torch.cuda.packed import PackedCudaLinear  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402

from edgepipe.backend.types import PackedProducts, RowState, StateWrite  # noqa: E402
from edgepipe.errors import DeviceOutOfMemory, StageError  # noqa: E402
from edgepipe.spec.facts import ModelConfig  # noqa: E402
from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from tests.support.backends.host_compiler import COMPILER  # noqa: E402
from tests.support.backends.host_kernels import ROUTING, SOURCES, Part, compile_for_host  # noqa: E402
from tests.support.backends.kernel_forms import FORMS  # noqa: E402
from tests.support.backends.recorded_steps import STEP_FORMS  # noqa: E402
from tests.support.backends.steps import step_row  # noqa: E402
from tests.support.backends.torch_twins import Twins  # noqa: E402
from tests.support.models.recurrent_layers import MODELS  # noqa: E402

CPU = torch.device("cpu")
REFUSED = "was not launched: too many resources requested"

Launch = Callable[[str], None]


class FailingModule:
    """A compiled module whose launches call a function, which may fail."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def launch(self, function: str, *, blocks: int, shared_bytes: int, arguments: Sequence[Any]) -> None:
        self._launch(function)


class Compiler:
    """NVRTC that compiles nothing."""

    version = "13.0"

    def compile(self, source: str, *, architecture: int, options: Sequence[str]) -> bytes:
        return b"cubin"


@pytest.fixture
def library_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Launch], CudaLibrary]:
    """Makes a device's library whose modules launch by a function; each library is that of a new process."""
    properties = SimpleNamespace(major=9, minor=0, name="H100", multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(cuda, "find_nvrtc", lambda *_: Compiler())

    def make(launch: Launch) -> CudaLibrary:
        monkeypatch.setattr(cuda, "CudaModule", lambda *_, compiler: FailingModule(launch))
        return CudaLibrary(CPU, tmp_path / "kernels")

    return make


def refuse(function: str) -> None:
    raise RuntimeError(f"{function} {REFUSED}")


def test_packed_weights_whose_kernels_are_not_launched_are_multiplied_by_torch(
    library_of: Callable[[Launch], CudaLibrary],
) -> None:
    weight = random_packed(FORMS["Q4_K"], 32, 512, np.random.default_rng(1))
    linear = PackedCudaLinear(512, [32], [weight.form], dtype=torch.bfloat16, device=CPU, library=library_of(refuse))
    linear.fill(0, weight)
    x = torch.randn(3, 512).bfloat16()
    exact = torch.from_numpy(weight.float32()).T
    error = (linear.rows(x).float() - x.float() @ exact).abs()
    assert (error <= 2.0**-7 * (x.float().abs() @ exact.abs())).all()
    reason = f"own kernels fail their check here: dequantise {REFUSED}"
    assert linear.products == {PackedProducts(by="torch (blocks widened)", reason=reason)}


def test_experts_whose_kernels_are_not_launched_are_multiplied_one_by_one(
    library_of: Callable[[Launch], CudaLibrary],
) -> None:
    matrix = ExpertMatrix(4, 64, 1, 32, [None], device=CPU, library=library_of(refuse))
    matrix.fill(0, torch.randn(4 * 32, 64).bfloat16())
    assert matrix.waits


def test_attention_whose_kernel_is_not_launched_runs_without_pages(
    library_of: Callable[[Launch], CudaLibrary], caplog: pytest.LogCaptureFixture
) -> None:
    library = library_of(refuse)
    twins = Twins(_large_heads(), decode=lambda heads: library.paged(paged_form(heads)))
    twins.step([step_row(0, 3, (1, 1))], np.arange(3))
    twins.finish()
    assert f"attend without pages and graphs: own kernels fail their check here: attend_parts {REFUSED}" in caplog.text


def _large_heads() -> ModelConfig:
    """A model with heads that torch's kernel over pages excludes."""
    config = tiny_config(num_layers=1, hidden_size=16, vocab_size=31)
    (layer,) = config.layers
    return replace(config, layers=(layer.with_attention(num_heads=2, num_kv_heads=1, head_dim=384),))


def test_recurrent_layers_whose_kernels_are_not_launched_are_computed_by_torch(
    library_of: Callable[[Launch], CudaLibrary], caplog: pytest.LogCaptureFixture
) -> None:
    library = library_of(refuse)
    form = STEP_FORMS["delta"]
    twins = Twins(MODELS["gated DeltaNet"], step_kernels=lambda mixer, _dtype: library.mixer_step(form).of(mixer))
    row = step_row(0, 3, (1, 1))
    twins.step([replace(row, state=RowState(None, (StateWrite(3, 1),)))], np.arange(3))
    twins.finish()
    assert f"by torch's operations: own kernels fail their check here: convolve_step {REFUSED}" in caplog.text


def _divide(_function: str) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("launch", [refuse, _divide, lambda _: None], ids=["refused", "bug", "no results"])
def test_kernels_that_failed_are_not_tried_again(launch: Launch, library_of: Callable[[Launch], CudaLibrary]) -> None:
    launches = 0

    def counted(function: str) -> None:
        nonlocal launches
        launches += 1
        launch(function)

    library = library_of(counted)
    for load in (
        lambda: library.products(FORMS["Q6_K"]),
        library.routing,
        lambda: library.mixer_step(STEP_FORMS["delta"]),
    ):
        with pytest.raises(KernelsUnavailable):
            load()
        before = launches
        with pytest.raises(KernelsUnavailable):
            load()
        assert launches == before > 0


def test_a_check_without_memory_says_nothing_of_the_kernels(library_of: Callable[[Launch], CudaLibrary]) -> None:
    def lack(_function: str) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    library = library_of(lack)
    for _ in "12":
        with pytest.raises(torch.OutOfMemoryError):
            library.products(FORMS["Q4_K"])


def test_attention_whose_check_lacks_memory_is_a_lack_of_memory() -> None:
    def lack(_heads: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(DeviceOutOfMemory, match="the checks of kernels do not fit"):
        Twins(_large_heads(), decode=lack)


def test_kernels_that_stop_the_device_fail_one_load(
    library_of: Callable[[Launch], CudaLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses all work of a process after some faults: the next process leaves those kernels alone for a day."""
    from edgepipe_torch.cuda.kernels import checked_library

    launches = 0

    def fault(_function: str) -> None:
        nonlocal launches
        launches += 1
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")

    def stopped(*_: object) -> None:
        raise StageError("cuda:0 does not compute", fact="CUDA error")

    with monkeypatch.context() as lost:
        lost.setattr(checked_library, "check_device", stopped)
        with pytest.raises(StageError, match="own kernels stopped") as found:
            library_of(fault).products(FORMS["Q4_K"])
    assert found.value.fact.endswith("an illegal memory access was encountered")
    before = launches
    with pytest.raises(KernelsUnavailable, match="earlier load") as later:
        library_of(fault).products(FORMS["Q4_K"])
    assert launches == before
    assert later.value.remedy.startswith("rm ")
    with pytest.raises(KernelsUnavailable):
        library_of(fault).products(FORMS["Q6_K"])
    assert launches > before, "other kernels are tried"
    before, now_s = launches, time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 25 * 3600)
    with pytest.raises(KernelsUnavailable):
        library_of(fault).products(FORMS["Q4_K"])
    assert launches > before


MUTANTS = (
    ("taken[expert] = 0;", "taken[expert] = expert == 1;"),
    ("if (weight == 0.0f) continue;", ""),
    ("highest = values[0];\n    synchronise();", "highest = values[0];"),
    ("(1.0f + expf(-sums[0]))", "(1.0f + expf(sums[0]))"),
    ("sums[threadIdx.x] = sum;\n    synchronise();", "sums[threadIdx.x] = sum;"),
    ("row * stride + feature;", "row * features + feature;"),
)


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
def test_the_check_at_load_refuses_broken_routing(tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    *shared, own = ROUTING_FILES
    source = (SOURCES / own).read_text(encoding="utf-8")
    for each in ROUTING_FILES:
        shutil.copy(SOURCES / each, folder)
    parts = [ROUTING]
    for index, (whole, broken) in enumerate(MUTANTS):
        assert whole in source, whole
        (folder / f"mutant_{index}.cu").write_text(source.replace(whole, broken, 1), encoding="utf-8")
        parts.append(Part(files=(*shared, f"mutant_{index}.cu"), macros={}, functions=ROUTING.functions))
    good, *mutants = compile_for_host(parts, tmp_path, folder)
    assert worst_routing_error(RoutingKernels(good), CPU) <= 1
    assert [whole for (whole, _), module in zip(MUTANTS, mutants, strict=True) if _passes(module)] == []


def _passes(module: Any) -> bool:
    try:
        return worst_routing_error(RoutingKernels(module), CPU) <= 1
    except RuntimeError:  # threads diverge
        return False


def test_a_form_without_kernels_says_so(library_of: Callable[[Launch], CudaLibrary]) -> None:
    with pytest.raises(KernelsUnavailable, match="add_weighted was not launched"):
        library_of(refuse).experts(WIDE_FORM)
