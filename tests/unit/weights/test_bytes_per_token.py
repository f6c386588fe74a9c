"""Bytes of weights that a token reads, over those of the file: an 8B in Q4_K_M in each backend's own layout."""

from __future__ import annotations

import pytest

from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.layout import EMBEDDING
from edgepipe.weights.mixes import mix_weights, named_model
from edgepipe.weights.resident import resident_sizes

MODEL, MIX = "llama-3.1-8b", "q4_k_m"


def read_over_file(kind: str) -> float:
    """All layers and the head; of the embedding a token reads a row."""
    config, weights = named_model(f"{MODEL}:{MIX}")
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    stored = sum(info.num_bytes for info in mix_weights(config, MIX, whole) if info.name != EMBEDDING)
    sizes = resident_sizes(config, weights, kind=kind, dtype="bfloat16")
    return (sum(sizes.layers) + sizes.norm + sizes.head) / stored


@pytest.mark.parametrize(
    ("kind", "ratio"),
    [
        ("torch-cuda", 1.02),  # scales of K types take a byte instead of six bits; the goal is 1.03
        ("mlx-blocks", 1.02),  # the same in own kernels; the goal is 1.05
        ("mlx", 1.18),  # without them, Q4_K takes 5 bits and Q6_K 9, in kernels that MLX has
    ],
)
def test_bytes_read_over_the_files(kind: str, ratio: float) -> None:
    assert read_over_file(kind) == pytest.approx(ratio, abs=0.005)
