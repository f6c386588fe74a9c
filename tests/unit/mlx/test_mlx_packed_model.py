"""Models with packed weights: their logits, their memory, and a ring with torch."""

from __future__ import annotations

import tracemalloc
import weakref
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from edgepipe_mlx import MlxBackend
from edgepipe_mlx.loading import WeightTypes, load_shard
from edgepipe_mlx.packing import lay_out, mlx_form

from edgepipe.backend.loader import create_backend
from edgepipe.backend.types import BackendOptions
from edgepipe.errors import ConfigInvalid
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices
from edgepipe.spec.layer_spec import Experts, Router
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import StoredTensor, WeightSource
from edgepipe.store.store import StoredModel
from edgepipe.weights.dequantise import as_bf16_bits, widen_bf16
from edgepipe.weights.resident import WIDE, slice_bytes
from edgepipe.weights.weight_table import table_of
from tests.support.backends.mlx_models import (
    Chain,
    Float32s,
    MemorySource,
    cpu_options,
    random_weights,
    row,
    tiny_config,
)
from tests.support.models.packed import PackedTinyModel, random_packed
from tests.support.numerics.golden_ids import items
from tests.support.numerics.harness import Pipeline

HIDDEN = 256
RING_STEPS = 5
PACKED_GAP = 0.25  # moves of a gap stay below, in the ring of a wide and a packed half
RING_TOKENS = 24
K_BOUND = 0.05  # share of the logits' spread: how far both kinds of rounding move a logit
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
EXACT_MIX = {"q_proj.weight": "Q4_K", "k_proj.weight": "Q5_K", "v_proj.weight": "Q8_0", "o_proj.weight": "NVFP4"}
EXACT_MIX |= {"gate_proj.weight": "Q4_1", "up_proj.weight": "IQ4_XS", "down_proj.weight": "MXFP4", "": "Q4_0"}
Q4_K_M_MIX = {"v_proj.weight": "Q6_K", "down_proj.weight": "Q6_K", "lm_head.weight": "Q6_K", "": "Q4_K"}
ROUNDED_MIX = {"q_proj.weight": "Q6_K", "v_proj.weight": "Q3_K", "down_proj.weight": "Q2_K", "": "Q6_K"}


def packed_config(**changes: object) -> ModelConfig:
    """A model whose matrices have inputs for blocks of 256."""
    facts: dict[str, object] = {"hidden_size": HIDDEN, "intermediate_size": 512, "num_heads": 8, "head_dim": 32}
    return tiny_config(**(facts | changes))


def expert_config() -> ModelConfig:
    """Experts in the outer layers, with a shared one and a bias for choosing."""
    config = packed_config(qkv_bias=True)
    router = Router(score="sigmoid", correction=True, bias=True)
    experts = Experts(count=3, used=2, inner=512, router=router, bias=True, shared_inner=256, shared_gated=True)
    outer, middle = replace(config.layers[0], dense=None, experts=experts), config.layers[1]
    return replace(config, layers=(outer, middle, outer))


def logits(source: WeightSource, *, weights: str = "auto", dtype: str = "float32") -> Float32s:
    chain = Chain(source, ranges=[(0, 2), (2, 3)], options=cpu_options(weights=weights, dtype=dtype))
    return chain.run(TOKENS, [row(0, len(TOKENS), (0, 1))])


def distance(actual: Float32s, expected: Float32s) -> float:
    """Largest difference as a part of the logits' spread."""
    return float(np.abs(actual - expected).max() / expected.std())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "with a head"])
@pytest.mark.parametrize(("mix", "bound"), [(EXACT_MIX, 2e-4), (ROUNDED_MIX, 0.05)], ids=["exact", "rounded"])
def test_packed_logits_are_those_of_the_files_values(mix: dict[str, str], bound: float, tied: bool) -> None:
    config = packed_config(tied_embeddings=tied, qkv_bias=True, output_bias=True, mlp_bias=True)
    source = PackedTinyModel(config, mix)
    exact, got = logits(source, weights="wide"), logits(source)
    assert distance(got, exact) <= bound
    assert distance(logits(source, dtype="bfloat16"), exact) <= 0.1


def test_weights_wide_computes_with_the_files_values_in_bf16() -> None:
    config = packed_config()
    source = PackedTinyModel(config, EXACT_MIX, rounded=True)
    [part] = make_slices([LayerRange(0, 3)], 3)
    arrays = {info.name: widen_bf16(as_bf16_bits(source.read(info.name))) for info in source.tensors(part)}
    np.testing.assert_array_equal(logits(source, weights="wide"), logits(MemorySource(config, arrays)))
    assert distance(logits(source), logits(source, weights="wide")) > 1e-4


def test_unknown_ways_to_keep_weights_are_refused() -> None:
    with pytest.raises(ConfigInvalid):
        MlxBackend(cpu_options(weights="small"))


def test_the_profile_says_how_weights_are_kept() -> None:
    assert [MlxBackend(cpu_options(weights=each)).profile().packing for each in ("auto", "wide")] == ["mlx", ""]


