"""The slots of recurrent layers on MLX: what they hold, and the memory that they and a step's updates take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from edgepipe_mlx import MlxBackend
from edgepipe_mlx.states import LayerStates

from edgepipe.backend.types import RowState, StateWrite
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.spec.layer_spec import Dense, ShortConv
from edgepipe.testing.tiny_model import TinyWeights
from tests.support.backends.mlx_models import cpu_options
from tests.support.backends.steps import make_step, run_step, step_row, token_ids
from tests.support.models.recurrent_layers import recurrent_model

SLOTS = 6
WIDE = 4096  # channels, so that small allocations beside the states do not count
WRITES = st.lists(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=4, unique=True), min_size=1, max_size=12)


@settings(max_examples=15, deadline=None)
@given(writes=WRITES, seed=st.integers(0, 2**32 - 1))
def test_slots_hold_what_was_written_last_and_the_memory_of_one_state_each(writes: list[list[int]], seed: int) -> None:
    mx.set_default_device(mx.Device(mx.cpu))
    random, expected = np.random.default_rng(seed), np.zeros((SLOTS + 1, 2, WIDE), np.float32)
    before = mx.get_active_memory()
    states = LayerStates(ShortConv(channels=WIDE, taps=3), SLOTS)
    whole = mx.get_active_memory() - before
    for slots in writes:
        (read,) = states.read(slots)
        np.testing.assert_array_equal(np.array(read), expected[slots])
        expected[slots] = random.normal(size=(len(slots), 2, WIDE)).astype(np.float32)
        longer = mx.array(np.pad(expected[slots], ((0, 0), (4, 0), (0, 0))))  # a part of it is the state
        mx.eval(states.write(slots, (longer[:, 4:],)))
        del read, longer
        mx.synchronize()
        assert mx.get_active_memory() - before <= whole * 1.01
    (every,) = states.read(range(SLOTS + 1))
    np.testing.assert_array_equal(np.array(every), expected)


def test_a_step_does_not_copy_the_states_of_other_sequences() -> None:
    """A wide first layer keeps the device behind. A short convolution has few operations: MLX's CPU queues ten."""
    config = recurrent_model(None, *[ShortConv(channels=2048, taps=3)] * 3)
    wide = replace(config.layers[0], dense=Dense(inner=1 << 16))
    backend = MlxBackend(cpu_options())
    source = TinyWeights(replace(config, layers=(wide, *config.layers[1:])))
    backend.load(make_slices([LayerRange(0, 4)], 4), source, lambda _progress: None)
    before = mx.get_active_memory()
    backend.allocate_kv(num_blocks=4, block_size=16, state_slots=600)
    pools = mx.get_active_memory() - before
    read: tuple[int | None, ...] = (None, None)
    for turn in range(3):
        rows = [
            replace(
                step_row(turn, 1, (2 * number, 1), sequence=number + 1), state=RowState(slot, (StateWrite(1, number),))
            )
            for number, slot in enumerate(read)
        ]
        mx.reset_peak_memory()
        run_step(backend, make_step(rows), token_ids([turn], [turn + 1]))
        assert mx.get_peak_memory() - before < pools * 1.2
        read = (0, 1)
    backend.close()
