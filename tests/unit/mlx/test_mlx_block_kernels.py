"""The Metal kernels of K types: their own source computes exact weights' products, run on a CPU thread by thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")
pytest.importorskip("torch", reason="torch is not installed")

import mlx.core as mx
from edgepipe_mlx import backend as mlx_backend
from edgepipe_mlx.blocks.checking import BLOCK_TYPES, block_error, checked_kernels
from edgepipe_mlx.blocks.kernels import BlockArrays, MetalKernels, ReferenceKernels, block_values
from edgepipe_mlx.blocks.layout import lay_out_blocks

from edgepipe.backend.types import SlowPath
from tests.support.backends.host_compiler import COMPILER
from tests.support.backends.metal_kernels import HostKernels
from tests.support.models.packed import random_packed

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
BF16 = mx.bfloat16

MUTANTS: dict[str, tuple[str, str, str]] = {
    "codes of one word": ("Q6_K", "if (shift + BITS > 16) code |= uint(parts[place + 1]) << (16 - shift);", ""),
    "codes of another share": ("Q4_K", "+ share * BITS", "+ (share ^ 1) * BITS"),
    "one block of two": (
        "Q4_K",
        "block = lane / BLOCK_LANES; block < blocks; block += 2",
        "block = 0; block < 1; block++",
    ),
    "the last odd block twice": ("Q4_K", "block < blocks; block += 2", "block < blocks + 1; block += 2"),
    "no zero": ("Q6_K", "float offset = -scale * float(ZERO);", "float offset = 0.0f;"),
    "offsets of the scales' base": ("Q4_K", "base[KINDS - 1]", "base[0]"),
    "offsets of the scales' factors": ("Q4_K", "factor[GROUPS * (KINDS - 1)]", "factor[0]"),
    "factors of another group": ("Q6_K", "group = share * SHARE_INPUTS / GROUP", "group = share * SHARE_INPUTS / 32"),
    "sums of a lane": ("Q4_K", "metal::simd_sum(sums[feature][row])", "sums[feature][row]"),
    "rows beyond the last": ("Q4_K", " && row < rows)", ")"),
    "features beyond the last": ("Q4_K", "lane == 0 && feature < features", "lane == 0"),
    "inputs of the first row": ("Q4_K", "metal::min(row, rows - 1) * inputs", "0 * inputs"),
    "the first expert": ("Q4_K", "size_t(experts[row]) * outputs", "size_t(0) * outputs"),
    "rows of no expert": ("Q4_K", "row / (experts_shape[0] / x_shape[0])", "0"),
    "totals of all rows": (
        "Q4_K",
        "totals[row] = 0.0f;",
        "if (!row) totals[row] = 0.0f; else totals[row] = totals[0];",
    ),
}
"""A type, a part of a source, and what a mistake would have there."""


@pytest.fixture(autouse=True)
def on_cpu() -> None:
    mlx_backend.configure(mx.Device(mx.cpu))


def metal_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str] = lambda text: text
) -> MetalKernels:
    monkeypatch.setattr(mx.fast, "metal_kernel", HostKernels(folder, change).make)
    return MetalKernels()


def arrays_of(scheme: str, shape: tuple[int, int]) -> tuple[BlockArrays, np.ndarray]:
    """A weight of random blocks of a file, and its values [O, I]."""
    packed = random_packed(scheme, shape, np.random.default_rng(3))
    made = lay_out_blocks(packed)
    planes = (mx.array(each) for each in (made.words, made.factors, made.bases))
    return BlockArrays(made.form, *planes), packed.float32()


@pytest.mark.parametrize("scheme", BLOCK_TYPES)
def test_widened_values_are_the_files(scheme: str) -> None:
    arrays, exact = arrays_of(scheme, (5, 512))
    np.testing.assert_array_equal(np.array(block_values(arrays)), exact)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("scheme", BLOCK_TYPES)
def test_the_reference_rounds_once(scheme: str, dtype: mx.Dtype) -> None:
    assert block_error(ReferenceKernels(), scheme, dtype) <= 1


@needs_compiler
@pytest.mark.parametrize("scheme", BLOCK_TYPES)
def test_the_kernels_round_once(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert block_error(metal_kernels(tmp_path, monkeypatch), scheme, BF16) <= 1


@needs_compiler
@pytest.mark.parametrize("scheme", ["Q4_K", "Q6_K"])
def test_a_row_does_not_depend_on_others(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows are no numbers."""
    kernels = metal_kernels(tmp_path, monkeypatch)
    arrays, _ = arrays_of(scheme, (6, 768))
    x = mx.array(np.random.default_rng(1).standard_normal((7, 768)).astype(np.float32)).astype(BF16)
    for row in (0, 3, 6):
        beside = mx.full(x.shape, float("nan"), BF16)
        beside[row] = x[row]
        alone, together = (kernels.rows(rows, arrays, BF16) for rows in (x[row : row + 1], beside))
        assert mx.array_equal(alone[0], together[row])


@needs_compiler
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_kernels_fail_the_check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, whole, broken = MUTANTS[name]
    changed: list[int] = []

    def change(text: str) -> str:
        changed.append(text.count(whole))
        return text.replace(whole, broken)

    monkeypatch.setattr(mx.fast, "metal_kernel", HostKernels(tmp_path, change).make)
    found = checked_kernels(BF16, (scheme,))
    assert sum(changed)
    assert isinstance(found, SlowPath)


@needs_compiler
def test_kernels_that_pass_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metal_kernels(tmp_path, monkeypatch)
    assert isinstance(checked_kernels(BF16, ("Q4_K",)), MetalKernels)


def test_kernels_that_do_not_compile_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_given: Any) -> Any:
        raise RuntimeError("[metal::Device] Unable to build metal library from source\nerror: no such function")

    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **_given: refused)
    found = checked_kernels(BF16)
    assert isinstance(found, SlowPath)
    assert "Unable to build" in found.reason
