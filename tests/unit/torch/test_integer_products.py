"""Products whose inputs are rounded to integers of 8 or 16 bits: how far they are from the exact ones, and when."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
llvm = pytest.importorskip("llvmlite.binding")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cpu.device import CpuDevice  # noqa: E402
from edgepipe_torch.cpu.integer_code import ByteProducts, has_integer_products  # noqa: E402
from edgepipe_torch.cpu.kernels import Compiler, CpuKernels, cpu_kernels  # noqa: E402
from edgepipe_torch.cpu.kinds import Kind  # noqa: E402
from edgepipe_torch.cpu.packed import PackedCpuLinear  # noqa: E402
from edgepipe_torch.devices import make_device  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.linear import PartForms, Workspace  # noqa: E402
from torch import Tensor  # noqa: E402

from edgepipe.backend.types import BackendOptions  # noqa: E402
from edgepipe.config import kernel_dir  # noqa: E402
from edgepipe.errors import ConfigInvalid  # noqa: E402
from edgepipe.spec.packed import Packed  # noqa: E402
from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from tests.support.models.packed import PackedTinyModel, random_packed  # noqa: E402
from tests.support.numerics.harness import Pipeline  # noqa: E402

KERNELS = cpu_kernels()
pytestmark = pytest.mark.skipif(
    isinstance(KERNELS, KernelsUnavailable) or not KERNELS.byte_products, reason="this CPU adds no products of bytes"
)


@cache
def kernels_with(products: ByteProducts) -> CpuKernels:
    """The kernels of a CPU that adds so many products of bytes; pairs are of AVX2, which all of them have."""
    compiler = Compiler(llvm, kernel_dir(), width=8 if products == "pairs" else 0)
    compiler.byte_products = products
    return CpuKernels(compiler)


OWN: ByteProducts = "" if isinstance(KERNELS, KernelsUnavailable) else KERNELS.byte_products


@pytest.fixture(params=sorted({OWN, "pairs"} - {""}))
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    """Kernels with products in integers: this CPU's, and those with AVX2."""
    return kernels_with(request.param)


INPUTS, OUTPUTS = 512, 37
STEPS = {1: 1 / 254, 2: 1 / 65_270}  # largest rounding of an input, of the largest in its group
NAMES = ("Q4_0", "Q8_0", "IQ4_NL", "MXFP4", "Q4_1", "Q4_K")
BYTES = ("Q8_0", "IQ4_NL")  # their codes have 8 bits in the kernels
MODEL = tiny_config(num_layers=2, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32, vocab_size=304)


def made(name: str, rows: int = OUTPUTS, seed: int = 1) -> Packed:
    return random_packed(name, (rows, INPUTS), np.random.default_rng(seed))


def linear_of(parts: Sequence[Packed], digits: int, kernels: CpuKernels | None = None) -> PackedCpuLinear:
    workspace = Workspace(torch.float32, torch.device("cpu"))
    linear = PackedCpuLinear("test", INPUTS, [part.shape[0] for part in parts], workspace, kernels, digits=digits)
    for index, part in enumerate(parts):
        linear.fill(index, part)
        linear.fill_bias(index, torch.linspace(-1, 1, part.shape[0]))
    linear.finish()
    return linear


