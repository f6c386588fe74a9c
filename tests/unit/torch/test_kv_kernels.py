"""Kernels for KV as codes against torch's operations, and whole models with either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cpu.device import CpuDevice  # noqa: E402
from edgepipe_torch.cpu.kernels import CpuKernels, cpu_kernels  # noqa: E402
from edgepipe_torch.cpu.replay import DecodeReplays  # noqa: E402
from edgepipe_torch.cpu.step_ops import CompiledOps  # noqa: E402
from edgepipe_torch.layers.attention import CausalMasks  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.head_shape import LayerHeads, layer_heads  # noqa: E402
from edgepipe_torch.layers.kv_codes import FourBits  # noqa: E402
from edgepipe_torch.layers.linear import Workspace  # noqa: E402
from edgepipe_torch.layers.packed_attention import PackedSequenceAttention  # noqa: E402
from edgepipe_torch.layers.packed_kv import PackedKVStorage  # noqa: E402
from edgepipe_torch.layers.prepared import PreparedStep, prepare_step  # noqa: E402
from edgepipe_torch.layers.rope import Rotations  # noqa: E402
from torch import Tensor  # noqa: E402

from edgepipe.backend.types import BackendOptions, StepRow  # noqa: E402
from edgepipe.spec.facts import ModelConfig  # noqa: E402
from edgepipe.spec.kv_forms import rest_tokens, span_tokens  # noqa: E402
from edgepipe.spec.tensors import WeightSource  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights, tiny_config  # noqa: E402
from tests.support.backends.steps import make_step, step_row  # noqa: E402
from tests.support.models.packed import PackedTinyModel  # noqa: E402
from tests.support.models.specs import with_attention  # noqa: E402
from tests.support.numerics.harness import Pipeline  # noqa: E402

pytestmark = pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")

CPU = torch.device("cpu")
BLOCK, BLOCKS = 4, 84
MOST_BLOCKS = BLOCKS // 3  # of one of three sequences
SHAPES = {  # heads, kv heads, size of a head
    "one query for each key": (3, 3, 8),
    "an odd group, heads of more than 64": (6, 2, 72),
    "the demo model's": (9, 3, 64),
    "a group of 16": (3, 3, 16),
    "odd groups of 16": (6, 2, 80),
    "a large block": (4, 2, 128),
}
CASES = [  # form of the KV, name of a shape
    *[("8bit", name) for name in SHAPES],
    *[("4bit", name) for name, (_, _, head_dim) in SHAPES.items() if head_dim % 16 == 0],
]
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 32,
    "vocab_size": 304,
}


def shaped(name: str) -> ModelConfig:
    heads, kv_heads, head_dim = SHAPES[name]
    return tiny_config(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)


def ops_for(config: ModelConfig, kv: str = "8bit") -> CompiledOps:
    kernels = cpu_kernels()
    assert isinstance(kernels, CpuKernels)
    return CompiledOps(kernels, config, Workspace(torch.float32, CPU), kv=kv)


def heads_of(config: ModelConfig) -> LayerHeads:
    """The first layer's heads."""
    attention = config.layers[0].attention
    assert attention is not None
    return layer_heads([attention])[0]


def pool_for(config: ModelConfig, kv: str = "8bit") -> PackedKVStorage:
    heads = [heads_of(config)]
    return PackedKVStorage(heads, classes=[0], num_blocks=[BLOCKS], block_size=BLOCK, device=CPU, form=kv)


def placed(config: ModelConfig, qkv: Tensor, slots: Tensor, kv: str = "8bit") -> PackedKVStorage:
    """A pool to which the kernels have written the keys and values of qkv, which they rotate in place."""
    pool = pool_for(config, kv)
    rotations = torch.from_numpy(Rotations(config).at(np.arange(len(qkv)))[0]).unsqueeze(1)
    ops_for(config, kv).place(qkv, rotations, slots, pool, heads_of(config))
    return pool


