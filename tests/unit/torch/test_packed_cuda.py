"""Merged products with packed weights give exact weights' products, by own kernels and by fallbacks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch.cuda.kernels.checking import random_packed  # noqa: E402
from edgepipe_torch.cuda.kernels.forms import KernelForm, kernel_form  # noqa: E402
from edgepipe_torch.cuda.kernels.products import Products  # noqa: E402
from edgepipe_torch.cuda.packed import PackedCudaLinear  # noqa: E402
from edgepipe_torch.cuda.packed_tiles import TiledWeight  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402

from edgepipe.backend.types import PackedProducts  # noqa: E402
from edgepipe.spec.packed import Packed  # noqa: E402
from edgepipe.weights.resident import resident_bytes  # noqa: E402
from tests.support.backends.kernel_forms import FORMS  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from tests.support.backends.host_kernels import HostModule

    Modules = dict[KernelForm, HostModule]

CPU = torch.device("cpu")
BF16 = 2.0**-8
MIXES = [["Q4_K"], ["Q4_K", "Q4_K", "Q6_K"], ["Q4_0", "", "Q4_0"], ["Q6_K", "Q4_K"], ["FP8", "FP8"], ["AWQ", ""]]


class HostLibrary:
    """Kernels of all tested forms on this CPU."""

    def __init__(self, modules: dict[KernelForm, HostModule]) -> None:
        self._modules = modules

    def products(self, form: KernelForm) -> Products:
        if form not in self._modules:
            raise KernelsUnavailable("it was not compiled")
        return Products(self._modules[form], form, multiprocessors=3)


def weight_of(name: str, out_features: int, in_features: int, rng: np.random.Generator) -> Packed | Tensor:
    if not name:
        return torch.from_numpy(rng.standard_normal((out_features, in_features), np.float32)).bfloat16()
    return random_packed(FORMS[name], out_features, in_features, rng)


def filled(
    weights: list[Packed | Tensor], *, library: HostLibrary | None, dtype: dtype, bias: bool = False
) -> tuple[PackedCudaLinear, np.ndarray, np.ndarray]:
    """A product with its exact weight [O, I] and bias [O]."""
    sizes = [weight.shape[0] for weight in weights]
    forms = [weight.form if isinstance(weight, Packed) else None for weight in weights]
    linear = PackedCudaLinear(weights[0].shape[1], sizes, forms, dtype=dtype, device=CPU, library=library)
    biases = [torch.randn(size).to(dtype) for size in sizes]
    for index in reversed(range(len(weights))):  # files have any order
        weight = weights[index]
        linear.fill(index, weight)
        if bias:
            linear.fill_bias(index, biases[index])
    linear.finish()
    exact = [weight.float32() if isinstance(weight, Packed) else weight.float().numpy() for weight in weights]
    return linear, np.concatenate(exact), np.concatenate([each.float().numpy() for each in biases]) * bias


def assert_product(found: Tensor, x: Tensor, exact: np.ndarray, added: np.ndarray, bound: float) -> None:
    inputs = x.double().numpy()
    expected = inputs @ exact.T.astype(np.float64) + added
    size = np.abs(inputs) @ np.abs(exact.T.astype(np.float64)) + np.abs(added)
    assert (np.abs(found.double().numpy() - expected) <= bound * size + 1e-6).all()


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
@pytest.mark.parametrize("num_rows", [1, 20, 70])
def test_merged_parts_of_several_forms(mix: list[str], num_rows: int, host_modules: Modules) -> None:
    rng = np.random.default_rng(2)
    weights = [weight_of(name, size, 512, rng) for name, size in zip(mix, (64, 32, 24), strict=False)]
    library = HostLibrary(host_modules)
    linear, exact, bias = filled(weights, library=library, dtype=torch.bfloat16, bias=num_rows == 20)
    x = torch.randn(num_rows, 512).bfloat16()
    assert_product(linear.rows(x), x, exact, bias, BF16)
    total = torch.randn(num_rows, len(exact)).bfloat16()
    summed = total.clone()
    linear.add_to(x, summed)
    assert_product(summed, x, exact, bias + total.double().numpy(), 2 * BF16)


@pytest.mark.parametrize("own", [True, False])
def test_swiglu_and_rows_of_a_table(own: bool, host_modules: Modules) -> None:
    rng = np.random.default_rng(3)
    library = HostLibrary(host_modules) if own else None
    weights = [weight_of("Q6_K", 48, 512, rng), weight_of("Q6_K", 48, 512, rng)]
    linear, exact, _ = filled(weights, library=library, dtype=torch.bfloat16)
    slow = PackedProducts(by="torch (blocks widened)", reason="own kernels need a CUDA device")
    assert linear.products == {PackedProducts(by="own kernels (CUDA)") if own else slow}
    x = torch.randn(5, 512).bfloat16()
    both = torch.from_numpy(x.float().numpy() @ exact.T)
    expected = torch.nn.functional.silu(both[:, :48]) * both[:, 48:]
    bound = 0.02 * float(expected.abs().max())
    torch.testing.assert_close(linear.swiglu(x).float(), expected, rtol=0.02, atol=bound)
    ids = torch.tensor([95, 0, 17, 17])
    torch.testing.assert_close(linear.take(ids), torch.from_numpy(exact)[ids].bfloat16(), rtol=BF16, atol=1e-6)


@pytest.mark.parametrize("own", [True, False])
def test_sorted_columns(own: bool, host_modules: Modules) -> None:
    """GPTQ's act-order: stored columns are those of the inputs in another order."""
    rng = np.random.default_rng(4)
    weights: list[Packed | Tensor] = []
    for _part in range(2):
        weight = random_packed(FORMS["AWQ"], 32, 256, rng)
        order = rng.permutation(256).astype(np.int32)
        weights.append(replace(weight, form=replace(weight.form, ordered=True), order=order))
    library = HostLibrary(host_modules) if own else None
    linear, exact, _ = filled(weights, library=library, dtype=torch.bfloat16)
    for num_rows in (2, 66):
        x = torch.randn(num_rows, 256).bfloat16()
        assert_product(linear.rows(x), x, exact, np.zeros(64), BF16)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(FORMS)), st.integers(1, 3), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_without_kernels_torch_widens(name: str, units: int, out_features: int, seed: int) -> None:
    form = FORMS[name]
    weight = random_packed(form, out_features, units * max(form.group, form.span, 16), np.random.default_rng(seed))
    linear, exact, _ = filled([weight], library=None, dtype=torch.float32)
    torch.testing.assert_close(linear.take(torch.arange(out_features)).numpy(), exact, rtol=1e-6, atol=0)
    x = torch.randn(3, weight.shape[1])
    assert_product(linear.rows(x), x, exact, np.zeros(out_features), 1e-5)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 512), (50, 768), (17, 3 * 256)])
def test_resident_bytes_are_the_tiles(name: str, out_features: int, in_features: int) -> None:
    weight = random_packed(FORMS[name], out_features, in_features, np.random.default_rng(5))
    tiled = TiledWeight(kernel_form(weight), out_features, in_features, CPU)
    assert tiled.num_bytes == resident_bytes(weight.form, weight.shape, kind="torch-cuda", dtype="bfloat16")


def test_a_fallback_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    weight = random_packed(FORMS["IQ4_XS"], 16, 256, np.random.default_rng(6))
    for _ in range(2):
        filled([weight], library=HostLibrary({}), dtype=torch.bfloat16)
    (record,) = caplog.records
    means = "packed weights of 4 bits, groups of 32, are multiplied by torch (blocks widened)"
    assert record.getMessage() == f"{means}: it was not compiled"
