"""Packed products on a CPU against the file's values, for every form; and whole models made of packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cpu.kernels import CpuKernels, cpu_kernels  # noqa: E402
from edgepipe_torch.cpu.packed import PackedCpuLinear  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.linear import Workspace  # noqa: E402
from torch import Tensor  # noqa: E402

from edgepipe.backend.types import BackendOptions  # noqa: E402
from edgepipe.errors import ConfigInvalid  # noqa: E402
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices  # noqa: E402
from edgepipe.spec.packed import GroupValues, Packed, split_planes  # noqa: E402
from edgepipe.spec.packed_form import PackedForm  # noqa: E402
from edgepipe.spec.tensors import StoredTensor, TensorInfo, WeightSource  # noqa: E402
from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from edgepipe.weights.resident import resident_bytes  # noqa: E402
from edgepipe.weights.stored_weight import OneTensorPerWeight  # noqa: E402
from tests.support.backends.torch_slices import loaded_slice  # noqa: E402
from tests.support.models.packed import PackedTinyModel, exact_float32, random_packed  # noqa: E402
from tests.support.numerics.harness import Pipeline  # noqa: E402

CPU = torch.device("cpu")
ROUNDED = 1.5e-6  # of float32 sums: at worst 256 * 2**-24 = 1.5e-5
SCALED = 1e-3  # of scales that float16 does not hold: 2**-12 each

BOUNDS = {  # largest error of an output, in units of |x| * |w| summed over the inputs
    "Q4_0": ROUNDED,
    "Q4_1": ROUNDED,
    "Q5_0": ROUNDED,
    "Q5_1": ROUNDED,
    "Q8_0": ROUNDED,
    "TQ2_0": ROUNDED,
    "IQ4_NL": ROUNDED,
    "MXFP4": ROUNDED,
    "NVFP4": ROUNDED,
    "IQ2_XS": ROUNDED,  # requantised when packed
    "Q2_K": SCALED,
    "Q3_K": SCALED,
    "Q4_K": SCALED,
    "Q5_K": SCALED,
    "Q6_K": SCALED,
    "IQ4_XS": SCALED,
    "zeros": SCALED,
    "ordered": SCALED,
    "per row": SCALED,
    "4 bits by 8": SCALED,
    "6 bits by 8": SCALED,
    "fp8": SCALED,
    "nf4": 8e-3,  # its levels are rounded to 8 bits
}
HAND_MADE = {
    "zeros": PackedForm(bits=4, group=128, base_bits=32, offset="zeros"),
    "ordered": PackedForm(bits=4, group=64, base_bits=32, offset="zeros", ordered=True),
    "per row": PackedForm(bits=8, group=256, base_bits=32, offset="zero"),
    "4 bits by 8": PackedForm(bits=4, group=8, base_bits=32, offset="zero"),
    "6 bits by 8": PackedForm(bits=6, group=8, base_bits=32, offset="zero"),
    "fp8": PackedForm(bits=8, group=128, base_bits=32, codebook="e4m3"),
    "nf4": PackedForm(bits=4, group=64, base_bits=32, codebook="nf4"),
}
NAMES = tuple(BOUNDS)
INPUTS = 256


def made(name: str, rows: int, seed: int) -> Packed:
    """A random packed weight [rows, 256] of a named form."""
    rng = np.random.default_rng(seed)
    form = HAND_MADE.get(name)
    if form is None:
        return random_packed(name, (rows, INPUTS), rng)
    codes = rng.integers(0, 1 << form.bits, (rows, INPUTS), dtype=np.uint8)
    if form.codebook == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    low, high = split_planes(codes, form.bits)
    groups = INPUTS // form.group
    zeros = rng.integers(0, 16, (rows, groups), dtype=np.uint8)
    zero = {"zeros": zeros, "zero": 1 << (form.bits - 1)}.get(form.offset)
    return Packed(
        name=name,
        shape=(rows, INPUTS),
        form=form,
        low=low,
        high=high,
        scale=GroupValues(base=rng.uniform(1e-3, 3e-3, (rows, groups)).astype(np.float32)),
        zero=zero,
        order=rng.permutation(INPUTS).astype(np.int32) if form.ordered else None,
    )


def linear_of(
    parts: Sequence[Packed], biases: Sequence[Tensor | None] = (), *, kernels: KernelsUnavailable | None = None
) -> PackedCpuLinear:
    sizes = [part.shape[0] for part in parts]
    linear = PackedCpuLinear("test", INPUTS, sizes, Workspace(torch.float32, CPU), kernels)
    for index, part in enumerate(parts):
        linear.fill(index, part)
    for index, bias in enumerate(biases):
        if bias is not None:
            linear.fill_bias(index, bias)
    linear.finish()
    return linear


def check(name: str, found: Tensor, x: Tensor, values: np.ndarray, extra: Tensor | float = 0) -> None:
    """Every output is within the form's bound of the exact product."""
    weight = torch.from_numpy(values).double()
    expected = x.double() @ weight.t() + extra
    size = x.double().abs() @ weight.abs().t() + abs(extra)
    assert ((found - expected).abs() <= BOUNDS[name] * size).all(), ((found - expected).abs() / size).max()