@given(case=st.sampled_from(CASES), count=st.integers(1, 5), scale=st.integers(-30, 14), seed=st.integers(0, 9))
@settings(max_examples=40)
def test_codes_are_those_of_torch_bit_by_bit(case: tuple[str, str], count: int, scale: int, seed: int) -> None:
    kv, name = case
    config = shaped(name)
    shape = heads_of(config)
    rng = torch.Generator().manual_seed(seed)
    qkv = torch.randn(count, shape.num_heads + shape.entries, shape.head_dim, generator=rng) * 2.0**scale
    qkv[0, -1] = 0.0
    slots = torch.randperm(BLOCKS * BLOCK, generator=rng)[:count]
    pool = placed(config, qkv, slots, kv)
    expected, found = pool.form(shape).encode(qkv[:, shape.num_heads :]), pool.gather(0, slots)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.codes, expected.codes)
    if isinstance(form := pool.form(shape), FourBits):
        assert torch.equal(pool.rests(shape, count), form.encode_whole(qkv[:, shape.num_heads :]).rests)
    assert int(pool.arrays(0).codes.count_nonzero()) == int(found.codes.count_nonzero()), "no other slot is written"


@pytest.mark.parametrize("kv", ["8bit", "4bit"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 3e38])
def test_a_head_beyond_the_scales_is_seen_and_no_other(bad: float, kv: str) -> None:
    config = shaped("a group of 16")
    qkv = torch.ones(2, 9, 16)
    qkv[1, 7, 3] = bad  # a value, to which no rotary embedding applies
    pool = placed(config, qkv, torch.tensor([5, 9]), kv)
    found = pool.form(heads_of(config)).widen(pool.run(0, 0, 12), torch.float32)
    assert found.isnan().any(-1).nonzero().tolist() == found.isnan().all(-1).nonzero().tolist() == [[9, 4]]


def laid_out(rows: Sequence[StepRow], config: ModelConfig, kv: str) -> PreparedStep:
    return prepare_step(
        make_step(rows),
        rotations=Rotations(config),
        block_size=BLOCK,
        num_blocks=BLOCKS,
        span=span_tokens(kv, BLOCK),
    )


ROWS = st.lists(st.tuples(st.integers(1, 10), st.integers(0, 50), st.booleans()), min_size=1, max_size=3)


