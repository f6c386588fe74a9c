"""The two forms of a recurrence side by side: prompts in the chunked form, and token by token in the step form."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from transformers import PretrainedConfig

from edgepipe.backend.protocol import Backend
from edgepipe.spec.tensors import WeightSource
from tests.support.models.recurrent_checkpoints import DELTA, GRANITE, LFM2, made
from tests.support.numerics.harness import Pipeline

_CONTEXT = 8192
_BLOCK_TOKENS = 16
_LOUD = {"logits_scaling": 0.05}  # what logits are divided by: gaps are as wide as those of other models
_LARGE_DELTA = {"hidden_size": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_LARGE_MAMBA = {"hidden_size": 128, "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
MIXERS: dict[str, Callable[[], PretrainedConfig]] = {
    "gated DeltaNet": made("Qwen3_5TextConfig", DELTA, intermediate_size=48, max_position_embeddings=_CONTEXT),
    "gated DeltaNet, heads of 128": made(
        "Qwen3_5TextConfig", DELTA, _LARGE_DELTA, intermediate_size=48, max_position_embeddings=_CONTEXT
    ),
    "Mamba-2": made("GraniteMoeHybridConfig", GRANITE, _LOUD, num_local_experts=0, max_position_embeddings=_CONTEXT),
    "Mamba-2, states of 128": made(
        "GraniteMoeHybridConfig", GRANITE, _LOUD, _LARGE_MAMBA, num_local_experts=0, max_position_embeddings=_CONTEXT
    ),
    "short convolution": made(
        "Lfm2Config", LFM2, intermediate_size=48, block_multiple_of=16, max_position_embeddings=_CONTEXT
    ),
}
"""Tiny models by what most of their layers are; some with heads as large as real ones."""

LEAST_GAP = 0.1
"""Between the two best logits: a smaller one does not decide the next id."""


class Forms(NamedTuple):
    """How far the chunked form is from the step form."""

    difference: float  # the largest one of all logits, relative to the largest logit
    wrong: int  # next ids that differ, where the step form's gap is above LEAST_GAP
    decided: int  # tokens with such a gap


def compare_forms(backend: Backend, weights: WeightSource, num_tokens: int) -> Forms:
    """Compute random tokens in one row, and again in rows of one token; the backend is closed afterwards."""
    tokens = np.random.default_rng(num_tokens).integers(0, 60, num_tokens + 1).tolist()
    blocks = num_tokens // _BLOCK_TOKENS + 5
    pipeline = Pipeline.build([backend], weights, num_blocks=blocks, block_size=_BLOCK_TOKENS)
    whole = pipeline.forced(tokens[:1], tokens[1:])
    single = pipeline.forced(tokens[:1], tokens[1:], chunks=(1,) * num_tokens)
    pipeline.close()
    second, best = np.sort(single, axis=-1)[:, -2:].T
    decided = best - second > LEAST_GAP
    differ = whole.argmax(-1) != single.argmax(-1)
    difference = float(np.abs(whole - single).max() / np.abs(single).max())
    return Forms(difference, int((differ & decided).sum()), int(decided.sum()))
