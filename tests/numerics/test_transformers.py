"""The torch decoder against ``transformers`` on tiny random checkpoints: every variant of the family, float32 links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.numerics_harness import Logits, Pipeline

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from edgepipe_torch import TorchBackend
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from edgepipe.backend.types import ActivationType, BackendOptions
from edgepipe.model.weights import Weights, open_weights

TOLERANCE = 2e-3  # of the largest logit
TOKENS = np.random.default_rng(3).integers(0, 131, 100).tolist()
CHUNKS = (13, 1, 40, 1, 1, 27, 1)  # the rest, 16 tokens, comes last
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
PAIRS = 4  # rotary pairs of a head


def sized(**changes: Any) -> dict[str, Any]:
    return SIZES | changes


def llama(**changes: Any) -> PretrainedConfig:
    return LlamaConfig(**sized(**changes))


def scaled(kind: str, **parameters: Any) -> PretrainedConfig:
    """A llama with a rope scaling whose trained context is much shorter than the test's sequence."""
    return llama(rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **parameters})


def longrope(trained_context: int) -> PretrainedConfig:
    """Beyond its trained context long factors are used, within it short ones."""
    config = scaled(
        "longrope",
        factor=256 / trained_context,
        short_factor=[1.0 + 0.1 * i for i in range(PAIRS)],
        long_factor=[1.5 + 0.7 * i for i in range(PAIRS)],
        original_max_position_embeddings=trained_context,
    )
    return config


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "llama, every head its own keys": lambda: llama(num_key_value_heads=6),
    "llama, one head of keys": lambda: llama(num_key_value_heads=1),
    "llama, head dimension 22": lambda: llama(head_dim=22),
    "llama, biases everywhere": lambda: llama(attention_bias=True, mlp_bias=True),
    "rope linear": lambda: scaled("linear", factor=4.0),
    "rope dynamic": lambda: scaled("dynamic", factor=4.0),
    "rope llama3": lambda: scaled("llama3", **LLAMA3),
    "rope yarn": lambda: scaled("yarn", **YARN),
    "rope yarn, every field": lambda: scaled(
        "yarn", **YARN, beta_fast=16.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=0.4, truncate=False
    ),
    "rope yarn, attention factor": lambda: scaled("yarn", **YARN, attention_factor=1.3),
    "rope longrope, beyond": lambda: longrope(16),
    "rope longrope, within": lambda: longrope(256),
    "mistral, window 7": lambda: MistralConfig(**SIZES, sliding_window=7),
    "mistral, window 70": lambda: MistralConfig(**SIZES, sliding_window=70),
    "mistral, no window": lambda: MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2, tied, windows above layer 0": lambda: Qwen2Config(
        **sized(tie_word_embeddings=True, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "qwen3, wide heads": lambda: Qwen3Config(**SIZES, head_dim=26),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint and what ``transformers`` computes from it."""

    weights: Weights
    logits: Logits  # [len(TOKENS), V], of one pass over all tokens


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = random_model(CONFIGS[request.param]())
    model.save_pretrained(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS])).logits[0].numpy()
    return Case(weights=open_weights(Path(folder)), logits=logits)


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Weights large enough for every part to matter; norms and biases random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.2)
            if "norm" in name:
                parameter.add_(1.0)
    return model


def build(weights: Weights, num_stages: int, *, scattered: bool = False) -> Pipeline:
    options = BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)
    backends = [TorchBackend(options) for _ in range(num_stages)]
    return Pipeline.build(backends, weights, num_blocks=24, scattered=scattered)


def logits_of(pipeline: Pipeline, chunks: Sequence[int] = ()) -> Logits:
    """[len(TOKENS), V]; ``forced`` leaves out what follows the last token, so one more is put behind."""
    return pipeline.forced(TOKENS[:1], [*TOKENS[1:], 0], chunks=chunks)


def assert_close(found: Logits, expected: Logits) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_prompt_in_uneven_chunks_then_decoding(case: Case, num_stages: int) -> None:
    assert_close(logits_of(build(case.weights, num_stages), CHUNKS), case.logits)


def test_a_whole_prompt_in_scattered_blocks(case: Case) -> None:
    assert_close(logits_of(build(case.weights, 1, scattered=True)), case.logits)


def test_bf16_compute_is_near(case: Case) -> None:
    """Usually within 0.05; one of the shapes makes 0.14 or 0.18 of other ways to round. What is wrong makes 1."""
    options = BackendOptions(device="cpu", dtype="bfloat16", threads=1)
    pipeline = Pipeline.build([TorchBackend(options)], case.weights, num_blocks=24)
    assert float(np.abs(logits_of(pipeline, CHUNKS) - case.logits).max()) < 0.25 * float(np.abs(case.logits).max())
