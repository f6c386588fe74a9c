"""Latent attention of GGUF files on both backends: both forms of kv_b, packed or not, and KV as codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from edgepipe_torch import TorchBackend

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import WeightSource
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.weights import Weights, open_weights
from tests.support.models.family_files import write_family_gguf
from tests.support.numerics.harness import Logits, Pipeline
from tests.support.numerics.spec_reference import reference_logits

TOKENS = np.random.default_rng(3).integers(0, 64, 60).tolist()
CHUNKS = (13, 1, 27, 1)
KINDS = ("joined", "split")


def options(kv: str) -> BackendOptions:
    return BackendOptions(device="cpu", dtype="float32", kv=kv, activation_type=ActivationType.FLOAT32, threads=1)


def torch_backend(kv: str) -> Backend:
    return TorchBackend(options(kv))


def mlx_backend(kv: str) -> Backend:
    backend = pytest.importorskip("edgepipe_mlx", reason="MLX is not installed").MlxBackend
    return backend(options(kv))


BACKENDS: Mapping[str, Callable[[str], Backend]] = {"torch": torch_backend, "mlx": mlx_backend}


def values(source: WeightSource) -> dict[str, np.ndarray]:
    config = source.config
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    loaded = {info.name: (info.shape, source.load(info.name)) for info in source.weights(whole)}
    return {
        name: weight.float32() if isinstance(weight, Packed) else as_float32(weight).reshape(shape)
        for name, (shape, weight) in loaded.items()
    }


def logits_of(weights: Weights, name: str, kv: str = "") -> Logits:
    """Logits of a pipeline of two stages."""
    pipeline = Pipeline.build([BACKENDS[name](kv) for _ in range(2)], weights, num_blocks=16, scattered=True)
    return pipeline.forced(TOKENS[:1], [*TOKENS[1:], 0], chunks=CHUNKS)


def distance(found: Logits, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", ["", "_b.weight"])
def test_files_compute_what_their_values_say(kind: str, packed: str, tmp_path: Path) -> None:
    """Also packed kv_b keeps the file's values: within float32's rounding."""
    weights = open_weights(write_family_gguf(tmp_path / "m.gguf", "deepseek_v3", kv_b=kind, packed=packed))
    expected = reference_logits(weights.config, values(weights), TOKENS)
    for name in BACKENDS:
        found = logits_of(weights, name)
        assert distance(found, expected) < 1e-4
        np.testing.assert_array_equal(found.argmax(1), expected.argmax(1))


@pytest.mark.parametrize(("kv", "least"), [("8bit", 0.99), ("4bit", 0.9)])
@pytest.mark.parametrize("name", BACKENDS)
def test_kv_as_codes_is_near(name: str, kv: str, least: float, tmp_path: Path) -> None:
    weights = open_weights(write_family_gguf(tmp_path / "m.gguf", "deepseek_v3"))
    expected = reference_logits(weights.config, values(weights), TOKENS)
    found = logits_of(weights, name, kv)
    assert distance(found, expected) > 1e-4
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > least