@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_files_values(name: str) -> None:
    weight = made(name, 37, 1)
    values = weight.float32()
    linear = linear_of([weight], [torch.linspace(-1, 1, 37)])
    torch.manual_seed(0)
    x = torch.randn(20, INPUTS)
    for count in (*range(1, 10), 12, 20):
        check(name, linear.rows(x[:count]), x[:count], values, torch.linspace(-1, 1, 37))
    total = torch.ones(20, 37)
    linear.add_to(x, total)
    check(name, total, x, values, torch.linspace(-1, 1, 37).double() + 1)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 40)), min_size=1, max_size=3),
    st.integers(1, 20),
    st.sampled_from([1, 2]),
    st.integers(0, 100),
)
def test_parts_of_different_forms_are_merged(
    kinds: list[tuple[str, int]], num_rows: int, threads: int, seed: int
) -> None:
    parts = [made(name, rows, seed + index) for index, (name, rows) in enumerate(kinds)]
    linear = linear_of(parts)
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((num_rows, INPUTS), np.float32))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = linear.rows(x)
    finally:
        torch.set_num_threads(before)
    start = 0
    for (name, rows), part in zip(kinds, parts, strict=True):
        check(name, found[:, start : start + rows], x, part.float32())
        start += rows


@pytest.mark.parametrize("count", [1, 3, 5, 8, 13, 20])
def test_a_row_does_not_depend_on_its_neighbours_values(count: int) -> None:
    linear = linear_of([made("Q4_K", 48, 1), made("Q6_K", 16, 2)])
    x = torch.randn(count, INPUTS)
    alone = linear.rows(x).clone()
    x[:-1] *= 1e4
    assert torch.equal(linear.rows(x)[-1], alone[-1])


@pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(name: str) -> None:
    linear = linear_of([made(name, 37, 1)], [torch.linspace(-1, 1, 37)])
    x = torch.randn(150, INPUTS, generator=torch.Generator().manual_seed(0))
    before = torch.randn(150, 37, generator=torch.Generator().manual_seed(1))
    together, added = linear.rows(x).clone(), before.clone()
    linear.add_to(x, added)
    for count in (*range(1, 10), 12, 16, 23, 130):
        assert torch.equal(linear.rows(x[:count]), together[:count])
        some = before[:count].clone()
        linear.add_to(x[:count], some)
        assert torch.equal(some, added[:count])


@pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")
def test_one_scale_for_a_row_longer_than_a_panel() -> None:
    rng, inputs = np.random.default_rng(2), 592
    codes = rng.integers(0, 256, (32, inputs), dtype=np.uint8)
    low, high = split_planes(codes, 8)
    scale = GroupValues(base=rng.uniform(1e-3, 3e-3, (32, 1)).astype(np.float32))
    form = PackedForm(bits=8, group=inputs, base_bits=32, offset="zero")
    weight = Packed(name="w", shape=(32, inputs), form=form, low=low, high=high, scale=scale, zero=128, order=None)
    linear = PackedCpuLinear("w", inputs, (32,), Workspace(torch.float32, CPU))
    linear.fill(0, weight)
    linear.finish()
    assert linear.num_bytes == resident_bytes(form, weight.shape, kind="torch-cpu", dtype="float32")
    x = torch.randn(20, inputs, generator=torch.Generator().manual_seed(0))
    together = linear.rows(x).clone()
    check("per row", together, x, weight.float32())
    assert torch.equal(linear.rows(x[:1]), together[:1])


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_the_table_are_widened(name: str) -> None:
    weight = made(name, 40, 3)
    values = torch.from_numpy(weight.float32())
    ids = torch.tensor([39, 0, 16, 15, 0])
    error = (linear_of([weight]).take(ids) - values[ids]).abs().max() / values.abs().max()
    assert error <= BOUNDS[name]


