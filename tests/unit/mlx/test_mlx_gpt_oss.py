"""gpt-oss on MLX: MXFP4 experts of every layout, alone and in rings with torch, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")
pytest.importorskip("torch", reason="transformers computes with torch, which is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from edgepipe_mlx import MlxBackend
from edgepipe_torch import TorchBackend

from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.weights.weights import open_weights
from tests.support.backends.mlx_models import cpu_options
from tests.support.models.gpt_oss_files import random_tensors, write_gguf, write_hugging_face, write_mlx
from tests.support.numerics.gpt_oss_reference import reference_logits
from tests.support.numerics.harness import Logits, Pipeline

TOKENS = np.random.default_rng(3).integers(0, 96, 40).tolist()
TORCH = BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)


@pytest.fixture(scope="module")
def expected() -> Logits:
    return reference_logits(random_tensors(), TOKENS)


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        ("hugging face", "mlx"),
        ("mlx", "mlx"),
        ("gguf", "mlx"),
        ("hugging face", "mlx torch"),
        ("hugging face", "torch mlx"),
    ],
)
def test_packed_experts_compute_as_transformers(tmp_path: Path, expected: Logits, layout: str, order: str) -> None:
    tensors = random_tensors()
    write = {"hugging face": write_hugging_face, "mlx": write_mlx}.get(layout)
    path = write(tmp_path, tensors) if write else write_gguf(tmp_path / "m.gguf", tensors)
    backends = [MlxBackend(cpu_options()) if name == "mlx" else TorchBackend(TORCH) for name in order.split()]
    pipeline = Pipeline.build(backends, open_weights(path), num_blocks=8)
    found = pipeline.forced(TOKENS[:1], [*TOKENS[1:], 0], chunks=(13, 1, 20))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
    assert np.array_equal(found.argmax(axis=1), expected.argmax(axis=1))