@given(
    case=st.sampled_from(CASES),
    rows=ROWS,
    window=st.sampled_from([None, 1, 7, 40]),
    threads=st.just(1),
    seed=st.integers(0, 9),
)
@example(case=("8bit", "the demo model's"), rows=[(1, 0, False), (8, 20, True)], window=None, threads=2, seed=0)
@example(case=("4bit", "the demo model's"), rows=[(1, 0, False), (8, 20, True)], window=None, threads=2, seed=0)
@settings(max_examples=40)
def test_attention_is_torch_s_within_rounding(
    case: tuple[str, str], rows: list[tuple[int, int, bool]], window: int | None, threads: int, seed: int
) -> None:
    """Sequences with tokens before the step, in one run of blocks or scattered; long and short prompts."""
    kv, name = case
    config = with_attention(shaped(name), window=window)
    shape = heads_of(config)
    rng = np.random.default_rng(seed)
    pool = pool_for(config, kv)
    spread = torch.from_numpy(rng.uniform(0.1, 8, (BLOCKS * BLOCK, 2 * shape.num_kv_heads, 1)).astype(np.float32))
    stored = rng.standard_normal((BLOCKS * BLOCK, 2 * shape.num_kv_heads, shape.head_dim), np.float32)
    pool.write(0, torch.arange(BLOCKS * BLOCK), torch.from_numpy(stored) * spread)
    step_rows: list[StepRow] = []
    for index, (count, before, scattered) in enumerate(rows):
        blocks = -(-(before + count + rest_tokens(kv)) // BLOCK)
        own = index * MOST_BLOCKS + rng.permutation(MOST_BLOCKS)[:blocks]
        begin = index * MOST_BLOCKS + int(rng.integers(MOST_BLOCKS - blocks))
        runs = [(int(block), 1) for block in own] if scattered else [(begin, blocks)]
        step_rows.append(step_row(before, count, *runs, sequence=index + 1))
    prepared = laid_out(step_rows, config, kv)
    total = sum(count for count, _, _ in rows)
    queries = torch.from_numpy(rng.standard_normal((total, shape.num_heads, shape.head_dim), np.float32))
    written = rng.standard_normal((total, 2 * shape.num_kv_heads, shape.head_dim), np.float32)
    found, expected = torch.full_like(queries, 7.0), torch.full_like(queries, -7.0)
    before_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for ops, out in ((ops_for(config, kv), found), (None, expected)):
            masks, own = CausalMasks(torch.float32, CPU), queries.clone()
            attention = PackedSequenceAttention(prepared, pool, masks, torch.float32, ops)
            attention.open(shape)
            pool.write(0, torch.from_numpy(prepared.layout.slots), torch.from_numpy(written))
            if attention.rests is not None:
                attention.rests.keep(shape)
            attention.run(shape, own, out)
    finally:
        torch.set_num_threads(before_threads)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv", ["8bit", "4bit"])
@pytest.mark.parametrize("head", [0, 3])  # a key, a value
def test_a_nan_reaches_its_sequence_and_no_other(head: int, kv: str) -> None:
    config = shaped("a group of 16")
    pool = pool_for(config, kv)
    stored = torch.randn(40, 6, 16)
    stored[3, head] = torch.nan
    pool.write(0, torch.arange(40), stored)
    rows = [step_row(19, 1, (0, 5), (10, 12)), step_row(19, 1, (5, 5), (22, 12), sequence=2)]
    prepared = laid_out(rows, config, kv)
    queries, out = torch.randn(2, 3, 16), torch.zeros(2, 3, 16)
    masks = CausalMasks(torch.float32, CPU)
    attention = PackedSequenceAttention(prepared, pool, masks, torch.float32, ops_for(config, kv))
    attention.run(heads_of(config), queries, out)
    assert out[0, 0].isnan().all()
    assert out[0, 1:].isfinite().all()
    assert out[1].isfinite().all()


def pipeline(
    source: WeightSource, kv: str, *, scattered: bool = False, without: KernelsUnavailable | None = None
) -> Pipeline:
    options = BackendOptions(device="cpu", threads=1, kv=kv)
    device = CpuDevice(torch.float32, kv=kv, kernels=without)
    return Pipeline.build([TorchBackend(options, device=device)], source, num_blocks=40, scattered=scattered)


def decoded(runner: Pipeline, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Logits of two sequences' steps: a prompt, single tokens, windows of four, a chunk beside a single token."""
    first, second = (runner.add(80) for _ in range(2))
    found = [runner.step([(first, tokens[:20]), (second, tokens[5:14])])]
    found += [runner.step([(first, [token]), (second, [token + 1])]) for token in tokens[20:26]]
    for at in (26, 30):
        work = [(first, tokens[at : at + 4]), (second, tokens[at : at + 2])]
        found.append(runner.step(work, all_logits=True))
    found.append(runner.step([(first, tokens[34:35]), (second, tokens[34:50])]))
    return np.concatenate(found)


# A code may differ by one, where rotations round differently.
@pytest.mark.parametrize(("kv", "rounding"), [("8bit", 3e-3), ("4bit", 5e-2)])
@pytest.mark.parametrize(("window", "scattered", "packed"), [(None, False, True), (9, True, True), (9, False, False)])
def test_a_model_decodes_as_without_kernels(
    kv: str, rounding: float, window: int | None, scattered: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(**SIZES, windows=(window, None))
    source = PackedTinyModel(config, {"": "Q8_0"}) if packed else TinyWeights(config)
    replayed: list[int] = []
    run = DecodeReplays.run
    monkeypatch.setattr(DecodeReplays, "run", lambda *given: (replayed.append(1), run(*given))[1])
    tokens = [int(token) for token in np.random.default_rng(2).integers(0, 290, 60)]
    found = decoded(pipeline(source, kv, scattered=scattered), tokens)
    assert len(replayed) == (8 if packed else 0)
    expected = decoded(pipeline(source, kv, without=KernelsUnavailable("for a test")), tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding * float(np.abs(expected).max()))
