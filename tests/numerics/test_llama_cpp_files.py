"""Both backends on GGUF files that llama.cpp converted and quantised, against the logits that it computes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.llama_cpp_files import NAMES, RECURRENT, LlamaCppFile, llama_cpp_file
from tests.support.numerics.harness import Logits, Pipeline

pytest.importorskip("torch")
pytest.importorskip("mlx.core")

from edgepipe_mlx import MlxBackend
from edgepipe_torch import TorchBackend

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.weights.weights import open_weights

EXACT = 1e-4  # share of the largest logit
ROUNDED = {"llama-q4_k_m": 0.03}  # a group's scale and offset are rounded once; llama.cpp's own products differ by 0.06
NUM_TOKENS = 24
Maker = Callable[[BackendOptions], Backend]
_OPTIONS = BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama_cpp")


def ring(file: LlamaCppFile, *backends: Maker) -> Pipeline:
    return Pipeline.build([kind(_OPTIONS) for kind in backends], open_weights(file.path), num_blocks=12)


def logits_of(pipeline: Pipeline, file: LlamaCppFile) -> Logits:
    return pipeline.forced(file.tokens[:1], [*file.tokens[1:], 0])


@pytest.mark.parametrize("backend", [TorchBackend, MlxBackend])
@pytest.mark.parametrize("name", NAMES)
def test_all_positions_are_as_llama_cpp_computes_them(folder: Path, name: str, backend: Maker) -> None:
    file = llama_cpp_file(name, folder)
    pipeline = ring(file, backend)
    found = logits_of(pipeline, file)
    pipeline.close()
    tolerance = ROUNDED.get(name, EXACT)
    np.testing.assert_allclose(found[file.rows], file.logits, rtol=0, atol=tolerance * float(np.abs(file.logits).max()))
    if tolerance == EXACT:
        assert found.argmax(axis=1).tolist() == file.top.tolist()


@pytest.mark.parametrize("name", RECURRENT)
def test_a_ring_of_torch_and_mlx_answers_as_each_alone(folder: Path, name: str) -> None:
    file = llama_cpp_file(name, folder)
    answers: list[list[int]] = []
    for backends in ((TorchBackend,), (MlxBackend,), (TorchBackend, MlxBackend), (MlxBackend, TorchBackend)):
        pipeline = ring(file, *backends)
        answers += pipeline.greedy([file.tokens], NUM_TOKENS)
        pipeline.close()
    assert answers[0][0] == file.top[-1]
    assert answers == answers[:1] * len(answers)


def test_each_family_with_recurrent_layers_has_a_file() -> None:
    kinds = {name.rpartition("-")[0] for name in RECURRENT}
    assert kinds == {
        "qwen3-next",
        "qwen35",
        "qwen35-experts",
        "nemotron-h",
        "nemotron-h-experts",
        "granite-4",
        "granite-4-experts",
        "lfm2",
        "lfm2-experts",
    }
