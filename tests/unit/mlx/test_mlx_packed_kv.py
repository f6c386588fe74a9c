"""8-bit KV in MLX: what is stored, and how far results are from those of float KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

mx: Any = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from edgepipe_mlx import MlxBackend  # noqa: E402
from edgepipe_mlx.packed_kv import encode  # noqa: E402

from edgepipe.backend.types import BackendOptions  # noqa: E402
from edgepipe.model.facts import LayerRange, make_slices  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights, tiny_config  # noqa: E402
from tests.support.steps import make_step, run_step, step_row, token_ids  # noqa: E402

CONFIG = tiny_config()
SLICES = make_slices([LayerRange(0, CONFIG.num_layers)], CONFIG.num_layers)
PROMPT = np.random.default_rng(5).integers(0, CONFIG.vocab_size, 60).tolist()
HEADS = arrays.arrays(np.float32, (2, 3, 8), elements=st.floats(-6e4, 6e4, width=32))


def loaded(kv: str) -> MlxBackend:
    backend = MlxBackend(BackendOptions(device="cpu", settings={"kv": kv}))
    backend.load(SLICES, TinyWeights(CONFIG), lambda _progress: None)
    return backend


@given(HEADS)
def test_a_value_is_rounded_by_at_most_half_a_scale(values: np.ndarray) -> None:
    codes, scales = (np.array(made).astype(np.float64) for made in encode(mx.array(values)))
    assert (np.abs(codes * scales - values) <= scales * 0.5000001).all()
    assert np.abs(codes).max() <= 127


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_head_beyond_the_scales_is_seen_and_no_other(bad: float) -> None:
    values = np.ones((2, 2, 8), np.float32)
    values[1, 0, 3] = bad
    _codes, scales = encode(mx.array(values))
    assert np.isnan(np.array(scales)[..., 0]).tolist() == [[False, False], [True, False]]


def test_a_pool_takes_the_bytes_that_the_planner_counts() -> None:
    backend = loaded("8bit")
    backend.allocate_kv(num_blocks=1, block_size=16)
    before = mx.get_active_memory()
    backend.allocate_kv(num_blocks=1001, block_size=16)
    grown = mx.get_active_memory() - before
    assert grown == pytest.approx(1000 * backend.kv_block_bytes(CONFIG, SLICES, 16), rel=0.02)


def test_logits_are_near_those_of_float_kv() -> None:
    results: list[np.ndarray] = []
    for kv in ("auto", "8bit"):
        backend = loaded(kv)
        backend.allocate_kv(num_blocks=4, block_size=16)
        results.append(run_step(backend, make_step([step_row(0, 60, (0, 4))]), token_ids(PROMPT)))
    exact, found = results
    assert 0 < np.sqrt(((found - exact) ** 2).mean()) <= 0.04 * exact.std()