def test_models_of_floats_have_one_path() -> None:
    config = tiny_config()
    source = MemorySource(config, random_weights(config))
    np.testing.assert_array_equal(logits(source), logits(source, weights="wide"))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "wide"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [packed_config(tied_embeddings=True, qkv_bias=True), packed_config(qkv_bias=True), expert_config()],
    ids=["tied", "with a head", "experts"],
)
def test_a_slices_memory_is_what_the_planner_expects(packed: bool, dtype: str, config: ModelConfig) -> None:
    source = PackedTinyModel(config, EXACT_MIX | ROUNDED_MIX | {"embed_tokens.weight": "Q8_0"})
    [part] = make_slices([LayerRange(0, 3)], 3)
    types = WeightTypes(dtype=DTYPES[dtype], packed=packed, in_float32=True, inputs_first=False)
    mx.clear_cache()
    before = mx.get_active_memory()
    with mx.stream(mx.Device(mx.cpu)):
        shard = load_shard([part], source, types, lambda _progress: None)
    kind = "mlx" if packed else WIDE
    expected = slice_bytes(config, table_of(source.weights(part)), part, kind=kind, dtype=dtype)
    assert shard.num_bytes == expected
    assert expected <= mx.get_active_memory() - before <= 1.02 * expected + 100_000  # allocations are rounded up


class WatchedModel(PackedTinyModel):
    """Notes how many bytes of packed weights are still alive when the next one is loaded."""

    def __init__(self, config: ModelConfig, schemes: dict[str, str]) -> None:
        super().__init__(config, schemes)
        self._alive: list[weakref.ref[np.ndarray]] = []
        self.kept: list[int] = []

    def load(self, name: str) -> StoredTensor | Packed:
        self.kept.append(sum(each() is not None for each in self._alive))
        weight = super().load(name)
        if isinstance(weight, Packed):
            self._alive += [weakref.ref(plane) for plane in (weight.low, weight.high) if plane is not None]
        return weight


@pytest.mark.parametrize("config", [packed_config(intermediate_size=4096), expert_config()], ids=["dense", "experts"])
def test_a_weights_stored_form_is_freed_before_the_next(config: ModelConfig) -> None:
    source = WatchedModel(config, EXACT_MIX | ROUNDED_MIX)
    [part] = make_slices([LayerRange(0, 3)], 3)
    largest = max(info.num_bytes for info in source.weights(part))
    types = WeightTypes(dtype=mx.bfloat16, packed=True, in_float32=True, inputs_first=False)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with mx.stream(mx.Device(mx.cpu)):
        shard = load_shard([part], source, types, lambda _progress: None)
    assert set(source.kept) == {0}
    assert mx.get_peak_memory() - before <= 1.02 * shard.num_bytes + largest


@pytest.mark.parametrize("scheme", ["Q4_K", "Q5_K", "Q8_0", "Q6_K"])
def test_laying_out_takes_little_more_than_its_result(scheme: str) -> None:
    packed = random_packed(scheme, (1024, 2048), np.random.default_rng(0))
    wanted = mlx_form(packed.form, packed.shape[1])
    assert wanted is not None
    tracemalloc.start()
    try:
        planes = lay_out(packed, wanted, narrow=True)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert planes.biases is not None
    result_bytes = planes.words.nbytes + planes.scales.nbytes + planes.biases.nbytes
    assert peak_bytes <= result_bytes + 5_000_000  # a chunk of 2^18 values in float32, several times


def test_a_ring_of_wide_torch_and_packed_mlx_gives_the_references_ids(demo_model: StoredModel) -> None:
    """The file's Q4_1 values, where the reference rounds them to bf16: gaps of the best two logits move by 0.05."""
    pytest.importorskip("torch", reason="torch is not installed")
    [item] = [item for item in items() if item.name == "raw_once"]
    kept = {"torch": "wide", "mlx": "auto"}
    options = [BackendOptions(device="cpu", threads=1, settings={"weights": each}) for each in kept.values()]
    backends = [create_backend(name, each) for name, each in zip(kept, options, strict=True)]
    ring = Pipeline.build(backends, demo_model.open_weights())
    sequence = ring.add(len(item.prompt_ids) + RING_STEPS)
    found = [ring.step([(sequence, item.prompt_ids)])[0]]
    found += [ring.step([(sequence, [token])])[0] for token in item.greedy_ids[: RING_STEPS - 1]]
    ring.close()
    decided = [index for index in range(RING_STEPS) if item.gaps[index] >= PACKED_GAP]
    assert len(decided) >= RING_STEPS // 2
    assert [int(found[index].argmax()) for index in decided] == [item.greedy_ids[index] for index in decided]
    for logits_row, gap in zip(found, item.gaps, strict=False):
        best, second = np.sort(logits_row)[[-1, -2]]
        assert abs(best - second - gap) <= PACKED_GAP


def test_a_ring_of_packed_torch_and_packed_mlx_gives_the_ids_of_exact_k_types() -> None:
    """Torch keeps the values of Q4_K and Q6_K, MLX rounds Q6_K to 8 bits, the link rounds to bf16."""
    pytest.importorskip("torch", reason="torch is not installed")
    source = PackedTinyModel(packed_config(), Q4_K_M_MIX)
    options = BackendOptions(device="cpu", threads=1)
    exact = Pipeline.build([MlxBackend(cpu_options(weights="wide"))], source)
    [ids] = exact.greedy([TOKENS], RING_TOKENS)
    expected = exact.forced(TOKENS, ids)
    ring = Pipeline.build([create_backend(name, options) for name in ("torch", "mlx")], source)
    found = ring.forced(TOKENS, ids)
    assert distance(found, expected) <= K_BOUND
    best, second = np.sort(expected)[:, [-1, -2]].T
    decided = best - second >= 2 * K_BOUND * expected.std()  # each of the two may move by the bound
    assert decided.sum() >= len(decided) // 2
    assert np.array_equal(found.argmax(-1)[decided], expected.argmax(-1)[decided])
