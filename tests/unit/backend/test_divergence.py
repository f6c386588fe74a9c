"""KL divergence between two models on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgepipe.backend import divergence as module
from edgepipe.backend.divergence import computing_backend, divergence, kl_divergence
from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.errors import BackendUnavailable
from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import ModelConfig
from tests.support.models.files import hf_values
from tests.support.models.packed import PackedTinyModel
from tests.support.numerics.harness import Pipeline

torch = pytest.importorskip("torch", reason="the torch backend computes")


def config() -> ModelConfig:
    return replace(hf_config(hf_values()), context_length=40)


def backend() -> Any:
    from edgepipe_torch import TorchBackend

    return TorchBackend(BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32))


def test_kl_is_the_definition() -> None:
    reference, found = np.array([1.0, 2.0, 0.5], np.float32), np.array([0.0, 2.0, 1.0], np.float32)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (reference.astype(float), found.astype(float)))
    assert kl_divergence(reference, found) == pytest.approx(float((p * np.log(p / q)).sum()))
    assert kl_divergence(reference, reference + 5) == pytest.approx(0, abs=1e-12)
    assert np.isfinite(kl_divergence(reference * 1000, found * -1000))


def test_a_model_does_not_diverge_from_itself() -> None:
    source = PackedTinyModel(config(), {})
    tokens = list(np.random.default_rng(0).integers(0, 300, 100))
    found = divergence(backend(), source, source, tokens)
    assert (found.kl, found.same_token, found.num_tokens) == (0, 1, 100)


def whole_logits(source: PackedTinyModel, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits [T, V] of the whole model at once, each window a sequence of its own."""
    pipeline = Pipeline.build([backend()], source)
    size = source.config.context_length
    windows = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    return np.concatenate([pipeline.step([(pipeline.add(size), window)], all_logits=True) for window in windows])


@pytest.mark.parametrize("slice_bytes", [1 << 30, 1])
def test_slices_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> None:
    monkeypatch.setattr(module, "_SLICE_BYTES", slice_bytes)
    model, packed = PackedTinyModel(config(), {}), PackedTinyModel(config(), {}, seed=1)
    tokens = list(range(90))
    seen: list[tuple[int, int]] = []
    found = divergence(backend(), model, packed, tokens, lambda done, total: seen.append((done, total)))
    num_slices = 1 if slice_bytes > 1 else 3
    assert seen == [(done, num_slices) for done in range(num_slices + 1)]
    reference, changed = whole_logits(model, tokens), whole_logits(packed, tokens)
    assert found.kl == pytest.approx(np.mean([kl_divergence(*pair) for pair in zip(reference, changed, strict=True)]))
    assert found.same_token == np.mean(reference.argmax(-1) == changed.argmax(-1))
    assert found.num_tokens == 90


def test_without_a_library_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, _options: BackendOptions) -> Any:
        raise BackendUnavailable(f"the {name} backend cannot be imported")

    monkeypatch.setattr(module, "create_backend", missing)
    with pytest.raises(BackendUnavailable, match="no backend is installed") as error:
        computing_backend()
    assert "--extra torch" in error.value.next_step
