"""Kernels that compute wrong values are noticed when they load, and torch computes instead."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
llvm = pytest.importorskip("llvmlite.binding")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cpu.checking import ROW_COUNTS  # noqa: E402
from edgepipe_torch.cpu.device import CpuDevice  # noqa: E402
from edgepipe_torch.cpu.kernels import Compiler, CpuKernels, cpu_kernels, most_rows  # noqa: E402
from edgepipe_torch.cpu.kinds import Kind  # noqa: E402
from edgepipe_torch.cpu.packed import PackedCpuLinear  # noqa: E402
from edgepipe_torch.cpu.product_code import CHUNK_ROWS, ProductCode  # noqa: E402
from edgepipe_torch.cpu.row_parts import parts_of  # noqa: E402
from edgepipe_torch.cpu.tiled_weight import NUMBERS  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.linear import Workspace  # noqa: E402

from edgepipe.backend.types import BackendOptions, PackedProducts  # noqa: E402
from edgepipe.config import kernel_dir  # noqa: E402
from edgepipe.spec.facts import ModelConfig  # noqa: E402
from edgepipe.spec.layer_spec import DeltaNet  # noqa: E402
from edgepipe.spec.packed import Packed  # noqa: E402
from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from tests.support.models.packed import PackedTinyModel, random_packed  # noqa: E402
from tests.support.numerics.harness import Pipeline  # noqa: E402

pytestmark = pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")

INPUTS = 256
E2M1, BFLOAT16 = Kind(bits=4, e2m1=True), NUMBERS[torch.bfloat16]
ALL_KINDS = [*(Kind(bits=bits, added=added) for bits in (4, 5, 6, 8) for added in (False, True)), E2M1]
ALL_KINDS += NUMBERS.values()
WIDENED = "torch (blocks widened)"


class Altered(Compiler):
    """Compiles the functions of a name (a pattern) with an instruction replaced by another."""

    def __init__(self, folder: Path, function: str, old: str, new: str, *, where: str = "") -> None:
        """``folder`` keeps altered code; ``where``: text that a module of such functions has."""
        super().__init__(llvm, kernel_dir())
        self._altered = Compiler(llvm, folder)
        self._function = function
        self._old, self._new = old, new
        self._where = where

    def compile(self, text: str) -> Any:
        """Compile a module."""
        pattern = rf"(define[^\n]* @{self._function}\(.*?\n}}\n)"
        if self._where not in text or not re.search(pattern, text, flags=re.DOTALL):
            return super().compile(text)
        altered = re.sub(pattern, lambda found: found[1].replace(self._old, self._new), text, flags=re.DOTALL)
        assert altered != text
        return self._altered.compile(altered)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For altered code."""
    return tmp_path_factory.mktemp("kernels")


def linear_of(parts: list[Packed], kernels: CpuKernels | KernelsUnavailable | None) -> PackedCpuLinear:
    workspace = Workspace(torch.float32, torch.device("cpu"))
    linear = PackedCpuLinear("test", INPUTS, [part.shape[0] for part in parts], workspace, kernels)
    for index, part in enumerate(parts):
        linear.fill(index, part)
        linear.fill_bias(index, torch.arange(float(part.shape[0])))
    linear.finish()
    return linear


def backend_with(kernels: CpuKernels | KernelsUnavailable | None) -> TorchBackend:
    return TorchBackend(BackendOptions(device="cpu", threads=2), device=CpuDevice(torch.float32, kernels=kernels))


MODEL = tiny_config(
    num_layers=2, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32, vocab_size=304, tied_embeddings=True
)


