"""The helpers that other tests lean on."""

from __future__ import annotations

import numpy as np
import pytest

from edgepipe.errors import ModelInvalid
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.testing.clock import FakeClock
from edgepipe.testing.tiny_model import TinyWeights, tiny_config


def test_a_fake_clock_moves_when_told() -> None:
    clock = FakeClock(monotonic_s=5, wall_s=100)
    clock.advance(2)
    clock.wall_jump(-50)
    assert (clock.monotonic_s(), clock.wall_s()) == (7, 52)
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


def test_tiny_weights_are_the_same_for_everybody_and_exact_in_bf16() -> None:
    config = tiny_config()
    first, second, other = TinyWeights(config), TinyWeights(config), TinyWeights(config, seed=1)
    name = "model.layers.2.mlp.up_proj.weight"
    raw = first.read(name)
    assert raw.info.num_bytes == len(raw.data) == 2 * 64 * 32
    assert np.array_equal(raw.data, second.read(name).data)
    assert not np.array_equal(raw.data, other.read(name).data)
    widened = (raw.data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(raw.info.shape)
    assert np.array_equal(widened, first.values(name))


def test_tiny_weights_list_what_a_slice_needs_and_count_what_is_read() -> None:
    weights = TinyWeights(tiny_config())
    middle = make_slices([LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 4)], 4)[1]
    infos = weights.tensors(middle)
    assert {info.name.split(".")[2] for info in infos} == {"1"}
    for info in infos:
        weights.read(info.name)
    assert weights.bytes_read == sum(info.num_bytes for info in infos)
    with pytest.raises(ModelInvalid):
        weights.read("model.layers.9.mlp.up_proj.weight")
