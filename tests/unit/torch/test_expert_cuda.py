"""Experts' products by (row, expert) on CUDA: the kernels' own source, run on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch.cuda.experts import CudaExperts, ExpertMatrix  # noqa: E402
from edgepipe_torch.cuda.kernels.checking import random_packed, worst_expert_error  # noqa: E402
from edgepipe_torch.cuda.kernels.driver import SHARED_BYTES  # noqa: E402
from edgepipe_torch.cuda.kernels.experts import (  # noqa: E402
    ExpertKernels,
    RoutingKernels,
    Runs,
    column_tiles,
    expert_warps_down,
    most_runs,
)
from edgepipe_torch.cuda.kernels.forms import (  # noqa: E402
    EXPERT_MACROS,
    ROUTING_FILES,
    WIDE_FORM,
    KernelForm,
    expert_files,
    kernel_source,
    options,
)
from edgepipe_torch.cuda.kernels.products import staged_bytes, staged_inputs, staged_unit  # noqa: E402
from edgepipe_torch.cuda.kernels.routing_checking import worst_routing_error  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.routing import add_gated, choose  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from edgepipe.backend.types import PackedProducts  # noqa: E402
from edgepipe.spec.layer_spec import Activation, Router  # noqa: E402
from edgepipe.spec.packed import Packed  # noqa: E402
from tests.support.backends.kernel_forms import FORMS  # noqa: E402
from tests.support.backends.nvrtc import nvrtc_for  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from tests.support.backends.host_kernels import HostModule

CPU = torch.device("cpu")
KINDS = {"Q4_K": FORMS["Q4_K"], "MXFP4": FORMS["MXFP4"], "bf16": WIDE_FORM}
EXPERTS, HIDDEN, INNER, USED = 5, 256, 64, 2


class HostExperts:
    """The kernels of tested forms on this CPU, as an ``ExpertLibrary``."""

    def __init__(self, routing: HostModule, modules: dict[KernelForm, HostModule], multiprocessors: int = 3) -> None:
        self._routing = routing
        self._modules = modules
        self._multiprocessors = multiprocessors

    def experts(self, form: KernelForm) -> ExpertKernels:
        if form not in self._modules:
            raise KernelsUnavailable("it was not compiled")
        return ExpertKernels(self._modules[form], form, multiprocessors=self._multiprocessors)

    def routing(self) -> RoutingKernels:
        return RoutingKernels(self._routing)

    def with_multiprocessors(self, count: int) -> HostExperts:
        return HostExperts(self._routing, self._modules, count)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> HostExperts:
    from tests.support.backends.host_compiler import COMPILER
    from tests.support.backends.host_kernels import ROUTING, compile_for_host, experts_part

    if COMPILER is None:
        pytest.skip("g++ is not installed")
    parts = [ROUTING, *map(experts_part, KINDS.values())]
    routing, *modules = compile_for_host(parts, tmp_path_factory.mktemp("kernels"))
    return HostExperts(routing, dict(zip(KINDS.values(), modules, strict=True)))


class Made:
    """Experts of random weights, and what they compute in float64."""

    def __init__(
        self, library: HostExperts, kinds: tuple[str, str, str], activation: Activation, *, bias: bool = False
    ) -> None:
        rng = np.random.default_rng(3)
        shapes = [(INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
        names = [
            name if name == "bf16" or columns % 256 == 0 else "MXFP4"
            for name, (_, columns) in zip(kinds, shapes, strict=True)
        ]
        weights = [
            self._weight(name, EXPERTS * rows, columns, rng)
            for name, (rows, columns) in zip(names, shapes, strict=True)
        ]
        forms = [weight.form if isinstance(weight, Packed) else None for weight in weights]
        self.gate_up = ExpertMatrix(EXPERTS, HIDDEN, 2, INNER, forms[:2], device=CPU, library=library)
        self.down = ExpertMatrix(EXPERTS, INNER, 1, HIDDEN, forms[2:], device=CPU, library=library)
        biases = [torch.randn(weight.shape[0], generator=torch.manual_seed(4)).bfloat16() * bias for weight in weights]
        for matrix, part, index in ((self.down, 0, 2), (self.gate_up, 1, 1), (self.gate_up, 0, 0)):
            matrix.fill(part, weights[index])
            if bias:
                matrix.fill_bias(part, biases[index])
        self.experts = CudaExperts(self.gate_up, self.down, activation, library)
        exact = [weight.float32() if isinstance(weight, Packed) else weight.float().numpy() for weight in weights]
        self._exact = [
            each.astype(np.float64).reshape(EXPERTS, *shape) for each, shape in zip(exact, shapes, strict=True)
        ]
        self._biases = [each.double().numpy().reshape(EXPERTS, -1) for each in biases]
        self._activation = activation

    @staticmethod
    def _weight(name: str, rows: int, columns: int, rng: np.random.Generator) -> Packed | Tensor:
        if name == "bf16":
            return torch.from_numpy(rng.standard_normal((rows, columns), np.float32) / 16).bfloat16()
        return random_packed(FORMS[name], rows, columns, rng)

    def expected(self, x: Tensor, chosen: Tensor, weights: Tensor) -> np.ndarray:
        rows = x.double().numpy()
        total = np.zeros_like(rows)
        gates, ups, downs = self._exact
        for row, k in np.ndindex(*chosen.shape):
            own = int(chosen[row, k])
            gate = gates[own] @ rows[row] + self._biases[0][own]
            up = ups[own] @ rows[row] + self._biases[1][own]
            inner = self._activated(gate, up)
            total[row] += float(weights[row, k]) * (downs[own] @ inner + self._biases[2][own])
        return total

    def _activated(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        if self._activation == "gelu_tanh":
            return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
        if self._activation == "clamped_swiglu":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        return gate / (1 + np.exp(-gate)) * up


def routes(rows: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [T, H], chosen experts [T, K] and weights [T, K]."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((rows, HIDDEN), np.float32) / 32).bfloat16()
    chosen = torch.from_numpy(np.argsort(rng.random((rows, EXPERTS)), axis=1)[:, :USED].copy())
    return x, chosen, torch.from_numpy(rng.random((rows, USED), np.float32))


def assert_adds(made: Made, rows: int) -> None:
    x, chosen, weights = routes(rows)
    total = torch.randn(rows, HIDDEN).bfloat16()
    summed = total.clone()
    made.experts.add(x, chosen, weights, summed)
    expected = made.expected(x, chosen, weights) + total.double().numpy()
    np.testing.assert_allclose(summed.double().numpy(), expected, rtol=0.03, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("multiprocessors", [1, 200])
def test_products_round_once(name: str, multiprocessors: int, library: HostExperts) -> None:
    """Few multiprocessors: a block takes up to eight row tiles. Many: eight warps share one. Runs of 8, 16, 64."""
    own = library.with_multiprocessors(multiprocessors)
    assert [column_tiles(rows, 2, 5) for rows in (1, 11, 40)] == [1, 2, 8]
    assert worst_expert_error(own.experts(KINDS[name]), own.routing(), KINDS[name], CPU) <= 1


@pytest.mark.parametrize("kind", ["Q4_K", "bf16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_a_mixture(kind: str, activation: Activation, library: HostExperts) -> None:
    made = Made(library, (kind, kind, kind), activation, bias=activation != "silu")
    assert_adds(made, 9)
    assert not made.experts.waits
    assert made.gate_up.products == ({PackedProducts(by="own kernels (CUDA)")} if kind == "Q4_K" else set())


@pytest.mark.parametrize("kinds", [("Q4_K", "MXFP4", "bf16"), ("bf16", "Q4_0", "Q4_K")], ids="+".join)
def test_what_kernels_do_not_multiply_goes_expert_by_expert(kinds: tuple[str, str, str], library: HostExperts) -> None:
    made = Made(library, kinds, "clamped_swiglu", bias=True)
    assert made.experts.waits
    assert_adds(made, 7)


def test_without_forms_every_product_goes_expert_by_expert(
    library: HostExperts, caplog: pytest.LogCaptureFixture
) -> None:
    made = Made(HostExperts(library._routing, {}), ("Q4_K", "Q4_K", "Q4_K"), "silu")
    assert_adds(made, 7)
    assert "one after the other, without CUDA graphs: it was not compiled" in caplog.text


def test_a_row_does_not_depend_on_its_neighbours(library: HostExperts) -> None:
    made = Made(library, ("Q4_K", "Q4_K", "Q4_K"), "silu")
    x, chosen, weights = routes(12)
    found: list[Tensor] = []
    for seed in (5, 6):
        others, other_chosen, other_weights = routes(12, seed)
        others[0], other_chosen[0], other_weights[0] = x[0], chosen[0], weights[0]
        if seed == 6:
            others[1:] *= float("nan")
            other_chosen[1:] = chosen[0]
        total = torch.zeros(12, HIDDEN).bfloat16()
        made.experts.add(others, other_chosen, other_weights, total)
        found.append(total[0])
    assert torch.equal(found[0], found[1])


@settings(deadline=None, max_examples=12)
@given(
    st.integers(1, 5),
    st.sampled_from([2, 5, 64, 300]),
    st.integers(1, 10),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_choices_are_the_router_s(
    rows: int, experts: int, used: int, score: str, normalised: bool, corrected: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, experts, generator=generator)
    correction = torch.randn(experts, generator=generator) if corrected else None
    how = Router(score="softmax" if score == "softmax" else "sigmoid", normalised=normalised, correction=corrected)
    used = min(used, experts)
    chosen, weights = _kept[0].routing().choose(how, logits, correction, used)
    expected, expected_weights = choose(how, logits, correction, used)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_rows_without_an_order_choose_different_experts(value: float, library: HostExperts) -> None:
    logits = torch.full((2, 7), value)
    logits[1] = torch.arange(7.0)
    chosen, weights = library.routing().choose(Router(), logits, None, 4)
    assert sorted(set(chosen[0].tolist())) == sorted(chosen[0].tolist())
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < 7
    assert chosen[1].tolist() == [6, 5, 4, 3]
    assert torch.isfinite(weights[1]).all()


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K", "Q4_K"), ("Q4_K", "MXFP4", "bf16")], ids="+".join)
def test_experts_in_another_place_are_left_out(kinds: tuple[str, str, str], library: HostExperts) -> None:
    made = Made(library, kinds, "silu")
    x, chosen, weights = routes(9)
    here = chosen < 2
    assert 0 < int(here.any(dim=1).sum()) < 9, "some rows have none"
    total = torch.zeros(9, HIDDEN).bfloat16()
    made.experts.add(x, chosen.masked_fill(~here, -1), weights.masked_fill(~here, 0.0), total)
    expected = made.expected(x, chosen, weights * here)
    np.testing.assert_allclose(total.double().numpy(), expected, rtol=0.03, atol=0.02 * np.abs(expected).max())


def test_results_of_weight_0_may_be_undefined(library: HostExperts) -> None:
    results, total = torch.full((4, HIDDEN), float("nan")).bfloat16(), torch.ones(2, HIDDEN).bfloat16()
    results[1] = 3.0
    library.routing().add_weighted(results, torch.tensor([[0.0, 2.0], [0.0, 0.0]]), total)
    assert total[:, 0].tolist() == [7.0, 1.0]
    assert (total == total[:, :1]).all()


def test_what_surrounds_products_rounds_once(library: HostExperts) -> None:
    """Choices, weighted sums and gated sums."""
    assert worst_routing_error(library.routing(), CPU) <= 1


def test_a_gated_sum_is_torchs(library: HostExperts) -> None:
    draw = torch.Generator().manual_seed(8)
    x, added, total = (torch.randn(3, HIDDEN, generator=draw).bfloat16() for _ in range(3))
    gate = (torch.randn(1, HIDDEN, generator=draw) / 8).bfloat16()
    expected = total.clone()
    add_gated(x, gate, added, expected)
    library.routing().add_gated(x, gate, added, total)
    torch.testing.assert_close(total, expected, rtol=0.03, atol=0.03)  # torch rounds between its operations


def test_many_rows_are_the_sum_of_parts(library: HostExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgepipe_torch.cuda.experts._MOST_ROWS", 4)
    assert_adds(Made(library, ("bf16", "bf16", "bf16"), "silu"), 9)


def test_nothing_waits_for_the_device(library: HostExperts) -> None:
    made = Made(library, ("Q4_K", "Q4_K", "Q4_K"), "silu")
    x, chosen, weights = routes(3)
    total = torch.zeros(3, HIDDEN).bfloat16()
    with _NoWaiting():
        made.experts.add(x, chosen, weights, total)


class _NoWaiting(TorchDispatchMode):
    """Fails for operations whose shape or Python value needs the device's data, or that copy between devices."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping would import the compiler: four seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "unique", "_to_copy")), name
        return func(*args, **(kwargs or {}))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_sorted_pairs(rows: int, experts: int, used: int, seed: int) -> None:
    used = min(used, experts)
    rng = np.random.default_rng(seed)
    favour = rng.random(experts) ** 4  # some experts are preferred
    chosen = np.argsort(rng.random((rows, experts)) * favour, axis=1)[:, :used].copy()
    found = torch.zeros(2, dtype=torch.int32)
    runs = _kept[0].routing().sort(torch.from_numpy(chosen), experts, found)
    assert found.tolist() == [int(runs.count), len(np.unique(chosen))]
    order, count = runs.order.numpy(), int(runs.count)
    flat = chosen.reshape(-1)
    assert sorted(order.tolist()) == list(range(rows * used))
    assert count <= runs.most_runs
    at = 0
    for expert, first, size in runs.runs[:count].tolist():
        assert first == at
        assert 0 < size <= 8 * runs.column_tiles
        assert (flat[order[first : first + size]] == expert).all()
        at += size
    assert at == rows * used
    assert runs.runs[:count, 0].tolist() == sorted(runs.runs[:count, 0].tolist())


