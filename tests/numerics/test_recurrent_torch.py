"""Families with recurrent layers on torch: logits of tiny random checkpoints against ``transformers``, in float32.

Slices are cut inside the pattern of recurrent layers and attention. Prompts come in chunks, beside other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from edgepipe_torch import TorchBackend

from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.weights.weights import Weights, open_weights
from tests.support.models.recurrent_checkpoints import CONFIGS, TOKENS, save_checkpoint
from tests.support.numerics.harness import Pipeline

TOLERANCE = 1e-4  # share of the largest logit
CHUNKS = (13, 1, 30, 1, 1)  # pieces of 70 tokens; the rest comes last


def backends(count: int, dtype: str = "float32") -> list[TorchBackend]:
    kind = ActivationType.FLOAT32 if dtype == "float32" else ActivationType.BF16
    options = BackendOptions(device="cpu", dtype=dtype, activation_type=kind, threads=1)
    return [TorchBackend(options) for _ in range(count)]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, np.ndarray]:
    folder = tmp_path_factory.mktemp("model")
    expected = save_checkpoint(CONFIGS[request.param](), folder, TOKENS)
    return open_weights(folder), expected


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))


@pytest.mark.parametrize(("count", "chunks"), [(1, ()), (3, CHUNKS)], ids=["whole", "chunks, three stages"])
def test_logits_are_those_of_transformers(
    checkpoint: tuple[Weights, np.ndarray], count: int, chunks: Sequence[int]
) -> None:
    weights, expected = checkpoint
    pipeline = Pipeline.build(backends(min(count, weights.config.num_layers)), weights)
    close(pipeline.forced(TOKENS[:1], [*TOKENS[1:], 0], chunks=chunks), expected)
    pipeline.close()


def test_rows_beside_one_another_are_as_alone(checkpoint: tuple[Weights, np.ndarray]) -> None:
    weights, expected = checkpoint
    pipeline = Pipeline.build(backends(1), weights)
    first, second, third = (pipeline.add(len(TOKENS)) for _ in range(3))
    for lengths in ((20, 1, 5), (1, 1, 30), (1, 2, 1), (12, 1, 1), (1, 1, 1)):
        work = [
            (each, TOKENS[each.length : each.length + count])
            for each, count in zip((first, second, third), lengths, strict=True)
        ]
        found = pipeline.step(work)
        for row, each in zip(found, (first, second, third), strict=True):
            close(row, expected[each.length - 1])
    pipeline.close()