def inputs(rows: int, seed: int = 0) -> Tensor:
    """Rows whose groups differ in size by up to 2**20."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-10, 11, (rows, INPUTS // 16, 1), generator=random)
    return (torch.randn(rows, INPUTS // 16, 16, generator=random) * 2.0**sizes).view(rows, INPUTS)


def exact(weight: Packed, x: Tensor) -> Tensor:
    values = torch.from_numpy(weight.float32()).double()
    return x.double() @ values.t() + torch.linspace(-1, 1, len(values)).double()


def largest_errors(weight: Packed, x: Tensor, digits: int) -> Tensor:
    """Bound of outputs [T, O]: inputs by half a step, scales by float16, and float32 sums."""
    values = torch.from_numpy(weight.float32()).double()
    offsets = np.zeros((1, 1), np.float32) if weight.offset is None else weight.offset.float32()
    added = torch.from_numpy(np.repeat(offsets, INPUTS // offsets.shape[1], axis=1)).double()
    tops = x.double().abs().view(len(x), -1, weight.form.group).amax(2)
    rounded = tops.repeat_interleave(weight.form.group, 1) * STEPS[digits]
    sizes = (values - added).abs() + added.abs()
    return rounded @ (values - added).abs().t() + 1e-3 * x.double().abs() @ sizes.t() + 1e-6


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_products_are_as_far_from_the_exact_ones_as_their_inputs(name: str, digits: int, kernels: CpuKernels) -> None:
    weight, x = made(name), inputs(140)
    linear = linear_of([weight], digits, kernels)
    rounded = kernels.byte_products == "fours" or name not in BYTES
    assert (f"inputs of {8 * digits} bits" in linear.products.pop().by) == rounded
    expected, bound = exact(weight, x), largest_errors(weight, x, digits)
    for count in (1, 2, 7, 8, 9, 140):
        error = (linear.rows(x[:count]).double() - expected[:count]).abs()
        assert (error <= bound[:count]).all()
    total = torch.ones(3, OUTPUTS)
    linear.add_to(x[:3], total)
    assert ((total.double() - 1 - expected[:3]).abs() <= bound[:3] + 1e-6 * expected[:3].abs()).all()


@pytest.mark.parametrize("name", ["Q4_1", "Q4_0"])
def test_more_bits_of_inputs_are_nearer(name: str, kernels: CpuKernels) -> None:
    weight, x = made(name), torch.randn(20, INPUTS, generator=torch.Generator().manual_seed(0))
    errors = [
        (linear_of([weight], digits, kernels).rows(x).double() - exact(weight, x)).square().mean().sqrt()
        for digits in (1, 2, 0)
    ]
    assert errors[0] > 200 * errors[1]
    assert errors[1] > 3 * errors[2]


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "MXFP4"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(name: str, digits: int, kernels: CpuKernels) -> None:
    linear, x = linear_of([made(name)], digits, kernels), inputs(150)
    together = linear.rows(x).clone()
    for count in (*range(1, 10), 12, 16, 23, 130):
        assert torch.equal(linear.rows(x[:count]), together[:count])
    assert torch.equal(linear.rows(x.flip(0)).flip(0), together)


def test_parts_of_different_forms_are_merged(kernels: CpuKernels) -> None:
    parts = [made(name, 32, seed) for seed, name in enumerate(("Q4_0", "Q8_0", "Q6_K", "Q4_K", "Q4_0"))]
    x = inputs(5)
    found = linear_of(parts, 2, kernels).rows(x).double().split(32, dim=1)
    for part, own in zip(parts, found, strict=True):
        assert ((own - exact(part, x)).abs() <= largest_errors(part, x, 2)).all()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_an_input_that_is_no_number_makes_its_row_nan_and_no_other(wrong: float, kernels: CpuKernels) -> None:
    linear, x = linear_of([made("Q4_0")], 2, kernels), inputs(9)
    before = linear.rows(x).clone()
    x[4, 100] = wrong
    found = linear.rows(x)
    assert found[4].isnan().all()
    others = torch.arange(9) != 4
    assert torch.equal(found[others], before[others])


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-36, 1e30])
def test_the_smallest_and_the_largest_inputs_are_computed(size: float, kernels: CpuKernels) -> None:
    weight, x = made("Q4_0"), size * torch.randn(2, INPUTS, generator=torch.Generator().manual_seed(0))
    error = (linear_of([weight], 2, kernels).rows(x).double() - exact(weight, x)).abs()
    assert (error <= largest_errors(weight, x, 2)).all()


# --- which products, and when ------------------------------------------------------------------------------------


class Altered(Compiler):
    """Compiles products in integers with one instruction replaced by another."""

    def __init__(self, folder: Path, old: str, new: str) -> None:
        super().__init__(llvm, kernel_dir())
        self._altered = Compiler(llvm, folder)
        self._old, self._new = old, new

    def compile(self, text: str) -> Any:
        """Compile a module."""
        if "vpdpbusd" not in text and "pmadd.ub" not in text:
            return super().compile(text)
        assert self._old in text
        return self._altered.compile(text.replace(self._old, self._new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<i32 8, i32 8,", "<i32 7, i32 8,"),  # of a whole number's higher digit
        ("mul i32", "add i32"),  # what the zero takes away
        ("fcmp olt float", "fcmp ogt float"),  # inputs too small to be divided by
        ("llvm.smax.v8i32", "llvm.smin.v8i32"),
        ("lshr", "shl"),  # of the codes of odd inputs
    ],
)
def test_a_wrong_product_is_noticed(old: str, new: str, tmp_path: Path) -> None:
    kernels = CpuKernels(Altered(tmp_path, old, new))
    with pytest.raises(KernelsUnavailable, match="wrong values"):
        kernels.product(Kind(bits=4), 2)
    assert kernels.product(Kind(bits=6), 2).digits == 0


def test_codes_that_are_no_bytes_keep_inputs_of_float32() -> None:
    def whole(products: ByteProducts) -> list[int]:
        return [bits for bits in (4, 5, 6, 8) if has_integer_products(Kind(bits=bits), products)]

    assert [whole(products) for products in ("fours", "pairs", "")] == [[4, 8], [4], []]
    assert not has_integer_products(Kind(bits=8, floats=True), "fours")
    linear, x = linear_of([made("Q6_K")], 1), inputs(3)
    assert torch.equal(linear.rows(x), linear_of([made("Q6_K")], 0).rows(x))


def test_a_cpu_without_such_products_says_so(caplog: pytest.LogCaptureFixture) -> None:
    kernels = kernels_with("")
    CpuDevice(torch.float32, digits=1, kernels=kernels).start_load(None)
    assert ["AVX-512 VNNI" in record.getMessage() for record in caplog.records] == [True]
    x = inputs(3)
    assert torch.equal(linear_of([made("Q4_0")], 1, kernels).rows(x), linear_of([made("Q4_0")], 0).rows(x))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        CpuDevice(torch.float32, digits=0, kernels=kernels).start_load(None)
        CpuDevice(torch.float32, digits=1).start_load(None)
    assert not caplog.records


@pytest.mark.parametrize(
    ("wanted", "bits"), [("int8", "inputs of 8 bits"), ("int16", "inputs of 16 bits"), ("auto", "")]
)
def test_the_option_names_the_bits_of_inputs(wanted: str, bits: str) -> None:
    device = make_device(BackendOptions(device="cpu", settings={"products": wanted}))
    weight = made("Q4_0")
    linear = device.product("ffn", INPUTS, (OUTPUTS,), PartForms(forms=[weight.form], fit_16_bits=False))
    linear.fill(0, weight)
    linear.finish()
    assert isinstance(linear, PackedCpuLinear)
    found = linear.products.pop().by
    assert bits in found
    assert bool(bits) == ("inputs" in found)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="int4"):
        make_device(BackendOptions(device="cpu", settings={"products": "int4"}))


def test_a_model_decodes_as_it_reads_a_prompt() -> None:
    """Steps of one token, which are recorded, and one step of all."""
    source = PackedTinyModel(MODEL, {"v_proj.weight": "Q8_0", "": "Q4_0"})
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, MODEL.vocab_size, 12)]
    logits: list[np.ndarray] = []
    for products in ("int16", "auto"):
        backend = TorchBackend(BackendOptions(device="cpu", threads=1, settings={"products": products}))
        pipeline = Pipeline.build([backend], source, num_blocks=8)
        logits += [pipeline.forced(tokens[:1], tokens[1:]), pipeline.forced(tokens[:1], tokens[1:], chunks=[1] * 11)]
    whole, single, floats, _ = logits
    np.testing.assert_allclose(single, whole, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(whole, floats, rtol=1e-2, atol=1e-2)
    assert not np.array_equal(whole, floats)
