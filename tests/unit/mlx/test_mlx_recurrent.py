"""Families with recurrent layers on MLX, and in rings with torch: logits of tiny checkpoints, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from edgepipe_mlx import MlxBackend
from edgepipe_torch import TorchBackend

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.weights.weights import Weights, open_weights
from tests.support.models.recurrent_checkpoints import CONFIGS, TOKENS, save_checkpoint
from tests.support.models.recurrent_files import TINY, write_recurrent_gguf
from tests.support.numerics.harness import Pipeline
from tests.support.numerics.spec_reference import float_weights, reference_logits

TOLERANCE = 1e-4  # share of the largest logit
CHUNKS = (13, 1, 30, 1, 1)  # pieces of 70 tokens; the rest comes last
OPTIONS = BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)


def backends(kinds: str) -> list[Backend]:
    return [MlxBackend(OPTIONS) if kind == "mlx" else TorchBackend(OPTIONS) for kind in kinds.split("+")]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, np.ndarray]:
    folder = tmp_path_factory.mktemp("model")
    expected = save_checkpoint(CONFIGS[request.param](), folder, TOKENS)
    return open_weights(folder), expected


def close(found: np.ndarray, expected: np.ndarray, *, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * float(np.abs(expected).max()))


@pytest.mark.parametrize(("kinds", "chunks"), [("mlx", ()), ("torch+mlx", CHUNKS), ("mlx+torch", CHUNKS)])
def test_logits_are_those_of_transformers(
    checkpoint: tuple[Weights, np.ndarray], kinds: str, chunks: Sequence[int]
) -> None:
    weights, expected = checkpoint
    pipeline = Pipeline.build(backends(kinds), weights)
    close(pipeline.forced(TOKENS[:1], [*TOKENS[1:], 0], chunks=chunks), expected)
    pipeline.close()


def test_rows_beside_one_another_are_as_alone(checkpoint: tuple[Weights, np.ndarray]) -> None:
    weights, expected = checkpoint
    pipeline = Pipeline.build(backends("mlx"), weights)
    first, second, third = (pipeline.add(len(TOKENS)) for _ in range(3))
    for lengths in ((20, 1, 5), (1, 2, 1), (1, 1, 1)):
        work = [
            (each, TOKENS[each.length : each.length + count])
            for each, count in zip((first, second, third), lengths, strict=True)
        ]
        found = pipeline.step(work)
        for row, each in zip(found, (first, second, third), strict=True):
            close(row, expected[each.length - 1])
    pipeline.close()


@pytest.mark.parametrize("family", TINY)
def test_a_gguf_file_gives_the_logits_of_its_weights(family: str, tmp_path: Path) -> None:
    weights = open_weights(write_recurrent_gguf(tmp_path / "m.gguf", family))
    expected = reference_logits(weights.config, float_weights(weights), TOKENS)
    pipeline = Pipeline.build(backends("mlx"), weights)
    close(pipeline.forced(TOKENS[:1], [*TOKENS[1:], 0]), expected, tolerance=1e-3)  # these weights amplify rounding
    pipeline.close()
