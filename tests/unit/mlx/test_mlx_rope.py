"""The rotary embedding of the MLX backend."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")

from edgepipe_mlx.rope import RotaryEmbedding  # noqa: E402

PHI_FACTOR = 1.1902380714238083  # of Phi-3.5-mini; the nearest bf16 is 1.1875


def test_bf16_rounds_the_scaled_values_and_not_their_factor() -> None:
    values = np.linspace(-3, 3, 64, dtype=np.float32).reshape(4, 1, 1, 16)
    with mx.stream(mx.cpu):
        x = mx.array(values).astype(mx.bfloat16)
        rope = RotaryEmbedding(np.ones(8), head_dim=16, interleaved=False, amplitude=PHI_FACTOR)
        found = rope.rotate(x, mx.zeros(4, mx.int32))
        expected = (x.astype(mx.float32) * PHI_FACTOR).astype(mx.bfloat16)
        assert found.dtype == mx.bfloat16
        assert mx.array_equal(found, expected)
