"""Recorded decode steps of layers that torch computes in part: the same bits as without a recording."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import edgepipe_torch.cpu.device as cpu_device  # noqa: E402
from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cpu.kernels import cpu_kernels  # noqa: E402
from edgepipe_torch.cpu.replay import DecodeReplays  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402

from edgepipe.backend.types import ActivationType, BackendOptions  # noqa: E402
from edgepipe.spec.facts import ModelConfig  # noqa: E402
from edgepipe.spec.layer_spec import Dense, Experts, Latent, Router, Temperature  # noqa: E402
from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from tests.support.models.packed import PackedTinyModel  # noqa: E402
from tests.support.numerics.harness import Logits, Pipeline  # noqa: E402

pytestmark = pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")

PLAIN = tiny_config(num_layers=2, hidden_size=64, vocab_size=96)
TOKENS: list[int] = np.random.default_rng(1).integers(0, 96, 40).tolist()
CHUNKS = (30, 1, 1, 4, 1, 1, 1)  # all but the first are recorded, and so is the token before them
HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
LATENT = Latent(query_rank=0, kv_rank=32, nope_dim=32, rope_dim=32, value_dim=32)


def layers(attention: dict[str, Any], **own: Any) -> ModelConfig:
    """Change all layers' attention and other parts."""
    return replace(
        PLAIN,
        layers=tuple(replace(spec.with_attention(**attention), **own) for spec in PLAIN.layers),
    )


CASES = {
    "a part of a head rotates": layers(HEADS | {"rotary_dim": 16}),
    "no positions": layers(HEADS | {"rope": None}),
    "temperature": layers(HEADS | {"temperature": Temperature(growth=0.5, context=4)}),
    "latent": layers({"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "rotary_dim": 32, "latent": LATENT}),
    "latent, two query products": layers(
        {
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 64,
            "rotary_dim": 32,
            "latent": replace(LATENT, query_rank=32),
        }
    ),
    "Gemma 4": layers(
        HEADS | {"values_from_keys": True, "value_norm": True, "qk_norm": "head", "rotary_dim": 16},
        norms="both",
        output_scaled=True,
        dense=Dense(inner=128, activation="gelu_tanh"),
    ),
    "side by side, scaled": layers(HEADS, norms="parallel", residual_scale=0.5),
    "experts": layers(HEADS, dense=None, experts=Experts(count=4, used=2, inner=64, router=Router(), shared_inner=64)),
}


def logits(config: ModelConfig) -> Logits:
    options = BackendOptions(device="cpu", dtype="float32", activation_type=ActivationType.FLOAT32, threads=1)
    pipeline = Pipeline.build([TorchBackend(options)], PackedTinyModel(config, {"": "Q8_0"}), num_blocks=24)
    return pipeline.forced(TOKENS[:1], [*TOKENS[1:], 0], chunks=CHUNKS)


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_a_recorded_step_gives_the_same_bits(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[int] = []
    run = DecodeReplays.run
    monkeypatch.setattr(DecodeReplays, "run", lambda *given: (replayed.append(1), run(*given))[1])
    found = logits(config)
    assert len(replayed) == len(CHUNKS)
    monkeypatch.setattr(cpu_device, "can_record", lambda *_: False)
    assert np.array_equal(found, logits(config))
    assert len(replayed) == len(CHUNKS)
