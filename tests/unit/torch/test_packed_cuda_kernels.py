"""The CUDA kernels' own source computes exact weights' products: run on a CPU, and compiled for every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch.cuda.kernels.checking import random_packed, worst_error, worst_gated_error  # noqa: E402
from edgepipe_torch.cuda.kernels.driver import SHARED_BYTES  # noqa: E402
from edgepipe_torch.cuda.kernels.forms import PRODUCT_FILES, KernelForm, kernel_form, kernel_source, options  # noqa: E402
from edgepipe_torch.cuda.kernels.library import CompiledKernels  # noqa: E402
from edgepipe_torch.cuda.kernels.products import (  # noqa: E402
    MOST_ROWS,
    Products,
    column_tiles_of,
    staged_bytes,
    staged_inputs,
    warps_down,
)
from edgepipe_torch.cuda.packed_tiles import TiledWeight  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402

from tests.support.backends.host_kernels import HostModule  # noqa: E402
from tests.support.backends.kernel_forms import FORMS  # noqa: E402
from tests.support.backends.nvrtc import nvrtc_for  # noqa: E402

CPU = torch.device("cpu")
ARCHITECTURES = (80, 86, 89, 90, 120)

Modules = dict[KernelForm, HostModule]


@pytest.mark.parametrize("name", FORMS)
def test_products_round_once(name: str, host_modules: Modules) -> None:
    form = FORMS[name]
    assert worst_error(Products(host_modules[form], form, multiprocessors=2), form, CPU) <= 1


@pytest.mark.parametrize(("name", "multiprocessors"), [("Q4_K", 1), ("Q6_K", 200), ("MXFP4", 3)])
def test_activations_of_gates_and_ups_round_once(name: str, multiprocessors: int, host_modules: Modules) -> None:
    """Few multiprocessors: a block takes four gates and their ups. Many: one of each."""
    form = FORMS[name]
    products = Products(host_modules[form], form, multiprocessors=multiprocessors)
    assert worst_gated_error(products, form, CPU, features=80, rows=(1, 9, 33)) <= 1


@pytest.mark.parametrize("multiprocessors", [1, 4, 200])
def test_blocks_of_every_shape_agree(multiprocessors: int, host_modules: Modules) -> None:
    """Few multiprocessors: a block takes up to eight row tiles. Many: eight warps share one."""
    form = FORMS["Q4_1"]
    products = Products(host_modules[form], form, multiprocessors=multiprocessors)
    assert worst_error(products, form, CPU, out_features=150, in_features=1120, rows=(1, 8, 9, 64)) <= 1


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_a_row_does_not_depend_on_others(name: str, host_modules: Modules) -> None:
    form = FORMS[name]
    products = Products(host_modules[form], form, multiprocessors=4)
    weight = random_packed(form, 48, 512, np.random.default_rng(1))
    tiled = TiledWeight(form, 48, 512, CPU)
    tiled.fill(0, weight)
    x = torch.randn(8, 512).bfloat16()
    alone, together = (torch.empty(rows, 48, dtype=torch.bfloat16) for rows in (1, 8))
    x[1:] *= float("nan")
    products.affine_mm(tiled, x[:1], alone, bias=None, add=False)
    products.affine_mm(tiled, x, together, bias=None, add=False)
    assert torch.equal(together[0], alone[0])


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(FORMS)), st.integers(1, 70), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_tiles_hold_the_codes_where_the_kernels_look(name: str, out_features: int, units: int, seed: int) -> None:
    form = FORMS[name]
    in_features = units * max(form.group, form.span, 16)
    weight = random_packed(form, out_features, in_features, np.random.default_rng(seed))
    form = kernel_form(weight)
    tiled = TiledWeight(form, out_features, in_features, CPU)
    tiled.fill(0, weight)
    codes = np.zeros((16 * tiled.row_tiles, 128 * tiled.input_tiles), np.uint8)
    codes[:out_features, :in_features] = weight.codes()
    found = _codes_of_plane(tiled.low.numpy(), 4)
    if tiled.high is not None:
        found |= _codes_of_plane(tiled.high.numpy(), form.bits - 4) << 4
    assert np.array_equal(found, codes)


def _codes_of_plane(words: np.ndarray, bits: int) -> np.ndarray:
    """Read a plane by the formula in packed.cu, value by value of a row of a tile."""
    row_tiles, input_tiles = words.shape[:2]
    codes = np.zeros((row_tiles, input_tiles, 16, 128), np.uint8)
    unsigned = words.view(np.uint32)
    for w, j, t, h in np.ndindex(4, 4, 4, 2):
        bit = bits * (j + 4 * (w % (4 // bits))) + 16 * h
        place = 32 * w + 16 * (j // 2) + 4 * t + 2 * (j % 2) + h
        codes[..., place] = (unsigned[:, :, :, t, w * bits // 4] >> bit) & ((1 << bits) - 1)
    return codes.transpose(0, 2, 1, 3).reshape(16 * row_tiles, 128 * input_tiles)


@given(
    st.sampled_from(sorted(FORMS)),
    st.integers(1, 10_000),
    st.integers(1, 250),
    st.integers(1, MOST_ROWS),
    st.integers(1, 200),
    st.booleans(),
)
def test_launches_fit_shared_memory(
    name: str, row_tiles: int, input_tiles: int, rows: int, multiprocessors: int, gated: bool
) -> None:
    form = FORMS[name]
    down = warps_down(form, row_tiles, rows, multiprocessors, gated=gated)
    tiles = column_tiles_of(rows)
    chunk = staged_inputs(form, input_tiles, rows, down, column_tiles=tiles)
    assert 8 % down == 0
    assert down > 1 or not gated
    assert chunk > 0
    assert chunk % (8 // down * 128) == 0
    assert staged_bytes(form, rows, chunk, column_tiles=tiles) <= SHARED_BYTES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compile_without_a_gpu(architecture: int) -> None:
    nvrtc = nvrtc_for(architecture)
    form = FORMS[("Q4_K", "Q6_K", "FP8", "NF4", "AWQ")[ARCHITECTURES.index(architecture)]]
    cubin = nvrtc.compile(kernel_source(), architecture=architecture, options=options(form.macros))
    assert cubin.startswith(b"\x7fELF")
    assert b"affine_mm_8" in cubin
    with pytest.raises(KernelsUnavailable, match="BITS"):
        nvrtc.compile(kernel_source(), architecture=architecture, options=[])


class CountingCompiler:
    """In place of NVRTC."""

    version = "13.0"

    def __init__(self) -> None:
        self.compiled: list[tuple[int, tuple[str, ...]]] = []

    def compile(self, source: str, *, architecture: int, options: list[str]) -> bytes:
        self.compiled.append((architecture, tuple(options)))
        return b"\x7fELF" + str(len(self.compiled)).encode()


def test_compiled_kernels_are_kept(tmp_path: Path) -> None:
    compiler: Any = CountingCompiler()
    kernels = CompiledKernels(compiler, tmp_path / "kernels")
    first = kernels.cubin(PRODUCT_FILES, FORMS["Q4_K"].macros, 90)
    assert CompiledKernels(compiler, tmp_path / "kernels").cubin(PRODUCT_FILES, FORMS["Q4_K"].macros, 90) == first
    assert len(compiler.compiled) == 1
    for form, architecture in ((FORMS["Q4_K"], 89), (FORMS["Q6_K"], 90)):
        assert kernels.cubin(PRODUCT_FILES, form.macros, architecture) != first
    compiler.version = "13.1"
    assert kernels.cubin(PRODUCT_FILES, FORMS["Q4_K"].macros, 90) != first
    assert len(compiler.compiled) == 4
    for path in (tmp_path / "kernels").iterdir():
        path.write_bytes(path.read_bytes()[:-1])  # as after a crash
    assert kernels.cubin(PRODUCT_FILES, FORMS["Q4_K"].macros, 90).startswith(b"\x7fELF")
    assert len(compiler.compiled) == 5


def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    compiler: Any = CountingCompiler()
    assert CompiledKernels(compiler, tmp_path / "file").cubin(PRODUCT_FILES, FORMS["Q4_K"].macros, 90)