_kept: list[HostExperts] = []


@pytest.fixture(scope="module", autouse=True)
def _keep(library: HostExperts) -> None:
    _kept[:] = [library]


@given(
    st.sampled_from(sorted(FORMS)),
    st.integers(1, 2048),
    st.integers(1, 16),
    st.integers(1, 512),
    st.integers(1, 500),
    st.integers(1, 200),
    st.booleans(),
)
def test_launches_fit_shared_memory(
    name: str, rows: int, used: int, experts: int, tiles: int, multiprocessors: int, gated: bool
) -> None:
    used = min(used, experts)
    columns = column_tiles(rows, used, experts)
    runs = Runs(
        order=torch.empty(0),
        runs=torch.empty(most_runs(rows, used, experts, 8 * columns), 3),
        count=torch.empty(0),
        column_tiles=columns,
        used=used,
        rows=rows,
    )
    down = expert_warps_down(FORMS[name], tiles, runs, gated=gated, multiprocessors=multiprocessors)
    assert down in ((2, 4, 8) if gated else (1, 2, 4, 8))
    pairs = min(8 * columns, rows)
    chunk = staged_inputs(FORMS[name], 100, pairs, down, column_tiles=columns)
    assert chunk % staged_unit(down) == 0
    assert staged_bytes(FORMS[name], pairs, chunk, column_tiles=columns) <= SHARED_BYTES


@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_compile_without_a_gpu(architecture: int) -> None:
    nvrtc = nvrtc_for(architecture)
    form = list(KINDS.values())[(80, 90, 120).index(architecture)]
    chosen = options(form.macros | EXPERT_MACROS)
    cubin = nvrtc.compile(kernel_source(expert_files(form)), architecture=architecture, options=chosen)
    assert b"expert_mm_8" in cubin
    assert b"sort_pairs" in nvrtc.compile(kernel_source(ROUTING_FILES), architecture=architecture, options=[])