@pytest.mark.parametrize("name", NAMES)
def test_torch_computes_the_same_without_kernels(name: str) -> None:
    parts = [made(name, 300, 4), made("Q4_1", 20, 5)]
    x, ids, bias = torch.randn(3, INPUTS), torch.tensor([7, 299]), torch.randn(300)
    with_kernels = linear_of(parts, [bias])
    without = linear_of(parts, [bias], kernels=KernelsUnavailable("for a test"))
    torch.testing.assert_close(with_kernels.rows(x), without.rows(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(with_kernels.take(ids), without.take(ids), rtol=1e-6, atol=0)
    total = torch.ones(3, 320)
    without.add_to(x, total)
    torch.testing.assert_close(total - 1, without.rows(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inner", [24, 21])
def test_swiglu(inner: int) -> None:
    linear = linear_of([made("Q8_0", inner, 1), made("Q4_0", inner, 2)])
    x = 100 * torch.randn(5, INPUTS)
    gate, up = linear.rows(x).clone().chunk(2, dim=-1)
    torch.testing.assert_close(linear.swiglu(x), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-6)


def test_a_part_of_floats_stands_beside_packed_parts() -> None:
    packed, floats = made("Q4_0", 24, 1), torch.randn(9, INPUTS)
    linear = PackedCpuLinear("test", INPUTS, [24, 9], Workspace(torch.float32, CPU))
    linear.fill(1, floats)
    linear.fill(0, packed)
    linear.fill_bias(1, torch.ones(9))
    linear.finish()
    x = torch.randn(2, INPUTS)
    expected = torch.cat([x @ torch.from_numpy(packed.float32()).t(), x @ floats.t() + 1], dim=1)
    torch.testing.assert_close(linear.rows(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_what_the_planner_counts(name: str) -> None:
    weight = made(name, 37, 1)
    counted = resident_bytes(weight.form, weight.shape, kind="torch-cpu", dtype="float32")
    assert linear_of([weight]).num_bytes == counted


# --- whole models -----------------------------------------------------------------------------------------------


class ExactFloats(OneTensorPerWeight):
    """The same weights as float32, never rounded."""

    def __init__(self, source: PackedTinyModel) -> None:
        self._source = source
        self.bytes_read = 0

    @property
    def config(self) -> ModelConfig:
        return self._source.config

    def tensors(self, part: Slice) -> Sequence[TensorInfo]:
        infos = self._source.tensors(part)
        return [replace(info, scheme="F32", num_bytes=4 * int(np.prod(info.shape))) for info in infos]

    def read(self, name: str) -> StoredTensor:
        values = exact_float32(self._source.load(name))
        info = TensorInfo(name=name, shape=values.shape, scheme="F32", num_bytes=values.nbytes)
        return StoredTensor(info=info, data=np.ascontiguousarray(values).reshape(-1).view(np.uint8))


MIXED = {
    "v_proj.weight": "Q6_K",
    "q_proj.weight": "Q4_K",
    "k_proj.weight": "Q5_K",
    "down_proj.weight": "Q8_0",
    "": "Q4_K",
}
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 32,
    "vocab_size": 300,
    "tied_embeddings": True,
}
SMALL = tiny_config(**SIZES)
MODELS = {
    "mixed": (SMALL, MIXED),
    "one type, untied": (replace(SMALL, tied_embeddings=False), {"": "Q4_0"}),
    "norms of heads, windows, biases": (
        tiny_config(**SIZES, windows=(5, None), qk_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True),
        MIXED,
    ),
    "floats beside": (
        SMALL,
        {"v_proj.weight": "F16", "gate_proj.weight": "BF16", "embed_tokens.weight": "F16", "": "Q8_0"},
    ),
}


def pipeline(source: WeightSource, *, scattered: bool = False, settings: dict[str, str] | None = None) -> Pipeline:
    backend = TorchBackend(BackendOptions(device="cpu", threads=2, settings=settings or {}))
    return Pipeline.build([backend], source, num_blocks=40, scattered=scattered)


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_model_computes_what_its_exact_values_do(name: str) -> None:
    config, schemes = MODELS[name]
    source = PackedTinyModel(config, schemes)
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, config.vocab_size, 60)]
    exact = pipeline(ExactFloats(source)).forced(tokens[:5], tokens[5:])
    for scattered, chunks in ((False, ()), (True, (20, *[1] * 20, 5, 2))):
        found = pipeline(source, scattered=scattered).forced(tokens[:5], tokens[5:], chunks=chunks)
        assert np.abs(found - exact).max() <= 5e-3 * np.abs(exact).max()


def test_sequences_that_decode_together_give_what_each_gives_alone() -> None:
    source = PackedTinyModel(SMALL, MIXED)
    prompts = [[1, 2, 3], [7] * 40, [9, 8, 7, 6]]
    together = pipeline(source, scattered=True).greedy(prompts, 8)
    assert together == [pipeline(source).greedy([prompt], 8)[0] for prompt in prompts]


def test_weights_wide_computes_with_bf16_values_as_before() -> None:
    source = PackedTinyModel(SMALL, MIXED, rounded=True)
    tokens = list(range(30))
    wide = pipeline(source, settings={"weights": "wide"}).forced(tokens[:5], tokens[5:])
    rounded = ExactFloats(source)
    read = rounded.read
    rounded.read = lambda name: _in_bf16(read(name))  # type: ignore[method-assign]  # the same, rounded
    before = pipeline(rounded).forced(tokens[:5], tokens[5:])
    np.testing.assert_allclose(wide, before, rtol=1e-4, atol=1e-4)


def _in_bf16(raw: StoredTensor) -> StoredTensor:
    values = torch.from_numpy(raw.data.view(np.float32).copy()).bfloat16().float()
    return replace(raw, data=values.numpy().view(np.uint8))


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="weights 'narrow'"):
        TorchBackend(BackendOptions(device="cpu", settings={"weights": "narrow"}))


def test_no_layer_is_held_in_16_bits() -> None:
    source = PackedTinyModel(SMALL, {"": "Q4_K"})
    (part,) = make_slices([LayerRange(0, SMALL.num_layers)], SMALL.num_layers)
    loaded = loaded_slice(source, part)
    products = [each for layer in loaded.layers for each in layer.linears]
    assert all(isinstance(product, PackedCpuLinear) for product in products)
    values = sum(int(np.prod(info.shape)) for info in source.weights(part) if "layers" in info.name and info.form)
    assert sum(product.num_bytes for product in products) <= 0.7 * values


@pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")
def test_kernels_run_on_several_threads_here() -> None:
    kernels = cpu_kernels()
    assert isinstance(kernels, CpuKernels)
    assert kernels.parallel


def test_windows_of_several_tokens_are_replayed() -> None:
    """Speculation: each sequence brings a few tokens, and every one needs logits; the calls are recorded once."""
    source = PackedTinyModel(SMALL, MIXED)
    runner = pipeline(source)
    tokens = [int(token) for token in np.random.default_rng(2).integers(0, SMALL.vocab_size, 40)]
    expected = runner.forced(tokens[:5], tokens[5:])
    sequence = runner.add(len(tokens))
    runner.step([(sequence, tokens[:5])])
    found = [runner.step([(sequence, tokens[at : at + 4])], all_logits=True) for at in range(5, 37, 4)]
    np.testing.assert_allclose(np.concatenate(found), expected[1:33], rtol=1e-3, atol=1e-3)
