"""Weights of K types at their own size: products, memory, models, and what takes their place if kernels fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")
pytest.importorskip("torch", reason="torch is not installed")

import mlx.core as mx
from edgepipe_mlx import MlxBackend, own_kernels
from edgepipe_mlx import backend as mlx_backend
from edgepipe_mlx.blocks.checking import BLOCK_TYPES
from edgepipe_mlx.blocks.kernels import MOST_ROWS, MOST_WITH_EXPERTS, BlockKernels, MetalKernels, ReferenceKernels
from edgepipe_mlx.blocks.layout import lay_out_blocks
from edgepipe_mlx.blocks.matrix import BlockMatrix, BlockStack
from edgepipe_mlx.experts import ExpertLinear, JoinedExperts
from edgepipe_mlx.joined import JoinedLinear
from edgepipe_mlx.matrices import Linear
from edgepipe_mlx.pages.kernels import ReferencePages

from edgepipe.backend.protocol import ExplainingBackend
from edgepipe.backend.types import DeviceProfile, SlowPath
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.spec.layer_spec import Experts, Router
from edgepipe.spec.packed import GroupValues, Packed
from edgepipe.weights.resident import keeps_blocks, resident_bytes, slice_bytes
from edgepipe.weights.weight_table import table_of
from tests.support.backends.host_compiler import COMPILER
from tests.support.backends.metal_kernels import HostKernels
from tests.support.backends.mlx_models import BLOCK_SIZE, Chain, cpu_options, row, tiny_config
from tests.support.models.packed import PackedTinyModel, random_packed

INPUTS = 512
KERNELS = ReferenceKernels()
MIX = {"v_proj.weight": "Q6_K", "down_proj.weight": "Q6_K", "o_proj.weight": "Q5_K", "k_proj.weight": "Q8_0"}
MIX |= {"lm_head.weight": "Q6_K", "": "Q4_K"}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
PROFILE = DeviceProfile(
    backend="mlx",
    device="gpu",
    name="a Mac",
    compute_dtype="float32",
    memory_total_bytes=1,
    memory_free_bytes=1,
    bandwidth_bytes_per_s=1.0,
    flops=1.0,
)
MISSING = SlowPath(what="widened", cost="more bytes", reason="a compiler's error")


@pytest.fixture(autouse=True)
def on_cpu() -> None:
    mlx_backend.configure(mx.Device(mx.cpu))


def packed_of(scheme: str, rows: int, seed: int = 0) -> Packed:
    return random_packed(scheme, (rows, INPUTS), np.random.default_rng([seed, rows]))


def matrix_of(packed: Packed, *, dtype: mx.Dtype = mx.float32, in_float32: bool = True) -> BlockMatrix:
    return BlockMatrix(lay_out_blocks(packed), dtype=dtype, in_float32=in_float32, kernels=KERNELS)


def stack_of(packed: Packed, count: int, *, dtype: mx.Dtype = mx.float32, in_float32: bool = True) -> BlockStack:
    made = lay_out_blocks(packed)
    return BlockStack(made, count=count, dtype=dtype, in_float32=in_float32, kernels=KERNELS)


def rows_of(count: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(1).standard_normal((count, INPUTS)).astype(np.float32)).astype(dtype)


def close(found: mx.array, expected: np.ndarray, tolerance: float) -> None:
    """``tolerance``: of the largest value."""
    values = np.array(found.astype(mx.float32))
    np.testing.assert_allclose(values, expected, rtol=0, atol=tolerance * float(np.abs(expected).max()))


@pytest.mark.parametrize("count", [1, MOST_ROWS, MOST_ROWS + 1], ids=["one", "few", "many"])
@pytest.mark.parametrize("scheme", BLOCK_TYPES)
def test_products_of_any_number_of_rows(scheme: str, count: int) -> None:
    """On Metal, many rows are multiplied in float16, with scales and offsets rounded to it. A CPU sums in it, too."""
    packed, x = packed_of(scheme, 24), rows_of(count)
    exact = np.array(x).astype(np.float64) @ packed.float32().astype(np.float64).T
    close(matrix_of(packed).multiply(x), exact, 4e-6)
    narrow = matrix_of(packed, dtype=mx.bfloat16, in_float32=False)
    inputs = x.astype(mx.bfloat16)
    exact = np.array(inputs.astype(mx.float32)).astype(np.float64) @ packed.float32().astype(np.float64).T
    close(narrow.logits(inputs), exact, 4e-6 if count <= MOST_ROWS else 1e-2)
    close(narrow.multiply(inputs), exact, 1e-2)
    assert narrow.multiply(inputs).dtype == mx.bfloat16


def test_scales_that_float16_does_not_hold() -> None:
    packed = packed_of("Q6_K", 8)
    base = np.full_like(packed.scale.base, 3000.0)
    packed = replace(packed, scale=GroupValues(base=base, factor=packed.scale.factor))
    x = rows_of(MOST_ROWS + 1, mx.bfloat16)
    exact = np.array(x.astype(mx.float32)).astype(np.float64) @ packed.float32().astype(np.float64).T
    close(matrix_of(packed, dtype=mx.bfloat16, in_float32=False).multiply(x), exact, 5e-3)


@pytest.mark.parametrize("scheme", BLOCK_TYPES)
def test_rows_of_a_table_and_its_size(scheme: str) -> None:
    packed = packed_of(scheme, 16)
    matrix = matrix_of(packed)
    np.testing.assert_array_equal(np.array(matrix.rows(mx.array([3, 0, 15, 3]))), packed.float32()[[3, 0, 15, 3]])
    assert keeps_blocks(packed.form, 16, INPUTS)
    expected = resident_bytes(packed.form, packed.shape, kind="mlx-blocks", dtype="bfloat16")
    assert matrix.num_bytes == expected == packed.num_bytes


@pytest.mark.parametrize("scheme", ["Q4_0", "Q8_0", "IQ4_XS", "MXFP4"])
def test_other_types_are_as_mlx_keeps_them(scheme: str) -> None:
    packed = packed_of(scheme, 16)
    assert not keeps_blocks(packed.form, 16, INPUTS)
    sizes = [resident_bytes(packed.form, packed.shape, kind=kind, dtype="bfloat16") for kind in ("mlx", "mlx-blocks")]
    assert sizes[0] == sizes[1]


def test_a_weight_of_few_blocks_is_as_mlx_keeps_it() -> None:
    """MLX would give kernels its bases in another address space."""
    form = packed_of("Q6_K", 16).form
    assert [keeps_blocks(form, rows, INPUTS) for rows in (1, 3, 4)] == [False, False, True]


@pytest.mark.parametrize("count", [2, MOST_ROWS + 4], ids=["few", "many"])
@pytest.mark.parametrize("activated", [False, True])
def test_joined_projections(activated: bool, count: int) -> None:
    schemes, sizes = ("Q4_K", "Q4_K", "Q6_K"), (32, 16, 48)
    parts = [
        Linear(matrix_of(packed_of(scheme, size, seed)), None)
        for seed, (scheme, size) in enumerate(zip(schemes, sizes, strict=True))
    ]
    x = rows_of(count)
    alone = [part.multiply(x) for part in parts]
    joined = JoinedLinear(parts, activated=activated)
    for exactly in (False, True):
        for found, expected in zip(joined.multiply(x, in_float32=exactly), alone, strict=True):
            close(found, np.array(expected), 1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["Q4_K", "Q6_K"])
def test_rows_with_experts(scheme: str, dtype: mx.Dtype) -> None:
    """Few, many, and many sorted by expert, as mixtures give them; gates and ups joined, then downs."""
    count, used, features = 4, 2, 12
    packed = [packed_of(scheme, count * features, seed) for seed in range(2)]
    exact = [each.float32().astype(np.float64).reshape(count, features, INPUTS) for each in packed]
    stacks = [stack_of(each, count, dtype=dtype, in_float32=dtype == mx.float32) for each in packed]
    joined = JoinedExperts([ExpertLinear(stack, None) for stack in stacks])
    tolerance = 2e-6 if dtype == mx.float32 else 6e-3
    for rows in (3, MOST_WITH_EXPERTS // used + 5):
        x = rows_of(rows, dtype)
        inputs = np.array(x.astype(mx.float32)).astype(np.float64)
        experts = np.random.default_rng(rows).integers(0, count, (rows, used)).astype(np.uint32)
        expected = [np.einsum("rkoi,ri->rko", each[experts], inputs) for each in exact]
        found = joined.multiply_by(x[:, None, None], mx.array(experts), is_sorted=False)
        for own, wanted in zip(found, expected, strict=True):
            close(own.squeeze(2), wanted, tolerance)
        order = np.argsort(experts.reshape(-1), kind="stable")
        given = x[mx.array(order // used)][:, None], mx.array(experts.reshape(-1)[order])
        for own, wanted in zip(joined.multiply_by(*given, is_sorted=True), expected, strict=True):
            close(own.squeeze(1), wanted.reshape(-1, features)[order], tolerance)


def model(*, experts: bool = False) -> PackedTinyModel:
    config = tiny_config(hidden_size=256, intermediate_size=512, num_heads=8, head_dim=32)
    if experts:
        mixture = Experts(count=4, used=2, inner=256, router=Router(), shared_inner=256, shared_gated=True)
        outer = replace(config.layers[0], dense=None, experts=mixture)
        config = replace(config, layers=(outer, config.layers[1], outer))
    return PackedTinyModel(config, MIX)


def logits_of(
    source: PackedTinyModel, chunks: Sequence[int] = (len(TOKENS),), *, weights: str = "auto"
) -> tuple[np.ndarray, MlxBackend]:
    """Logits of all tokens, in steps of some tokens each."""
    chain = Chain(source, options=cpu_options(weights=weights))
    found, start = [], 0
    for count in chunks:
        found.append(chain.run(TOKENS[start : start + count], [row(start, count, (0, 1))]))
        start += count
    assert start <= BLOCK_SIZE
    return np.concatenate(found), chain.backend


def with_kernels(monkeypatch: pytest.MonkeyPatch, found: BlockKernels | SlowPath) -> None:
    """Load as on Metal, and compute on the CPU."""
    monkeypatch.setattr(own_kernels, "checked_kernels", lambda _dtype: found)
    for module in (mlx_backend, own_kernels):
        monkeypatch.setattr(module, "is_cpu", lambda _device: False)
    monkeypatch.setattr(mlx_backend, "measure", lambda *_given: PROFILE)
    monkeypatch.setattr(own_kernels, "checked_pages", lambda _forms: ReferencePages())


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_model_gives_the_logits_of_its_weights(experts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(experts=experts)
    expected, _ = logits_of(source, weights="wide")
    with_kernels(monkeypatch, KERNELS)
    found, backend = logits_of(source, chunks=(5, 1, 1, 1))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * float(expected.std()))
    assert [each.by for each in backend.packed_products()] == ["own kernels (Metal)", "MLX"]
    assert backend.slow_paths(BLOCK_SIZE) == ()
    assert backend.profile().packing == "mlx-blocks"


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
def test_a_model_by_the_kernels_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(experts=True)
    with_kernels(monkeypatch, KERNELS)
    expected, _ = logits_of(source)
    host = HostKernels(tmp_path)
    monkeypatch.setattr(mx.fast, "metal_kernel", host.make)
    with_kernels(monkeypatch, MetalKernels())
    found, _ = logits_of(source)
    assert host.launches > 10
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_slices_memory_is_what_the_planner_expects(experts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(experts=experts)
    [part] = make_slices([LayerRange(0, 3)], 3)
    for found, kind in ((KERNELS, "mlx-blocks"), (MISSING, "mlx")):
        with_kernels(monkeypatch, found)
        backend = MlxBackend(cpu_options())
        mx.clear_cache()
        before = mx.get_active_memory()
        backend.load([part], source, lambda _progress: None)
        expected = slice_bytes(source.config, table_of(source.weights(part)), part, kind=kind, dtype="float32")
        assert expected <= mx.get_active_memory() - before <= 1.02 * expected + 100_000
        backend.close()


def test_without_kernels_weights_are_as_mlx_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    source = model()
    expected, plain = logits_of(source)
    with_kernels(monkeypatch, MISSING)
    found, backend = logits_of(source)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * float(np.abs(expected).max()))
    assert isinstance(backend, ExplainingBackend)
    assert backend.slow_paths(BLOCK_SIZE) == (MISSING,)
    assert plain.slow_paths(BLOCK_SIZE) == ()
    assert [each.by for each in backend.packed_products()] == ["MLX"]
    assert backend.profile().packing == "mlx"
    monkeypatch.setattr(mlx_backend, "packed_errors", lambda _types: iter(()))  # those of MLX
    monkeypatch.setattr(own_kernels, "page_errors", lambda _dtype: iter(()))
    reasons = [each.reason for each in backend.kernel_errors() if each.reason]
    assert reasons == [MISSING.reason]


def test_a_model_without_k_types_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels(monkeypatch, MISSING)
    _, backend = logits_of(PackedTinyModel(model().config, {"": "Q8_0"}))
    assert backend.slow_paths(BLOCK_SIZE) == ()


def test_users_can_do_without_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernels(monkeypatch, KERNELS)
    backend = MlxBackend(cpu_options(weights="mlx"))
    assert backend.profile().packing == "mlx"
    backend.load(make_slices([LayerRange(0, 3)], 3), model(), lambda _progress: None)
    assert [each.by for each in backend.packed_products()] == ["MLX"]
    assert backend.slow_paths(BLOCK_SIZE) == ()
