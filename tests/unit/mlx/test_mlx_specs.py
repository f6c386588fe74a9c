"""Each option of a layer spec on MLX, against a decoder in numpy: a whole prompt, and chunks with decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

from edgepipe.errors import ArchitectureUnsupported
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Dense, Experts, Latent, LayerSpec, Norm, Rope, Router
from tests.support.backends.mlx_models import Chain, MemorySource, cpu_options, random_weights, row, tiny_config
from tests.support.numerics.spec_reference import reference_logits

NUM_TOKENS = 40  # with 4 experts each, rows are sorted by expert; those of a few tokens are not
PIECES = [(0, 13), (13, 20), (33, 1), (34, 1), (35, 5)]  # first token, tokens
TOKENS = np.random.default_rng(1).integers(0, 97, NUM_TOKENS).tolist()
YARN = Rope(scaling="yarn", factor=4.0, original_context=64)
SIX = Experts(count=6, used=4, inner=24, router=Router())
PLAIN = tiny_config()


def with_spec(**changes: Any) -> ModelConfig:
    return replace(PLAIN, layers=tuple(replace(spec, **changes) for spec in PLAIN.layers))


def with_attention(*each: dict[str, Any]) -> ModelConfig:
    """Changes of all layers, or of each."""
    layers = zip(PLAIN.layers, each * 3 if len(each) == 1 else each, strict=True)
    return replace(PLAIN, layers=tuple(spec.with_attention(**own) for spec, own in layers))


def with_latent(more: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    latent = replace(Latent(query_rank=0, kv_rank=16, nope_dim=6, rope_dim=4, value_dim=10), **changes)
    shape = {"num_kv_heads": 1, "head_dim": 20, "rotary_dim": 4, "interleaved": True, "scale": 0.4}
    return with_attention(shape | {"latent": latent, "qkv_bias": True, **(more or {})})


def with_experts(experts: Experts = SIX, *, dense: Dense | None = None, **router: Any) -> ModelConfig:
    """A dense layer between two with experts."""
    own = replace(experts, router=replace(experts.router, **router))
    first, middle, last = PLAIN.layers
    outer = [replace(spec, dense=dense, experts=own) for spec in (first, last)]
    return replace(PLAIN, layers=(outer[0], middle, outer[1]))


def unequal(spec: LayerSpec, heads: int, kv_heads: int, head_dim: int) -> LayerSpec:
    return spec.with_attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)


def gemma(config: ModelConfig) -> ModelConfig:
    return replace(config, norm=Norm(eps=1e-6, plus_one=True), embedding_scale=32**0.5, logit_softcap=30.0)


CASES: dict[str, ModelConfig] = {
    "norms after": with_spec(norms="after"),
    "norms before and after": with_spec(norms="both"),
    "parallel": with_spec(norms="parallel"),
    "parallel LayerNorm": replace(with_spec(norms="parallel"), norm=Norm(eps=1e-5, kind="layer"), logit_scale=0.25),
    "weights minus one, capped logits": gemma(with_spec(norms="both")),
    "scaled residuals": with_spec(residual_scale=0.3),
    "GELU": with_spec(dense=Dense(inner=48, activation="gelu_tanh")),
    "clamped SwiGLU": with_spec(dense=Dense(inner=48, activation="clamped_swiglu", bias=True)),
    "partial rotary": with_attention({"rotary_dim": 4}),
    "partial rotary with an amplitude": with_attention({"rotary_dim": 4, "rope": YARN}),
    "interleaved rotary": with_attention({"interleaved": True}),
    "interleaved partial rotary": with_attention({"interleaved": True, "rotary_dim": 8, "rope": YARN}),
    "different rotary": with_attention({}, {"rope": None}, {"rope": Rope(theta=100.0), "rotary_dim": 6}),
    "norms of heads": with_attention({"qk_norm": "head"}),
    "norms of all heads": with_attention({"qk_norm": "all"}),
    "norms of heads, weights minus one": gemma(with_attention({"qk_norm": "head", "scale": 0.2})),
    "capped attention": with_attention({"softcap": 2.0}, {"softcap": 2.0, "window": 7}, {"window": 20}),
    "sinks": with_attention({"sinks": True}, {"sinks": True, "window": 7}, {"sinks": True, "window": 20}),
    "sinks and capped attention": with_attention({"sinks": True, "softcap": 2.0}),
    "unequal heads": replace(
        PLAIN,
        layers=(unequal(PLAIN.layers[0], 8, 1, 6), unequal(PLAIN.layers[1], 2, 2, 20), PLAIN.layers[2]),
    ),
    "latent attention": with_latent(),
    "latent attention, two query products, windows": with_latent({"window": 7}, query_rank=12),
    "latent attention, kv_b in two, halves rotate": with_latent({"interleaved": False, "rope": YARN}, joined=False),
    "experts": with_experts(),
    "experts, every one used": with_experts(replace(SIX, used=6), normalised=False),
    "experts, sigmoid and groups": with_experts(
        score="sigmoid", correction=True, groups=3, groups_used=2, group_score="top2", scale=2.5
    ),
    "experts with biases": with_experts(replace(SIX, bias=True, activation="clamped_swiglu"), bias=True),
    "a shared expert": with_experts(replace(SIX, shared_inner=40), normalised=False),
    "a gated shared expert": with_experts(replace(SIX, shared_inner=40, shared_gated=True)),
    "dense beside experts": with_experts(dense=Dense(inner=48, activation="gelu_tanh")),
}


def run(chain: Chain) -> dict[str, np.ndarray]:
    """Logits of every token: of a whole prompt, and of chunks and decoded tokens over scattered blocks."""
    pieces = [chain.run(TOKENS[at : at + count], [row(at, count, (7, 1), (4, 2))]) for at, count in PIECES]
    return {"whole": chain.run(TOKENS, [row(0, NUM_TOKENS, (0, 3))]), "pieces": np.concatenate(pieces)}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_a_layer_computes_what_its_spec_says(config: ModelConfig) -> None:
    weights = random_weights(config)
    expected = reference_logits(config, weights, TOKENS)
    for found in run(Chain(MemorySource(config, weights), ranges=[(0, 2), (2, 3)])).values():
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))


@pytest.mark.parametrize(
    "name", ["weights minus one, capped logits", "sinks", "capped attention", "latent attention", "experts"]
)
def test_bf16_stays_near(name: str) -> None:
    config = CASES[name]
    weights = random_weights(config)
    expected = reference_logits(config, weights, TOKENS)
    for found in run(Chain(MemorySource(config, weights), options=cpu_options(dtype="bfloat16"))).values():
        assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.98


@pytest.mark.parametrize("name", ["sinks and capped attention", "experts", "experts, sigmoid and groups"])
def test_a_row_does_not_depend_on_its_neighbours_values(name: str) -> None:
    """Bit for bit: the same sequence beside others of the same length."""
    chain = Chain(MemorySource(CASES[name], random_weights(CASES[name])))
    found: list[np.ndarray] = []
    for seed in (2, 3):
        others = np.random.default_rng(seed).integers(0, 97, NUM_TOKENS).tolist()
        rows = [row(0, NUM_TOKENS, (0, 3)), row(0, NUM_TOKENS, (3, 3), sequence=2)]
        found.append(chain.run(TOKENS + others, rows)[:NUM_TOKENS])
    np.testing.assert_array_equal(found[0], found[1])


def test_a_kind_of_norm_that_mlx_does_not_compute_is_refused_before_anything_is_read() -> None:
    kind: Any = "of another kind"
    config = replace(PLAIN, norm=replace(PLAIN.norm, kind=kind))
    source = MemorySource(config, random_weights(config))
    with pytest.raises(ArchitectureUnsupported, match="'of another kind'"):
        Chain(source)
    assert not source.names_read
