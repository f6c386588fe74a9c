"""Loading slices: what is read, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

from edgepipe_mlx import MlxBackend

from edgepipe.backend.types import LoadProgress
from edgepipe.errors import ArchitectureUnsupported, ModelInvalid
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.spec.layer_spec import Rope
from edgepipe.spec.layout import slice_parameters
from tests.support.backends.mlx_models import (
    Chain,
    Float32s,
    MemorySource,
    cpu_options,
    random_weights,
    row,
    tiny_config,
)

CONFIG = tiny_config()


def load(config: ModelConfig, weights: dict[str, Float32s], *parts: Slice) -> tuple[MemorySource, list[LoadProgress]]:
    source, progress = MemorySource(config, weights), list[LoadProgress]()
    whole = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    MlxBackend(cpu_options()).load(parts or whole, source, progress.append)
    return source, progress


def test_a_middle_slice_reads_its_layers_and_nothing_else() -> None:
    middle = Slice(index=1, layers=LayerRange(1, 2), embedding=False, head=False)
    source, progress = load(CONFIG, random_weights(CONFIG), middle)
    assert source.names_read
    assert all(name.startswith("model.layers.1.") for name in source.names_read)
    assert source.bytes_read == 4 * slice_parameters(CONFIG, middle)
    assert len(progress) == len(source.names_read)
    assert progress[-1].bytes_done == progress[-1].bytes_total == source.bytes_read


def test_a_tied_table_is_read_once_and_serves_embedding_and_head() -> None:
    config = tiny_config(tied_embeddings=True)
    source = MemorySource(config, random_weights(config))
    chain = Chain(source, ranges=[(0, 2), (2, 3)])
    assert source.names_read.count("model.embed_tokens.weight") == 1
    assert np.isfinite(chain.run([1, 2], [row(0, 2, (0, 1))])).all()


def without(name: str) -> Callable[[dict[str, Float32s]], None]:
    def damage(weights: dict[str, Float32s]) -> None:
        del weights[name]

    return damage


def replaced(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, Float32s]], None]:
    return lambda weights: weights.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (without("model.layers.2.mlp.up_proj.weight"), "model.layers.2.mlp.up_proj.weight"),
        (without("lm_head.weight"), "lm_head.weight"),
        (replaced("model.layers.0.self_attn.k_proj.weight", (48, 32)), "model.layers.0.self_attn.k_proj.weight"),
        (replaced("model.layers.0.self_attn.q_proj.bias", (48,)), "model.layers.0.self_attn.q_proj.bias"),
    ],
    ids=["a layer's tensor missing", "head missing", "wrong shape", "a bias that the config denies"],
)
def test_weights_that_contradict_the_config_are_refused_by_name(
    damage: Callable[[dict[str, Float32s]], None], named: str
) -> None:
    weights = random_weights(CONFIG)
    damage(weights)
    with pytest.raises(ModelInvalid, match=named):
        load(CONFIG, weights)


def test_an_unknown_rope_scaling_is_refused_in_three_lines() -> None:
    config = tiny_config(rope=Rope(scaling="strange"))
    with pytest.raises(ArchitectureUnsupported) as refused:
        load(config, random_weights(config))
    assert len(refused.value.lines()) == 3
