"""The CUDA kernels' own source computes exact weights' products: run on a CPU, and compiled for every architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch.cuda.kernels.checking import (  # noqa: E402
    random_packed,
    worst_error,
    worst_gated_error,
    worst_product_error,
)
from edgepipe_torch.cuda.kernels.driver import SHARED_BYTES  # noqa: E402
from edgepipe_torch.cuda.kernels.forms import PRODUCT_FILES, KernelForm, kernel_form, kernel_source, options  # noqa: E402
from edgepipe_torch.cuda.kernels.library import CompiledKernels  # noqa: E402
from edgepipe_torch.cuda.kernels.products import (  # noqa: E402
    MOST_ROWS,
    Products,
    product_plan,
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


MULTIPROCESSORS = 4  # so many blocks share the inputs of three row tiles


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "NF4", "AWQ"])
def test_blocks_that_share_inputs_round_once(name: str, host_modules: Modules) -> None:
    form = FORMS[name]
    assert product_plan(form, 3, 8, 64, MULTIPROCESSORS).splits == 4
    products = Products(host_modules[form], form, multiprocessors=MULTIPROCESSORS)
    assert worst_error(products, form, CPU, out_features=40, in_features=1024, rows=(33, 64)) <= 1
    assert worst_gated_error(products, form, CPU, features=32, rows=(40,)) <= 1


class WithoutSums:
    """Kernels of which one is never run."""

    def __init__(self, module: HostModule) -> None:
        self._module = module

    def launch(self, function: str, *, blocks: int, shared_bytes: int, arguments: Sequence[Any]) -> None:
        if function != "add_splits":
            self._module.launch(function, blocks=blocks, shared_bytes=shared_bytes, arguments=arguments)


def test_the_check_at_load_covers_shared_inputs(host_modules: Modules) -> None:
    form = FORMS["MXFP4"]
    module = host_modules[form]
    assert worst_product_error(Products(module, form, multiprocessors=128), form, CPU) <= 1
    found = worst_product_error(Products(WithoutSums(module), form, multiprocessors=128), form, CPU)
    assert not found <= 1


def test_rows_of_the_largest_product_have_the_same_bits_beside_any(host_modules: Modules) -> None:
    form = FORMS["Q4_K"]
    products = Products(host_modules[form], form, multiprocessors=MULTIPROCESSORS)
    tiled = TiledWeight(form, 48, 1024, CPU)
    tiled.fill(0, random_packed(form, 48, 1024, np.random.default_rng(1)))
    x = torch.randn(64, 1024).bfloat16()
    few, many = (torch.ones(rows, 48, dtype=torch.bfloat16) for rows in (33, 64))
    products.affine_mm(tiled, x[:33], few, bias=None, add=True)
    x[33:] = float("nan")
    products.affine_mm(tiled, x, many, bias=None, add=True)
    assert torch.equal(few, many[:33])


def test_sums_of_shared_inputs_add_up_in_the_order_of_the_inputs(host_modules: Modules) -> None:
    """One block finds 2^26, the next one as much less, the third one a small number, which only this order keeps."""
    form = FORMS["Q8_0"]
    products = Products(host_modules[form], form, multiprocessors=MULTIPROCESSORS)
    weight = random_packed(form, 48, 1024, np.random.default_rng(1))
    weight = replace(weight, scale=replace(weight.scale, base=np.ones_like(weight.scale.base)))
    tiled = TiledWeight(form, 48, 1024, CPU)
    tiled.fill(0, weight)
    row = weight.float32()[0]
    first = next(place for place in range(256) if row[place] and row[place] in row[256:512])
    second = 256 + int(np.flatnonzero(row[256:512] == row[first])[0])
    third = 512 + int(np.flatnonzero(row[512:])[0])
    x = torch.zeros(64, 1024, dtype=torch.bfloat16)
    x[0, first], x[0, second], x[0, third] = 2.0**26, -(2.0**26), 1.0
    out = torch.empty(64, 48, dtype=torch.bfloat16)
    products.affine_mm(tiled, x, out, bias=None, add=False)
    assert out[0, 0] == row[third]


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
    plan = product_plan(form, row_tiles, input_tiles, rows, multiprocessors, gated=gated)
    assert 8 % plan.down == 0
    assert plan.down > 1 or not gated
    assert plan.blocks * plan.down >= row_tiles
    assert plan.chunk > 0
    assert plan.chunk % (8 // plan.down * 128) == 0
    assert 1 <= plan.splits <= input_tiles
    assert plan.shared_bytes <= SHARED_BYTES
    if rows > 32:
        assert plan.shared_bytes <= 49 * 1024, "two blocks share an RTX 4090's multiprocessor"
    else:
        assert plan.splits == 1


@pytest.mark.parametrize(
    ("row_tiles", "input_tiles", "blocks", "splits"),
    [(256, 32, 64, 4), (384, 32, 96, 4), (256, 112, 64, 4), (1792, 32, 224, 1), (8016, 32, 1002, 1), (64, 32, 16, 8)],
    ids=["output", "queries, keys and values", "down", "gates and ups", "head", "1,024 features"],
)
def test_an_rtx_4090_has_two_blocks_on_each_multiprocessor(
    row_tiles: int, input_tiles: int, blocks: int, splits: int
) -> None:
    """64 rows of an 8B. Gates and ups fill 1.75 blocks on average: more would cost as much as they gain."""
    plan = product_plan(FORMS["Q4_K"], row_tiles, input_tiles, 64, 128)
    assert (plan.blocks, plan.splits) == (blocks, splits)


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
