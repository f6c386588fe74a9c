"""KV as codes with the demo model's real weights, through the backend's own path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest

pytest.importorskip("torch")

from edgepipe_torch import TorchBackend

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.store.quantise import REFERENCE_TEXT
from edgepipe.store.store import StoredModel
from tests.support.numerics.harness import Pipeline

KL = {"8bit": 2e-3, "4bit": 0.08}  # median of the tokens, nats; the mean hangs on the first few with 4 bits
TOKENS = 64
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "The capital of France is Paris."


def torch_backend(options: BackendOptions) -> Backend:
    return TorchBackend(options)


def mlx_backend(options: BackendOptions) -> Backend:
    return pytest.importorskip("edgepipe_mlx", reason="MLX is not installed").MlxBackend(options)


@pytest.fixture(
    scope="module",
    params=[pytest.param(torch_backend, id="torch"), pytest.param(mlx_backend, id="mlx", marks=pytest.mark.long)],
)
def pipelines(request: pytest.FixtureRequest, demo_model: StoredModel) -> Iterator[Mapping[str, Pipeline]]:
    """The demo model with each form of KV, and with wide KV."""
    make: Callable[[BackendOptions], Backend] = request.param
    made = {
        kv: Pipeline.build(
            [
                make(
                    BackendOptions(
                        device="cpu", dtype="float32", kv=kv, activation_type=ActivationType.FLOAT32, threads=1
                    )
                )
            ],
            demo_model.open_weights(),
            num_blocks=20,
        )
        for kv in ("", *KL)
    }
    yield made
    for pipeline in made.values():
        pipeline.close()


def test_predictions_are_those_of_wide_kv_within_the_bound(
    pipelines: Mapping[str, Pipeline], demo_model: StoredModel
) -> None:
    """A prompt in two chunks, then single tokens."""
    tokens = demo_model.tokenizer().encode(REFERENCE_TEXT)[:TOKENS]
    found = {
        kv: pipeline.forced(tokens[:1], [*tokens[1:], 0], chunks=(TOKENS - 20, 12, *[1] * 8)).astype(np.float64)
        for kv, pipeline in pipelines.items()
    }
    for logits in found.values():
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    wide = found.pop("")
    kl = {kv: float(np.median((np.exp(wide) * (wide - each)).sum(-1))) for kv, each in found.items()}
    assert all(1e-6 < kl[kv] <= allowed for kv, allowed in KL.items()), kl
    assert (found["4bit"].argmax(-1) == wide.argmax(-1)).mean() > 0.6


@pytest.mark.parametrize("kv", KL)
def test_a_question_has_the_known_answer(pipelines: Mapping[str, Pipeline], demo_model: StoredModel, kv: str) -> None:
    tokenizer = demo_model.tokenizer()
    (ids,) = pipelines[kv].greedy([tokenizer.encode(QUESTION)], num_tokens=7)
    assert tokenizer.decode(ids) == ANSWER
