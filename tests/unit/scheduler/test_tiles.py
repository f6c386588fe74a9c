"""Tile edges are found in measured step times, whatever noise they carry."""

from __future__ import annotations

import random

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import named_device
from edgepipe.model.facts import LayerRange, make_slices
from edgepipe.scheduler.tiles import TileEdges
from edgepipe.shapes.loader import named_shape


def test_the_edges_of_a_device_are_found_through_jitter() -> None:
    config, device = named_shape("qwen2.5-32b"), named_device("rtx4090")
    part = make_slices([LayerRange(0, config.num_layers)], config.num_layers)[0]
    cost, draw, tiles = CostModel(config, device).slice_cost(part), random.Random(3), TileEdges()
    for _ in range(6000):
        tokens = draw.randint(1, 288)
        work = StepWork.of_rows([100] * tokens, [1] * tokens, logit_rows=0)
        tiles.note(num_tokens=tokens, seconds=cost.step_s(work) * draw.gauss(1, 0.02))
    real = {first - 1 for first, more in device.tile_steps if more > 1.15}
    assert real, "a device with steps is needed"
    assert real <= set(tiles.edges())
    assert len(tiles.edges()) <= len(device.tile_steps) + 2


def test_what_grows_evenly_or_was_hardly_seen_has_no_edges() -> None:
    tiles = TileEdges()
    for tokens in (*range(200, 400), *range(200, 400)):
        tiles.note(num_tokens=tokens, seconds=0.02 + tokens * 1e-5)
    assert tiles.edges() == ()
    for _ in range(3):
        tiles.note(num_tokens=401, seconds=0.1)
    assert tiles.edges() == ()
    tiles.note(num_tokens=401, seconds=0.1)
    assert tiles.edges() == (400,)
    tiles.note(num_tokens=1 << 20, seconds=9.0)
    assert tiles.edges() == (400,), "nothing of that size is ever trimmed"
