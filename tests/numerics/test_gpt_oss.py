"""gpt-oss with MXFP4 experts on torch: its values are those of transformers' own function, and so are its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.numerics.harness import Logits, Pipeline

pytest.importorskip("torch")
pytest.importorskip("transformers")

from edgepipe_torch import TorchBackend

from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.packed import Packed
from edgepipe.weights.weights import open_weights
from tests.support.models.gpt_oss_files import EXPERTS, random_tensors, write_gguf, write_hugging_face, write_mlx
from tests.support.numerics.gpt_oss_reference import reference_logits, widened

TOKENS = np.random.default_rng(3).integers(0, 96, 40).tolist()
WHOLE = Slice(index=0, layers=LayerRange(0, 2), embedding=True, head=True)


def test_packed_values_are_transformers(tmp_path: Path) -> None:
    tensors = random_tensors()
    weights, state = open_weights(write_hugging_face(tmp_path, tensors)), widened(tensors)
    packed = [info for info in weights.weights(WHOLE) if info.form is not None]
    assert len(packed) == 2 * 3
    for info in packed:
        loaded = weights.load(info.name)
        assert isinstance(loaded, Packed)
        module, _, matrix = info.name.removesuffix(".weight").rpartition(".")
        whole = state[f"{module}.down_proj" if matrix == "down_proj" else f"{module}.gate_up_proj"].numpy()
        own = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2), "down_proj": slice(None)}[matrix]
        values = loaded.float32().reshape(EXPERTS, -1, loaded.shape[1])
        assert np.array_equal(values, whole.swapaxes(1, 2)[:, own]), info.name


@pytest.fixture(scope="module")
def expected() -> Logits:
    return reference_logits(random_tensors(), TOKENS)


def written(folder: Path, layout: str) -> Path:
    write = {"hugging face": write_hugging_face, "mlx": write_mlx}.get(layout)
    return write(folder, random_tensors()) if write else write_gguf(folder / "m.gguf", random_tensors())


def computed(path: Path, *, num_stages: int, **options: Any) -> Logits:
    backends = [TorchBackend(BackendOptions(device="cpu", threads=1, **options)) for _ in range(num_stages)]
    pipeline = Pipeline.build(backends, open_weights(path), num_blocks=8)
    return pipeline.forced(TOKENS[:1], [*TOKENS[1:], 0], chunks=(13, 1, 20))


@pytest.mark.parametrize(("layout", "num_stages"), [("hugging face", 1), ("hugging face", 2), ("mlx", 1), ("gguf", 1)])
def test_packed_experts_compute_as_transformers(tmp_path: Path, expected: Logits, layout: str, num_stages: int) -> None:
    path = written(tmp_path, layout)
    found = computed(path, num_stages=num_stages, dtype="float32", activation_type=ActivationType.FLOAT32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
    assert np.array_equal(found.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.parametrize("layout", ["hugging face", "mlx"])
def test_experts_may_be_widened_to_bf16(tmp_path: Path, expected: Logits, layout: str) -> None:
    """A tenth of the rows may choose another expert, where two scores are close."""
    found = computed(written(tmp_path, layout), num_stages=1, dtype="bfloat16")
    largest = np.abs(found - expected).max(axis=1)
    assert float((largest > 0.25 * np.abs(expected).max()).mean()) <= 0.1
