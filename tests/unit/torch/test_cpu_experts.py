"""Experts multiplied by one compiled call, against the same experts one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch.cpu import device as cpu_device  # noqa: E402
from edgepipe_torch.cpu.experts import CpuExperts  # noqa: E402
from edgepipe_torch.cpu.kernels import CpuKernels  # noqa: E402
from edgepipe_torch.cpu.packed import PackedCpuLinear  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.experts import EachExpert  # noqa: E402
from edgepipe_torch.layers.feed_forward import Gated  # noqa: E402
from edgepipe_torch.layers.linear import Workspace  # noqa: E402
from edgepipe_torch.layers.mixture import Mixture  # noqa: E402
from torch import Tensor, dtype  # noqa: E402

from edgepipe.spec.layer_spec import Activation  # noqa: E402
from edgepipe.weights.weights import open_weights  # noqa: E402
from tests.support.backends.torch_slices import compiled_kernels, loaded_slice  # noqa: E402
from tests.support.models.experts import write_expert_folder  # noqa: E402
from tests.support.models.files import write_hf_folder  # noqa: E402
from tests.support.models.packed import random_packed  # noqa: E402

HIDDEN, INNER, COUNT, USED = 256, 256, 6, 2
NEAR = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    with compiled_kernels():
        yield


def make_each(
    activation: Activation = "silu",
    *,
    schemes: tuple[str, str, str] = ("Q4_K", "Q4_K", "Q6_K"),
    biased: bool = False,
    kernels: KernelsUnavailable | None = None,
) -> EachExpert:
    """Random experts; ``schemes`` of gate, up and down."""
    space, rng = Workspace(torch.float32, torch.device("cpu")), np.random.default_rng(1)
    experts: list[Gated] = []
    for expert in range(COUNT):
        first = PackedCpuLinear("experts", HIDDEN, (INNER, INNER), space, kernels)
        second = PackedCpuLinear("experts", INNER, (HIDDEN,), space, kernels)
        gate, up, down = (random_packed(scheme, (HIDDEN, INNER), rng) for scheme in schemes)
        for linear, part, weight in ((first, 0, gate), (first, 1, up), (second, 0, down)):
            linear.fill(part, weight)
        if biased:
            first.fill_bias(1, torch.full((INNER,), float(expert)))
            second.fill_bias(0, torch.full((HIDDEN,), 1.0 + expert))
        for linear in (first, second):
            linear.finish()
        experts.append(Gated(first, second, activation))
    return EachExpert(experts)


def make_floats(number: dtype, *, tiled: bool) -> EachExpert:
    """Random experts of floats, in the kernels' tiles or multiplied by torch."""
    space, generator = Workspace(torch.float32, torch.device("cpu")), torch.Generator().manual_seed(2)
    experts: list[Gated] = []
    for _ in range(COUNT):
        first = PackedCpuLinear("experts", HIDDEN, (INNER, INNER), space, tiled_floats=tiled)
        second = PackedCpuLinear("experts", INNER, (HIDDEN,), space, tiled_floats=tiled)
        for linear, part, outputs, inputs in (
            (first, 0, INNER, HIDDEN),
            (first, 1, INNER, HIDDEN),
            (second, 0, HIDDEN, INNER),
        ):
            linear.fill(part, torch.randn(outputs, inputs, generator=generator).mul_(0.1).to(number))
        for linear in (first, second):
            linear.finish()
        experts.append(Gated(first, second, "silu"))
    return EachExpert(experts)


def check_bits(grouped: CpuExperts) -> None:
    """A row's experts have one row, some, or as many as unpack weights to memory: it has the same bits."""
    x, chosen, weights = make_rows(40)
    together = torch.zeros(40, HIDDEN)
    grouped.add(x, chosen, weights, together)
    counts = chosen.flatten().bincount(minlength=COUNT).tolist()
    assert max(counts) >= 17 > min(counts)
    for part in [*(slice(row, row + 1) for row in (0, 17, 39)), slice(3, 6), slice(10, 22)]:
        alone = torch.zeros_like(together[part])
        grouped.add(x[part], chosen[part], weights[part], alone)
        assert torch.equal(alone, together[part])


def make_grouped(each: EachExpert, activation: Activation = "silu") -> CpuExperts:
    return CpuExperts(each, activation, Workspace(torch.float32, torch.device("cpu")))


def make_rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, chosen experts and weights; the first expert has most rows, the last has none."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, HIDDEN, generator=generator)
    odds = torch.tensor([20.0, 4, 4, 2, 2, 0]).expand(count, -1)
    chosen = torch.multinomial(odds, USED, generator=generator)
    return x, chosen, torch.rand(count, USED, generator=generator)


def added(experts: EachExpert | CpuExperts, count: int) -> Tensor:
    x, chosen, weights = make_rows(count)
    total = torch.ones(count, HIDDEN)
    experts.add(x, chosen, weights, total)
    return total


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 7, 40, 150])
def test_all_experts_at_once_give_what_each_gives(count: int, threads: int) -> None:
    torch.set_num_threads(threads)
    each = make_each()
    torch.testing.assert_close(added(make_grouped(each), count), added(each, count), **NEAR)


@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped_swiglu"])
def test_other_activations_and_biases(activation: Activation) -> None:
    each = make_each(activation, biased=True)
    torch.testing.assert_close(added(make_grouped(each, activation), 9), added(each, 9), **NEAR)


def test_parts_of_one_product_may_have_other_types() -> None:
    each = make_each(schemes=("Q4_0", "Q8_0", "Q5_0"))
    torch.testing.assert_close(added(make_grouped(each), 5), added(each, 5), **NEAR)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("scheme", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4"])
def test_a_row_gives_the_same_bits_alone_and_among_others(scheme: str, activation: Activation) -> None:
    check_bits(make_grouped(make_each(activation, schemes=(scheme, scheme, scheme)), activation))


@pytest.mark.parametrize("number", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_experts_of_floats_keep_their_values_and_a_rows_bits(number: dtype) -> None:
    each, by_torch = (make_floats(number, tiled=tiled) for tiled in (True, False))
    check_bits(make_grouped(each))
    torch.testing.assert_close(added(make_grouped(each), 40), added(by_torch, 40), **NEAR)
    held, wide = (sum(linear.num_bytes for linear in experts.linears) for experts in (each, by_torch))
    assert held * 4 == wide * number.itemsize


def test_kernels_multiply_the_experts_of_a_model_of_floats(tmp_path: Path) -> None:
    source = open_weights(write_expert_folder(tmp_path / "folder"))
    for kernels, packed in ((None, True), (KernelsUnavailable("not here"), False)):
        mixtures = [layer.feed_forward for layer in loaded_slice(source, kernels=kernels).layers]
        linears = [each for mixture in mixtures if isinstance(mixture, Mixture) for each in mixture.linears]
        assert linears
        assert all(isinstance(each, PackedCpuLinear) == packed for each in linears)


def test_a_model_of_floats_without_experts_asks_for_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled when they are asked for, and a log says what lacks them."""
    write_hf_folder(tmp_path / "folder")

    def asked() -> CpuKernels:
        raise AssertionError("it asked for kernels")

    monkeypatch.setattr(cpu_device, "cpu_kernels", asked)
    assert not any(isinstance(each, PackedCpuLinear) for each in loaded_slice(open_weights(tmp_path / "folder")).packed)


def test_without_kernels_each_expert_is_computed() -> None:
    each = make_each(kernels=KernelsUnavailable("not here"))
    assert torch.equal(added(make_grouped(each), 4), added(each, 4))