def logits_of(backend: TorchBackend, model: ModelConfig = MODEL) -> np.ndarray:
    """Logits of a prompt of 5 tokens and of 12 decode steps."""
    source = PackedTinyModel(model, {"v_proj.weight": "Q6_K", "conv1d.weight": "F32", "": "Q4_0"})
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, model.vocab_size, 17)]
    return Pipeline.build([backend], source, num_blocks=8).forced(tokens[:5], tokens[5:])


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """Logits without any kernels."""
    return logits_of(backend_with(KernelsUnavailable("for a test")))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [("tile2", "lshr", "ashr"), ("store_totals", "fadd", "fsub")],
)
def test_a_wrong_product_is_noticed_and_torch_multiplies(
    function: str, old: str, new: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(1)
    wrong, right = random_packed("Q4_0", (48, INPUTS), rng), random_packed("Q6_K", (32, INPUTS), rng)
    kernels = CpuKernels(Altered(folder, function, old, new, where="@work_b4("))
    linears = [linear_of([wrong, right], kernels) for _ in range(2)]
    (message,) = warnings_of(caplog)
    assert re.match(r"torch computes weights of 4 bits: own kernels compute wrong values here: .* times", message)
    for linear in linears:
        assert not linear.only_kernels
        assert {each.by for each in linear.products} == {WIDENED, own_kernels()}
        for count in (1, 2, 30):
            x = torch.from_numpy(rng.standard_normal((count, INPUTS), np.float32))
            good = linear_of([wrong, right], None)
            torch.testing.assert_close(linear.rows(x), good.rows(x), rtol=1e-4, atol=1e-4)
            total, good_total = torch.ones(count, 80), torch.ones(count, 80)
            linear.add_to(x, total)
            good.add_to(x, good_total)
            torch.testing.assert_close(total, good_total, rtol=1e-4, atol=1e-4)
    table, ids = linear_of([wrong], kernels), torch.tensor([47, 0])
    torch.testing.assert_close(table.take(ids), torch.from_numpy(wrong.float32())[ids], rtol=1e-6, atol=0)


def own_kernels() -> str:
    return linear_of([random_packed("Q6_K", (16, INPUTS), np.random.default_rng(0))], None).products.pop().by


def test_a_model_with_a_wrong_product_decodes_by_torch(folder: Path, expected: np.ndarray) -> None:
    backend = backend_with(CpuKernels(Altered(folder, "tile2", "lshr", "ashr", where="@work_b4(")))
    np.testing.assert_allclose(logits_of(backend), expected, rtol=1e-3, atol=1e-3)
    fast, slow = backend.packed_products()
    assert fast == PackedProducts(by=own_kernels())
    assert slow.by == WIDENED
    assert "wrong values" in slow.reason


@pytest.mark.parametrize("function", ["rotate", "attend_items"])
def test_a_model_with_wrong_attention_decodes_by_torch(
    function: str, folder: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    backend = backend_with(CpuKernels(Altered(folder, function, "fmul", "fadd", where="@rotate(")))
    np.testing.assert_allclose(logits_of(backend), expected, rtol=1e-3, atol=1e-3)
    assert [text.split(":")[0] for text in warnings_of(caplog)] == ["torch computes heads of 32"]
    assert backend.packed_products() == [PackedProducts(by=own_kernels())]


RECURRENT = replace(
    MODEL,
    layers=(
        replace(
            MODEL.layers[0],
            attention=None,
            recurrent=DeltaNet(key_heads=4, value_heads=8, key_dim=16, value_dim=32, taps=4),
        ),
        MODEL.layers[1],
    ),
)


@pytest.mark.parametrize(("function", "old", "new"), [("convolve", "fmul", "fadd"), ("heads", "fsub", "fadd")])
def test_a_model_with_wrong_recurrent_layers_decodes_by_torch(
    function: str, old: str, new: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits_of(backend_with(KernelsUnavailable("for a test")), RECURRENT)
    backend = backend_with(CpuKernels(Altered(folder, function, old, new, where="@convolve(")))
    np.testing.assert_allclose(logits_of(backend, RECURRENT), expected, rtol=1e-3, atol=1e-3)
    assert [text.split(":")[0] for text in warnings_of(caplog)] == ["torch computes gated DeltaNet of 16 x 32"]
    assert backend.packed_products() == [PackedProducts(by=own_kernels())]


def test_a_model_with_right_kernels_agrees_with_torch(expected: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    backend = backend_with(None)
    np.testing.assert_allclose(logits_of(backend), expected, rtol=1e-3, atol=1e-3)
    assert not warnings_of(caplog)
    backend.close()
    assert backend.packed_products() == []


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("normalise", "fdiv", "fmul"),
        ("swiglu", "fneg", "freeze"),
        ("replay", "mul", "add"),
        ("normalise", "void", "nothing"),  # LLVM does not compile it
        ("swiglu", "@swiglu", "@gelu"),
    ],
)
def test_functions_that_every_model_needs_rule_out_all_kernels(function: str, old: str, new: str, folder: Path) -> None:
    if function == "replay":  # wrong addresses would end the process: return at once instead
        old, new = "ptr %calls, i64 %count) #0 {\n", "ptr %calls, i64 %count) #0 {\n  ret void\nunused:\n"
    with pytest.raises(KernelsUnavailable):
        CpuKernels(Altered(folder, function, old, new))


def test_the_check_reaches_every_compiled_number_of_rows() -> None:
    for width, kind in product((4, 8, 16), ALL_KINDS):
        most = most_rows(width)
        code = ProductCode(kind, width=width, most_rows=most)
        tiles = [count for count in ROW_COUNTS if count < code.panel_rows]
        chunks = [size for count in ROW_COUNTS if count >= code.panel_rows for size in parts_of(count, CHUNK_ROWS)]
        assert {size for count in tiles for size in parts_of(count, most[0])} == set(code.tile_counts)
        assert {size for count in chunks for size in parts_of(count, most[1])} == set(code.panel_counts)


@pytest.mark.parametrize(
    ("width", "kind"), [(16, Kind(bits=6)), (4, Kind(bits=5)), (16, E2M1), (4, E2M1), (16, BFLOAT16)]
)
def test_code_for_other_vectors_passes_the_check_here(width: int, kind: Kind) -> None:
    """Vectors of AVX-512 and Arm, which LLVM splits or pads for this CPU."""
    kernels = CpuKernels(Compiler(llvm, kernel_dir(), width=width))
    assert kernels.product(kind).work.address
